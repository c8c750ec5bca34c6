package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
	"github.com/symmem/symmem/memory"
)

// TestConformanceOfFakes: what every backend promises, over engines that keep the library's rules: as on the CPU, where memory is
// moved once at rendezvous, and with flags in shared memory, as on GPUs.
func TestConformanceOfFakes(t *testing.T) {
	for name, c := range map[string]struct {
		opts   Options
		worlds []int
		near   bool
		hosts  []string
	}{
		"one island":            {Options{}, []int{1, 2, 4}, true, nil},
		"one island, driven":    {Options{drive: true}, []int{1, 3}, true, nil},
		"two islands":           {Options{NetDevices: []string{"lo"}}, []int{2, 4}, true, []string{"a", "a", "b", "b"}},
		"mixed islands":         {Options{NetDevices: []string{"lo"}}, []int{3, 5}, true, []string{"a", "b", "a", "c", "b"}},
		"no islands":            {Options{Islands: "off"}, []int{1, 2, 4}, false, nil},
		"pads":                  {Options{pads: true}, []int{1, 3}, false, nil},
		"pads and shared flags": {Options{pads: true, shareFlags: true}, []int{2, 4}, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			net := &network{delay: 10 * time.Microsecond}
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					d, err := devhost.New(&devhost.Options{Err: g.Err})
					if err != nil {
						return nil, err
					}
					o := c.opts
					o.Opened, o.engine = d, net.engine
					b, err := New(ctx, g, &o)
					if err != nil {
						return nil, errors.Join(err, d.Close())
					}
					b.owned = true // so that the device is closed
					assert.Equal(t, o.shareFlags && g.Size() > 1, b.sharing)
					return b, nil
				},
				WorldSizes: c.worlds, Unreachable: !c.near, Hosts: c.hosts, Adoptable: OnDevice,
			})
			for name, e := range net.engines {
				assert.True(t, e.closed, name)
			}
		})
	}
}

// OnDevice allocates memory of the backend's device, past the backend.
func OnDevice(b backend.Backend, _ int, bytes int64) (device.Ptr, func() error, error) {
	p, err := b.Device().Alloc(bytes)
	return p, func() error { return b.Device().Free(p) }, err
}

// TestDriver: agents without a thread of the library's are driven on until they are closed, whoever waits or not.
func TestDriver(t *testing.T) {
	net := &network{}
	onFakes(t, net, 2, Options{drive: true}, func(ctx context.Context, m *memory.Memory) error {
		began := time.Now()
		for {
			net.mu.Lock()
			least := 10
			for _, e := range net.engines {
				least = min(least, e.progressed)
			}
			net.mu.Unlock()
			if least == 10 {
				return m.Group().Barrier(ctx, "driven")
			}
			if time.Since(began) > 20*time.Second {
				return errors.New("the driver does not look")
			}
			time.Sleep(time.Millisecond)
		}
	})
	// An engine that was driven on when it was closed has said so.
	for name, e := range net.engines {
		assert.True(t, e.closed, name)
		assert.Zero(t, e.late, name)
	}
}

// TestDriverRests: where all ranks map each other's memory a driver looks seldom, and often while there are transfers and as soon as there is memory that the
// ranks do not map.
func TestDriverRests(t *testing.T) {
	net := &network{}
	onFakesAt(t, net, make([]string, 2), func(int) Options { return Options{drive: true} }, func(ctx context.Context, m *memory.Memory) error {
		b := m.Backend().(*Backend)
		looks := func() int {
			net.mu.Lock()
			defer net.mu.Unlock()
			return net.engines[b.node.name].progressed
		}
		if _, _, err := mapped(ctx, m, 64); err != nil {
			return err
		}
		began, before := time.Now(), looks()
		time.Sleep(200 * time.Millisecond)
		after := looks()
		assert.LessOrEqual(t, after-before, 2+int(time.Since(began)/restEvery), "it does not rest")
		// One that rests has looked 500 times in that time.
		often := func(why string) {
			before := looks()
			assert.Eventually(t, func() bool { return looks() >= before+600 }, 500*restEvery, time.Millisecond, why)
		}
		tr := &transfer{backend: b, op: nixl.Read, memory: b.node.memory, peer: 1 - m.Group().Rank()}
		b.node.opened(tr)
		assert.True(t, b.node.hasOpen())
		often("with a transfer")
		b.node.forget(tr)
		assert.False(t, b.node.hasOpen())
		assert.True(t, b.node.driver.resting.Load())
		p, free, err := OnDevice(b, 0, 64)
		if err != nil {
			return err
		}
		a, err := m.Register(ctx, p, 64, "")
		if err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		assert.False(t, b.node.driver.resting.Load(), "memory that is not mapped is there")
		often("with memory that the ranks do not map")
		return errors.Join(m.Free(ctx, a), free(), m.Group().Barrier(ctx, "rested"))
	})
}

// TestWhoNeedsThreads: memory of the CPU, and several hosts, unless all ranks map each other's memory.
func TestWhoNeedsThreads(t *testing.T) {
	cpu, err := devhost.New(nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, cpu.Close()) }()
	one, two := group.Member{BootID: "a"}, group.Member{BootID: "b"}
	assert.True(t, needsThread(cpu, []group.Member{one, one}, false))
	assert.True(t, needsThread(gpu{cpu}, []group.Member{one, two}, false))
	assert.False(t, needsThread(gpu{cpu}, []group.Member{one, one}, false))
	assert.False(t, needsThread(cpu, []group.Member{one, one}, true))
}

// gpu is a device that says it is one.
type gpu struct{ device.Device }

func (gpu) Kind() device.Kind { return device.CUDA }

// TestFirstMoveFails: a rank that cannot move the first bytes makes the rendezvous fail on all ranks, and it can be tried
// again.
func TestFirstMoveFails(t *testing.T) {
	var failing atomic.Bool
	net := &network{delay: time.Millisecond, fail: func(engine, call string) error {
		if failing.Load() && call == "Status" && strings.Contains(engine, "-1-") {
			return errBackend
		}
		return nil
	}}
	onFakes(t, net, 3, Options{pads: true}, func(ctx context.Context, m *memory.Memory) error {
		a, w, err := mapped(ctx, m, 8)
		if err != nil {
			return err
		}
		other, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		failing.Store(true)
		if err := m.Group().Barrier(ctx, "failing"); err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, other, memory.Record{}); err == nil || !strings.Contains(err.Error(), "rank 1") {
			t.Errorf("rank %d: %v", m.Group().Rank(), err)
		}
		failing.Store(false)
		if err := m.Group().Barrier(ctx, "working"); err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, other, memory.Record{}); err != nil {
			return err
		}
		// Adopted memory has no pad, and is only read.
		p, err := m.Device().Alloc(16)
		if err != nil {
			return err
		}
		if err := m.Device().CopyFromHost(p, []byte("as it was before")); err != nil {
			return err
		}
		adopted, err := m.Register(ctx, p, 16, "")
		if err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, adopted, memory.Record{}); err != nil {
			return err
		}
		var got [16]byte
		if err := m.Device().CopyToHost(got[:], p); err != nil || string(got[:]) != "as it was before" {
			t.Errorf("adopted memory holds %q (%v)", got, err)
		}
		return errors.Join(w.Err(), m.Free(ctx, adopted), m.Device().Free(p), m.Free(ctx, other), m.Free(ctx, a))
	})
}

// mapped returns a window of n bytes.
func mapped(ctx context.Context, m *memory.Memory, n int64) (backend.Allocation, *memory.Window, error) {
	a, err := m.Allocate(ctx, n, "")
	if err != nil {
		return nil, nil, err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	return a, w, err
}

// prepare prepares a write of all of a to the next rank.
func prepare(m *memory.Memory, a backend.Allocation, w *memory.Window) (*memory.Transfer, error) {
	next := (m.Group().Rank() + 1) % m.Group().Size()
	return m.PrepareTransfer(backend.Write, next, []memory.TransferBlock{{Local: a.Ptr(), Window: w, Bytes: a.Bytes()}})
}

// TestFirstMoveIsLate: when a rank cannot wait for its first bytes, or for those of another one, the others give their memory back when all have come.
func TestFirstMoveIsLate(t *testing.T) {
	for hasty, what := range []string{"of another rank", "its own"} {
		t.Run(what, func(t *testing.T) {
			var late atomic.Bool
			net := &network{blind: true, slow: func(engine string) time.Duration {
				if late.Load() && strings.Contains(engine, "-1-") {
					return 800 * time.Millisecond
				}
				return 0
			}}
			onFakes(t, net, 3, Options{pads: true}, func(ctx context.Context, m *memory.Memory) error {
				first, _, err := mapped(ctx, m, 8)
				if err != nil {
					return err
				}
				a, err := m.Allocate(ctx, 64, "")
				if err != nil {
					return err
				}
				late.Store(true)
				if err := m.Group().Barrier(ctx, "late"); err != nil {
					return err
				}
				soon, cancel := context.WithCancel(ctx)
				defer cancel()
				if m.Group().Rank() == hasty {
					time.AfterFunc(50*time.Millisecond, cancel)
				}
				if _, err := m.Rendezvous(soon, a, memory.Record{}); err == nil {
					return fmt.Errorf("rank %d has waited", hasty)
				}
				return errors.Join(m.Free(ctx, a), m.Group().Barrier(ctx, "freed"), m.Free(ctx, first))
			})
			assert.Zero(t, net.astray.Load(), "what was written to memory that was given back")
		})
	}
}

// TestTransferThatHangs: the watchdog ends it, the memory is kept as long as the library works on it, and the transfer can be
// posted again.
func TestTransferThatHangs(t *testing.T) {
	var hang atomic.Bool
	net := &network{hang: hang.Load}
	var ready, closing sync.WaitGroup
	ready.Add(2)
	closing.Add(2)
	onFakes(t, net, 2, Options{KernelTimeout: time.Second}, func(ctx context.Context, m *memory.Memory) error {
		a, w, err := mapped(ctx, m, 100)
		if err != nil {
			return err
		}
		x, err := prepare(m, a, w)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		ready.Done()
		ready.Wait()
		hang.Store(true)
		began := time.Now()
		if err := errors.Join(x.Post(s), x.Post(s)); !errors.Is(err, errs.ErrInProgress) {
			t.Errorf("posted twice: %v", err)
		}
		if err := s.Synchronize(ctx); !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "has not ended in 1s") {
			t.Errorf("a transfer that hangs: %v", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the watchdog took %v", took)
		}
		if st, err := x.Status(); st != memory.TransferDone || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v: %v", st, err)
		}
		b := m.Backend().(*Backend)
		if left, err := b.node.sweep(); left != 1 || err != nil {
			t.Errorf("%d requests are left under way: %v", left, err)
		}
		// Nothing is released while the library works on it.
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		if err := m.Free(short, a); !errors.Is(err, context.DeadlineExceeded) || w.Err() != nil {
			t.Errorf("freeing while a transfer is under way: %v", err)
		}
		closing.Done()
		closing.Wait()
		hang.Store(false)
		if m.Group().Rank() == 0 {
			time.Sleep(20 * time.Millisecond) // the other rank frees, and must wait for this one's write
		}
		if err := errors.Join(x.Post(s), x.WaitOn(s), x.Wait(ctx), x.Close()); err != nil {
			return err
		}
		return errors.Join(m.Free(ctx, a), s.Close())
	})
}

// TestTransferClosedWhilePolled: a stream that has cut a run off goes on polling it, also when the transfer has been closed: it hears that, and the request is kept
// until the library has done with it.
func TestTransferClosedWhilePolled(t *testing.T) {
	var hang atomic.Bool
	net := &network{hang: hang.Load}
	var ready, over sync.WaitGroup
	ready.Add(2)
	over.Add(2)
	onFakes(t, net, 2, Options{}, func(ctx context.Context, m *memory.Memory) error {
		a, w, err := mapped(ctx, m, 100)
		if err != nil {
			return err
		}
		b := m.Backend().(*Backend)
		x, err := b.PrepareTransfer(backend.Write, 1-m.Group().Rank(), []backend.Block{{Alloc: a, Local: a.Ptr(), Remote: w.Mapping(), Bytes: 8}})
		if err != nil {
			return err
		}
		ready.Done()
		ready.Wait()
		hang.Store(true)
		run, err := x.Start()
		if err != nil {
			return err
		}
		if ended, err := run.Poll(); ended || err != nil {
			return fmt.Errorf("it has ended: %t, %w", ended, err)
		}
		if err := x.Close(); err != nil {
			return err
		}
		if ended, err := run.Poll(); ended || !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("after Close it has ended: %t, %w", ended, err)
		}
		if _, err := x.Start(); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("after Close it starts: %w", err)
		}
		if left, err := b.node.sweep(); left != 1 || err != nil {
			t.Errorf("%d requests are left under way: %v", left, err)
		}
		over.Done()
		over.Wait()
		hang.Store(false)
		return m.Free(ctx, a)
	})
}

// TestPutSignalThatFails: a put that fails is followed by no signal. The peer waits until the put that is made again has come.
func TestPutSignalThatFails(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			var failing atomic.Bool
			net := &network{delay: time.Millisecond, fail: func(engine, call string) error {
				if call == "Status" && strings.Contains(engine, "-0-") && failing.CompareAndSwap(true, false) {
					return errBackend
				}
				return nil
			}}
			onFakes(t, net, 2, Options{KernelTimeout: 10 * time.Second}, func(ctx context.Context, m *memory.Memory) error {
				a, w, err := mapped(ctx, m, 8)
				if err != nil {
					return err
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				if m.Group().Rank() == 1 {
					var got [8]byte
					err := errors.Join(m.Wait(s, 0, 0), s.Synchronize(ctx), m.Device().CopyToHost(got[:], a.Ptr()))
					assert.Equal(t, [8]byte{7, 7, 7, 7, 7, 7, 7, 7}, got, "the signal came without the data")
					return errors.Join(err, s.Close(), m.Group().Barrier(ctx, "looked"))
				}
				if err := m.Device().CopyFromHost(a.Ptr(), []byte{7, 7, 7, 7, 7, 7, 7, 7}); err != nil {
					return err
				}
				run := func() error { return m.PutSignal(s, 1, w, 0, a.Ptr(), 8, 0) }
				if graph {
					if err := errors.Join(s.BeginCapture(), run()); err != nil {
						return err
					}
					g, err := s.EndCapture()
					if err != nil {
						return err
					}
					defer func() { assert.NoError(t, g.Close()) }()
					run = func() error { return g.Launch(s) }
				}
				failing.Store(true)
				assert.ErrorIs(t, errors.Join(run(), s.Synchronize(ctx)), errBackend)
				return errors.Join(run(), s.Synchronize(ctx), s.Close(), m.Group().Barrier(ctx, "looked"))
			})
		})
	}
}

// TestSignalIsLate: a signal whose time is over when its word is still being written leaves that write to the library, and nobody's words are given back before it
// has ended. Two signals of one channel that are under way together go one after the other, and the second has less time for its write.
func TestSignalIsLate(t *testing.T) {
	var writes atomic.Int32
	var counted atomic.Bool
	net := &network{blind: true, slow: func(engine string) time.Duration {
		if !counted.Load() || !strings.Contains(engine, "-0-") {
			return 0
		}
		return time.Duration(writes.Add(1)) * 500 * time.Millisecond
	}}
	onFakes(t, net, 2, Options{KernelTimeout: time.Second}, func(ctx context.Context, m *memory.Memory) error {
		_, _, err := mapped(ctx, m, 8)
		if err != nil || m.Group().Rank() == 1 {
			return err
		}
		counted.Store(true)
		var streams [2]device.Stream
		for i := range streams {
			if streams[i], err = m.Device().NewStream(); err != nil {
				return err
			}
			if err := m.Signal(streams[i], 1, 0); err != nil {
				return err
			}
		}
		err = errors.Join(streams[0].Synchronize(ctx), streams[1].Synchronize(ctx))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		return errors.Join(streams[0].Close(), streams[1].Close())
	})
	assert.EqualValues(t, 2, writes.Load())
	assert.Zero(t, net.astray.Load(), "words were given back that the library was writing")
}

// TestTransferThatFails: the library's error is told when the group has nothing better to say, and the next post works.
func TestTransferThatFails(t *testing.T) {
	var failing atomic.Bool
	net := &network{delay: time.Millisecond, fail: func(_, call string) error {
		if call == "Status" && failing.Load() {
			return errBackend
		}
		return nil
	}}
	onFakes(t, net, 1, Options{}, func(ctx context.Context, m *memory.Memory) error { return nil })
	var ready sync.WaitGroup
	ready.Add(2)
	onFakes(t, net, 2, Options{}, func(ctx context.Context, m *memory.Memory) error {
		a, w, err := mapped(ctx, m, 100)
		if err != nil {
			return err
		}
		x, err := prepare(m, a, w)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		ready.Done()
		ready.Wait()
		if m.Group().Rank() == 0 {
			failing.Store(true)
			err := errors.Join(x.Post(s), s.Synchronize(ctx))
			failing.Store(false)
			if !errors.Is(err, errBackend) || !strings.Contains(err.Error(), "rank 1") {
				t.Errorf("a transfer that fails: %v", err)
			}
			if err := errors.Join(x.Post(s), s.Synchronize(ctx)); err != nil {
				return err
			}
		}
		return errors.Join(x.Close(), m.Free(ctx, a), s.Close())
	})
}

// TestPeerIsLost: the library's error of a peer that has died becomes the group's.
func TestPeerIsLost(t *testing.T) {
	var gone atomic.Bool
	net := &network{delay: time.Millisecond, fail: func(_, call string) error {
		if gone.Load() && (call == "Status" || call == "Post") {
			return errBackend
		}
		return nil
	}}
	onFakes(t, net, 2, Options{}, func(ctx context.Context, m *memory.Memory) error {
		a, w, err := mapped(ctx, m, 100)
		if err != nil {
			return err
		}
		x, err := prepare(m, a, w)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := m.Group().Barrier(ctx, "ready"); err != nil {
			return err
		}
		if m.Group().Rank() == 1 {
			gone.Store(true)
			time.Sleep(50 * time.Millisecond)
			m.Group().Abort("it is killed")
		} else {
			for !gone.Load() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			began := time.Now()
			if err := errors.Join(x.Post(s), s.Synchronize(ctx)); !errors.Is(err, errs.ErrPeerLost) {
				t.Errorf("a transfer to a rank that has died: %v", err)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it was known after %v", took)
			}
		}
		err = errors.Join(x.Close(), m.Free(ctx, a), s.Close())
		if err != nil && !errors.Is(err, errs.ErrPeerLost) {
			return err
		}
		return nil
	})
}

// TestOpenFails: a rank that cannot take part is an error on all, which names it, and nothing is left.
func TestOpenFails(t *testing.T) {
	for _, call := range []string{"NewAgent", "Register", "MetadataOf", "Know", "NewRequest", "Post", "Status"} {
		t.Run(call, func(t *testing.T) {
			bad := errors.New("bad " + call)
			net := &network{delay: time.Millisecond}
			net.fail = func(engine, c string) error {
				if c == call && strings.Contains(engine, "-1-") {
					return bad
				}
				return nil
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			groups, err := group.Local(3, nil)
			require.NoError(t, err)
			var wg sync.WaitGroup
			for _, g := range groups {
				wg.Go(func() {
					d, err := devhost.New(nil)
					if err != nil {
						t.Error(err)
						return
					}
					b, err := New(ctx, g, &Options{Opened: d, engine: net.engine})
					if b != nil || err == nil || !strings.Contains(err.Error(), "rank 1") || !strings.Contains(err.Error(), bad.Error()) {
						t.Errorf("rank %d: %v", g.Rank(), err)
					}
					if err := errors.Join(g.Close(ctx), d.Close()); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			for name, e := range net.engines {
				assert.True(t, e.closed, name)
			}
		})
	}
}

// TestSubGroup: a sub-group uses its parent's agent.
func TestSubGroup(t *testing.T) {
	net := &network{}
	onFakes(t, net, 3, Options{}, func(ctx context.Context, m *memory.Memory) error {
		if m.Group().Rank() == 1 {
			return nil
		}
		g, err := m.Group().Sub(ctx, []int{0, 2})
		if err != nil {
			return err
		}
		sub, err := memory.Open(ctx, Name, &backend.Env{Group: g, Opened: m.Device(), Parent: m.Backend()}, nil)
		if err != nil {
			return err
		}
		a, w, err := mapped(ctx, sub, 8)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		other := 1 - g.Rank()
		if err := m.Device().CopyFromHost(a.Ptr().Add(int64(g.Rank())), []byte{byte(g.Rank() + 5)}); err != nil {
			return err
		}
		err = errors.Join(sub.Copy(s, backend.Write, other, w, int64(g.Rank()), a.Ptr().Add(int64(g.Rank())), 1), sub.Signal(s,
			other, 0),
			sub.Wait(s, other, 0), s.Synchronize(ctx))
		if err != nil {
			return err
		}
		var got [2]byte
		if err := m.Device().CopyToHost(got[:], a.Ptr()); err != nil {
			return err
		}
		assert.Equal(t, [2]byte{5, 6}, got)
		return errors.Join(s.Close(), sub.Free(ctx, a), sub.Close(ctx), g.Close(ctx))
	})
	assert.Len(t, net.engines, 3)
}

// TestRegister: memory that is not the device's is refused, and adopted memory stays the caller's.
func TestRegister(t *testing.T) {
	onFakes(t, &network{}, 1, Options{}, func(ctx context.Context, m *memory.Memory) error {
		_, err := m.Register(ctx, 0x1000, 64, "")
		require.ErrorIs(t, err, errs.ErrInvalid)
		p, err := m.Device().Alloc(64)
		require.NoError(t, err)
		_, err = m.Register(ctx, p, 65, "")
		require.ErrorIs(t, err, errs.ErrInvalid)
		a, err := m.Register(ctx, p, 64, "")
		require.NoError(t, err)
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		require.NoError(t, err)
		require.NoError(t, m.Free(ctx, a))
		return m.Device().Free(p)
	})
}

// TestAdoptedTwice: memory that two groups have adopted goes on being moved for the one when the other has freed it.
func TestAdoptedTwice(t *testing.T) {
	onFakes(t, &network{}, 2, Options{}, func(ctx context.Context, m *memory.Memory) error {
		g, err := m.Group().Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		sub, err := memory.Open(ctx, Name, &backend.Env{Group: g, Opened: m.Device(), Parent: m.Backend()}, nil)
		if err != nil {
			return err
		}
		p, err := m.Device().Alloc(64)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		adopt := func(m *memory.Memory) (backend.Allocation, *memory.Window, error) {
			a, err := m.Register(ctx, p, 64, "")
			if err != nil {
				return nil, nil, err
			}
			w, err := m.Rendezvous(ctx, a, memory.Record{})
			return a, w, err
		}
		first, _, err := adopt(m)
		if err != nil {
			return err
		}
		a, w, err := adopt(sub)
		if err != nil {
			return err
		}
		x, err := prepare(sub, a, w)
		if err != nil {
			return err
		}
		if err := m.Free(ctx, first); err != nil {
			return err
		}
		if err := errors.Join(x.Post(s), s.Synchronize(ctx), x.Close()); err != nil {
			return fmt.Errorf("when the other group has freed its own: %w", err)
		}
		return errors.Join(sub.Free(ctx, a), s.Close(), sub.Close(ctx), g.Close(ctx), m.Device().Free(p))
	})
}

// TestKindsDiffer: ranks must agree on whose memory it is.
func TestKindsDiffer(t *testing.T) {
	b := &Backend{peers: []member{{Kind: "host"}, {Kind: "cuda"}}}
	require.ErrorIs(t, b.agree(), errs.ErrMismatch)
}

func TestCapabilitiesSayWhy(t *testing.T) {
	for _, kind := range []device.Kind{device.Host, device.CUDA} {
		for _, c := range capabilities(kind).List() {
			assert.True(t, c.Have || c.Why != "" || c.Name == "collective_allocate", "%v: %s", kind, c.Name)
		}
	}
}
