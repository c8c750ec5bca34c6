package group

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// memoryStores are stores in the memory of this process, by their URL and name.
var memoryStores struct {
	sync.Mutex
	places map[string]*memoryPlace
}

// memoryPlace is the place of one attempt of a job.
type memoryPlace struct {
	mu     sync.Mutex
	kept   map[string][]byte
	owner  *memoryStore
	commit func() error    // called before each change
	hangs  chan<- struct{} // if not nil, is closed by the next commit, which does not end before its context
}

type memoryStore struct{ place *memoryPlace }

func init() {
	memoryStores.places = map[string]*memoryPlace{}
	durable.Register("memory", func(_ context.Context, u *url.URL, opts durable.Options) (durable.Store, error) {
		p := memoryPlaceOf(u.String(), opts.Name)
		p.mu.Lock()
		defer p.mu.Unlock()
		s := &memoryStore{p}
		p.owner = s
		return s, nil
	})
}

func memoryPlaceOf(u, name string) *memoryPlace {
	memoryStores.Lock()
	defer memoryStores.Unlock()
	key := u + " " + name
	if memoryStores.places[key] == nil {
		memoryStores.places[key] = &memoryPlace{kept: map[string][]byte{}}
	}
	return memoryStores.places[key]
}

func (s *memoryStore) own() error {
	if s.place.owner != s {
		return &durable.StoreError{Op: "keeping", URL: "memory://", Condition: durable.Replaced}
	}
	return nil
}

func (s *memoryStore) Load(context.Context) (map[string][]byte, error) {
	s.place.mu.Lock()
	defer s.place.mu.Unlock()
	return maps.Clone(s.place.kept), s.own()
}

func (s *memoryStore) Commit(ctx context.Context, groups [][]durable.Change) error {
	s.place.mu.Lock()
	hangs := s.place.hangs
	s.place.hangs = nil
	s.place.mu.Unlock()
	if hangs != nil {
		close(hangs)
		<-ctx.Done()
		return &durable.StoreError{Op: "keeping", URL: "memory://", Condition: durable.Unreachable, Err: ctx.Err()}
	}
	s.place.mu.Lock()
	defer s.place.mu.Unlock()
	for _, changes := range groups {
		if s.place.commit != nil {
			if err := s.place.commit(); err != nil {
				return err
			}
		}
		if err := s.own(); err != nil {
			return err
		}
		for _, c := range changes {
			switch {
			case c.All:
				maps.DeleteFunc(s.place.kept, func(key string, _ []byte) bool { return strings.HasPrefix(key, c.Key) })
			case c.Value == nil:
				delete(s.place.kept, c.Key)
			default:
				s.place.kept[c.Key] = append([]byte{}, c.Value...)
			}
		}
	}
	return s.own()
}

func (s *memoryStore) Clear(context.Context) error {
	s.place.mu.Lock()
	defer s.place.mu.Unlock()
	if err := s.own(); err != nil {
		return err
	}
	clear(s.place.kept)
	return nil
}

func (s *memoryStore) Close() error { return nil }

var storeCount struct {
	sync.Mutex
	n int
}

// uniqueJob returns the name of a job that no other test has.
func uniqueJob() string {
	storeCount.Lock()
	defer storeCount.Unlock()
	storeCount.n++
	return fmt.Sprintf("job-%d-%s", storeCount.n, processID())
}

// testService is a service that can be ended and started again at the same address, if that is none that others may be given meanwhile.
type testService struct {
	t     *testing.T
	opts  Options
	addr  string
	serve func(context.Context, *Options) error
	stop  context.CancelFunc
	ended chan error
}

// newTestService serves on l by serve, with opts.
func newTestService(t *testing.T, l net.Listener, opts Options, serve func(context.Context, *Options) error) *testService {
	t.Helper()
	s := &testService{t: t, opts: opts, addr: l.Addr().String(), serve: serve}
	s.start(l)
	t.Cleanup(func() { s.stop() })
	return s
}

// start serves on l, or again at the address.
func (s *testService) start(l net.Listener) {
	s.t.Helper()
	if l == nil {
		l = listenAgain(s.t, s.addr)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 2*time.Minute) // it serves cleanups too
	o := s.opts
	o.Listener = l
	s.stop, s.ended = cancel, make(chan error, 1)
	ended := s.ended
	go func() { ended <- s.serve(ctx, &o) }()
}

// end ends the service, and returns what it does.
func (s *testService) end() error {
	s.t.Helper()
	s.stop()
	return s.wait()
}

func (s *testService) wait() error {
	s.t.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(30 * time.Second):
		s.t.Fatal("the service does not end")
		return nil
	}
}

// keptService is a service of Serve with a store.
type keptService struct{ *testService }

func newKeptService(t *testing.T, n int, base Options) *keptService {
	t.Helper()
	base.WorldSize = n
	return &keptService{newTestService(t, testneed.Listen(t), base, Serve)}
}

// listenAgain listens at an address that another service has just left.
func listenAgain(t *testing.T, addr string) (l net.Listener) {
	t.Helper()
	var err error
	require.Eventually(t, func() bool {
		l, err = net.Listen("tcp", addr)
		return err == nil
	}, 10*time.Second, 5*time.Millisecond, "listening again: %v", err)
	return l
}

// finish lets the ranks leave, with which the service ends.
func (s *keptService) finish(ctx context.Context, groups []*Group) {
	s.t.Helper()
	requireNone(s.t, onAll(groups, func(g *Group) error { return g.Close(ctx) }))
	require.NoError(s.t, s.wait())
}

// join joins all ranks.
func (s *keptService) join() []*Group {
	s.t.Helper()
	groups, failures := joinAll(s.t, s.opts.WorldSize, func(rank int) *Options {
		o := s.opts
		o.Rank, o.LocalRank, o.Addr, o.Served, o.Store = rank, rank, s.addr, true, ""
		return &o
	})
	requireNone(s.t, failures)
	return groups
}

// newKept joins n ranks to a service that keeps what it knows, and closes them when the test ends.
func newKept(t *testing.T, n int, store string) []*Group {
	t.Helper()
	s := newKeptService(t, n, Options{Job: uniqueJob(), Store: store})
	groups := s.join()
	t.Cleanup(func() { leaveAll(t, groups) })
	return groups
}

// eachStore runs a test over each kind of store.
func eachStore(t *testing.T, fn func(t *testing.T, store string)) {
	t.Run("memory", func(t *testing.T) { fn(t, "memory://here/"+uniqueJob()) })
	t.Run("etcd", func(t *testing.T) { fn(t, etcdURL(t)) })
}

// TestServiceStartedAgain: services come and go, some in good order and some by the failure of their store between two changes, while the ranks call and
// store. Each call ends as if there had been one service: all-gathers have everybody's data, and sums count everything once.
func TestServiceStartedAgain(t *testing.T) {
	t.Parallel() // it waits, most of the time
	const n, enough = 4, 8
	for name, token := range map[string]string{"plain": "", "token": "0123456789abcdef"} {
		t.Run(name, func(t *testing.T) {
			eachStore(t, func(t *testing.T, store string) {
				ctx := testContext(t)
				s := newKeptService(t, n, Options{Job: uniqueJob(), Store: store, Token: token})
				groups := s.join()
				done := make(chan struct{})
				var restarts, calls atomic.Int32
				rounds := 0
				var again sync.WaitGroup
				again.Go(func() {
					random := rand.New(rand.NewPCG(1, 2))
					for before := int32(0); ; before = calls.Load() {
						select {
						case <-done:
							return
						case <-time.After(time.Duration(random.IntN(60)) * time.Millisecond):
						}
						// Where it takes the ranks longer than that to come back, as on a machine that is busy, they would never get an answer: so three times of four
						// it waits until some rank has had one.
						for answered := random.IntN(4) > 0; answered && restarts.Load() > 0 && calls.Load() == before; {
							select {
							case <-done:
								return
							case <-time.After(time.Millisecond):
							}
						}
						if p := memoryPlaceOf(store, fmt.Sprintf("%s\x00%d", s.opts.Job, 0)); strings.HasPrefix(store, "memory") && random.IntN(2) == 0 {
							left, refused := random.IntN(20), false
							p.mu.Lock()
							p.commit = func() error {
								if left--; left < 0 {
									refused = true
									return &durable.StoreError{Op: "keeping", URL: "memory://", Condition: durable.Full}
								}
								return nil
							}
							p.mu.Unlock()
							select {
							case err := <-s.ended:
								var failed *durable.StoreError
								if assert.ErrorAs(t, err, &failed) {
									assert.Equal(t, durable.Full, failed.Condition)
								}
							case <-done:
								p.mu.Lock()
								p.commit = nil // the goodbyes are to be kept
								ends := refused
								p.mu.Unlock()
								if !ends {
									return
								}
								<-s.ended
							}
							p.mu.Lock()
							p.commit = nil
							p.mu.Unlock()
						} else {
							s.stop()
							<-s.ended
						}
						s.start(nil)
						restarts.Add(1)
					}
				})
				failures := onAll(groups, func(g *Group) error {
					for i := 0; ; i++ {
						last := []byte{0}
						if restarts.Load() >= enough {
							last[0] = 1
						}
						if last, err := g.Broadcast(ctx, "last", 0, last); err != nil {
							return fmt.Errorf("round %d: %w", i, err)
						} else if last[0] == 1 {
							if g.Rank() == 0 {
								rounds = i
							}
							return nil
						}
						calls.Add(1)
						blob := fmt.Sprintf("%d of %d", g.Rank(), i)
						all, err := g.AllGather(ctx, "all", []byte(blob))
						if err != nil {
							return fmt.Errorf("round %d: %w", i, err)
						}
						calls.Add(1)
						for rank, got := range all {
							if want := fmt.Sprintf("%d of %d", rank, i); string(got) != want {
								return fmt.Errorf("round %d: rank %d brought %q", i, rank, got)
							}
						}
						if _, err := g.Store().Add(ctx, "sum", int64(g.Rank()+1)); err != nil {
							return fmt.Errorf("round %d: %w", i, err)
						}
						calls.Add(1)
						key := fmt.Sprintf("turn %d", i)
						if g.Rank() == i%n {
							if err := g.Store().Set(ctx, key, []byte(blob)); err != nil {
								return err
							}
						} else if got, err := g.Store().Get(ctx, key); err != nil || string(got) != fmt.Sprintf("%d of %d", i%n, i) {
							return fmt.Errorf("round %d: %q: %w", i, got, err)
						}
						calls.Add(1)
						if i%10 == 3 {
							sub, err := g.Sub(ctx, []int{0, 1, 2, 3})
							if err != nil {
								return fmt.Errorf("round %d: %w", i, err)
							}
							if err := sub.Barrier(ctx, "sub"); err != nil {
								return fmt.Errorf("round %d: %w", i, err)
							}
							if err := sub.Close(ctx); err != nil {
								return err
							}
						}
						if i%10 == 5 { // a vote fails on all
							var mine error
							if g.Rank() == 2 {
								mine = errs.ErrNoMemory
							}
							if err := g.Vote(ctx, "vote", mine); !errors.Is(err, errs.ErrNoMemory) {
								return fmt.Errorf("round %d: %w", i, err)
							}
						}
					}
				})
				requireNone(t, failures)
				sum, _, err := groups[0].Store().TryGet(ctx, "sum")
				require.NoError(t, err)
				assert.Equal(t, strconv.Itoa(rounds*(1+2+3+4)), string(sum))
				close(done)
				again.Wait()
				t.Log("the service was started again", restarts.Load(), "times in", rounds, "rounds")
				s.finish(ctx, groups)
				requireNothingKept(t, store, s.opts.Job)
			})
		})
	}
}

// requireNothingKept fails unless the store has forgotten a job.
func requireNothingKept(t *testing.T, store, job string) {
	t.Helper()
	s, err := durable.Open(testContext(t), store, durable.Options{Name: job + "\x000", TTL: time.Minute})
	require.NoError(t, err)
	defer s.Close()
	kept, err := s.Load(testContext(t))
	require.NoError(t, err)
	require.Empty(t, kept)
}

// TestKeptCallsAreDropped: what the store keeps does not grow with the number of calls.
func TestKeptCallsAreDropped(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	store := "memory://here/" + uniqueJob()
	s := newKeptService(t, 3, Options{Job: uniqueJob(), Store: store})
	groups := s.join()
	place := memoryPlaceOf(store, s.opts.Job+"\x000")
	size := func() int {
		place.mu.Lock()
		defer place.mu.Unlock()
		return len(place.kept)
	}
	requireNone(t, onAll(groups, func(g *Group) error {
		for i := range 200 {
			if err := g.Barrier(ctx, "b"); err != nil {
				return err
			}
			if _, err := g.Store().Add(ctx, "n", 1); err != nil {
				return err
			}
			if i%20 == 0 {
				sub, err := g.Sub(ctx, []int{0, 1, 2})
				if err != nil {
					return err
				}
				if err := sub.Store().Set(ctx, "k", []byte("v")); err != nil {
					return err
				}
				if err := sub.Close(ctx); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	// Three ranks, the world, and one key.
	require.Eventually(t, func() bool { return size() <= 5 }, 20*time.Second, 10*time.Millisecond, "%d keys are kept", size())
	// Failed calls are kept until the others come, and of those that nobody comes to only the latest.
	short, cancel := context.WithCancel(ctx)
	cancel()
	for range 2 * maxTombstones {
		require.Error(t, groups[1].Barrier(short, "alone"))
	}
	require.NoError(t, s.endAndStart())
	var gaveUp *AbandonedError
	require.ErrorAs(t, groups[0].Barrier(ctx, "alone"), &gaveUp)
	require.Eventually(t, func() bool { return size() <= 5+maxTombstones }, 20*time.Second, 10*time.Millisecond, "%d keys are kept", size())
	s.finish(ctx, groups)
}

// endAndStart ends the service in good order and starts another.
func (s *keptService) endAndStart() error {
	var missing *MissingRanksError
	if err := s.end(); !errors.As(err, &missing) {
		return fmt.Errorf("the service ended with %w", err)
	}
	s.start(nil)
	return nil
}

// TestRankGoneMeanwhile: a rank that dies while there is no service is lost for the next one, one that was lost before stays lost, one that has left
// has left, and all of that is told.
func TestRankGoneMeanwhile(t *testing.T) {
	t.Parallel() // it waits, most of the time
	eachStore(t, func(t *testing.T, store string) {
		ctx := testContext(t)
		s := newKeptService(t, 5, Options{Job: uniqueJob(), Store: store, LivenessTimeout: time.Second})
		groups := s.join()
		subs := make([]*Group, 3)
		requireNone(t, onAll(groups[:3], func(g *Group) (err error) {
			subs[g.Rank()], err = g.Sub(ctx, []int{0, 1, 2})
			return err
		}))
		require.NoError(t, groups[4].Close(ctx))
		breakLink(t, groups[3])
		for _, g := range groups[:3] {
			var lost *PeerLostError
			require.ErrorAs(t, g.Barrier(ctx, "b"), &lost)
		}
		for range 2 { // once more: what was restored is kept too
			require.NoError(t, s.endAndStart())
			requireNone(t, onAll(subs, func(g *Group) error { return g.Barrier(ctx, "of three") }))
			for _, g := range groups[:3] {
				var lost *PeerLostError
				require.ErrorAs(t, g.Barrier(ctx, "b"), &lost)
				require.Contains(t, []int{3, 4}, lost.Rank)
			}
		}
		pair := make([]*Group, 2)
		requireNone(t, onAll(groups[:2], func(g *Group) (err error) {
			pair[g.Rank()], err = g.Sub(ctx, []int{0, 1})
			return err
		}))
		require.ErrorAs(t, s.end(), new(*MissingRanksError))
		breakLink(t, groups[2])
		s.start(nil)
		for rank, err := range onAll(subs[:2], func(g *Group) error { return g.Barrier(ctx, "with the dead") }) {
			var lost *PeerLostError
			require.ErrorAsf(t, err, &lost, "rank %d", rank)
			require.Equal(t, 2, lost.Rank)
			require.Contains(t, lost.Reason, "not come back")
		}
		requireNone(t, onAll(pair, func(g *Group) error { return g.Barrier(ctx, "survivors") }))
		s.finish(ctx, groups[:2])
		requireNothingKept(t, store, s.opts.Job)
	})
}

// TestServiceDoesNotComeBack: ranks look for the next service for their timeout, and calls end with their own.
func TestServiceDoesNotComeBack(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Timeout: 2 * time.Second})
	groups := s.join()
	require.ErrorAs(t, s.end(), new(*MissingRanksError))
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, groups[0].Barrier(short, "short"), context.DeadlineExceeded)
	require.NoError(t, groups[0].Err(), "it still looks")
	for rank, err := range onAll(groups, func(g *Group) error { <-g.Lost(); return g.Err() }) {
		var lost *PeerLostError
		require.ErrorAsf(t, err, &lost, "rank %d", rank)
		require.Contains(t, lost.Reason, "there is none in its place")
	}
	for _, g := range groups {
		_ = g.Close(ctx) // there is nobody to say goodbye to; it ends
	}
}

// TestLeaveWithoutService: a rank that leaves while there is no service has left for the next one.
func TestLeaveWithoutService(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: "memory://here/" + uniqueJob()})
	groups := s.join()
	require.ErrorAs(t, s.end(), new(*MissingRanksError))
	left := make(chan error, 1)
	go func() { left <- groups[0].Close(ctx) }()
	time.Sleep(50 * time.Millisecond) // so that it says goodbye in vain
	s.start(nil)
	require.NoError(t, <-left)
	var lost *PeerLostError
	require.ErrorAs(t, groups[1].Barrier(ctx, "alone"), &lost)
	require.Contains(t, lost.Error(), "left")
	require.NoError(t, groups[1].Close(ctx))
	require.NoError(t, s.wait())
}

// TestGoodbyeBeforeTheEnd: ranks whose goodbye was the last thing that a service has kept learn from the next one that they have left.
func TestGoodbyeBeforeTheEnd(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	store := "memory://here/" + uniqueJob()
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: store})
	groups := s.join()
	require.ErrorAs(t, s.end(), new(*MissingRanksError))
	place := memoryPlaceOf(store, s.opts.Job+"\x000")
	place.mu.Lock()
	for rank := range 2 {
		var kept pb.KeptRank
		require.NoError(t, proto.Unmarshal(place.kept[rankKey(rank)], &kept))
		kept.State = uint32(rankLeft)
		place.kept[rankKey(rank)] = put(rankKey(rank), &kept).Value
	}
	place.mu.Unlock()
	ends := make(chan []error, 1)
	go func() { ends <- onAll(groups, func(g *Group) error { return g.Close(ctx) }) }()
	time.Sleep(50 * time.Millisecond) // so that they say goodbye in vain
	s.start(nil)
	requireNone(t, <-ends)
	require.NoError(t, s.wait())
}

// TestKeptRefuses: who comes to a job that goes on, and is none of its ranks, is refused, and a job that does not fit what is kept does not start.
func TestKeptRefuses(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	store := "memory://here/" + uniqueJob()
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: store, LivenessTimeout: time.Second})
	groups := s.join()
	require.NoError(t, s.endAndStart())
	stranger := s.opts
	stranger.Rank, stranger.Addr, stranger.Served, stranger.Store = 1, s.addr, true, ""
	_, err := Join(ctx, &stranger)
	requireRefused(t, err, RefusedDuplicate, s.addr)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))

	require.ErrorAs(t, s.end(), new(*MissingRanksError))
	place := memoryPlaceOf(store, s.opts.Job+"\x000")
	for name, change := range map[string]func(kept map[string][]byte){
		"garbage in a rank":  func(kept map[string][]byte) { kept["rank/1"] = []byte("\xff") },
		"a rank too many":    func(kept map[string][]byte) { kept["rank/2"] = kept["rank/1"] },
		"no rank":            func(kept map[string][]byte) { kept["rank/x"] = kept["rank/1"] },
		"garbage in a group": func(kept map[string][]byte) { kept[groupKey("g")] = []byte("\xff") },
		"a group of others":  func(kept map[string][]byte) { kept[groupKey("g")] = []byte{0x0a, 1, 'g', 0x1a, 2, 5, 9} },
		"an empty group":     func(kept map[string][]byte) { kept[groupKey("g")] = nil },
		"garbage in a call":  func(kept map[string][]byte) { kept[callKey(worldName, 7)] = []byte("\xff") },
		"no number":          func(kept map[string][]byte) { kept[ofKey(worldName)+"call/x"] = []byte{} },
		"no member":          func(kept map[string][]byte) { kept[awayKey(worldName, 9)] = []byte{} },
		"no key":             func(kept map[string][]byte) { kept[ofKey(worldName)+"key/zz"] = []byte{} },
		"something new":      func(kept map[string][]byte) { kept["new"] = []byte{} },
		"new of a group":     func(kept map[string][]byte) { kept[ofKey(worldName)+"new"] = []byte{} },
		"garbage in a reply": func(kept map[string][]byte) { kept[replyKey(1, 3)] = []byte("\xff") },
		"a reply to nobody":  func(kept map[string][]byte) { kept[replyKey(7, 3)] = []byte{} },
	} {
		place.mu.Lock()
		good := maps.Clone(place.kept)
		change(place.kept)
		place.mu.Unlock()
		o := s.opts
		o.Listener = listenLoopback(t)
		var damaged *durable.StoreError
		require.ErrorAs(t, Serve(ctx, &o), &damaged, name)
		require.Equal(t, durable.Damaged, damaged.Condition, name)
		require.ErrorIs(t, damaged, errs.ErrUnavailable)
		place.mu.Lock()
		place.kept = good
		place.mu.Unlock()
	}
	s.start(nil)
	s.finish(ctx, groups)

	o := s.opts
	for name, tt := range map[string]struct{ store, says string }{
		"no URL":      {"etcd", "allowed: a URL such as etcd://"},
		"other kinds": {"redis://host:1/x", `"redis"; allowed: etcd`},
	} {
		o.Listener, o.Store = listenLoopback(t), tt.store
		err := Serve(ctx, &o)
		require.ErrorIs(t, err, ErrInvalid, name)
		require.ErrorContains(t, err, tt.says)
	}
	o.Listener, o.Store = nil, store
	o.Addr = s.addr
	_, err = Join(ctx, &o)
	require.ErrorIs(t, err, ErrInvalid, "ranks have no store")
}

// TestTwoServices: of two services for one job the later one has it.
func TestTwoServices(t *testing.T) {
	t.Parallel() // it waits, most of the time
	eachStore(t, func(t *testing.T, store string) {
		ctx := testContext(t)
		s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: store, Timeout: 5 * time.Second, LivenessTimeout: time.Second})
		groups := s.join()
		o := s.opts
		o.Listener = listenLoopback(t)
		second := make(chan error, 1)
		adding, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			err := Serve(ctx, &o)
			if err != nil { // the ranks are with the first one still
				cancel()
			}
			second <- err
		}()
		for rank, err := range onAll(groups, func(g *Group) error {
			_, err := g.Store().Add(adding, "k", 1)
			for err == nil { // until the second one has it
				_, err = g.Store().Add(adding, "k", 1)
			}
			return err
		}) {
			require.Errorf(t, err, "rank %d", rank)
			require.NotErrorIsf(t, err, context.Canceled, "rank %d", rank)
		}
		var replaced *durable.StoreError
		require.ErrorAs(t, s.wait(), &replaced)
		require.Equal(t, durable.Replaced, replaced.Condition)
		require.NoError(t, <-second, "no rank has come back, so the job is over")
		for _, g := range groups {
			_ = g.Close(ctx) // its service is at another address
		}
	})
}

// breakLink is the death of a rank, as the service sees it.
func breakLink(t *testing.T, g *Group) {
	t.Helper()
	r, ok := g.session.transport.(*remote)
	require.True(t, ok)
	r.cancel() // it does not come again
}

// TestLossBetweenConnections: a rank comes back, hears of a loss, and has to connect once more before it has said anything: what was sent to it over the
// first connection may not have arrived, so it is told again over the second.
func TestLossBetweenConnections(t *testing.T) {
	ctx := testContext(t)
	name := uniqueJob()
	store, err := durable.Open(ctx, "memory://here/"+name, durable.Options{Name: name})
	require.NoError(t, err)
	l := listenLoopback(t)
	o, err := (&Options{WorldSize: 3, Addr: l.Addr().String()}).checked()
	require.NoError(t, err)
	h := newHub(3, o.bounds())
	h.keeper = newKeeper(store, time.Second, o.Logger)
	for rank := range h.ranks { // present, as an earlier service has left them
		h.ranks[rank] = hubRank{state: rankPresent, session: fmt.Sprint("join ", rank), member: Member{WorldRank: rank}}
		h.present++
	}
	s, err := startService(l, h, o, false, o.Logger)
	require.NoError(t, err)
	defer func() {
		s.stop()
		require.NoError(t, h.keeper.end(ctx, true))
	}()
	hello := &pb.Hello{WorldSize: 3, Member: Member{WorldRank: 0}.toWire(), Session: "join 0", Again: true}
	admitted := func() *serviceConn {
		t.Helper()
		near, far := net.Pipe()
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		c := &serviceConn{
			service: s, socket: s.front.listener.track(near), outbox: newOutbox(100, 1<<20), gone: make(chan struct{}),
		}
		c.rank.Store(-1)
		require.Nil(t, c.admit(hello))
		return c
	}
	first := admitted()
	h.lose(2, "the test says so")
	require.NoError(t, h.keeper.flush(ctx))
	require.Len(t, first.outbox.take(), 2, "the welcome and the loss")
	first.breaks("the test says so")
	second := admitted()
	require.NoError(t, h.keeper.flush(ctx))
	got := second.outbox.take()
	require.Len(t, got, 2, "the welcome and the loss")
	frame, ok := got[1].message.(rawFrame)
	require.Truef(t, ok, "%T", got[1].message)
	var m pb.ServerMessage
	require.NoError(t, proto.Unmarshal(frame, &m))
	require.EqualValues(t, 2, m.GetLoss().GetWorldRank())
}

// TestLongReturn: a rank comes back with so many calls under way that it takes more bytes to say so than a stranger may send.
func TestLongReturn(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for name, token := range map[string]string{"plain": "", "token": "0123456789abcdef"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			lim := defaultLimits
			lim.unproven = 8 << 10
			s := newKeptService(t, 2, Options{
				Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Token: token, Timeout: 20 * time.Second, limits: &lim,
			})
			groups := s.join()
			const calls = 1000
			failures := make([][]error, 2)
			var wait sync.WaitGroup
			callAll := func(rank int) {
				failures[rank] = make([]error, calls)
				for i := range calls {
					wait.Go(func() { failures[rank][i] = groups[rank].Barrier(ctx, "many") })
				}
			}
			r := groups[1].session.transport.(*remote)
			waiting := func() int {
				r.mu.Lock()
				defer r.mu.Unlock()
				return len(r.rounds)
			}
			callAll(1)
			require.Eventually(t, func() bool { return waiting() == calls }, 30*time.Second, time.Millisecond)
			require.Error(t, s.end())
			s.start(nil)
			callAll(0)
			wait.Wait()
			requireNone(t, failures[0])
			requireNone(t, failures[1])
			s.finish(ctx, groups)
		})
	}
}
