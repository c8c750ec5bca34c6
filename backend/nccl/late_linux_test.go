package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// between returns the options of a rank whose calls of NCCL go through change.
func (m *machine) between(rank int, change func(f *nccl.Functions)) *Options {
	o := m.plain(rank)
	o.load = func(*nccl.Options) (*nccl.Library, error) {
		f := m.library()
		change(&f)
		return nccl.New("/fake/libnccl.so.2", f)
	}
	return o
}

// gate holds up what comes to it once it is shut.
type gate struct {
	mu   sync.Mutex
	open chan struct{}
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
}

func (g *gate) pass() {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	if open != nil {
		<-open
	}
}

// has reports whether there is memory at p.
func (m *machine) has(p device.Ptr) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return m.memory[p] != nil
}

// within bounds f.
func within(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return f(ctx)
}

// TestMemoryOfALateRegistration is kept while NCCL may use it, although it was freed: until the call ends, which finds it where it was, or until the
// communicator is aborted, which waits until nothing uses the other windows.
func TestMemoryOfALateRegistration(t *testing.T) {
	const calls = "ncclCommWindowRegister"
	for _, how := range []string{"the call returns late", "the call never ends", "adopted"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel() // they wait more than they work
			m := newMachine(2)
			var inside gate
			var away sync.Mutex // guards stays
			stays := false
			m.absent = func(call string, rank int) bool {
				away.Lock()
				defer away.Unlock()
				return stays && call == calls && rank == 1
			}
			returnsLate := how == "the call returns late"
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				me := g.Rank()
				o := m.between(me, func(f *nccl.Functions) {
					own := f.CommWindowRegister
					f.CommWindowRegister = func(h nccl.CommHandle, p uint64, n uintptr, w *nccl.WindowHandle, flags nccl.WindowFlags) nccl.Result {
						if me == 0 && returnsLate {
							inside.pass()
						}
						return own(h, p, n, w, flags)
					}
				})
				b, err := New(ctx, g, o)
				if err != nil {
					return err
				}
				used, err := b.Allocate(ctx, granule)
				if err != nil {
					return err
				}
				other, err := b.Rendezvous(ctx, used)
				if err != nil {
					return err
				}
				var a backend.Allocation
				var adopted device.Ptr
				if how == "adopted" {
					adopted = m.memoryOf(me, granule, true)
					a, err = b.Register(ctx, adopted, granule)
				} else {
					a, err = b.Allocate(ctx, granule)
				}
				if err := errors.Join(err, g.Barrier(ctx, "used")); err != nil {
					return err
				}
				if me == 0 {
					if returnsLate {
						inside.shut()
					} else {
						away.Lock()
						stays = true
						away.Unlock()
					}
				}
				if err := g.Barrier(ctx, "shut"); err != nil {
					return err
				}
				err = within(ctx, 500*time.Millisecond, func(ctx context.Context) error {
					_, err := b.Rendezvous(ctx, a)
					return err
				})
				// Where the other rank's time was up first, it has told this one.
				if _, told := errors.AsType[*group.VoteError](err); !told && !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("registering: %w", err)
				}
				p := a.Ptr()
				err = a.Release(ctx)
				switch {
				case how == "adopted" && (err == nil || !strings.Contains(err.Error(), "must stay until the rank is closed")):
					return fmt.Errorf("releasing memory that is in use: %w", err)
				case how != "adopted" && err != nil:
					return err
				case !m.has(p):
					return errors.New("the memory was freed while it is being registered")
				}
				if _, err := other.Peer(1 - me); err != nil {
					return fmt.Errorf("the other window: %w", err)
				}
				if err := g.Barrier(ctx, "kept"); err != nil {
					return err
				}
				if me == 0 && returnsLate {
					close(inside.open)
				}
				for returnsLate { // the other rank's call has returned, and is polled;  somebody who allocates notices
					another, err := b.Allocate(ctx, granule)
					if err := errors.Join(err, another.Release(ctx), ctx.Err()); err != nil {
						return err
					}
					if !m.has(p) {
						break
					}
					time.Sleep(time.Millisecond)
				}
				if err := g.Barrier(ctx, "ended"); err != nil {
					return err
				}
				err = errors.Join(other.Unmap(ctx), used.Release(ctx))
				if how == "adopted" {
					err = errors.Join(err, a.Release(ctx)) // the communicator is no more
					m.drop(adopted)
				} else if m.has(p) {
					err = errors.Join(err, errors.New("the memory is still there without the communicator"))
				}
				return errors.Join(err, b.Close(ctx))
			}))
			m.requireClean(t)
			assert.Equal(t, 2, m.aborted)
		})
	}
}

// TestWindowStays: memory whose window could not be removed is kept until no communicator has it, though it was released; the communicators are
// aborted then, and not destroyed.
func TestWindowStays(t *testing.T) {
	for _, how := range []string{"plain", "symmetric", "adopted"} {
		t.Run(how, func(t *testing.T) {
			m := newMachine(2)
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				me := g.Rank()
				var armed atomic.Bool
				b, err := New(ctx, g, m.between(me, func(f *nccl.Functions) {
					own := f.CommWindowDeregister
					f.CommWindowDeregister = func(h nccl.CommHandle, w nccl.WindowHandle) nccl.Result {
						if armed.Load() {
							return nccl.SystemError
						}
						return own(h, w)
					}
				}))
				if err != nil {
					return err
				}
				var a backend.Allocation
				if how == "adopted" {
					a, err = b.Register(ctx, m.memoryOf(me, granule, true), granule)
				} else {
					a, err = b.Allocate(ctx, granule)
				}
				if err != nil {
					return err
				}
				p := a.Ptr()
				w, err := b.Rendezvous(ctx, a)
				if err != nil {
					return err
				}
				if how == "symmetric" { // so that two communicators have a window of it
					r, err := b.PrepareAllReduce(ctx, &backend.AllReduce{Name: symmetricForm, In: a, Out: a, Count: 16, DType: "f32", Op: "sum"})
					if err != nil {
						return err
					}
					if err := r.Close(); err != nil {
						return err
					}
				}
				armed.Store(me == 1)
				err = w.Unmap(ctx)
				armed.Store(false)
				if failed := err != nil && strings.Contains(err.Error(), "ncclCommWindowDeregister"); failed != (me == 1) {
					return fmt.Errorf("removing the window: %w", err)
				}
				err = a.Release(ctx)
				if refused := err != nil && strings.Contains(err.Error(), "must stay until the rank is closed"); refused != (how == "adopted" && me == 1) {
					return fmt.Errorf("releasing the memory: %w", err)
				}
				if how == "symmetric" { // one of the two is gone
					if err := b.reducers[symmetricForm].comm.Abort(ctx, errors.New("it is not wanted")); err != nil {
						return err
					}
				}
				other, err := b.Allocate(ctx, granule)
				if err == nil {
					err = other.Release(ctx)
				}
				if here := m.has(p); here != (me == 1 || how == "adopted") {
					err = errors.Join(err, fmt.Errorf("the memory is there: %t", here))
				}
				if err = errors.Join(err, b.Close(ctx)); how != "adopted" {
					return err
				}
				err = errors.Join(err, a.Release(ctx))
				m.drop(p)
				return err
			}))
			m.requireClean(t)
			aborted := 1
			if how == "symmetric" {
				aborted = 3
			}
			assert.Equal(t, aborted, m.aborted)
		})
	}
}

// TestContextFails: a rank whose context cannot be made current, wherever that is from opening to closing, and whatever the driver says, has the error,
// and so have all ranks unless it is only giving back what is its own. Nobody waits for it, and no id is made in vain.
func TestContextFails(t *testing.T) {
	for _, code := range []cu.Result{cu.OperatingSystem, cu.NotSupported} { // the second is none of NCCL's answers
		told := 0
		for nth := int32(1); ; nth++ {
			failed, struck := contextFails(t, nth, code)
			if !struck { // there are no more places
				require.NoError(t, errors.Join(failed...))
				break
			}
			if failed[0] == nil && failed[1] != nil {
				require.ErrorContains(t, failed[1], "closing symmetric memory (it was released)", "push %d", nth)
			} else {
				require.ErrorContains(t, failed[0], "cuCtxPushCurrent", "push %d", nth)
				require.ErrorContains(t, failed[0], "rank 1", "push %d", nth)
				require.NotContains(t, failed[0].Error(), "deadline", "push %d", nth)
				told++
			}
			require.ErrorContains(t, failed[1], "cuCtxPushCurrent", "push %d", nth)
		}
		assert.GreaterOrEqual(t, told, 10, "places")
	}
}

// contextFails opens, uses and closes the backend while the nth push of a context fails on rank 1, and reports whether there was one.
func contextFails(t *testing.T, nth int32, code cu.Result) (failed []error, struck bool) {
	m := newMachine(2)
	m.version, m.nvls = 22907, true
	var pushes atomic.Int32
	failed = make([]error, 2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.Multicast = "auto"
		if push := o.Driver.CtxPushCurrent; g.Rank() == 1 {
			o.Driver.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
				if pushes.Load() < nth && pushes.Add(1) == nth {
					return code
				}
				return push(c)
			}
		}
		failed[g.Rank()] = func() (err error) {
			b, err := New(ctx, g, o)
			if err != nil {
				return err
			}
			mem := memory.New(b, g, nil)
			defer func() {
				if err = errors.Join(err, mem.Close(ctx)); mem.Busy() {
					err = errors.Join(err, mem.Close(ctx))
				}
			}()
			a, err := mem.Allocate(ctx, 4096, "")
			if err := g.Vote(ctx, "allocating", err); err != nil {
				return err
			}
			_, err = mem.Rendezvous(ctx, a, memory.Record{})
			return err
		}()
		return nil
	}))
	m.Mu.Lock()
	assert.Empty(t, m.roots, "push %d", nth)
	m.Mu.Unlock()
	assert.Empty(t, m.Violations(), "push %d", nth)
	return failed, pushes.Load() == nth
}

// TestMadeLate: a communicator that its rank has given up before the call returned is aborted, and Close waits for that.
func TestMadeLate(t *testing.T) {
	for _, call := range []string{"ncclCommInitRankScalable", "ncclCommSplit"} {
		for victim := range 2 {
			t.Run(fmt.Sprintf("%s/rank=%d", call, victim), func(t *testing.T) {
				m := newMachine(2)
				entered, release, returned := make(chan struct{}), make(chan struct{}), make(chan struct{})
				failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
					o := m.between(g.Rank(), func(f *nccl.Functions) {
						hold := func(name string, own func() nccl.Result) nccl.Result {
							if name != call || g.Rank() != victim {
								return own()
							}
							defer close(returned)
							r := own()
							close(entered)
							<-release
							return r
						}
						initialise, split := f.CommInitRankScalable, f.CommSplit
						f.CommInitRankScalable = func(h *nccl.CommHandle, ranks, rank, n int32, id *nccl.UniqueID, c *nccl.ConfigLayout) nccl.Result {
							return hold("ncclCommInitRankScalable", func() nccl.Result { return initialise(h, ranks, rank, n, id, c) })
						}
						f.CommSplit = func(h nccl.CommHandle, color, key int32, child *nccl.CommHandle, c *nccl.ConfigLayout) nccl.Result {
							return hold("ncclCommSplit", func() nccl.Result { return split(h, color, key, child, c) })
						}
					})
					bounded, cancel := context.WithCancel(ctx) // on the victim it ends when the call is inside
					defer cancel()
					if g.Rank() == victim {
						var waiting sync.WaitGroup
						defer waiting.Wait()
						waiting.Go(func() {
							select {
							case <-entered:
							case <-ctx.Done():
							}
							cancel()
							time.Sleep(200 * time.Millisecond)
							close(release)
						})
					}
					if call == "ncclCommInitRankScalable" {
						_, err := New(bounded, g, o)
						return err
					}
					b, err := New(ctx, g, o)
					if err != nil {
						return err
					}
					_, err = b.reducer(bounded, plainForm, nccl.Part{Ranks: g.Size(), Rank: g.Rank()}, false)
					return errors.Join(err, b.Close(ctx))
				})
				for r, err := range failed {
					require.Error(t, err, "rank %d", r)
				}
				select {
				case <-returned:
				default:
					t.Error("nobody has waited for the call")
				}
				m.requireClean(t)
			})
		}
	}
}

// TestWindowsStayInUseOnAStuckCommunicator: where a registration was given up, freeing one of the tensors that have windows takes away no window of another that is in use.
func TestWindowsStayInUseOnAStuckCommunicator(t *testing.T) {
	m := newMachine(2)
	var stays atomic.Bool
	m.absent = func(call string, rank int) bool {
		return stays.Load() && call == "ncclCommWindowRegister" && rank == 1
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, m.plain(g.Rank()))
		if err != nil {
			return err
		}
		var allocs [3]backend.Allocation
		var maps [2]backend.Mapping
		for i := range allocs {
			if allocs[i], err = b.Allocate(ctx, granule); err != nil {
				return err
			}
			if i < 2 {
				if maps[i], err = b.Rendezvous(ctx, allocs[i]); err != nil {
					return err
				}
			}
		}
		if err := g.Barrier(ctx, "two windows"); err != nil {
			return err
		}
		stays.Store(true)
		err = within(ctx, 500*time.Millisecond, func(ctx context.Context) error {
			_, err := b.Rendezvous(ctx, allocs[2])
			return err
		})
		if err == nil {
			return errors.New("it was registered")
		}
		if err := g.Barrier(ctx, "given up"); err != nil {
			return err
		}
		peer, err := maps[0].Peer(1 - g.Rank())
		if err != nil {
			return err
		}
		if err := b.device.CopyToHost(make([]byte, 8), peer); err != nil {
			return fmt.Errorf("before: %w", err)
		}
		if err := errors.Join(maps[1].Unmap(ctx), g.Barrier(ctx, "one was freed")); err != nil {
			return err
		}
		m.Mu.Lock()
		aborted := m.aborted
		m.Mu.Unlock()
		if err := b.device.CopyToHost(make([]byte, 8), peer); err != nil || aborted > 0 || b.near.Handle() == 0 {
			err = fmt.Errorf("rank %d reads the peer's memory through a window that is in use, after another was freed: %v; communicators aborted: %d", g.Rank(), err, aborted)
			_ = g.Barrier(ctx, "end")
			return errors.Join(err, maps[0].Unmap(ctx), b.Close(ctx))
		}
		return errors.Join(g.Barrier(ctx, "end"), maps[0].Unmap(ctx), b.Close(ctx))
	}))
	assert.Positive(t, m.aborted)
}
