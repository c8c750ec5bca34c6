package group

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/internal/errs"
)

// servedLook is the pause between two looks whether a served job is over.
const servedLook = 50 * time.Millisecond

// Serve serves the rendezvous of a job from a process, or a goroutine, that is no rank of it. All ranks, rank 0 among them, join it with
// [Options].Served, so that the job can lose any of them, and none has to wait for the others before it leaves.
//
// Of opts it takes WorldSize, Addr or Listener, Job, Restart, Token, TLS, Timeout, LivenessTimeout and Logger, which have the meaning that they
// have for rank 0. It blocks until the job is over: until every rank has joined, and left or been lost. If some have gone and the others do not
// come within Timeout, that is the end too, with a [*MissingRanksError] that names them. It waits without bound for the first rank.
//
// If ctx ends first, Serve ends the service for the ranks that remain and returns a [*MissingRanksError] that names them, or those that had not
// come. Further errors are ErrInvalid for options that are not allowed, and ErrUnavailable if Addr cannot be listened on.
//
// # A service that is started again
//
// With [Options].Store, a Serve that has ended before the job, however it ended, can be called again, by any process that the ranks reach at their Addr,
// and goes on with the job. The ranks look for it for their Options.Timeout, and then count it as lost. Their calls wait meanwhile, as long as they
// wait for anything, and are done once: what a rank was told before is known to the new service, what it asked for and was not told yet it asks for again.
// A rank that has not come back within LivenessTimeout and some seconds, nor any other one meanwhile, is lost. Of two services for one attempt of a job, the later one takes the
// store, and the other ends, within a second or two where its ranks ask for nothing. A job that is over leaves nothing in the store; one that was given up is forgotten there some time after its
// ranks have stopped waiting. To start a job anew before that, count Restart up.
//
// If the store takes no more, or does not answer in time, Serve ends with a [*durable.StoreError].
func Serve(ctx context.Context, opts *Options) (err error) {
	// The socket comes first: where another service of the job has it, the store is that one's.
	o, l, err := listening(ctx, "Serve", opts)
	if err != nil {
		return err
	}
	h := newHub(o.WorldSize, o.bounds())
	k, err := recall(ctx, h, o)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	s, err := startService(l, h, o, false, o.Logger)
	if err != nil {
		return errors.Join(err, k.end(ctx, false))
	}
	over := false
	defer func() {
		// Nothing that the end of the service does to its ranks is kept.
		err = errors.Join(err, k.end(ctx, over))
		s.stop()
	}()
	over, err = s.serveUntilOver(ctx, func() bool { return true })
	if over && err == nil {
		s.front.drain(ctx)
	}
	return err
}

// listening checks what the call op was given, and gives the options with their defaults and the socket to serve on. After an error the listener of opts is closed.
func listening(ctx context.Context, op string, opts *Options) (*Options, net.Listener, error) {
	o, err := opts.checkedFor(op)
	if err == nil && o.Store != "" {
		if err = durable.Check(o.Store); err != nil {
			err = fmt.Errorf("%s: %w", op, err)
		}
	}
	if err = errors.Join(errs.Given(op, "ctx", ctx, "a context"), err); err != nil {
		if opts != nil && opts.Listener != nil {
			err = errors.Join(err, opts.Listener.Close())
		}
		return nil, nil, err
	}
	l, err := listen(ctx, op, o)
	return o, l, err
}

// serveUntilOver waits until the job is over, and all that it has told is kept, and reports whether it is. One that no rank has come to is over when none is to be expected.
func (s *service) serveUntilOver(ctx context.Context, expected func() bool) (over bool, err error) {
	h, k, o := s.hub, s.hub.keeper, s.options
	missing := func(ranks []int, since time.Time, err error) error {
		return &MissingRanksError{Op: "serving the rendezvous of job " + quoteJob(o.Job), Missing: ranks, Size: o.WorldSize, Waited: time.Since(since), Err: err}
	}
	look := time.NewTicker(servedLook)
	defer look.Stop()
	started := time.Now()
	var alone time.Time // since when no rank is there, though not all have come
	back := returning{missing: len(h.awaited()), last: started}
	for {
		if back.missing > 0 {
			awaited := h.awaited()
			if now := time.Now(); back.late(now, len(awaited), o.LivenessTimeout+o.returnTime()) {
				for _, rank := range awaited {
					h.loseAwaited(rank, fmt.Sprintf("it has not come back within %v to the rendezvous service that was started again", now.Sub(started).Round(time.Second)))
				}
			}
		}
		anybody := expected() // before the look at who is there: a rank that has come is one of both
		present, absent := h.standing()
		switch {
		case len(absent) == o.WorldSize && !anybody:
			return true, k.flush(ctx)
		case len(present) > 0 || len(absent) == o.WorldSize:
			alone = time.Time{}
		case len(absent) == 0 && k != nil && k.restored && time.Since(started) < o.returnTime():
			// A rank that has left may not know yet that it has: it comes again to be told.
		case len(absent) == 0:
			return true, k.flush(ctx)
		case alone.IsZero():
			alone = time.Now()
		case time.Since(alone) > o.Timeout:
			return false, missing(absent, alone, context.DeadlineExceeded)
		}
		select {
		case <-look.C:
		case <-k.broken():
			return false, k.err
		case <-ctx.Done():
			if len(present) > 0 {
				return false, missing(present, started, ctx.Err())
			}
			return false, missing(absent, started, ctx.Err())
		}
	}
}

// returnTime is how long a rank may take to come back to a service that was started again, beyond the liveness timeout: its attempts are a pause apart, and the
// one under way may be to a host that is gone.
func (o *Options) returnTime() time.Duration { return 2*lastBackoff + o.bounds().attempt }

// returning is how long a service that was started again has waited for the ranks that the one before knew.
type returning struct {
	missing int // ranks that are not back
	waited  time.Duration
	last    time.Time // when that was looked at
}

// late notes how many ranks are missing now, and reports whether those have had their time. As long as others come back it may be the service that is slow: a
// thousand ranks come at once. Time in which this process did not get to run does not count, since nobody could come back in it.
func (r *returning) late(now time.Time, missing int, bound time.Duration) bool {
	const longest = 20 * servedLook
	if missing < r.missing {
		r.waited = 0
	}
	r.waited += min(now.Sub(r.last), longest)
	r.missing, r.last = missing, now
	return missing > 0 && r.waited > bound
}

// storeTime bounds what is done with a store, at least: a store of several hosts elects a leader in some seconds.
const storeTime = 5 * time.Second

// recall opens the store of the job, if it has one, and gives the hub what an earlier service has kept there.
func recall(ctx context.Context, h *hub, o *Options) (*keeper, error) {
	if o.Store == "" {
		return nil, nil
	}
	bound := max(o.LivenessTimeout, storeTime)
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	store, err := durable.Open(ctx, o.Store, durable.Options{
		Name: fmt.Sprintf("%s\x00%d", o.Job, o.Restart), TTL: 2*o.Timeout + o.LivenessTimeout + storeTime, Logger: o.Logger,
	})
	if err != nil {
		return nil, fmt.Errorf("serving the rendezvous of job %s: %w", quoteJob(o.Job), err)
	}
	kept, err := store.Load(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serving the rendezvous of job %s: %w", quoteJob(o.Job), err), store.Close())
	}
	h.keeper = newKeeper(store, bound, o.Logger)
	h.keeper.restored = len(kept) > 0
	if err := h.restore(kept); err != nil {
		err = &durable.StoreError{Op: "reading the state of job " + quoteJob(o.Job), URL: durable.Redacted(o.Store), Condition: durable.Damaged, Err: err}
		return nil, errors.Join(err, h.keeper.end(ctx, false))
	}
	if n := len(h.awaited()); n > 0 {
		o.Logger.Info("going on with a job", "job", o.Job, "restart", o.Restart, "ranks", n)
	}
	return h.keeper, nil
}

// listen is the socket to serve on: the one that was given, or a new one at the address, or at the first of its Ports that is free. The socket is closed with an error.
func listen(ctx context.Context, op string, o *Options) (net.Listener, error) {
	l := o.Listener
	if l == nil {
		if err := checkAddress(ctx, op, o); err != nil {
			return nil, err
		}
		var err error
		for i, addr := range o.addrs() {
			if l, err = listenAt(ctx, o, addr); err == nil || !errors.Is(err, syscall.EADDRINUSE) {
				break
			}
			if i+1 < o.Ports {
				o.Logger.Info("another program has the port: serving the rendezvous on the next that is free", "address", addr)
			}
		}
		if err != nil {
			hint := "is another job using the port, or is the service of this job there, so that rank 0 must join it as the others do?"
			if unknown, ok := errors.AsType[*net.DNSError](err); ok {
				hint = unknownName(unknown.Name)
			} else if errors.Is(err, syscall.EADDRNOTAVAIL) {
				hint = "is that an address of the host on which this runs?"
			}
			return nil, fmt.Errorf("serving the rendezvous on %s (%s): %w", o.where(), hint, errors.Join(ErrUnavailable, err))
		}
	}
	if l.Addr() == nil { // package net takes a failed getsockname for no address, which could be any
		return nil, errors.Join(fmt.Errorf("serving the rendezvous: the system does not say what address its socket has; try again: %w", ErrUnavailable), l.Close())
	}
	if a, ok := l.Addr().(*net.TCPAddr); ok && len(o.Token) < MinToken && !a.IP.IsLoopback() {
		return nil, errors.Join(notLoopback(op, "Listener", l.Addr().String(), o), l.Close())
	}
	return l, nil
}

// unknownName says what to look at where nobody knows a host's name.
func unknownName(name string) string {
	return fmt.Sprintf("is %q spelled right, and does the name service of this host know it?", name)
}

// listenAt listens at an address. It looks a host's name up again for as long as that is not known, as the other ranks do: a name that is made for this process, as for a pod of
// Kubernetes, may be made when the process has begun. It takes no longer than Timeout. Of several addresses that a name has it takes the first that is this host's: one may be that of
// a pod before, which had the name too.
func listenAt(ctx context.Context, o *Options, addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	var config net.ListenConfig
	for pause := firstBackoff; ; pause = min(2*pause, lastBackoff) {
		l, err := config.Listen(ctx, "tcp", addr)
		if errors.Is(err, syscall.EADDRNOTAVAIL) { // package net tries one
			others, _ := net.DefaultResolver.LookupHost(ctx, host) // without them that error stands
			for _, other := range others {
				if l, failed := config.Listen(ctx, "tcp", net.JoinHostPort(other, port)); failed == nil || errors.Is(failed, syscall.EADDRINUSE) {
					return l, failed
				}
			}
		}
		unknown, ok := errors.AsType[*net.DNSError](err)
		if !ok || unknown.Name != host { // what is not known may be the name of a port
			return l, err
		}
		o.Logger.Debug("looking up where to serve the rendezvous", "address", addr, "error", err)
		if !rest(ctx, pause) {
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}
