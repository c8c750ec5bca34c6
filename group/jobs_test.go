package group

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
)

// jobsService is a service of ServeJobs.
type jobsService struct {
	t     *testing.T
	opts  Options
	addr  string
	stop  context.CancelFunc
	ended chan error
}

func newJobsService(t *testing.T, opts Options) *jobsService {
	t.Helper()
	l := listenLoopback(t)
	s := &jobsService{t: t, opts: opts, addr: l.Addr().String()}
	s.start(l)
	t.Cleanup(func() { s.stop() })
	return s
}

// start serves on l, or again at the address.
func (s *jobsService) start(l net.Listener) {
	s.t.Helper()
	if l == nil {
		var err error
		require.Eventually(s.t, func() bool {
			l, err = net.Listen("tcp", s.addr)
			return err == nil
		}, 10*time.Second, 5*time.Millisecond, "listening again: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 2*time.Minute)
	o := s.opts
	o.Listener = l
	s.stop, s.ended = cancel, make(chan error, 1)
	ended := s.ended
	go func() { ended <- ServeJobs(ctx, &o) }()
}

func (s *jobsService) wait() error {
	s.t.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(30 * time.Second):
		s.t.Fatal("the service does not end")
		return nil
	}
}

// rank is one of a job's options.
func (s *jobsService) rank(job string, size, rank int) *Options {
	return &Options{Rank: rank, LocalRank: rank, WorldSize: size, Addr: s.addr, Served: true, Job: job, Token: s.opts.Token, Timeout: 20 * time.Second, limits: s.opts.limits}
}

// join joins all ranks of a job.
func (s *jobsService) join(job string, size int) ([]*Group, error) {
	groups, failures := make([]*Group, size), make([]error, size)
	var wait sync.WaitGroup
	for rank := range groups {
		wait.Go(func() { groups[rank], failures[rank] = Join(testContext(s.t), s.rank(job, size, rank)) })
	}
	wait.Wait()
	return groups, errors.Join(failures...)
}

// TestServeJobs: jobs of several sizes are at one address at the same time, each for itself: a rank that is lost is lost for its own, and one that is over can be opened again.
func TestServeJobs(t *testing.T) {
	for name, token := range map[string]string{"plain": "", "token": "0123456789abcdef"} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			s := newJobsService(t, Options{Token: token})
			all := map[string][]*Group{}
			for i := range 4 {
				job := fmt.Sprint("job ", i)
				groups, err := s.join(job, i+1)
				require.NoError(t, err)
				all[job] = groups
			}
			for job, groups := range all {
				requireNone(t, onAll(groups, func(g *Group) error {
					blobs, err := g.AllGather(ctx, "who", []byte(fmt.Sprint(job, g.Rank())))
					for rank, b := range blobs {
						assert.Equal(t, fmt.Sprint(job, rank), string(b))
					}
					return err
				}))
				require.NoError(t, groups[0].Store().Set(ctx, "key", []byte(job)))
			}
			for job, groups := range all {
				v, err := groups[len(groups)-1].Store().Get(ctx, "key")
				require.NoError(t, err)
				require.Equal(t, job, string(v))
			}
			// One job loses a rank, another ends and begins again, under its name and as another attempt of it.
			all["job 3"][1].Abort("the test says so")
			var lost *PeerLostError
			require.ErrorAs(t, all["job 3"][0].Barrier(ctx, "lost"), &lost)
			requireNone(t, onAll(all["job 2"], func(g *Group) error { return g.Close(ctx) }))
			for range 3 {
				groups, err := s.join("job 2", 2)
				require.NoError(t, err)
				requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "again") }))
				requireNone(t, onAll(groups, func(g *Group) error { return g.Close(ctx) }))
			}
			o := s.rank("job 2", 1, 0)
			o.Restart = 1
			g, err := Join(ctx, o)
			require.NoError(t, err)
			require.NoError(t, g.Close(ctx))
			requireNone(t, onAll(all["job 1"], func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
			for _, job := range []string{"job 0", "job 3"} {
				for _, g := range all[job] {
					_ = g.Close(ctx) // of one whose rank is lost
				}
			}
			select {
			case err := <-s.ended:
				t.Fatalf("it has ended with a job there: %v", err)
			case <-time.After(3 * servedLook):
			}
			requireNone(t, onAll(all["job 1"], func(g *Group) error { return g.Close(ctx) }))
			require.NoError(t, s.wait())
		})
	}
}

// TestServeJobsMany: jobs come and go at the same time, each opened again and again, also by ranks that leave while others of it are still there; with Stay the service is there until its context ends.
func TestServeJobsMany(t *testing.T) {
	s := newJobsService(t, Options{Stay: true})
	ctx := testContext(t)
	var wait sync.WaitGroup
	for i := range 20 {
		job, size := fmt.Sprint("job ", i), 1+i%3
		for rank := range size {
			wait.Go(func() {
				for round := range 3 {
					g, err := Join(ctx, s.rank(job, size, rank))
					if !assert.NoError(t, err, "%s, rank %d, round %d", job, rank, round) {
						return
					}
					assert.NoError(t, g.Barrier(ctx, "all"))
					time.Sleep(rand.N(20 * time.Millisecond))
					assert.NoError(t, g.Close(ctx))
				}
			})
		}
	}
	wait.Wait()
	select {
	case err := <-s.ended:
		t.Fatalf("it has ended, though it was to stay: %v", err)
	case <-time.After(3 * servedLook):
	}
	s.stop()
	require.NoError(t, s.wait())
}

// TestServeJobsRefuses: what is wrong with a rank is said to it alone, and begins no job.
func TestServeJobsRefuses(t *testing.T) {
	lim := defaultLimits
	lim.jobs, lim.jobRanks, lim.doubt = 2, 5, 50*time.Millisecond
	s := newJobsService(t, Options{limits: &lim})
	ctx := testContext(t)
	first := s.rank("first", 2, 0)
	first.Restart = 3
	joined := make(chan *Group, 1)
	go func() {
		g, err := Join(ctx, first)
		assert.NoError(t, err)
		joined <- g
	}()
	second := s.rank("first", 2, 1)
	second.Restart = 3
	g1, err := Join(ctx, second)
	require.NoError(t, err)
	g0 := <-joined
	require.NotNil(t, g0)
	for name, tt := range map[string]struct {
		change func(o *Options)
		reason RefusalReason
		says   string
	}{
		"another size":       {func(o *Options) { o.WorldSize = 3 }, RefusedWorldSize, "this world has 2 ranks, not 3"},
		"an earlier attempt": {func(o *Options) { o.Restart = 2 }, RefusedRestart, "this is attempt 3 of the job, not 2"},
		"a rank that is":     {func(*Options) {}, RefusedDuplicate, "set SYMMEM_JOB"},
	} {
		t.Run(name, func(t *testing.T) {
			o := *second
			tt.change(&o)
			_, err := Join(ctx, &o)
			requireRefused(t, err, tt.reason, s.addr)
			assert.ErrorContains(t, err, tt.says)
		})
	}
	// What Join would not send, as another implementation may.
	for name, tt := range map[string]struct {
		change func(o *Options)
		rank   int
		again  bool
		reason RefusalReason
	}{
		"no world":           {func(o *Options) { o.WorldSize = 0 }, 0, false, RefusedWorldSize},
		"a huge world":       {func(o *Options) { o.WorldSize = MaxWorldSize + 1 }, 0, false, RefusedWorldSize},
		"a rank beyond":      {func(*Options) {}, 7, false, RefusedRank},
		"a rank below":       {func(*Options) {}, -1, false, RefusedRank},
		"attempt -1":         {func(o *Options) { o.Restart = -1 }, 0, false, RefusedRestart},
		"a long name":        {func(o *Options) { o.Job = strings.Repeat("j", maxText+1) }, 0, false, RefusedJob},
		"of another service": {func(*Options) {}, 0, true, RefusedLate},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := s.rank("strange", 2, 0).checked()
			require.NoError(t, err)
			tt.change(o)
			m, err := thisProcess(tt.rank, 0, "")
			require.NoError(t, err)
			session := newSession(tt.rank, time.Minute, nil, &lim)
			r := &remote{session: session, options: o, member: m, liveness: o.LivenessTimeout}
			r.ctx, r.cancel = context.WithCancel(ctx)
			defer r.cancel()
			_, err = r.attempt(ctx, func() {}, o.Addr, time.Minute, tt.again)
			refusal, ok := errors.AsType[*RefusedError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, tt.reason, refusal.Reason, refusal.Text)
		})
	}
	t.Run("more ranks than it takes", func(t *testing.T) {
		large := s.rank("large", 4, 0)
		large.Timeout = time.Second
		_, err := Join(ctx, large)
		var unreached *ConnectError
		require.ErrorAs(t, err, &unreached)
		require.ErrorContains(t, err, "would have 6 ranks with this one; it takes 5 at a time")
	})
	t.Run("more jobs than it takes", func(t *testing.T) {
		alone, err := Join(ctx, s.rank("second", 1, 0))
		require.NoError(t, err)
		third := s.rank("third", 1, 0)
		third.Timeout = time.Second
		_, err = Join(ctx, third)
		var unreached *ConnectError
		require.ErrorAs(t, err, &unreached)
		require.ErrorContains(t, err, "the service has 2 jobs")
		third.Timeout = 20 * time.Second
		late := make(chan error, 1)
		go func() {
			g, err := Join(ctx, third)
			if err == nil {
				err = g.Close(ctx)
			}
			late <- err
		}()
		require.NoError(t, alone.Close(ctx))
		require.NoError(t, <-late)
	})
	requireNone(t, onAll([]*Group{g0, g1}, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
	requireNone(t, onAll([]*Group{g0, g1}, func(g *Group) error { return g.Close(ctx) }))
	require.NoError(t, s.wait())
}

// TestServeJobsEnds: a job whose ranks do not come has an end, and an error that says who; so have those that are there when the context ends.
func TestServeJobsEnds(t *testing.T) {
	t.Run("a rank does not come", func(t *testing.T) {
		s := newJobsService(t, Options{Timeout: 500 * time.Millisecond})
		ctx := testContext(t)
		whole, err := s.join("whole", 2)
		require.NoError(t, err)
		o := s.rank("half", 3, 1)
		o.Timeout = 300 * time.Millisecond
		_, err = Join(ctx, o)
		var missing *MissingRanksError
		require.ErrorAs(t, err, &missing)
		require.Equal(t, []int{0, 2}, missing.Missing)
		time.Sleep(time.Second)
		requireNone(t, onAll(whole, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
		requireNone(t, onAll(whole, func(g *Group) error { return g.Close(ctx) }))
		err = s.wait()
		require.ErrorAs(t, err, &missing)
		assert.Equal(t, []int{0, 2}, missing.Missing)
		assert.ErrorContains(t, err, `"half"`)
		assert.NotContains(t, err.Error(), `"whole"`)
	})
	t.Run("the context", func(t *testing.T) {
		s := newJobsService(t, Options{})
		for _, job := range []string{"one", "two"} {
			groups, err := s.join(job, 2)
			require.NoError(t, err)
			t.Cleanup(func() {
				for _, g := range groups {
					_ = g.Close(testContext(t))
				}
			})
		}
		s.stop()
		err := s.wait()
		var missing *MissingRanksError
		require.ErrorAs(t, err, &missing)
		assert.Equal(t, []int{0, 1}, missing.Missing)
		for _, job := range []string{`"one"`, `"two"`} {
			assert.ErrorContains(t, err, job)
		}
		require.ErrorIs(t, err, context.Canceled)
	})
	t.Run("nobody has come", func(t *testing.T) {
		for _, stay := range []bool{false, true} {
			s := newJobsService(t, Options{Stay: stay})
			s.stop()
			require.NoError(t, s.wait())
		}
	})
	t.Run("options", func(t *testing.T) {
		for name, o := range map[string]*Options{
			"a world":    {WorldSize: 2, Addr: "127.0.0.1:0"},
			"a job":      {Job: "j", Addr: "127.0.0.1:0"},
			"an attempt": {Restart: 1, Addr: "127.0.0.1:0"},
			"no address": {},
			"nil":        nil,
			"any host":   {Addr: "0.0.0.0:0"},
		} {
			require.ErrorIs(t, ServeJobs(testContext(t), o), ErrInvalid, name)
		}
		require.ErrorIs(t, Serve(testContext(t), &Options{Addr: "127.0.0.1:0", Stay: true}), ErrInvalid)
		//nolint:staticcheck // that it is nil is what is tested
		require.ErrorIs(t, ServeJobs(nil, &Options{Addr: "127.0.0.1:0"}), ErrInvalid)
		require.ErrorIs(t, ServeJobs(testContext(t), &Options{Addr: listenLoopback(t).Addr().String()}), ErrUnavailable)
	})
}

// TestServeJobsKept: a service that ends is started again, and goes on with all of its jobs; a store that fails for one of them disturbs no other.
func TestServeJobsKept(t *testing.T) {
	t.Parallel() // it waits, most of the time
	eachStore(t, func(t *testing.T, store string) {
		ctx := testContext(t)
		s := newJobsService(t, Options{Store: store})
		names := []string{uniqueJob(), uniqueJob(), uniqueJob()}
		all := make([][]*Group, len(names))
		for i, job := range names {
			var err error
			all[i], err = s.join(job, i+1)
			require.NoError(t, err)
			require.NoError(t, all[i][0].Store().Set(ctx, "key", []byte(job)))
		}
		for range 2 {
			s.stop()
			require.Error(t, s.wait()) // ranks are there
			s.start(nil)
			for i, job := range names {
				requireNone(t, onAll(all[i], func(g *Group) error { return g.Barrier(ctx, "on") }))
				v, err := all[i][i].Store().Get(ctx, "key")
				require.NoError(t, err)
				require.Equal(t, job, string(v))
			}
		}
		for i := range names {
			requireNone(t, onAll(all[i], func(g *Group) error { return g.Close(ctx) }))
		}
		require.NoError(t, s.wait())
		for _, job := range names {
			requireNothingKept(t, store, job)
		}
	})
	t.Run("a store fails", func(t *testing.T) {
		ctx := testContext(t)
		store := "memory://fails/" + uniqueJob()
		s := newJobsService(t, Options{Store: store})
		good, err := s.join("good", 2)
		require.NoError(t, err)
		bad, err := s.join("bad", 1)
		require.NoError(t, err)
		place := memoryPlaceOf(store, "bad\x000")
		place.mu.Lock()
		place.commit = func() error { return &durable.StoreError{Op: "keeping", URL: store, Condition: durable.Full} }
		place.mu.Unlock()
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		require.Error(t, bad[0].Store().Set(short, "key", []byte("value")))
		requireNone(t, onAll(good, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
		place.mu.Lock()
		place.commit = nil
		place.mu.Unlock()
		require.NoError(t, bad[0].Barrier(ctx, "its rank has come again"))
		require.NoError(t, bad[0].Close(ctx))
		requireNone(t, onAll(good, func(g *Group) error { return g.Close(ctx) }))
		var failed *durable.StoreError
		require.ErrorAs(t, s.wait(), &failed)
		require.Equal(t, durable.Full, failed.Condition)
	})
}
