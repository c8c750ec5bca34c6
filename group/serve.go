package group

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
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
func Serve(ctx context.Context, opts *Options) error {
	const op = "Serve"
	o, err := opts.checkedFor(op)
	if err != nil {
		if opts != nil && opts.Listener != nil {
			err = errors.Join(err, opts.Listener.Close())
		}
		return err
	}
	h := newHub(o.WorldSize, o.bounds())
	l, err := listen(ctx, op, o)
	if err != nil {
		return err
	}
	s, err := startService(l, h, o, o.Logger)
	if err != nil {
		return err
	}
	defer s.stop()
	missing := func(ranks []int, since time.Time, err error) error {
		return &MissingRanksError{Op: "serving the rendezvous of job " + quoteJob(o.Job), Missing: ranks, Size: o.WorldSize, Waited: time.Since(since), Err: err}
	}
	look := time.NewTicker(servedLook)
	defer look.Stop()
	started := time.Now()
	var alone time.Time // since when no rank is there, though not all have come
	for {
		present, absent := h.in(rankPresent), h.in(rankAbsent)
		switch {
		case len(present) > 0 || len(absent) == o.WorldSize:
			alone = time.Time{}
		case len(absent) == 0:
			s.drain(ctx)
			return nil
		case alone.IsZero():
			alone = time.Now()
		case time.Since(alone) > o.Timeout:
			return missing(absent, alone, context.DeadlineExceeded)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			if len(present) > 0 {
				return missing(present, started, ctx.Err())
			}
			return missing(absent, started, ctx.Err())
		}
	}
}

// listen is the socket to serve on: the one that was given, or a new one at the address. The socket is closed with an error.
func listen(ctx context.Context, op string, o *Options) (net.Listener, error) {
	l := o.Listener
	if l == nil {
		if err := checkAddress(ctx, op, o); err != nil {
			return nil, err
		}
		var config net.ListenConfig
		var err error
		if l, err = config.Listen(ctx, "tcp", o.Addr); err != nil {
			return nil, fmt.Errorf("serving the rendezvous on %s (is another job using the port, or is the service of this job there, so that rank 0 must join it as the others do?): %w",
				o.Addr, errors.Join(ErrUnavailable, err))
		}
	}
	if a, ok := l.Addr().(*net.TCPAddr); ok && len(o.Token) < MinToken && !a.IP.IsLoopback() {
		return nil, errors.Join(notLoopback(op, "Listener", l.Addr().String(), o), l.Close())
	}
	return l, nil
}
