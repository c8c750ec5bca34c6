package group

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/internal/errs"
)

// Join makes this process a rank of a job and returns its world group. It is collective: it blocks until every rank of the world has
// joined, or until ctx or [Options].Timeout ends. Rank 0 serves the rendezvous for all ranks until it closes the group; see [Group.Close]. With
// [Options].Served another process does: see [Serve] and [ServeJobs].
//
// A Join that fails tells the others why before it returns, which may take up to two seconds beyond ctx and Timeout. On rank 0, where it serves the rendezvous, it takes
// them as long as a rank has not come, and a third where one is being told then: ranks that come a little later learn why too, and do not look for a service that has gone.
//
// Its errors are ErrInvalid for options that are not allowed, or that do not go together; a [*ConnectError] if the service was not
// reached in time; a [*RefusedError] if the job will not have this rank, which disturbs no other; ErrUnavailable if rank 0 cannot
// listen; a [*FileLimitError] if rank 0, or this process, may open no more files; and those of collective calls, among them a [*MissingRanksError] that
// names the ranks that had not come.
func Join(ctx context.Context, opts *Options) (*Group, error) {
	o, err := opts.checked()
	if err = errors.Join(errs.Given("Join", "ctx", ctx, "a context"), err); err == nil && o.WorldSize == 1 {
		err = ctx.Err() // nobody else is to be told
	}
	if err != nil {
		if opts != nil && opts.Listener != nil {
			err = errors.Join(err, opts.Listener.Close())
		}
		return nil, err
	}
	g, err := join(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("joining %s as rank %d of %d: %w", meetingPlace(o), o.Rank, o.WorldSize, err)
	}
	return g, nil
}

// meetingPlace says where the ranks of a job meet, so that those that wait for each other at different places are seen to.
func meetingPlace(o *Options) string {
	at := o.Addr
	if o.Listener != nil {
		at = o.Listener.Addr().String()
	}
	place := "the job"
	if o.Job != "" {
		place = "job " + quoteJob(o.Job)
	}
	if at != "" { // a rank alone needs none
		place += " at " + at
	}
	return place
}

func join(ctx context.Context, o *Options) (*Group, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	m, err := thisProcess(o.Rank, o.LocalRank, o.BootID)
	if err != nil {
		if o.Listener != nil {
			err = errors.Join(err, o.Listener.Close())
		}
		return nil, err
	}
	s := newSession(o.Rank, o.Timeout, o.Logger, o.bounds())
	s.served = o.Served
	world := make([]int, o.WorldSize)
	for i := range world {
		world[i] = i
	}
	g := newGroup(s, worldName, o.Rank, &roster{world: world})
	if err := s.add(g); err != nil {
		return nil, err
	}
	s.files = newFileCarrier(s)
	if o.Rank == 0 && !o.Served {
		s.transport, err = host(ctx, s, m, o)
	} else if err = checkAddress(ctx, "Join", o); err == nil {
		s.transport, err = connect(ctx, s, m, o)
	}
	if err != nil {
		return nil, err
	}
	if err := meet(ctx, g, m); err != nil {
		s.close()
		if t, ok := s.transport.(*hostTransport); ok && t.service != nil {
			err = errors.Join(err, t.service.front.listener.hindrance())
			if _, missing := errors.AsType[*MissingRanksError](err); missing {
				err = errors.Join(err, onlyHere(o, t.service.front.listener.Addr()))
			}
		}
		// The others are told why before the connection ends; that is bounded by a short timeout.
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTimeout)
		defer cancel()
		if t, ok := s.transport.(*hostTransport); ok {
			t.linger(grace)
			grace, cancel = context.WithTimeout(context.WithoutCancel(ctx), graceTimeout)
			defer cancel()
		}
		if bye := s.transport.goodbye(grace); bye != nil {
			s.logger.Debug("leaving a job that was not joined", "error", bye)
		}
		return nil, err
	}
	s.logger.Debug("joined", "job", o.Job, "restart", o.Restart, "world", o.WorldSize)
	return g, nil
}

// onlyHere says that no other host reaches where rank 0 serves, or nil if one may: systems give a host's own name a loopback address, where other hosts know another one by it.
func onlyHere(o *Options, at net.Addr) error {
	host, _, err := net.SplitHostPort(o.Addr)
	a, ok := at.(*net.TCPAddr)
	if o.Listener != nil || err != nil || !ok || !a.IP.IsLoopback() || net.ParseIP(host) != nil || strings.EqualFold(host, "localhost") {
		return nil
	}
	return fmt.Errorf("%q is %s here, so that ranks on other hosts do not reach rank 0; if there are any, give an address of this host that they know (SYMMEM_RENDEZVOUS_ADDR), or take the name's loopback "+
		"address out of /etc/hosts", host, a.IP)
}

// meet is the all-gather that opens the world: every rank learns of every other.
func meet(ctx context.Context, g *Group, m Member) error {
	own, err := proto.Marshal(m.toWire())
	if err != nil {
		return fmt.Errorf("encoding the member: %w", err)
	}
	o, err := g.call(ctx, g.take(1), &arrival{kind: kindJoin, op: worldName, data: own}, nil)
	if err != nil {
		return err
	}
	r, err := worldOf(o.blobs)
	if err != nil {
		return err
	}
	g.session.mu.Lock()
	g.roster, g.members = r, r.members
	g.session.mu.Unlock()
	return nil
}

// hostTransport is the transport of rank 0: the hub is in its own process, and it serves the hub to the other ranks.
type hostTransport struct {
	localTransport
	service *service // nil in a world of one
}

// host makes the hub, and serves it where there are other ranks.
func host(ctx context.Context, s *session, m Member, o *Options) (*hostTransport, error) {
	t := &hostTransport{localTransport: localTransport{hub: newHub(o.WorldSize, o.bounds()), worldRank: 0}}
	if _, ok := t.hub.attach(m, s); !ok {
		return nil, errors.New("attaching rank 0 to a new hub")
	}
	if o.WorldSize == 1 {
		if o.Listener != nil {
			if err := o.Listener.Close(); err != nil {
				return nil, fmt.Errorf("closing the listener, which a world of one does not need: %w", err)
			}
		}
		return t, nil
	}
	l, err := listen(ctx, "Join", o)
	if err != nil {
		return nil, err
	}
	t.service, err = startService(l, t.hub, o, true, o.Logger.With("rank", o.Rank))
	return t, err
}

// flush waits until the other ranks' outcomes are on their way.
func (t *hostTransport) flush() {
	if t.service != nil {
		t.service.flush()
	}
}

// goodbye takes rank 0 out of the job, and ends the service when nobody needs it any more or ctx ends.
func (t *hostTransport) goodbye(ctx context.Context) error {
	started := time.Now()
	t.hub.leave(0)
	if t.service == nil {
		return nil
	}
	defer t.service.stop()
	select {
	case <-t.hub.gone():
		t.service.front.drain(ctx)
		return nil
	case <-ctx.Done():
		missing := t.hub.attached()
		if len(missing) == 0 {
			return nil
		}
		return &MissingRanksError{Op: "ending the rendezvous service", Missing: missing, Size: len(t.hub.ranks),
			Waited: time.Since(started), Err: ctx.Err()}
	}
}

// linger takes rank 0 out of a job that it has not joined, and goes on serving it until every rank has come and gone, or ctx ends: those that come meanwhile are told
// why it has failed.
func (t *hostTransport) linger(ctx context.Context) {
	t.hub.leave(0)
	look := time.NewTicker(lingerLook)
	defer look.Stop()
	for {
		if present, absent := t.hub.standing(); len(present) == 0 && len(absent) == 0 {
			return
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// lingerLook is the pause between two looks whether every rank has come to a job that has failed.
const lingerLook = 5 * time.Millisecond

// checkAddress refuses addresses beyond this host, for serving and for connecting, without a token or with one that can be guessed: anyone could be
// there.
func checkAddress(ctx context.Context, op string, o *Options) error {
	if len(o.Token) >= MinToken {
		return nil
	}
	hostname, port, err := net.SplitHostPort(o.Addr)
	if err != nil {
		return invalid(op, "Addr", o.Addr, "host:port")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		if _, err := net.DefaultResolver.LookupPort(ctx, "tcp", port); err != nil {
			return invalid(op, "Addr", o.Addr, "host:port with a port from 0 to 65535")
		}
	}
	if hostname == "" {
		return notLoopback(op, "Addr", o.Addr, o)
	}
	addrs, err := net.DefaultResolver.LookupIPAddr(ctx, hostname)
	if err != nil {
		return fmt.Errorf("looking up the rendezvous address (%s): %w", unknownName(hostname), errors.Join(ErrUnavailable, err))
	}
	for _, a := range addrs {
		if !a.IP.IsLoopback() {
			return notLoopback(op, "Addr", o.Addr, o)
		}
	}
	return nil
}

func notLoopback(op, arg, addr string, o *Options) error {
	if o.Token != "" {
		return errs.Advised(op, "len(Token)", len(o.Token), fmt.Sprintf("at least %d bytes where %s, %s, is no loopback address", MinToken, arg, addr),
			"whoever answers there in place of the service could guess a shorter one: set SYMMEM_TOKEN on every rank to what \"openssl rand -hex 16\" prints")
	}
	return errs.Advised(op, arg, addr, "a loopback address such as 127.0.0.1:PORT as long as there is no token",
		"set SYMMEM_TOKEN on every rank, to one text of 16 bytes or more, to use other addresses")
}
