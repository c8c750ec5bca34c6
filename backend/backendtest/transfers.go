package backendtest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
)

// pace is how long a wait sleeps between two looks.
const pace = 50 * time.Microsecond

// runTransfer runs a transfer to its end.
func (h Harness) runTransfer(ctx context.Context, x backend.PreparedTransfer) error {
	p, err := x.Start()
	if err != nil {
		return err
	}
	return h.await(ctx, "a transfer", p.Poll)
}

// await asks again and again, until what it asks for has come.
func (h Harness) await(ctx context.Context, what string, poll func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, h.patience)
	defer cancel()
	for {
		if ended, err := poll(); ended || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has not come in %v: %w", what, h.patience, ctx.Err())
		case <-time.After(pace):
		}
	}
}

// transferrer returns the backend's own transfers, if it has any. A backend that reaches no peer by pointers must.
func (r *rank) transferrer(h Harness) (backend.Transferrer, error) {
	mover, ok := backend.TransferrerOf(r.Backend)
	if _, some := r.Backend.(backend.Mover); ok && !some && !r.Capabilities().Transfers {
		return nil, errors.New("the backend has transfers, and the capability says that it has not")
	}
	if !ok && h.Unreachable {
		return nil, errors.New("no peer can be reached, by pointers or by transfers")
	}
	if !ok {
		return nil, nil
	}
	return mover, nil
}

// exchange is memory for transfers: the first half holds what is sent, the second takes what comes.
type exchange struct {
	*rank
	alloc backend.Allocation
	mapping
	half int64
}

type mapping = backend.Mapping

func (r *rank) exchange(ctx context.Context, half int64) (*exchange, error) {
	a, m, err := r.mapped(ctx, 2*half)
	if err != nil {
		return nil, err
	}
	return &exchange{r, a, m, half}, nil
}

func (x *exchange) done(ctx context.Context) error { return x.rank.done(ctx, x.alloc, x.mapping) }

// inRing is an exchange whose first halves were filled, and a transfer of this rank's to the next one's second.
type inRing struct {
	*exchange
	mover        backend.Transferrer
	next, before int
	move         backend.PreparedTransfer
}

// ring makes one; nil where there is nobody to move to, or nothing that moves.
func (r *rank) ring(ctx context.Context, h Harness) (*inRing, error) {
	mover, err := r.transferrer(h)
	size := r.group.Size()
	if err != nil || mover == nil || size == 1 {
		return nil, err
	}
	x := &inRing{mover: mover, next: (r.group.Rank() + 1) % size, before: (r.group.Rank() + size - 1) % size}
	if x.exchange, err = r.exchange(ctx, halfBytes); err != nil {
		return nil, err
	}
	if err := errors.Join(x.fill(0), r.group.Barrier(ctx, "filled")); err != nil {
		return nil, err
	}
	x.move, err = mover.PrepareTransfer(backend.Write, x.next, x.blocks(0, halfBytes))
	return x, err
}

// sent returns the byte at a place of what a rank sends in a round.
func sent(rank, round int, at int64) byte { return byte(1 + (int64(7*rank+31*round)+at)%251) }

// fill writes what this rank sends in a round, and clears what came.
func (x *exchange) fill(round int) error {
	b := make([]byte, 2*x.half)
	for i := range x.half {
		b[i] = sent(x.group.Rank(), round, i)
	}
	return x.Device().CopyFromHost(x.alloc.Ptr(), b)
}

// pieces are what is moved: places in a half, and sizes.
var pieces = []struct{ at, bytes int64 }{{0, 1}, {17, 15}, {100, 4096}, {5000, 3001}, {9191, 1}}

const halfBytes = 9192

// blocks returns the pieces, from the half at from here to the half at to of the peer's.
func (x *exchange) blocks(local, remote int64) (all []backend.Block) {
	for _, p := range pieces {
		all = append(all, backend.Block{Alloc: x.alloc, Local: x.alloc.Ptr().Add(local + p.at), Remote: x.mapping, Offset: remote + p.at, Bytes: p.bytes})
	}
	return all
}

// check compares what came with what a rank sent in a round: the pieces, and nothing else.
func (x *exchange) check(from, round int) error {
	got := make([]byte, x.half)
	if err := x.Device().CopyToHost(got, x.alloc.Ptr().Add(x.half)); err != nil {
		return err
	}
	want := make([]byte, x.half)
	for _, p := range pieces {
		for i := p.at; i < p.at+p.bytes; i++ {
			want[i] = sent(from, round, i)
		}
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("round %d: byte %d from rank %d is %d and not %d", round, i, from, got[i], want[i])
		}
	}
	return nil
}

// transfers moves several blocks to and from a neighbour, again and again with one prepared transfer. One that is closed takes nothing
// from another.
func transfers(ctx context.Context, h Harness, r *rank) error {
	mover, err := r.transferrer(h)
	size := r.group.Size()
	if err != nil || mover == nil || size == 1 {
		return err
	}
	x, err := r.exchange(ctx, halfBytes)
	if err != nil {
		return err
	}
	next, before := (r.group.Rank()+1)%size, (r.group.Rank()+size-1)%size
	for _, op := range []backend.TransferOp{backend.Write, backend.Read} {
		if op == backend.Read && !r.Capabilities().Transfers {
			if _, err := mover.PrepareTransfer(op, next, x.blocks(halfBytes, 0)); !errors.Is(err, errs.ErrNotReachable) {
				return fmt.Errorf("reading, which the capabilities say is not possible, is not ErrNotReachable: %w", err)
			}
			continue
		}
		local, remote, from := int64(0), int64(halfBytes), before
		if op == backend.Read {
			local, remote, from = halfBytes, 0, next
		}
		prepare := func() (backend.PreparedTransfer, error) {
			return mover.PrepareTransfer(op, next, x.blocks(local, remote))
		}
		move, err := prepare()
		if err != nil {
			return err
		}
		other, err := prepare()
		if err != nil {
			return err
		}
		for round := range 5 {
			if err := errors.Join(x.fill(round), r.group.Barrier(ctx, "filled")); err != nil {
				return err
			}
			if err := h.runTransfer(ctx, move); err != nil {
				return fmt.Errorf("%v, round %d: %w", op, round, err)
			}
			// Whoever was written to looks as soon as the writer's run has ended.
			if err := r.group.Barrier(ctx, "moved"); err != nil {
				return err
			}
			if err := x.check(from, round); err != nil {
				return fmt.Errorf("%v: %w", op, err)
			}
			if err := r.group.Barrier(ctx, "looked"); err != nil {
				return err
			}
			if round == 2 {
				if err := other.Close(); err != nil {
					return fmt.Errorf("closing what never ran: %w", err)
				}
			}
		}
		if err := move.Close(); err != nil {
			return fmt.Errorf("closing: %w", err)
		}
	}
	return x.done(ctx)
}

// transfersOverlap: a run that begins while one is under way is refused and does not disturb it; of different transfers, many run at once.
func transfersOverlap(ctx context.Context, h Harness, r *rank) error {
	x, err := r.ring(ctx, h)
	if err != nil || x == nil {
		return err
	}
	for range 3 {
		run, err := x.move.Start()
		if err != nil {
			return err
		}
		if _, err := x.move.Start(); !errors.Is(err, errs.ErrInProgress) {
			return fmt.Errorf("starting a run that is under way is not ErrInProgress: %w", err)
		}
		if err := h.await(ctx, "a transfer that was started twice", run.Poll); err != nil {
			return err
		}
	}
	if err := errors.Join(x.move.Close(), r.group.Barrier(ctx, "moved"), x.check(x.before, 0), r.group.Barrier(ctx, "looked")); err != nil {
		return err
	}
	// Each block by a transfer of its own, all at once.
	if err := errors.Join(x.fill(1), r.group.Barrier(ctx, "filled")); err != nil {
		return err
	}
	var moves []backend.PreparedTransfer
	var polls []func() (bool, error)
	for _, b := range x.blocks(0, halfBytes) {
		m, err := x.mover.PrepareTransfer(backend.Write, x.next, []backend.Block{b})
		if err != nil {
			return err
		}
		run, err := m.Start()
		if err != nil {
			return err
		}
		moves, polls = append(moves, m), append(polls, run.Poll)
	}
	for i, poll := range polls {
		if err := errors.Join(h.await(ctx, "one of several transfers", poll), moves[i].Close()); err != nil {
			return err
		}
	}
	if err := errors.Join(r.group.Barrier(ctx, "moved"), x.check(x.before, 1)); err != nil {
		return err
	}
	return x.done(ctx)
}

// transferToTheDead: a transfer whose peer is known to be lost ends, with ErrPeerLost.
func transferToTheDead(ctx context.Context, h Harness, r *rank) error {
	mover, err := r.transferrer(h)
	if err != nil || mover == nil || r.group.Size() == 1 {
		return err
	}
	const dead = 1
	if r.group.Rank() != dead {
		defer r.others.Done()
	}
	x, err := r.exchange(ctx, halfBytes)
	if err != nil {
		return err
	}
	if r.group.Rank() == dead {
		if err := r.group.Barrier(ctx, "ready"); err != nil {
			return err
		}
		r.group.Abort("it is killed")
		// What was posted before may still write here, in the one process that all ranks are in.
		r.others.Wait()
		_ = errors.Join(x.mapping.Unmap(ctx), x.alloc.Release(ctx)) // which the others do not come to
		return nil
	}
	move, err := mover.PrepareTransfer(backend.Write, dead, x.blocks(0, halfBytes))
	if err := errors.Join(err, r.group.Barrier(ctx, "ready")); err != nil {
		return err
	}
	err = h.await(ctx, "the loss", func() (bool, error) { return r.group.Err() != nil, nil })
	if err != nil {
		return err
	}
	for range 3 {
		run, err := move.Start()
		if err == nil {
			err = h.await(ctx, "the end of a transfer to the dead", run.Poll)
		}
		if !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("a transfer to a lost rank is not ErrPeerLost: %w", err)
		}
	}
	if err := move.Close(); err != nil {
		return fmt.Errorf("closing a transfer to the dead: %w", err)
	}
	if q, ok := backend.QuiescerOf(r.Backend); ok {
		if err := q.Quiesce(ctx); err != nil {
			return fmt.Errorf("quiescing after the loss: %w", err)
		}
	}
	_ = errors.Join(x.mapping.Unmap(ctx), x.alloc.Release(ctx)) // which may need the dead
	return nil
}

// quiesce: nothing moves any more when it has come back without an error, and it never outlasts its context.
func quiesce(ctx context.Context, h Harness, r *rank) error {
	q, ok := backend.QuiescerOf(r.Backend)
	if !ok {
		return nil
	}
	idle := func(when string) error {
		ctx, cancel := context.WithTimeout(ctx, h.patience)
		defer cancel()
		if err := q.Quiesce(ctx); err != nil {
			return fmt.Errorf("quiescing %s: %w", when, err)
		}
		return nil
	}
	if err := idle("what never moved"); err != nil {
		return err
	}
	x, err := r.ring(ctx, h)
	if err != nil || x == nil {
		return err
	}
	run, err := x.move.Start()
	if err != nil {
		return err
	}
	// Nobody asks how the run goes meanwhile: whether it counts is the backend's to say, but not to wait for ever.
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	ended := make(chan error, 1)
	go func() { ended <- q.Quiesce(short) }()
	select {
	case err = <-ended:
	case <-time.After(h.patience):
		err = errors.New("it outlasts its context")
	}
	cancel()
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("quiescing beside a transfer: %w", err)
	}
	if err := errors.Join(h.await(ctx, "a transfer", run.Poll), idle("after a transfer"), x.move.Close()); err != nil {
		return err
	}
	if err := errors.Join(r.group.Barrier(ctx, "moved"), x.check(x.before, 0)); err != nil {
		return err
	}
	return x.done(ctx)
}
