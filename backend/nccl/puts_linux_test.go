package nccl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
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
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onPuttingHosts runs f on ranks with simulated GPUs, two of a host, between which NCCL puts.
func onPuttingHosts(t *testing.T, ranks int, f func(ctx context.Context, g *group.Group, mem *memory.Memory) error) {
	t.Helper()
	onPuttingHostsBy(t, ranks, func(int, *nccl.Functions) {}, f)
}

// onPuttingHostsBy is onPuttingHosts with a library that by has changed for each rank.
func onPuttingHostsBy(t *testing.T, ranks int, by func(rank int, of *nccl.Functions), f func(ctx context.Context, g *group.Group, mem *memory.Memory) error) {
	t.Helper()
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: 1})
	require.NoError(t, err)
	lib := simlib.NewNCCL(m)
	lib.Spread(2)
	lib.GIN()
	functions := lib.Functions()
	backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		own := *functions
		by(g.Rank(), &own)
		return withMemory(ctx, g, &Options{
			Driver: m.Driver(), Functions: &own, LocalRank: g.Rank(), Multicast: "off", KernelTimeout: 20 * time.Second,
			Getenv: func(name string) string { return map[string]string{hostEnv: fmt.Sprint(g.Rank() / 2)}[name] },
		}, func(_ *Backend, mem *memory.Memory) error {
			err := f(ctx, g, mem)
			if err != nil {
				g.Abort("the test has failed") // the others may be waiting
			}
			return err
		})
	}))
	assert.Empty(t, lib.Left())
	require.NoError(t, m.Err())
}

// TestPutsAndSignals: between hosts there are puts, signals, waits and barriers as on one, eager, recorded and mixed, and gets where there are addresses.
func TestPutsAndSignals(t *testing.T) {
	onPuttingHosts(t, 3, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		if c := mem.Capabilities(); c.PeerPointers || c.Transfers || !strings.Contains(c.Why["transfers"], "puts and signals reach all ranks") {
			return fmt.Errorf("the capabilities are %+v", c)
		}
		if !mem.CanSignal() {
			return errors.New("the memory says that ranks cannot signal each other")
		}
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		err = backendtest.WithWindow(ctx, mem, 4<<20, func(w *memory.Window) error {
			return errors.Join(putToAll(ctx, g, mem, w, s), replayPuts(ctx, g, mem, w, s), putLong(ctx, g, mem, w, s), getNear(ctx, g, mem, w, s))
		})
		return errors.Join(err, s.Close())
	})
}

// putToAll sends a word to every rank, with a signal behind it, again and again.
func putToAll(ctx context.Context, g *group.Group, mem *memory.Memory, w *memory.Window, s device.Stream) error {
	me, size := g.Rank(), g.Size()
	own, err := w.Peer(me, 0)
	if err != nil {
		return err
	}
	for round := range 5 {
		err := errors.Join(mem.Barrier(s, 1), s.Synchronize(ctx), mem.Device().CopyFromHost(own, []byte{byte(10*round + me + 1)}))
		for peer := range size {
			if peer != me {
				err = errors.Join(err, mem.PutSignal(s, peer, w, int64(64+me), own, 1, 0))
			}
		}
		for peer := range size {
			if peer != me {
				err = errors.Join(err, mem.Wait(s, peer, 0))
			}
		}
		got := make([]byte, size)
		if err = errors.Join(err, s.Synchronize(ctx), mem.Device().CopyToHost(got, own.Add(64))); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		for peer := range size {
			if peer != me && got[peer] != byte(10*round+peer+1) {
				return fmt.Errorf("round %d: rank %d has put %d", round, peer, got[peer])
			}
		}
	}
	return nil
}

// replayPuts records a put with a signal and a wait, round a ring, and runs it between others that are not recorded: signals of both are counted as one.
func replayPuts(ctx context.Context, g *group.Group, mem *memory.Memory, w *memory.Window, s device.Stream) error {
	me, size := g.Rank(), g.Size()
	next, before := (me+1)%size, (me+size-1)%size
	own, err := w.Peer(me, 0)
	if err != nil {
		return err
	}
	exchange := func() error {
		return errors.Join(mem.PutSignal(s, next, w, 128, own, 1, 0), mem.Wait(s, before, 0))
	}
	if err := s.BeginCapture(); err != nil {
		return err
	}
	err = exchange()
	graph, captured := s.EndCapture()
	if err = errors.Join(err, captured); err != nil {
		return err
	}
	for round, run := range []func() error{exchange, func() error { return graph.Launch(s) }, func() error { return graph.Launch(s) }, exchange, func() error { return graph.Launch(s) }} {
		value := byte(50 + 10*round)
		got := make([]byte, 1)
		err := errors.Join(mem.Device().CopyFromHost(own, []byte{value + byte(me)}), mem.Barrier(s, 1), run(), s.Synchronize(ctx), mem.Device().CopyToHost(got, own.Add(128)),
			mem.Barrier(s, 1), s.Synchronize(ctx))
		if err != nil || got[0] != value+byte(before) {
			return fmt.Errorf("round %d of the graph: %d came: %w", round, got[0], err)
		}
	}
	// One side signals by the graph, and the other waits without one.
	if me == 0 {
		err = graph.Launch(s)
	} else {
		err = exchange()
	}
	return errors.Join(err, s.Synchronize(ctx), graph.Close())
}

// putLong puts from memory that is no window, in several pieces.
func putLong(ctx context.Context, g *group.Group, mem *memory.Memory, w *memory.Window, s device.Stream) error {
	const n = 2*stageBytes + 333
	me, size := g.Rank(), g.Size()
	next, before := (me+1)%size, (me+size-1)%size
	pattern := func(rank int) []byte {
		b := bytes.Repeat([]byte{byte(rank), 1, 2, 3, 5, 8, 13}, n/7+1)[:n]
		b[n-1] = byte(100 + rank)
		return b
	}
	a, err := mem.Allocate(ctx, n, "no window")
	if err != nil {
		return err
	}
	got := make([]byte, n)
	own, err := w.Peer(me, 512)
	err = errors.Join(err, mem.Device().CopyFromHost(a.Ptr(), pattern(me)), mem.PutSignal(s, next, w, 512, a.Ptr(), n, 0), mem.Wait(s, before, 0), s.Synchronize(ctx),
		mem.Device().CopyToHost(got, own))
	if want := pattern(before); err == nil && !bytes.Equal(got, want) {
		at := 0
		for got[at] == want[at] {
			at++
		}
		err = fmt.Errorf("byte %d of what rank %d has put is %d and not %d", at, before, got[at], want[at])
	}
	// The same by a transfer that is prepared, when all have looked.
	if err = errors.Join(err, mem.Barrier(s, 1), s.Synchronize(ctx)); err != nil {
		return err
	}
	x, prepared := mem.PrepareTransfer(backend.Write, next, []memory.TransferBlock{{Local: a.Ptr(), Window: w, Offset: 1 << 10, Bytes: 100}, {Local: a.Ptr().Add(7), Window: w, Offset: 1 << 12, Bytes: 9}})
	if err = errors.Join(err, prepared); err != nil {
		return err
	}
	for range 2 {
		err = errors.Join(err, x.Post(s), x.WaitOn(s), mem.Signal(s, next, 0), mem.Wait(s, before, 0), s.Synchronize(ctx))
	}
	tail := make([]byte, 9)
	if err = errors.Join(err, x.Close(), mem.Device().CopyToHost(tail, own.Add(1<<12-512))); err == nil && !bytes.Equal(tail, pattern(before)[7:16]) {
		err = fmt.Errorf("%v came by the transfer", tail)
	}
	return errors.Join(err, mem.Barrier(s, 1), s.Synchronize(ctx), mem.Free(ctx, a))
}

// getNear gets from the ranks that have addresses here. From the others it cannot, and says why.
func getNear(ctx context.Context, g *group.Group, mem *memory.Memory, w *memory.Window, s device.Stream) error {
	me := g.Rank()
	own, err := w.Peer(me, 0)
	if err != nil {
		return err
	}
	for peer := range g.Size() {
		err := mem.Copy(s, backend.Read, peer, w, 64, own.Add(256), 1)
		if _, far := w.Peer(peer, 0); far == nil {
			if err = errors.Join(err, s.Synchronize(ctx)); err != nil {
				return err
			}
			continue
		}
		if !errors.Is(err, errs.ErrNotReachable) || !strings.Contains(err.Error(), "let that rank put") {
			return fmt.Errorf("a get of rank %d: %w", peer, err)
		}
	}
	return nil
}

// TestNoPuts: where NCCL cannot put, the errors of what would take that name the version, what is missing and what to do, and everything else works.
func TestNoPuts(t *testing.T) {
	for version, want := range map[nccl.Version][]string{
		22809: {"NCCL 2.28.9", "ncclPutSignal", "2.29.2 or newer"}, 22902: {"NCCL 2.29.2", "no GIN", "NCCL_GIN_ENABLE", "2.32 or newer"},
		23007: {"NCCL 2.30.7", "no GIN", "2.32 or newer"}, 23203: {"NCCL 2.32.3", "no GIN", "NCCL_GIN_TYPE=2 takes sockets"},
	} {
		m := newMachine(1)
		m.version = version
		h := hosts{"a", "b"}
		onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			if b.Moves() || mem.CanSignal() {
				return errors.New("it has puts")
			}
			s, err := mem.Device().NewStream()
			if err != nil {
				return err
			}
			err = backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				own, err := w.Peer(g.Rank(), 0)
				if err != nil {
					return err
				}
				_, direct := b.PrepareTransfer(backend.Write, 1-g.Rank(), nil)
				for what, err := range map[string]error{
					"put": mem.Copy(s, backend.Write, 1-g.Rank(), w, 0, own, 8), "signal": mem.Signal(s, 1-g.Rank(), 0), "barrier": mem.Barrier(s, 0), "backend": direct,
					"put with a signal": mem.PutSignal(s, 1-g.Rank(), w, 0, own, 8, 0),
				} {
					for _, word := range want {
						if !errors.Is(err, errs.ErrNotReachable) || !strings.Contains(err.Error(), word) {
							return fmt.Errorf("%s, without %q: %w", what, word, err)
						}
					}
				}
				return nil
			})
			_, flags := b.NewFlags(ctx, 1)
			if !errors.Is(flags, errs.ErrNotReachable) {
				return fmt.Errorf("flags: %w", flags)
			}
			return errors.Join(err, s.Close(), tryHosts(ctx, g, b, mem, []int{g.Rank()}))
		})
	}
}

// TestPutsByVersion: every version that can puts, from windows and at the offsets that the ranks have, and refuses to get.
func TestPutsByVersion(t *testing.T) {
	for _, version := range []nccl.Version{22902, 22907, 23007, 23203} {
		m := newMachine(2)
		m.version, m.gin = version, true
		h := hosts{"a", "a", "b", "b"}
		onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			if !b.Moves() {
				return errors.New("it has no puts: " + b.noPuts)
			}
			return tryHosts(ctx, g, b, mem, h.near(g.Rank()))
		})
		assert.EqualValues(t, 4, m.puts, "one of each rank to try")
	}
}

// TestPutsFailWhenTried: puts that fail on one rank, or change what they bring, are given up on all, and the rest works.
func TestPutsFailWhenTried(t *testing.T) {
	for what, spoil := range map[string]func(m *machine){
		"ncclPutSignal": func(m *machine) {
			m.fail = func(call string, rank, _ int) nccl.Result {
				if call == "ncclPutSignal" && rank == 2 {
					return nccl.InvalidUsage
				}
				return nccl.Success
			}
		},
		"arrives": func(m *machine) { m.unputtable, m.patience = func(rank int) bool { return rank == 2 }, time.Second },
	} {
		m := newMachine(2)
		m.version, m.gin = 23203, true
		spoil(m)
		h := hosts{"a", "a", "b", "b"}
		onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			if b.Moves() || !strings.Contains(b.noPuts, "failed when it was tried") {
				return fmt.Errorf("%s: it puts: %s", what, b.noPuts)
			}
			return tryHosts(ctx, g, b, mem, h.near(g.Rank()))
		})
		assert.Equal(t, 4, m.aborted, "%s", what)
	}
}

// putOnce starts a put of 8 bytes to another host and waits for its end.
func putOnce(b *Backend, mem *memory.Memory, w *memory.Window, peer int) error {
	own, err := w.Peer(mem.Group().Rank(), 0)
	if err != nil {
		return err
	}
	x, err := b.PrepareTransfer(backend.Write, peer, []backend.Block{{Alloc: w.Allocation(), Local: own, Remote: w.Mapping(), Offset: 64, Bytes: 8}})
	if err != nil {
		return err
	}
	run, err := x.Start()
	for ended := false; err == nil && !ended; time.Sleep(50 * time.Microsecond) {
		ended, err = run.Poll()
	}
	return errors.Join(err, x.Close())
}

// TestPutFails: a put that NCCL refuses later is the error of the rank that made it, and of what others put then; windows that are made afterwards are none for
// puts, which is said, and nothing is left.
func TestPutFails(t *testing.T) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	h := hosts{"a", "b"}
	onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
		peer := 1 - g.Rank()
		err := backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
			if err := errors.Join(putOnce(b, mem, w, peer), g.Barrier(ctx, "put")); err != nil {
				return err
			}
			m.set(func() {
				m.fail = func(call string, rank, _ int) nccl.Result {
					if call == "ncclPutSignal" && rank == 0 {
						return nccl.SystemError
					}
					return nccl.Success
				}
			})
			if err := g.Barrier(ctx, "failing"); err != nil {
				return err
			}
			if g.Rank() == 0 {
				if err := putOnce(b, mem, w, peer); err == nil || !strings.Contains(err.Error(), "ncclPutSignal") {
					return fmt.Errorf("a put that fails: %w", err)
				}
			}
			for began := time.Now(); b.puts.red.given() == nil; time.Sleep(time.Millisecond) {
				if time.Since(began) > 20*time.Second {
					return errors.New("the other rank is not told")
				}
			}
			if err := putOnce(b, mem, w, peer); !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("a put afterwards: %w", err)
			}
			return g.Barrier(ctx, "failed")
		})
		if err != nil {
			return err
		}
		return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
			if err := putOnce(b, mem, w, peer); !errors.Is(err, errs.ErrNotReachable) {
				return fmt.Errorf("a put into a window that was made afterwards: %w", err)
			}
			return nil
		})
	})
}

// TestPutFailsWithoutBlocking: a put that NCCL refuses gives the communicator up on every rank, and does not wait for that itself: whoever starts a put does
// all the work of the CPU for the device. Before the abort has ended, no other put starts, and those under way end with the error.
func TestPutFailsWithoutBlocking(t *testing.T) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	h := hosts{"a", "b"}
	var aborted atomic.Bool
	released := make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	defer release()
	onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
		peer := 1 - g.Rank()
		return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
			own, err := w.Peer(g.Rank(), 0)
			if err != nil {
				return err
			}
			prepare := func() (backend.PreparedTransfer, error) {
				return b.PrepareTransfer(backend.Write, peer, []backend.Block{{Alloc: w.Allocation(), Local: own, Remote: w.Mapping(), Offset: 64, Bytes: 8}})
			}
			under, err := prepare()
			if err != nil {
				return err
			}
			refused, err := prepare()
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				m.set(func() {
					m.unputtable = func(int) bool { return true } // those under way do not end
					m.afterAbort = func() {
						select {
						case <-released:
						case <-time.After(10 * time.Second):
						}
						aborted.Store(true)
					}
				})
			}
			if err := g.Barrier(ctx, "holding"); err != nil {
				return err
			}
			run, err := under.Start()
			if err != nil {
				return err
			}
			if err := g.Barrier(ctx, "under way"); err != nil {
				return err
			}
			if g.Rank() == 0 {
				m.set(func() {
					m.fail = func(call string, rank, _ int) nccl.Result {
						if call == "ncclPutSignal" && rank == 0 {
							return nccl.SystemError
						}
						return nccl.Success
					}
				})
				_, err = refused.Start()
				if _, stuck := errors.AsType[*nccl.StuckError](err); stuck || aborted.Load() {
					return fmt.Errorf("the put that is refused has waited for the abort: %w", err)
				}
				if err == nil || !strings.Contains(err.Error(), "ncclPutSignal") {
					return fmt.Errorf("a put that fails: %w", err)
				}
				if _, err := refused.Start(); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("a put before the abort has ended: %w", err)
				}
			}
			ended, err := run.Poll()
			for began := time.Now(); err == nil && time.Since(began) < 20*time.Second; ended, err = run.Poll() {
				time.Sleep(time.Millisecond)
			}
			if ended || !errors.Is(err, errs.ErrClosed) || !strings.Contains(err.Error(), "ncclPutSignal") {
				return fmt.Errorf("a put under way when another is refused on rank 0: %w", err)
			}
			if err := g.Barrier(ctx, "given up"); err != nil {
				return err
			}
			release()
			return errors.Join(under.Close(), refused.Close())
		})
	})
}

// TestPutNotEnding: a put that does not arrive ends with an error when its time is up, and another can then not be started by the same transfer; when the
// rank that it goes to is lost, all end, and the communicator is given up.
func TestPutNotEnding(t *testing.T) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	h := hosts{"a", "b"}
	for r, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := h.options(m, g.Rank())
		o.KernelTimeout = 2 * time.Second
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				m.set(func() { m.unputtable = func(rank int) bool { return rank == 1 } })
				if err := g.Barrier(ctx, "stopped"); err != nil {
					return err
				}
				if g.Rank() == 1 {
					if err := g.Barrier(ctx, "over"); err != nil {
						return err
					}
					g.Abort("it is killed")
					return errors.New("killed")
				}
				own, err := w.Peer(0, 0)
				if err != nil {
					return err
				}
				x, err := b.PrepareTransfer(backend.Write, 1, []backend.Block{{Alloc: w.Allocation(), Local: own, Remote: w.Mapping(), Bytes: 8}})
				if err != nil {
					return err
				}
				run, err := x.Start()
				if err != nil {
					return err
				}
				for err == nil {
					_, err = run.Poll()
					time.Sleep(time.Millisecond)
				}
				if !strings.Contains(err.Error(), "have not ended") {
					return fmt.Errorf("the error is %w", err)
				}
				if _, err := x.Start(); !errors.Is(err, errs.ErrInProgress) {
					return fmt.Errorf("started again: %w", err)
				}
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				if err := b.Quiesce(short); !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("quiescing beside it: %w", err)
				}
				if err := g.Barrier(ctx, "over"); err != nil {
					return err
				}
				for g.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				if _, err := run.Poll(); !errors.Is(err, errs.ErrPeerLost) {
					return fmt.Errorf("after the loss: %w", err)
				}
				if _, err := x.Start(); !errors.Is(err, errs.ErrPeerLost) {
					return fmt.Errorf("started after the loss: %w", err)
				}
				return errors.Join(b.Quiesce(ctx), x.Close(), errors.New("done"))
			})
		})
	}) {
		require.ErrorContains(t, err, []string{"done", "killed"}[r])
	}
	m.requireClean(t)
}

// TestPutArrivesLate: when what was given up has arrived after all, the transfer can be started again.
func TestPutArrivesLate(t *testing.T) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	h := hosts{"a", "b"}
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := h.options(m, g.Rank())
		o.KernelTimeout = time.Second
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				if err := g.Barrier(ctx, "begun"); err != nil || g.Rank() == 1 {
					return errors.Join(err, g.Barrier(ctx, "over"))
				}
				own, err := w.Peer(0, 0)
				if err != nil {
					return err
				}
				x, err := b.PrepareTransfer(backend.Write, 1, []backend.Block{{Alloc: w.Allocation(), Local: own, Remote: w.Mapping(), Bytes: 8}})
				if err != nil {
					return err
				}
				m.set(func() { m.unputtable = func(rank int) bool { return rank == 1 } })
				run, err := x.Start()
				for err == nil {
					_, err = run.Poll()
					time.Sleep(time.Millisecond)
				}
				if !strings.Contains(err.Error(), "have not ended") {
					return fmt.Errorf("the error is %w", err)
				}
				if _, err := x.Start(); !errors.Is(err, errs.ErrInProgress) {
					return fmt.Errorf("started beside it: %w", err)
				}
				m.set(func() { m.unputtable = nil })
				if err := b.Quiesce(ctx); err != nil {
					return err
				}
				run, err = x.Start()
				for ended := false; err == nil && !ended; time.Sleep(time.Millisecond) {
					ended, err = run.Poll()
				}
				return errors.Join(err, x.Close(), g.Barrier(ctx, "over"))
			})
		})
	}) {
		require.NoError(t, err)
	}
	m.requireClean(t)
}

// TestPutFromPartOfWindow: memory that is no window itself may lie in one, which goes when the memory that it is of is freed. Puts go on.
func TestPutFromPartOfWindow(t *testing.T) {
	onPuttingHosts(t, 3, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		b := mem.Backend().(*Backend)
		var p device.Ptr
		if err := b.device.WithContext(func() error {
			q, err := b.takeMemory(granule)
			p = device.Ptr(q)
			return err
		}); err != nil {
			return err
		}
		whole, err := mem.Register(ctx, p, granule, "whole")
		if err != nil {
			return err
		}
		if _, err := mem.Rendezvous(ctx, whole, memory.Record{}); err != nil {
			return err
		}
		from := p.Add(4096)
		part, err := mem.Register(ctx, from, 4096, "part")
		if err != nil {
			return err
		}
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		err = backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
			own, err := w.Peer(g.Rank(), 0)
			if err != nil {
				return err
			}
			// Ranks 0 and 2 are on two hosts.
			x, err := mem.PrepareTransfer(backend.Write, 2-2*(g.Rank()/2), []memory.TransferBlock{{Local: from, Window: w, Bytes: 8}})
			if err != nil {
				return err
			}
			put := func(text string) error {
				err := mem.Device().CopyFromHost(from, []byte(text))
				if g.Rank() != 1 {
					err = errors.Join(err, x.Post(s), x.WaitOn(s), s.Synchronize(ctx))
				}
				got := make([]byte, len(text))
				err = errors.Join(err, g.Barrier(ctx, "put"), mem.Device().CopyToHost(got, own), g.Barrier(ctx, "read"))
				if err == nil && g.Rank() != 1 && string(got) != text {
					err = fmt.Errorf("%q was put, and %q came", text, got)
				}
				return err
			}
			return errors.Join(put("with it."), mem.Free(ctx, whole), put("without."), x.Close(), b.puts.red.given())
		})
		return errors.Join(err, mem.Free(ctx, part), s.Close(), b.freeMemory(uint64(p)))
	})
}

// TestPutFlagArrivesAsItWas: a value that was given up and arrives after all is not the one that somebody has tried to put since.
func TestPutFlagArrivesAsItWas(t *testing.T) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	h := hosts{"a", "b"}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := h.options(m, g.Rank())
		o.KernelTimeout = time.Second
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
			f, err := b.NewFlags(ctx, 1)
			if err != nil {
				return err
			}
			if g.Rank() == 1 {
				if err := g.Barrier(ctx, "put"); err != nil {
					return err
				}
				f.Progress()
				if got := f.Words()[0].Load(); got != 7 {
					err = fmt.Errorf("%d has come", got)
				}
				return errors.Join(err, g.Barrier(ctx, "seen"), f.Close())
			}
			store, err := f.PrepareStore(1, 0)
			if err != nil {
				return err
			}
			m.set(func() { m.unputtable = func(rank int) bool { return rank == 1 } })
			for err = store.Post(7); err == nil; time.Sleep(time.Millisecond) {
				_, err = store.Poll()
			}
			if !strings.Contains(err.Error(), "have not ended") {
				return fmt.Errorf("the error is %w", err)
			}
			if err := store.Post(8); !errors.Is(err, errs.ErrInProgress) {
				return fmt.Errorf("put beside it: %w", err)
			}
			m.set(func() { m.unputtable = nil })
			return errors.Join(b.Quiesce(ctx), g.Barrier(ctx, "put"), g.Barrier(ctx, "seen"), store.Close(), f.Close())
		})
	}))
	m.requireClean(t)
}

// TestPutFlagsKeepWords: what a rank makes of its own words stays, until a peer writes them, whatever that is: a count that comes to 0 when it wraps around, too.
func TestPutFlagsKeepWords(t *testing.T) {
	for _, value := range []uint64{8, 0} {
		t.Run(fmt.Sprint(value), func(t *testing.T) { keepWords(t, value) })
	}
}

func keepWords(t *testing.T, value uint64) {
	m := newMachine(1)
	m.version, m.gin = 23203, true
	onPretended(t, m, hosts{"a", "b"}, func(ctx context.Context, g *group.Group, b *Backend, _ *memory.Memory) error {
		f, err := b.NewFlags(ctx, 2)
		if err != nil {
			return err
		}
		for i := range f.Words() {
			f.Words()[i].Store(7)
		}
		f.Progress()
		f.Progress()
		if a, b := f.Words()[0].Load(), f.Words()[1].Load(); a != 7 || b != 7 {
			return fmt.Errorf("the words are %d and %d", a, b)
		}
		if err := g.Barrier(ctx, "kept"); err != nil {
			return err
		}
		store, err := f.PrepareStore(1-g.Rank(), 1)
		if err == nil {
			err = store.Post(value)
		}
		for ended := false; err == nil && !ended; {
			ended, err = store.Poll()
		}
		if err = errors.Join(err, g.Barrier(ctx, "put")); err != nil {
			return err
		}
		f.Progress()
		if a, b := f.Words()[0].Load(), f.Words()[1].Load(); a != 7 || b != value {
			return fmt.Errorf("after a put the words are %d and %d", a, b)
		}
		return errors.Join(store.Close(), g.Barrier(ctx, "seen"), f.Close(), f.Close())
	})
}

// TestWindowFailsOnOneHost: a window that one rank's host cannot make is that error on every rank, before any comes to the call that takes all hosts, and the ranks stay in step.
func TestWindowFailsOnOneHost(t *testing.T) {
	const ranks = 4
	var armed atomic.Bool
	onPuttingHostsBy(t, ranks, func(rank int, of *nccl.Functions) {
		if register := of.CommWindowRegister; rank == ranks-1 {
			of.CommWindowRegister = func(h nccl.CommHandle, p uint64, n uintptr, w *nccl.WindowHandle, flags nccl.WindowFlags) nccl.Result {
				if armed.CompareAndSwap(true, false) {
					return nccl.UnhandledCudaError
				}
				return register(h, p, n, w, flags)
			}
		}
	}, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		a, err := mem.Allocate(ctx, 1<<20, "")
		if err != nil {
			return err
		}
		armed.Store(true)
		if err := g.Barrier(ctx, "armed"); err != nil {
			return err
		}
		within, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		_, err = mem.Rendezvous(within, a, memory.Record{})
		if failed, ok := errors.AsType[*group.VoteError](err); !ok || !strings.Contains(failed.Error(), "ncclUnhandledCudaError") {
			return fmt.Errorf("rank %d: %w is not NCCL's error", g.Rank(), err)
		}
		return errors.Join(g.Barrier(ctx, "in step"), mem.Free(ctx, a))
	})
}

// TestAutoWhatNCCLHasNot: where NCCL can put, auto does by puts what neither NCCL nor Hierarchical has: elements of 16-bit integers, averages of integers in shares that are not of one length, and the order of the ranks.
func TestAutoWhatNCCLHasNot(t *testing.T) {
	onPuttingHosts(t, 3, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		const n = 60
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		tensors := map[tensor.DType][2]*tensor.Tensor{}
		for _, dtype := range []tensor.DType{tensor.Float32, tensor.Int32, tensor.Uint16} {
			var pair [2]*tensor.Tensor
			for i := range pair {
				if pair[i], err = tensor.Zeros(ctx, mem, dtype, n); err == nil {
					err = pair[i].Rendezvous(ctx)
				}
				if err != nil {
					return err
				}
			}
			tensors[dtype] = pair
		}
		part := func(dtype tensor.DType, i int, elements int64) tensor.SymmetricTensor {
			x, err := tensors[dtype][i].Sub(0, elements)
			if err != nil {
				panic(err)
			}
			return x
		}
		const f32, i32, u16 = tensor.Float32, tensor.Int32, tensor.Uint16
		ordered := &kernels.Options{RankOrder: true}
		for _, c := range []struct {
			what string
			want kernels.Algorithm
			make func() (*kernels.Plan, error)
		}{
			{"all-reduce", kernels.NCCL, func() (*kernels.Plan, error) { return kernels.NewAllReduce(ctx, part(f32, 0, n), kernels.Sum, nil) }},
			{"all-reduce in the order of the ranks", kernels.Transfers, func() (*kernels.Plan, error) {
				return kernels.NewAllReduce(ctx, part(f32, 0, n), kernels.Sum, &kernels.AllReduceOptions{RankOrder: true})
			}},
			{"all-reduce of u16", kernels.Transfers, func() (*kernels.Plan, error) { return kernels.NewAllReduce(ctx, part(u16, 0, n), kernels.Sum, nil) }},
			{"reduce", kernels.NCCL, func() (*kernels.Plan, error) {
				return kernels.NewReduce(ctx, part(f32, 0, n), part(f32, 1, n), kernels.Sum, 1, nil)
			}},
			{"reduce in the order of the ranks", kernels.Transfers, func() (*kernels.Plan, error) {
				return kernels.NewReduce(ctx, part(f32, 0, n), part(f32, 1, n), kernels.Sum, 1, ordered)
			}},
			{"reduce of u16", kernels.Transfers, func() (*kernels.Plan, error) {
				return kernels.NewReduce(ctx, part(u16, 0, n), part(u16, 1, n), kernels.Sum, 1, nil)
			}},
			{"reduce-scatter, uneven", kernels.Hierarchical, func() (*kernels.Plan, error) {
				return kernels.NewReduceScatter(ctx, part(f32, 0, n-1), part(f32, 1, n/3), kernels.Sum, nil)
			}},
			{"reduce-scatter, uneven, in the order of the ranks", kernels.Transfers, func() (*kernels.Plan, error) {
				return kernels.NewReduceScatter(ctx, part(f32, 0, n-1), part(f32, 1, n/3), kernels.Sum, ordered)
			}},
			{"reduce-scatter, averages of i32", kernels.NCCL, func() (*kernels.Plan, error) {
				return kernels.NewReduceScatter(ctx, part(i32, 0, n), part(i32, 1, n/3), kernels.Avg, nil)
			}},
			{"reduce-scatter, averages of i32, uneven", kernels.Transfers, func() (*kernels.Plan, error) {
				return kernels.NewReduceScatter(ctx, part(i32, 0, n-1), part(i32, 1, n/3), kernels.Avg, nil)
			}},
			{"all-gather of u16, uneven", kernels.Hierarchical, func() (*kernels.Plan, error) {
				return kernels.NewAllGather(ctx, part(u16, 0, n/3), part(u16, 1, n-1), ordered)
			}},
			{"broadcast of u16", kernels.NCCL, func() (*kernels.Plan, error) { return kernels.NewBroadcast(ctx, part(u16, 0, n), 1, ordered) }},
		} {
			p, err := c.make()
			if err != nil {
				return fmt.Errorf("%s: %w", c.what, err)
			}
			if got := p.Algorithm(); got != c.want {
				err = fmt.Errorf("%s: %s was taken, and %s was expected", c.what, got, c.want)
			}
			if err = errors.Join(err, p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, c.what), p.Close(ctx)); err != nil {
				return err
			}
		}
		// What goes so is right.
		in, out := tensors[u16][0], tensors[u16][1]
		mine := slices.Repeat([]uint16{uint16(20000 + g.Rank())}, n)
		if err := errors.Join(tensor.Write(in.Local(), mine, 0), g.Barrier(ctx, "filled")); err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, in, kernels.Sum, &kernels.AllReduceOptions{Out: out})
		if err != nil {
			return err
		}
		got := make([]uint16, n)
		if err := errors.Join(p.Run(s), s.Synchronize(ctx), tensor.Read(out.Local(), got, 0), p.Close(ctx)); err != nil {
			return err
		}
		if i := slices.IndexFunc(got, func(v uint16) bool { return v != 60003 }); i >= 0 {
			return fmt.Errorf("element %d is %d", i, got[i])
		}
		for _, dtype := range []tensor.DType{f32, i32, u16} {
			err = errors.Join(err, tensors[dtype][0].Close(ctx), tensors[dtype][1].Close(ctx))
		}
		return errors.Join(err, s.Close())
	})
}

// TestUnevenByPuts: an all-gather whose shares are not of one length goes by puts where a rank has no memory for the workspace of Hierarchical.
func TestUnevenByPuts(t *testing.T) {
	onPuttingHosts(t, 3, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		const n = 8<<20 - 1
		size := g.Size()
		var ts [2]*tensor.Tensor
		for i, elements := range []int64{(n + 2) / 3, n} {
			var err error
			if ts[i], err = tensor.Zeros(ctx, mem, tensor.Float32, elements); err == nil {
				err = ts[i].Rendezvous(ctx)
			}
			if err != nil {
				return err
			}
		}
		first, err := kernels.NewBarrier(ctx, mem, nil) // which makes the first workspace
		if err != nil {
			return err
		}
		d := mem.Device()
		var taken []device.Ptr
		if g.Rank() == 1 {
			spare, err := d.Alloc(12 << 20) // for signals
			if err != nil {
				return err
			}
			for bytes := int64(1) << 40; bytes >= 2<<20; bytes /= 2 {
				if p, err := d.Alloc(bytes); err == nil {
					taken = append(taken, p)
				}
			}
			if err := d.Free(spare); err != nil {
				return err
			}
		}
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		mine := slices.Repeat([]float32{float32(g.Rank() + 1)}, (n+2)/3)
		if err := errors.Join(tensor.Write(ts[0].Local(), mine, 0), g.Barrier(ctx, "taken")); err != nil {
			return err
		}
		p, err := kernels.NewAllGather(ctx, ts[0], ts[1], nil)
		if err != nil {
			return err
		}
		if got := p.Algorithm(); got != kernels.Transfers {
			err = fmt.Errorf("%s was taken", got)
		}
		got := make([]float32, n)
		err = errors.Join(err, p.Run(s), s.Synchronize(ctx), tensor.Read(ts[1].Local(), got, 0), g.Barrier(ctx, "ran"), p.Close(ctx), first.Close(ctx), s.Close())
		for _, r := range []int{0, 1, size - 1} {
			if at := r * ((n + 2) / 3); err == nil && got[at] != float32(r+1) {
				err = fmt.Errorf("the share of rank %d begins with %v", r, got[at])
			}
		}
		for _, p := range taken {
			err = errors.Join(err, d.Free(p))
		}
		return errors.Join(err, ts[0].Close(ctx), ts[1].Close(ctx))
	})
}
