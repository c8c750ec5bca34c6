package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
)

// MaxJobs is the most jobs that [ServeJobs] has at a time.
const MaxJobs = 256

// maxJobRanks is the most ranks of all of these jobs together: a word of one rank makes room for all of its job.
const maxJobRanks = 4 * MaxWorldSize

// maxJobErrors is how many errors of jobs ServeJobs returns.
const maxJobErrors = 16

// ServeJobs serves the rendezvous of any number of jobs at one address, from a process, or a goroutine, that is no rank of them. A job begins with the first of
// its ranks, whose Job, Restart and WorldSize are the job's, and goes on as with [Serve]: its ranks join with [Options].Served. Jobs that are there at the same
// time need names of their own. A job that is over can be opened again, and one that has failed, as another attempt of it.
//
// Of opts it takes Addr or Listener, Stay, Token, TLS, Timeout, LivenessTimeout, Store and Logger, which have the meaning that they have for Serve; Job, Restart and
// WorldSize are to be zero. Whoever has the token may join any of the jobs.
//
// It blocks until jobs have begun and all of them are over; with Stay until ctx ends, which then is no error. A job whose ranks do not come, or whose store fails, has
// an end, and disturbs no other. ServeJobs returns the errors of such jobs, those of Serve, joined: the last of each job, of sixteen jobs at most. If ctx ends first it ends the service for
// the ranks that remain, and returns a [*MissingRanksError] for each of their jobs. It waits without bound for the first job. Further errors are ErrInvalid for options that are not
// allowed, a Store among them that its kind refuses when the first job comes, and ErrUnavailable if Addr cannot be listened on.
//
// With a Store it learns of the jobs of the service before it when their ranks come back, and does not end before they have had the time: LivenessTimeout and some seconds.
// A rank that comes first, and says another world size than the job has, is refused as at any other time.
//
// Ranks that were not told that a service is there, so without Options.Served, are of a job whose rank 0 serves it: they are refused, and look on where they have further Ports.
//
// Beyond [MaxJobs] jobs at a time, or four times [MaxWorldSize] ranks in all of them, the ranks of others are told to come again, which they do for their Timeout.
func ServeJobs(ctx context.Context, opts *Options) error {
	o, l, err := listening(ctx, "ServeJobs", opts)
	if err != nil {
		return err
	}
	f, err := newFront(l, o, o.Logger.With("service", l.Addr().String()))
	if err != nil {
		return err
	}
	j := &jobs{ctx: ctx, options: o, front: f, there: make(map[jobName]*job), failed: make(map[jobName]error), over: make(chan struct{}, 1)}
	f.find, f.returns = j.find, o.Store != ""
	f.start()
	if o.Store != "" {
		j.earliest = time.Now().Add(o.LivenessTimeout + o.returnTime())
		defer time.AfterFunc(time.Until(j.earliest), func() { signal(j.over) }).Stop()
	}
	for ended := false; !ended; {
		select {
		case <-j.over:
			ended = j.close(!o.Stay)
		case <-ctx.Done():
			ended = j.close(false)
		}
	}
	j.work.Wait()
	if ctx.Err() == nil {
		f.drain(ctx)
	}
	f.stop()
	return errors.Join(j.errors()...)
}

// jobs are those of one service.
type jobs struct {
	ctx     context.Context
	options *Options // of the service
	front   *front
	over    chan struct{} // holds a token after a job has ended
	work    sync.WaitGroup

	earliest time.Time // before which it does not end by itself

	mu      sync.Mutex
	closed  bool
	taken   bool // the store's kind has taken what the service was given
	gaveUp  bool // it is good for no job
	there   map[jobName]*job
	begun   bool              // a rank has come
	failed  map[jobName]error // the last of each job
	further int               // failures of jobs that are not there
	ended   []error           // of the jobs that the end of the context has ended
}

// jobName is one attempt of a job.
type jobName struct {
	name    string
	restart int
}

// job is one that is there.
type job struct {
	size    int           // its ranks
	streams int           // of ranks that have come for it; guarded by the lock of jobs
	ready   chan struct{} // closed when it has a service, or an error
	service *service
	err     error
}

// close lets no further job begin, and reports whether that is so: with idle only if none is there and one has been.
func (j *jobs) close(idle bool) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ctx.Err() == nil && !j.gaveUp && !(idle && j.begun && len(j.there) == 0 && !time.Now().Before(j.earliest)) {
		return false
	}
	j.closed = true
	return true
}

// tried notes how opening the store of a job went. A kind that refuses the store of the first one refuses it for every job, and whoever has given it looks for a service that ends: it does with that job. What is
// refused later was right before, as where certificates are being replaced, and disturbs no other job.
func (j *jobs) tried(err error) {
	none := errors.Is(err, ErrInvalid)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.gaveUp = j.gaveUp || none && !j.taken
	j.taken = j.taken || !none
}

// find is the job that a rank comes for, which begins if it is not there. gone is called when the rank's stream ends.
func (j *jobs) find(ctx context.Context, h *pb.Hello) (s *service, gone func(), err error) {
	n := jobName{string(h.GetJob()), int(h.GetRestart())}
	size := int(h.GetWorldSize())
	none := func() {}
	switch {
	case !h.GetServed():
		return nil, none, refused(RefusedJob, "this is a service for jobs whose ranks are told of it, and rank 0 of this one serves it itself: set SYMMEM_RENDEZVOUS_SERVED=true on every rank to "+
			"meet here, or another SYMMEM_RENDEZVOUS_ADDR")
	case len(n.name) > maxText:
		return nil, none, refused(RefusedJob, "the job's name has %d bytes; allowed are at most %d", len(n.name), maxText)
	case n.restart < 0:
		return nil, none, refused(RefusedRestart, "attempt %d of the job; the first is 0", n.restart)
	case size < 1 || size > MaxWorldSize:
		return nil, none, refused(RefusedWorldSize, "a world of %d ranks; allowed are 1 to %d", size, MaxWorldSize)
	case h.GetMember().GetWorldRank() < 0 || h.GetMember().GetWorldRank() >= int64(size):
		return nil, none, refused(RefusedRank, "rank %d is outside of a world of %d", h.GetMember().GetWorldRank(), size)
	}
	found, err := j.take(n, size)
	if err != nil {
		return nil, none, err
	}
	gone = func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		found.streams--
	}
	select {
	case <-found.ready:
	case <-ctx.Done():
		return nil, gone, status.FromContextError(ctx.Err()).Err()
	}
	if refusal, ok := errors.AsType[*RefusedError](found.err); ok && size == found.size {
		return nil, gone, refusal
	}
	if found.err != nil { // that of another world size is not this rank's: it comes again, and the job is opened with its own
		return nil, gone, status.Error(codes.Unavailable, readable(found.err))
	}
	return found.service, gone, nil
}

// expects reports whether a rank that has come for a job may still be admitted.
func (j *jobs) expects(one *job) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return one.streams > 0
}

// take is the job of a name, which begins if it is not there and may.
func (j *jobs) take(n jobName, size int) (*job, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	found := j.there[n]
	switch {
	case found != nil:
		found.streams++
		return found, nil
	case j.closed:
		return nil, status.Error(codes.Unavailable, refusedEnding.Text)
	case len(j.there) >= j.options.bounds().jobs:
		return nil, status.Errorf(codes.Unavailable, "the service has %d jobs, which are all that it takes at a time", len(j.there))
	}
	ranks := size
	for other, there := range j.there {
		if other.name == n.name && other.restart > n.restart {
			return nil, refused(RefusedRestart, "this is attempt %d of the job, not %d", other.restart, n.restart)
		}
		ranks += there.size
	}
	if most := j.options.bounds().jobRanks; ranks > most {
		return nil, status.Errorf(codes.Unavailable, "the jobs of the service would have %d ranks with this one; it takes %d at a time", ranks, most)
	}
	found = &job{size: size, streams: 1, ready: make(chan struct{})}
	j.there[n] = found
	o := *j.options
	o.WorldSize, o.Job, o.Restart = size, n.name, n.restart
	j.work.Go(func() { j.serve(found, n, &o) })
	return found, nil
}

// serve serves a job until it is over or has failed.
func (j *jobs) serve(one *job, n jobName, o *Options) {
	logger := j.front.logger.With("job", o.Job, "restart", o.Restart)
	h := newHub(o.WorldSize, o.bounds())
	k, err := recall(j.ctx, h, o)
	j.tried(err)
	came := false
	if other, ok := errors.AsType[*otherWorldError](err); ok { // one rank has come to the wrong job, which is no failure of the job
		one.err, err = refused(RefusedWorldSize, "this world has %d ranks, not %d", other.kept, other.asked), nil
		close(one.ready)
	} else if err != nil {
		one.err = err
		close(one.ready)
	} else {
		s := newService(h, o, true, logger)
		s.front, s.many = j.front, true
		s.work.Go(s.watch)
		one.service = s
		close(one.ready)
		var over bool
		for ended := false; !ended; {
			over, err = s.serveUntilOver(j.ctx, func() bool { return j.expects(one) })
			shut := s.shut() // else a rank has come at the last moment
			// Only where ranks were missing can a rank that has come help. A store that does not answer in time is beyond its deadline too, but ends the job.
			_, missing := errors.AsType[*MissingRanksError](err)
			ended = shut || err != nil && !missing || j.ctx.Err() != nil
			over = over && shut
		}
		if over {
			if errors.Is(err, j.ctx.Err()) {
				err = nil // it was over when the context ended
			}
			s.settle(j.ctx)
		}
		_, absent := h.standing()
		came = len(absent) < o.WorldSize
		err = errors.Join(err, k.end(j.ctx, over))
		s.close(j.ctx)
	}
	if !came && j.ctx.Err() != nil {
		err = nil // nobody is missing in a job that nobody was in
	}
	if err != nil {
		logger.Error("serving a job", "error", err)
	}
	j.end(n, came, err)
}

// end takes a job out that is over or has failed.
func (j *jobs) end(n jobName, came bool, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.there, n)
	j.begun = j.begun || came
	_, again := j.failed[n]
	switch {
	case err == nil:
	case j.ctx.Err() != nil:
		j.ended = append(j.ended, err)
	case again || len(j.failed) < maxJobErrors:
		j.failed[n] = err
	default:
		j.further++
	}
	signal(j.over)
}

// errors are those of all jobs that have failed, as far as they are kept.
func (j *jobs) errors() []error {
	j.mu.Lock()
	defer j.mu.Unlock()
	names := slices.SortedFunc(maps.Keys(j.failed), func(a, b jobName) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.restart, b.restart)) })
	var all []error
	for _, n := range names {
		all = append(all, j.failed[n])
	}
	if j.further > 0 {
		all = append(all, fmt.Errorf("%d more failures of jobs, which are in the log", j.further))
	}
	return append(all, j.ended...)
}
