package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// carrier moves open files between the ranks of a session's groups.
type carrier interface {
	// prepare gets ready to pass the files of one exchange, and returns the ticket that the other ranks need for it.
	prepare(p *parcel) (exchange, []byte, error)
	// close frees what the carrier holds.
	close() error
}

// parcel is one rank's part of an exchange of files.
type parcel struct {
	group   *Group
	seq     uint64
	send    *os.File // nil if this rank sends none
	senders []int    // the other ranks that send to this one
}

// exchange is an exchange of files under way on one rank. Its methods are called in this order; end always.
type exchange interface {
	// meet takes the tickets of all ranks, by rank.
	meet(tickets [][]byte) error
	// deliver sends this rank's file, if it has one to send, to every other rank.
	deliver(ctx context.Context) error
	// collect returns the files of the senders, by rank. It is called when all of them have delivered. After an error it holds
	// none.
	collect(ctx context.Context) ([]*os.File, error)
	// failed returns why a file could not be received, if that is known already.
	failed() error
	// end frees what the exchange holds: files that were not collected.
	end()
}

// ExchangeFile sends f to every other rank and returns the files that they sent: index j of the result is a new descriptor of rank j's file, and nil
// for this rank. The caller closes them, and f, which may be closed when the call returns. It is collective and blocks until all ranks have come.
//
// If it fails on any rank, it fails on all, with a [*VoteError] that names those, and no file stays open. For that, a rank whose context ends when all have sent
// still waits to hear how it went, for at most [Options].Timeout, if the rendezvous service is slow. It is ErrUnsupported if the
// ranks do not all run on one machine, and on other systems than Linux. Its other errors are those of collective calls. A nil f is ErrInvalid, which every rank gets:
// so a rank that has no file tells the others. It counts as three calls, so that another call in its place leaves the ranks out of step, behind a [*MismatchError].
func (g *Group) ExchangeFile(ctx context.Context, op string, f *os.File) ([]*os.File, error) {
	if err := g.made("ExchangeFile"); err != nil {
		return nil, err
	}
	var refusal error
	if f == nil {
		refusal = invalid(fmt.Sprintf("ExchangeFile %q", clip(op)), "f", "nil", "an open file on every rank")
	}
	senders := make([]int, g.Size())
	for i := range senders {
		senders[i] = i
	}
	return g.passFiles(ctx, "exchange-file", op, senders, f, refusal)
}

// BroadcastFile sends root's file to every other rank, and returns a new descriptor of it; on root it returns nil. A root that has no file
// to send passes the reason as refusal, and every rank gets a [*VoteError] that names root with its text. Other ranks' f and refusal
// are ignored. The caller closes the result, and root its own file, which may be closed when the call returns. It is collective and blocks
// until all ranks have come.
//
// If it fails on any rank, it fails on all, and no file stays open, as of [Group.ExchangeFile]. It is ErrUnsupported if the ranks do not all run on one machine, and
// on other systems than Linux. Its other errors are those of collective calls.
func (g *Group) BroadcastFile(ctx context.Context, op string, root int, f *os.File, refusal error) (*os.File, error) {
	if err := g.made("BroadcastFile"); err != nil {
		return nil, err
	}
	what := fmt.Sprintf("BroadcastFile %q", clip(op))
	switch {
	case root < 0 || root >= g.Size():
		refusal = invalid(what, "root", root, fmt.Sprintf("0 to %d", g.Size()-1))
	case root != g.rank:
		f, refusal = nil, nil
	case refusal == nil && f == nil:
		refusal = invalid(what, "f", "nil", "an open file, or a refusal that says why there is none")
	}
	files, err := g.passFiles(ctx, fmt.Sprintf("broadcast-file from root %d", root), op, []int{root}, f, refusal)
	if err != nil || g.rank == root {
		return nil, err
	}
	return files[root], nil
}

// passFiles is the exchange of files that both calls are made of. It takes three rounds: all are ready and say where they are
// to be reached; all have sent, so that what a rank has not received will not come; all have received.
func (g *Group) passFiles(ctx context.Context, what, op string, senders []int, f *os.File, refusal error) ([]*os.File, error) {
	seq := g.take(3)
	op = clip(what + " " + op)
	if err := g.checkOneMachine(); err != nil { // every rank sees the same members, so every rank returns here
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	ctx, refusal = errs.WithContext(op, ctx, refusal)
	ctx, cancel := context.WithTimeout(ctx, g.session.timeout)
	defer cancel()

	p := &parcel{group: g, seq: seq, senders: slices.DeleteFunc(slices.Clone(senders), func(r int) bool { return r == g.rank })}
	if len(p.senders) < len(senders) {
		p.send = f
	}
	var x exchange
	var ticket []byte
	if refusal == nil {
		if x, ticket, refusal = g.session.files.prepare(p); refusal == nil {
			defer x.end()
		}
	}
	const sending, receiving = ": sending", ": receiving"
	o, err := g.call(ctx, seq, &arrival{kind: kindAllGather, op: op, data: ticket}, refusal)
	if err != nil {
		if unheard(err) {
			g.decline(seq+1, kindVote, op+sending, err)
			g.decline(seq+2, kindVote, op+receiving, err)
		}
		return nil, err
	}
	if err = x.meet(o.blobs); err == nil {
		err = x.deliver(ctx)
	}
	if _, err = g.call(ctx, seq+1, &arrival{kind: kindVote, op: op + sending}, err); err != nil {
		if _, agreed := errors.AsType[*VoteError](err); !agreed {
			if unheard(err) {
				g.decline(seq+2, kindVote, op+receiving, err)
			}
			return nil, err
		}
		// One rank may have been unable to send because another could not receive, and only that one knows why.
		_, why := g.call(ctx, seq+2, &arrival{kind: kindVote, op: op + receiving}, x.failed())
		return nil, errors.Join(why, err) // the cause first
	}
	files, err := x.collect(ctx)
	// Behind this round there is none in which this rank could tell the others that it has failed, so it waits to hear how it went.
	if _, err = g.call(ctx, seq+2, &arrival{kind: kindVote, op: op + receiving, heard: true}, err); err != nil {
		return nil, errors.Join(err, closeFiles(files))
	}
	return files, nil
}

// unheard reports whether a rank has given up without hearing how a round went: the others may have gone on to the next one.
func unheard(err error) bool {
	missing, gaveUp := errors.AsType[*MissingRanksError](err)
	return gaveUp && missing.Missing == nil
}

// decline fails a round that this rank does not take part in any more, and that the others may wait for it in. It does not wait itself.
func (g *Group) decline(seq uint64, k kind, op string, why error) {
	text := clip(errs.Text(why))
	g.session.transport.arrive(g.name, seq, &arrival{
		kind: k, op: op, refused: true, refusal: text, conditions: errs.Codes(why), to: make(outcomeChan, 1),
	})
	g.session.transport.abandon(g.name, seq, text)
}

// checkOneMachine says whether the group's ranks can pass files at all.
func (g *Group) checkOneMachine() error {
	var apart []int
	for rank, m := range g.members {
		if !m.sameMachine(g.members[0]) {
			apart = append(apart, rank)
		}
	}
	if len(apart) == 0 {
		return nil
	}
	hosts := make([]string, 0, 2)
	for _, m := range []Member{g.members[0], g.members[apart[0]]} {
		hosts = append(hosts, fmt.Sprintf("%s (boot %s)", m.Host, cmp.Or(m.BootID, "id not known: /proc/sys/kernel/random/boot_id cannot be read")))
	}
	return fmt.Errorf("passing files in group %s: not on the machine of rank 0: %s: %s; use a group of the ranks of one "+
		"machine: %w", g.name, errs.Ranks(apart), strings.Join(hosts, ", "), ErrUnsupported)
}

// closeFiles closes what there is in files.
func closeFiles(files []*os.File) error {
	var err error
	for _, f := range files {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}
