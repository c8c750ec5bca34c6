package native

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tests/suite"
)

// signalKernels makes the machine's GPUs run the kernels of signals, in Go and with the same parameters.
func (m *machine) signalKernels() {
	m.Params = func(string) []int { return []int{int(unsafe.Sizeof(ptx.Params{}))} }
	m.Kernel = func(gpu int, name string, params []unsafe.Pointer) {
		k := &signalKernel{machine: m, gpu: gpu, p: *(*ptx.Params)(params[0]), began: time.Now()}
		k.run(name)
	}
}

// signalKernel is one launch. Kernels of other GPUs run at the same time, and the machine is not locked.
type signalKernel struct {
	machine *machine
	gpu     int
	p       ptx.Params
	began   time.Time
	fault   uint64
}

// word returns a word of memory of a GPU.
func (k *signalKernel) word(p uint64) *atomic.Uint32 {
	k.machine.Mu.Lock()
	defer k.machine.Mu.Unlock()
	var w *atomic.Uint32
	k.machine.bytes(k.gpu, device.Ptr(p), 4, func(of *physical, off, _ uint64) {
		w = (*atomic.Uint32)(unsafe.Pointer(&of.data()[off]))
	})
	return w
}

// pinned returns memory of the host at p.
func (k *signalKernel) pinned(p uint64) unsafe.Pointer {
	k.machine.Mu.Lock()
	defer k.machine.Mu.Unlock()
	return unsafe.Pointer(unsafe.SliceData(k.machine.Pinned(device.Ptr(p))))
}

// counter returns where writer counts on owner's pad: signals in row 0, barriers in row 1.
func (k *signalKernel) counter(owner, row, writer uint32) *atomic.Uint32 {
	return k.word(k.p.Workspace[owner] + uint64((k.p.Index*2+row)*k.p.World+writer)*128)
}

// state returns the word at that offset of the channel's own state.
func (k *signalKernel) state(at uint32) *atomic.Uint32 {
	size := (32 + 12*k.p.World + 127) / 128 * 128
	return k.word(k.p.Workspace[k.p.Rank] + uint64(k.p.Channels*2*k.p.World*128+k.p.Index*size+at))
}

// await waits until the counter has come to want.
func (k *signalKernel) await(counter *atomic.Uint32, want, peer uint32, kernel uint64) {
	stop := (*atomic.Uint32)(k.pinned(k.p.Stop))
	for ; int32(counter.Load()-want) < 0; time.Sleep(time.Millisecond) {
		why := uint64(0)
		if time.Since(k.began) > time.Duration(k.p.Timeout) {
			why = ptx.FaultTimeout
		}
		if stop.Load() != 0 {
			why = ptx.FaultStopped
		}
		if why != 0 {
			k.fault = why<<56 | kernel<<48 | uint64(peer)<<32 | uint64(k.p.Index)<<16
			return
		}
	}
}

// put copies what a put with signal moves.
func (k *signalKernel) put() {
	data := make([]byte, k.p.Count)
	side := func(at uint64, move func(piece, data []byte)) {
		k.machine.Mu.Lock()
		defer k.machine.Mu.Unlock()
		rest := data
		k.machine.bytes(k.gpu, device.Ptr(at), k.p.Count, func(of *physical, off, n uint64) {
			move(of.data()[off:off+n], rest)
			rest = rest[n:]
		})
	}
	side(k.p.In[0], func(piece, data []byte) { copy(data, piece) })
	side(k.p.Out[0], func(piece, data []byte) { copy(piece, data) })
}

func (k *signalKernel) run(name string) {
	world, rank, peer := k.p.World, k.p.Rank, k.p.Peer
	switch name {
	case ptx.Signal.Name, ptx.PutSignal.Name:
		if name == ptx.PutSignal.Name {
			k.put()
		}
		if k.p.Flags&ptx.Atomics != 0 {
			k.counter(peer, 0, rank).Add(1)
		} else {
			k.counter(peer, 0, rank).Store(k.state(32 + 4*peer).Add(1))
		}
	case ptx.Wait.Name:
		k.await(k.counter(rank, 0, peer), k.state(32+4*(world+peer)).Add(1), peer, ptx.FaultWait)
	case ptx.Barrier.Name:
		epoch := k.state(0).Add(1)
		for r := range world {
			k.counter(r, 1, rank).Store(epoch)
		}
		for r := range world {
			k.await(k.counter(rank, 1, r), epoch, r, ptx.FaultBarrier)
		}
	}
	if k.fault == 0 {
		return
	}
	cell := (*device.FaultCell)(k.pinned(k.p.Fault))
	if cell.GaveUp == atomic.LoadUint32(&cell.Told) {
		atomic.StoreUint64(&cell.Fault, k.fault)
	}
	atomic.AddUint32(&cell.GaveUp, 1)
}

// TestWaitsInVain: waits and barriers that were given up are told by their streams, and all goes on.
func TestWaitsInVain(t *testing.T) {
	for _, size := range []int{2, 3} {
		t.Run(fmt.Sprint(size, " ranks"), func(t *testing.T) {
			t.Parallel() // they wait more than they work
			m := newMachine(size)
			m.signalKernels()
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				b, err := New(ctx, g, m.plain(g.Rank()))
				if err != nil {
					return err
				}
				mem := memory.New(b, g, &memory.Options{Channels: 3, KernelTimeout: time.Second})
				err = backendtest.WithWindow(ctx, mem, 4096, nil) // the first makes the signal pads
				if err == nil {
					err = suite.WaitsInVain(ctx, mem)
				}
				return errors.Join(err, g.Barrier(ctx, "end"), mem.Close(ctx))
			}))
			assert.Empty(t, m.left())
		})
	}
}

// TestSignalsByTheLinks: signals are atomic operations on the ranks whose GPUs have links to all others that carry them, and counts that
// are stored on the ranks whose GPUs have one that does not; both arrive.
func TestSignalsByTheLinks(t *testing.T) {
	const size, rounds = 3, 5
	for _, atomics := range []func(a, b int) bool{
		func(int, int) bool { return true },
		func(a, b int) bool { return a == 0 || b == 0 }, // GPUs 1 and 2 have none between them
		nil, // the driver cannot be asked
	} {
		m := newMachine(size)
		m.signalKernels()
		run := m.Kernel
		var used, other [size]atomic.Int32 // launches of signals with atomics, and without, by GPU
		m.Kernel = func(gpu int, name string, params []unsafe.Pointer) {
			if name == ptx.Signal.Name {
				if (*ptx.Params)(params[0]).Flags&ptx.Atomics != 0 {
					used[gpu].Add(1)
				} else {
					other[gpu].Add(1)
				}
			}
			run(gpu, name, params)
		}
		backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			if atomics != nil {
				o.Driver.DeviceGetP2PAttribute = func(v *int32, a cu.P2PAttribute, src, dst cu.DeviceOrdinal) cu.Result {
					if a != cu.P2PNativeAtomics {
						return cu.InvalidValue
					}
					if *v = 0; atomics(int(src), int(dst)) {
						*v = 1
					}
					return cu.Success
				}
			}
			b, err := New(ctx, g, o)
			if err != nil {
				return err
			}
			mem := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: 20 * time.Second})
			return errors.Join(signalAround(ctx, mem, rounds), g.Barrier(ctx, "end"), mem.Close(ctx))
		}))
		assert.Empty(t, m.left())
		for gpu := range size {
			all := atomics != nil
			for peer := range size {
				all = all && (peer == gpu || atomics(gpu, peer))
			}
			want, not := &used[gpu], &other[gpu]
			if !all {
				want, not = not, want
			}
			assert.EqualValues(t, rounds*(size-1), want.Load(), "GPU %d, atomics to all others: %t", gpu, all)
			assert.Zero(t, not.Load(), "GPU %d, atomics to all others: %t", gpu, all)
		}
	}
}

// signalAround signals all others some times on one channel, and waits for as many signals of each of them.
func signalAround(ctx context.Context, mem *memory.Memory, rounds int) error {
	if err := backendtest.WithWindow(ctx, mem, 4096, nil); err != nil { // the first makes the signal pads
		return err
	}
	s, err := mem.Device().NewStream()
	if err != nil {
		return err
	}
	peers := func(enqueue func(device.Stream, int, int) error) error {
		for peer := range mem.Group().Size() {
			if peer == mem.Group().Rank() {
				continue
			}
			for range rounds {
				if err := enqueue(s, peer, 1); err != nil {
					return fmt.Errorf("with rank %d: %w", peer, err)
				}
			}
		}
		return nil
	}
	return errors.Join(peers(mem.Signal), peers(mem.Wait), s.Synchronize(ctx), s.Close())
}

// TestPutSignals: puts of many different pieces, more than are kept prepared, from several goroutines at once on streams of their own, each arrive,
// again and again.
func TestPutSignals(t *testing.T) {
	const size, streams, pieces, rounds, piece = 2, 3, 150, 2, 16
	m := newMachine(size)
	m.signalKernels()
	var launched atomic.Int32
	run := m.Kernel
	m.Kernel = func(gpu int, name string, params []unsafe.Pointer) {
		if name == ptx.PutSignal.Name {
			launched.Add(1)
		}
		run(gpu, name, params)
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, m.plain(g.Rank()))
		if err != nil {
			return err
		}
		mem := memory.New(b, g, &memory.Options{Channels: streams, KernelTimeout: 20 * time.Second})
		const half = streams * pieces * piece // what is sent lies in the first half, and what comes in the second
		err = backendtest.WithWindow(ctx, mem, 2*half, func(w *memory.Window) error {
			peer, own := 1-g.Rank(), w.Allocation().Ptr()
			image := make([]byte, half)
			for i := range image {
				image[i] = byte(i/piece + i%piece + 7*g.Rank())
			}
			if err := mem.Device().CopyFromHost(own, image); err != nil {
				return err
			}
			var all errgroup.Group
			for channel := range streams {
				all.Go(func() error {
					s, err := mem.Device().NewStream()
					if err != nil {
						return err
					}
					for range rounds {
						for i := range pieces {
							at := int64(channel*pieces+i) * piece
							err = errors.Join(err, mem.PutSignal(s, peer, w, half+at, own.Add(at), piece, channel), mem.Wait(s, peer, channel))
						}
					}
					return errors.Join(err, s.Synchronize(ctx), s.Close())
				})
			}
			if err := all.Wait(); err != nil {
				return err
			}
			got := make([]byte, half)
			if err := mem.Device().CopyToHost(got, own.Add(half)); err != nil {
				return err
			}
			for i, x := range got {
				if want := byte(i/piece + i%piece + 7*peer); x != want {
					return fmt.Errorf("byte %d is %d, not %d", i, x, want)
				}
			}
			return nil
		})
		return errors.Join(err, g.Barrier(ctx, "end"), mem.Close(ctx))
	}))
	assert.EqualValues(t, size*streams*pieces*rounds, launched.Load())
	assert.Empty(t, m.left())
}
