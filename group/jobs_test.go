package group

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/testneed"
)

// jobsService is a service of ServeJobs.
type jobsService struct{ *testService }

func newJobsService(t *testing.T, opts Options) *jobsService {
	t.Helper()
	return &jobsService{newTestService(t, testneed.Listen(t), opts, ServeJobs)}
}

// rank is one of a job's options.
func (s *jobsService) rank(job string, size, rank int) *Options {
	return &Options{Rank: rank, LocalRank: rank, WorldSize: size, Addr: s.addr, Served: true, Job: job, Token: s.opts.Token, Timeout: 20 * time.Second, limits: s.opts.limits}
}

// join joins all ranks of a job.
func (s *jobsService) join(job string, size int) ([]*Group, error) {
	s.t.Helper()
	groups, failures := joinAll(s.t, size, func(rank int) *Options { return s.rank(job, size, rank) })
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
		large.Timeout = 3 * time.Second
		_, err := Join(ctx, large)
		var unreached *ConnectError
		require.ErrorAs(t, err, &unreached)
		require.ErrorContains(t, err, "would have 6 ranks with this one; it takes 5 at a time")
	})
	t.Run("more jobs than it takes", func(t *testing.T) {
		alone, err := Join(ctx, s.rank("second", 1, 0))
		require.NoError(t, err)
		third := s.rank("third", 1, 0)
		third.Timeout = 3 * time.Second
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
		s := newJobsService(t, Options{Timeout: time.Second})
		ctx := testContext(t)
		whole, err := s.join("whole", 2)
		require.NoError(t, err)
		o := s.rank("half", 3, 1)
		o.Timeout = time.Second
		_, err = Join(ctx, o)
		var missing *MissingRanksError
		require.ErrorAs(t, err, &missing)
		require.Equal(t, []int{0, 2}, missing.Missing)
		time.Sleep(2 * time.Second)
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
			"no store":   {Addr: "127.0.0.1:0", Store: "nonsense"},
			"no kind":    {Addr: "127.0.0.1:0", Store: "absent://here/x"},
		} {
			require.ErrorIs(t, ServeJobs(testContext(t), o), ErrInvalid, name)
		}
		require.ErrorIs(t, Serve(testContext(t), &Options{Addr: "127.0.0.1:0", Stay: true}), ErrInvalid)
		var none context.Context
		require.ErrorIs(t, ServeJobs(none, &Options{Addr: "127.0.0.1:0"}), ErrInvalid)
		require.ErrorIs(t, ServeJobs(testContext(t), &Options{Addr: listenLoopback(t).Addr().String()}), ErrUnavailable)
	})
}

func init() {
	durable.Register("refused", func(_ context.Context, u *url.URL, opts durable.Options) (durable.Store, error) {
		if !strings.HasPrefix(opts.Name, strings.TrimPrefix(u.Path, "/")) {
			p := memoryPlaceOf(u.String(), opts.Name)
			p.mu.Lock()
			defer p.mu.Unlock()
			p.owner = &memoryStore{p}
			return p.owner, nil
		}
		return nil, invalid("opening a store", "the address", "here", "another")
	})
}

// TestServeJobsNoStore: a service whose store can be opened for no job ends with the first one, and says why, on whichever side one looks. It went on.
func TestServeJobsNoStore(t *testing.T) {
	for _, stay := range []bool{false, true} {
		s := newJobsService(t, Options{Store: "refused://here/", Stay: stay})
		rank := s.rank("job", 1, 0)
		rank.Timeout = 2 * time.Second
		_, err := Join(testContext(t), rank)
		require.ErrorIs(t, err, ErrUnavailable)
		err = s.wait()
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "the address is here; allowed: another")
	}
}

// TestServeJobsStoreRefusedLater: a store that its kind has opened for a job before, and refuses for another one, as where its certificates are being replaced, ends that job alone.
func TestServeJobsStoreRefusedLater(t *testing.T) {
	ctx := testContext(t)
	s := newJobsService(t, Options{Store: "refused://here/bad" + uniqueJob(), Stay: true})
	bad := strings.TrimPrefix(s.opts.Store, "refused://here/")
	good, err := s.join("good", 2)
	require.NoError(t, err)
	rank := s.rank(bad, 1, 0)
	rank.Timeout = time.Second
	_, err = Join(ctx, rank)
	require.ErrorIs(t, err, ErrUnavailable)
	requireNone(t, onAll(good, func(g *Group) error { return errors.Join(g.Barrier(ctx, "undisturbed"), g.Close(ctx)) }))
	another, err := s.join("another", 2)
	require.NoError(t, err, "the service is still there")
	requireNone(t, onAll(another, func(g *Group) error { return g.Close(ctx) }))
	require.ErrorIs(t, s.end(), ErrInvalid)
}

// TestServeJobsKept: a service that ends is started again, and goes on with all of its jobs; a store that fails for one of them disturbs no other.
func TestServeJobsKept(t *testing.T) {
	t.Parallel() // it waits, most of the time
	eachStore(t, func(t *testing.T, store string) {
		ctx := testContext(t)
		s := newJobsService(t, Options{Store: store, LivenessTimeout: 3 * time.Second})
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
	for name, failure := range map[string]*durable.StoreError{
		"a store fails":           {Op: "keeping", Condition: durable.Full},
		"a store does not answer": {Op: "keeping", Condition: durable.Unreachable, Err: context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			store := "memory://fails/" + uniqueJob()
			s := newJobsService(t, Options{Store: store, LivenessTimeout: time.Second, limits: quick()})
			good, err := s.join("good", 2)
			require.NoError(t, err)
			bad, err := s.join("bad", 1)
			require.NoError(t, err)
			place := memoryPlaceOf(store, "bad\x000")
			place.mu.Lock()
			place.commit = func() error { return failure }
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
			require.Equal(t, failure.Condition, failed.Condition)
		})
	}
}

// TestServeJobsStray: a rank that is the first to come to a service that was started again, and says another world size than the job has, is refused, and the job's own ranks
// go on. It is no failure of the job, nor is it taken out on one of its ranks that comes at the same time.
func TestServeJobsStray(t *testing.T) {
	ctx := testContext(t)
	openGated(t, func(context.Context) error { return nil })
	opts := Options{Store: "gated://here/" + uniqueJob(), LivenessTimeout: time.Second, limits: quick()}
	s := newJobsService(t, opts)
	groups := make([]*Group, 3)
	came := make(chan error, len(groups))
	for rank := range groups {
		go func() {
			var err error
			groups[rank], err = Join(ctx, s.rank("job", 3, rank))
			came <- err
		}()
		if rank == 0 { // a service that ends before any call of the world is over has kept how large it is, too
			require.Eventually(t, func() bool {
				place := memoryPlaceOf(opts.Store, "job\x000")
				place.mu.Lock()
				defer place.mu.Unlock()
				return place.kept["rank/0"] != nil
			}, 20*time.Second, time.Millisecond)
			s.stop()
			require.Error(t, s.wait())
			requireStrayRefused(t, opts, 5)
			s.start(nil)
		}
	}
	for range groups {
		require.NoError(t, <-came)
	}
	s.stop()
	require.Error(t, s.wait())
	for _, size := range []int{5, 1} {
		requireStrayRefused(t, opts, size)
	}
	s.start(nil)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
	requireNone(t, onAll(groups, func(g *Group) error { return g.Close(ctx) }))
	require.NoError(t, s.wait())
}

// requireStrayRefused lets a rank of another world size come to a service of jobs before the ranks of the job, of which there are three, and one of those after it.
func requireStrayRefused(t *testing.T, opts Options, size int) {
	t.Helper()
	ctx := testContext(t)
	goOn := make(chan struct{})
	opening := openGated(t, func(context.Context) error { <-goOn; return nil })
	s := newJobsService(t, opts)
	stray, own := make(chan error, 1), make(chan error, 1)
	join := func(size int, ended chan<- error) {
		_, err := Join(ctx, s.rank("job", size, 0))
		ended <- err
	}
	go join(size, stray)
	<-opening
	before := running("(*jobs).find(")
	go join(3, own)
	require.Eventually(t, func() bool { return running("(*jobs).find(") > before }, 20*time.Second, time.Millisecond, "the job's own rank waits too")
	close(goOn)
	err := <-stray
	requireRefused(t, err, RefusedWorldSize, s.addr)
	require.ErrorContains(t, err, fmt.Sprintf("this world has 3 ranks, not %d", size))
	requireRefusedFor(t, <-own, RefusedDuplicate) // rank 0 is there
	s.stop()
	var missing *MissingRanksError // the job was opened then, and its ranks have not come here
	require.ErrorAs(t, s.wait(), &missing)
	require.Equal(t, []int{0}, missing.Missing[:1])
}

// gated is what opening a store of the kind "gated" waits for; such stores are in memory.
var gated struct {
	sync.Mutex
	open func(ctx context.Context) error
}

func init() {
	durable.Register("gated", func(ctx context.Context, u *url.URL, opts durable.Options) (durable.Store, error) {
		gated.Lock()
		open := gated.open
		gated.Unlock()
		if err := open(ctx); err != nil {
			return nil, &durable.StoreError{Op: "opening", URL: "gated://", Condition: durable.Unreachable, Err: err}
		}
		p := memoryPlaceOf(u.String(), opts.Name)
		p.mu.Lock()
		defer p.mu.Unlock()
		s := &memoryStore{p}
		p.owner = s
		return s, nil
	})
}

// openGated sets what stores wait for, and returns a channel that is closed when the first does.
func openGated(t *testing.T, wait func(ctx context.Context) error) (began <-chan struct{}) {
	opening := make(chan struct{})
	var once sync.Once
	gated.Lock()
	gated.open = func(ctx context.Context) error {
		once.Do(func() { close(opening) })
		return wait(ctx)
	}
	gated.Unlock()
	t.Cleanup(func() {
		gated.Lock()
		gated.open = nil
		gated.Unlock()
	})
	return opening
}

// comesAgain is a rank that was in the job before, and comes back over a new connection.
func comesAgain(t *testing.T, o *Options, session string) error {
	t.Helper()
	o, err := o.checked()
	require.NoError(t, err)
	m, err := thisProcess(o.Rank, 0, "")
	require.NoError(t, err)
	s := newSession(o.Rank, time.Minute, nil, o.bounds())
	s.id = session
	r := &remote{session: s, options: o, member: m, liveness: o.LivenessTimeout}
	r.ctx, r.cancel = context.WithCancel(testContext(t))
	defer r.cancel()
	_, err = r.attempt(r.ctx, func() {}, o.Addr, time.Minute, true)
	return err
}

// running is how many goroutines of this process are in a function of this package.
func running(function string) int {
	stacks := make([]byte, 1<<22)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "symmem/group."+function)
}

// quick are limits for a service with a store that is started again: it ends seconds sooner.
func quick() *limits {
	lim := defaultLimits
	lim.attempt = 200 * time.Millisecond
	return &lim
}

// TestServeJobsDeaf: a rank that says goodbye and takes no answers goes with its job: its connection is ended before the next job takes its place.
func TestServeJobsDeaf(t *testing.T) {
	lim := defaultLimits
	lim.jobs = 1
	s := newJobsService(t, Options{limits: &lim, Stay: true})
	ctx := testContext(t)
	for i := range 2 {
		o, err := s.rank(fmt.Sprint("deaf ", i), 1, 0).checked()
		require.NoError(t, err)
		o.LivenessTimeout = time.Hour
		m, err := thisProcess(0, 0, "")
		require.NoError(t, err)
		r := &remote{
			session: newSession(0, time.Minute, nil, &lim), options: o, member: m, liveness: o.LivenessTimeout, outbox: newOutbox(1000, 1<<30), ended: make(chan struct{}),
			rounds: map[roundKey]*remoteRound{}, requests: map[uint64]remoteRequest{},
		}
		r.ctx, r.cancel = context.WithCancel(context.Background())
		defer r.cancel()
		l, err := r.find(ctx, false)
		require.NoError(t, err)
		defer func() {
			l.cancel()
			close(l.ended)
			_ = l.conn.Close() // the service has closed it
			l.work.Wait()
		}()
		set := &pb.StoreRequest{Id: 1, Group: worldName, Verb: uint32(verbSet), Key: []byte("k"), Value: make([]byte, 8<<20)}
		require.NoError(t, l.stream.SendMsg(&pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: set}}))
		for id := uint64(2); id < 5; id++ {
			get := &pb.StoreRequest{Id: id, Group: worldName, Verb: uint32(verbGet), Key: []byte("k")}
			require.NoError(t, l.stream.SendMsg(&pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: get}}))
		}
		require.NoError(t, l.stream.SendMsg(goodbyeMessage()))
	}
	next, err := Join(ctx, s.rank("next", 1, 0))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return running("(*serviceConn).write(") == 1 }, 20*time.Second, 5*time.Millisecond, "of the one that is there")
	require.NoError(t, next.Close(ctx))
}

// TestServeJobsComeAgain: a rank that has left its kept job and comes again to be told so is told at once; one of a job that nobody knows is refused, and leaves no job behind.
func TestServeJobsComeAgain(t *testing.T) {
	ctx := testContext(t)
	s := newJobsService(t, Options{Store: "memory://here/" + uniqueJob(), LivenessTimeout: time.Second, limits: quick()})
	groups, err := s.join("job", 2)
	require.NoError(t, err)
	id := groups[0].session.id
	require.NoError(t, groups[0].Close(ctx))
	began := time.Now()
	requireRefusedFor(t, comesAgain(t, s.rank("job", 2, 0), id), RefusedLate)
	require.Less(t, time.Since(began), defaultLimits.doubt/2)
	requireRefusedFor(t, comesAgain(t, s.rank("unknown", 3, 0), "strange"), RefusedLate)
	one, err := s.join("unknown", 1) // of another size
	require.NoError(t, err)
	requireNone(t, onAll(one, func(g *Group) error { return g.Close(ctx) }))
	require.NoError(t, groups[1].Close(ctx))
	require.NoError(t, s.wait())
}

func requireRefusedFor(t *testing.T, err error, reason RefusalReason) {
	t.Helper()
	refusal, ok := errors.AsType[*RefusedError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, reason, refusal.Reason, refusal.Text)
}

// TestServeJobsSlowStore: a rank that gives up while its job's store is opened leaves no job behind, and the end of the context meanwhile is nobody's failure.
func TestServeJobsSlowStore(t *testing.T) {
	t.Run("the rank gives up", func(t *testing.T) {
		goOn := make(chan struct{})
		opening := openGated(t, func(context.Context) error { <-goOn; return nil })
		s := newJobsService(t, Options{Store: "gated://here/" + uniqueJob(), LivenessTimeout: time.Second, limits: quick()})
		ctx, cancel := context.WithCancel(testContext(t))
		joined := make(chan error, 1)
		go func() {
			_, err := Join(ctx, s.rank("job", 2, 0))
			joined <- err
		}()
		<-opening
		cancel()
		require.ErrorIs(t, <-joined, context.Canceled)
		require.Eventually(t, func() bool { return running("(*jobs).find(") == 0 }, 20*time.Second, 5*time.Millisecond, "the service knows that it has given up")
		close(goOn)
		one, err := s.join("job", 1)
		require.NoError(t, err)
		require.NoError(t, one[0].Close(testContext(t)))
		require.NoError(t, s.wait())
	})
	t.Run("the context ends", func(t *testing.T) {
		opening := openGated(t, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		s := newJobsService(t, Options{Store: "gated://here/" + uniqueJob(), Stay: true})
		ctx, cancel := context.WithCancel(testContext(t))
		joined := make(chan error, 1)
		go func() {
			_, err := Join(ctx, s.rank("job", 1, 0))
			joined <- err
		}()
		<-opening
		s.stop()
		require.NoError(t, s.wait())
		cancel()
		require.Error(t, <-joined)
	})
}

// TestServeJobsWaitForAll: a service that is started again does not end with the first of its jobs that is over: ranks of another may notice later that the one before has gone.
func TestServeJobsWaitForAll(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	s := newJobsService(t, Options{Store: "memory://here/" + uniqueJob(), LivenessTimeout: 6 * time.Second, limits: quick()})
	first, err := s.join("first", 1)
	require.NoError(t, err)
	// What is between the other's rank and the service tells it nothing when the service goes, as where a host dies.
	between := listenLoopback(t)
	defer between.Close()
	var dead atomic.Bool
	go func() {
		for {
			near, err := between.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", s.addr)
			if err != nil {
				_ = near.Close()
				continue
			}
			go func() { _, _ = io.Copy(far, near) }()
			old := !dead.Load()
			go func() {
				for b := make([]byte, 1<<16); ; {
					n, err := far.Read(b)
					if old && dead.Load() {
						return // not even an end comes
					}
					if _, writeErr := near.Write(b[:n]); err != nil || writeErr != nil {
						_ = near.Close()
						return
					}
				}
			}()
		}
	}()
	o := s.rank("second", 1, 0)
	o.Addr, o.LivenessTimeout = between.Addr().String(), 4*time.Second
	second, err := Join(ctx, o)
	require.NoError(t, err)
	dead.Store(true)
	s.stop()
	require.Error(t, s.wait())
	s.start(nil)
	require.NoError(t, first[0].Close(ctx))
	require.NoError(t, second.Barrier(ctx, "it has come back"))
	require.NoError(t, second.Close(ctx))
	require.NoError(t, s.wait())
}

// TestServeJobsAtPorts: ranks whose rank 0 serves their job at the next port do not stay at a service for others, at the port where they look first.
func TestServeJobsAtPorts(t *testing.T) {
	ctx := testContext(t)
	var l, next net.Listener
	for { // two ports in a row
		var err error
		l, err = net.Listen("tcp", testneed.FreeAddress(t))
		require.NoError(t, err)
		host, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		if next, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(n+1))); err == nil {
			break
		}
		require.NoError(t, l.Close())
	}
	s := &jobsService{newTestService(t, l, Options{Stay: true}, ServeJobs)}
	require.NoError(t, next.Close())
	for range 3 {
		var wait sync.WaitGroup
		failures := make([]error, 3)
		for rank := range failures {
			wait.Go(func() {
				g, err := Join(ctx, &Options{Rank: rank, WorldSize: 3, Addr: s.addr, Ports: 2, Job: "own", Timeout: 20 * time.Second})
				if err == nil {
					err = errors.Join(g.Barrier(ctx, "together"), g.Close(ctx))
				}
				failures[rank] = err
			})
		}
		wait.Wait()
		requireNone(t, failures)
	}
	_, err := Join(ctx, &Options{Rank: 1, WorldSize: 3, Addr: s.addr, Job: "own"})
	requireRefusedFor(t, err, RefusedJob)
	require.ErrorContains(t, err, "SYMMEM_RENDEZVOUS_SERVED")
	s.stop()
	require.NoError(t, s.wait())
}

// TestServeJobsErrors: of jobs that fail again and again the last error is kept, and of very many how many there were.
func TestServeJobsErrors(t *testing.T) {
	j := &jobs{ctx: t.Context(), failed: map[jobName]error{}, over: make(chan struct{}, 1)}
	for i := range maxJobErrors + 3 {
		for attempt := range 2 {
			j.end(jobName{fmt.Sprintf("job %02d", i), 0}, true, fmt.Errorf("job %02d, failure %d", i, attempt))
		}
	}
	errs := j.errors()
	require.Len(t, errs, maxJobErrors+1)
	require.EqualError(t, errs[0], "job 00, failure 1")
	require.EqualError(t, errs[maxJobErrors], "6 more failures of jobs, which are in the log")
}
