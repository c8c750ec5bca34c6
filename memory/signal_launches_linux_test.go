package memory_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	_ "github.com/symmem/symmem/kernels/ptx/images" // the host backend brings none
	"github.com/symmem/symmem/memory"
)

// launchNoter passes the host device off as one that runs compiled kernels, and notes what would be launched.
type launchNoter struct {
	device.Device // without its HostMemory
	launched      []noted
	prepared      int
	open          atomic.Int64 // launches that are prepared and not closed
	loaded        int          // images
	stopped       atomic.Bool  // waits of kernels were ended
	full          atomic.Pointer[fullQueue]
}

// fullQueue is a stream whose queue in the driver has no room until it is told so.
type fullQueue struct {
	stream         device.Stream
	came, hasSpace chan struct{}
}

// noted is one launch.
type noted struct {
	kernel string
	device.Launch
	params ptx.Params
}

func (d *launchNoter) Kind() device.Kind      { return device.CUDA }
func (d *launchNoter) ComputeCapability() int { return 90 }
func (d *launchNoter) Multiprocessors() int   { return 4 }
func (d *launchNoter) LoadModule([]byte) (device.Module, error) {
	d.loaded++
	return noteModule{d}, nil
}
func (d *launchNoter) NewStopWord() (device.StopWord, error)                     { return d.word() }
func (d *launchNoter) NewFaultWord(func(uint64) error) (device.FaultWord, error) { return d.word() }

func (d *launchNoter) word() (*noteWord, error) {
	p, err := d.Alloc(64)
	return &noteWord{d, p}, err
}

func (d *launchNoter) NewStream() (device.Stream, error) {
	s, err := d.Device.NewStream()
	return &noteStream{s, d}, err
}

type noteStream struct {
	device.Stream
	dev *launchNoter
}

func (s *noteStream) Device() device.Device { return s.dev }

type noteWord struct {
	dev *launchNoter
	ptr device.Ptr
}

func (w *noteWord) Ptr() device.Ptr { return w.ptr }
func (w *noteWord) Load() uint64    { return 0 }
func (w *noteWord) Stop()           { w.dev.stopped.Store(true) }
func (w *noteWord) Close() error    { return w.dev.Free(w.ptr) }

type noteModule struct{ dev *launchNoter }

func (m noteModule) Function(name string) (device.Function, error) {
	return noteFunction{m.dev, name}, nil
}
func (m noteModule) Close() error { return nil }

type noteFunction struct {
	dev  *launchNoter
	name string
}

func (f noteFunction) MaxBlocks(int, int) (int, error) { return 64, nil }

func (f noteFunction) Prepare(l device.Launch) (device.PreparedLaunch, error) {
	n := noted{kernel: f.name, Launch: l}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&n.params)), unsafe.Sizeof(n.params)), l.Params[0])
	f.dev.prepared++
	f.dev.open.Add(1)
	return &noteLaunch{dev: f.dev, noted: n}, nil
}

type noteLaunch struct {
	dev *launchNoter
	noted
	closed atomic.Bool
}

func (l *noteLaunch) Launch(s device.Stream) error {
	if q := l.dev.full.Load(); q != nil {
		if q.stream == s {
			q.came <- struct{}{}
			<-q.hasSpace
		}
		if l.closed.Load() {
			return errors.New("a launch that is closed is launched")
		}
		return nil
	}
	l.dev.launched = append(l.dev.launched, l.noted)
	return nil
}

func (l *noteLaunch) Close() error {
	if l.closed.Swap(true) {
		return errors.New("a launch is closed twice")
	}
	l.dev.open.Add(-1)
	return nil
}

// noteBackend is the host backend over a launchNoter.
type noteBackend struct {
	*host.Backend
	dev *launchNoter
}

func (b noteBackend) Device() device.Device { return b.dev }

// TestSignalLaunches: what kernels of signals are launched with: channel, peer, every rank's pad, of a plan at its place of its channel, a
// thread for each rank where all are waited for, and where failures are told.
func TestSignalLaunches(t *testing.T) {
	for _, size := range []int{2, ptx.Inline + 1, 40} {
		t.Run(fmt.Sprintf("size=%d", size), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				near, err := host.New(g, nil)
				if err != nil {
					return err
				}
				b := noteBackend{near, &launchNoter{Device: near.Device()}}
				return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return launchesOfSignals(ctx, m, b) })
			}))
		})
	}
}

// launchesOfSignals is one rank of TestSignalLaunches. Memory has 2 channels.
func launchesOfSignals(ctx context.Context, m *memory.Memory, b backend.Backend) error {
	const offset = 384
	g, dev := m.Group(), b.Device().(*launchNoter)
	size := g.Size()
	if err := backendtest.WithWindow(ctx, m, 4096, nil); err != nil { // the first makes the signal pads
		return err
	}
	c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: offset + m.SignalsBytes(3)})
	if err != nil {
		return err
	}
	signals, err := c.Signals(ctx, offset, &memory.SignalsOptions{Channels: 3, Op: "the plan", Failed: func(err error) error { return err }})
	if err != nil {
		return err
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	last := size - 1
	all := uint32((max(size, 32) + 31) / 32 * 32)
	for _, x := range []struct {
		what          string
		enqueue       func() error
		kernel        ptx.Kernel
		peer, channel int // peer is -1 for all
		threads       uint32
		plan, unseen  bool // of a plan; its failure is not told by the stream
	}{
		{"Signal", func() error { return m.Signal(s, last, 1) }, ptx.Signal, last, 1, 32, false, false},
		{"Signal to another", func() error { return m.Signal(s, 0, 1) }, ptx.Signal, 0, 1, 32, false, false},
		{"Wait", func() error { return m.Wait(s, last, 0) }, ptx.Wait, last, 0, 32, false, false},
		{"Barrier", func() error { return m.Barrier(s, 1) }, ptx.Barrier, -1, 1, all, false, false},
		{"SignalAll", func() error { return signals.SignalAll(s, 2) }, ptx.SignalAll, -1, 2, all, true, true},
		{"WaitAll", func() error { return signals.WaitAll(s, 1) }, ptx.WaitAll, -1, 1, all, true, false},
		{"WaitAllBeside", func() error { return signals.WaitAllBeside(s, 1) }, ptx.WaitAll, -1, 1, all, true, true},
	} {
		dev.launched = nil
		if err := errors.Join(x.enqueue(), x.enqueue()); err != nil {
			return fmt.Errorf("%s: %w", x.what, err)
		}
		if len(dev.launched) != 2 || dev.launched[0].params != dev.launched[1].params {
			return fmt.Errorf("%s launches %+v", x.what, dev.launched)
		}
		l := dev.launched[0]
		p := l.params
		channels := uint32(2)
		if x.plan {
			channels = 3
		}
		switch {
		case l.kernel != x.kernel.Name || l.Grid != [3]uint32{1}:
			return fmt.Errorf("%s launches %s on %v blocks", x.what, l.kernel, l.Grid)
		case l.Block != [3]uint32{x.threads}:
			return fmt.Errorf("%s has %v threads and not %d", x.what, l.Block, x.threads)
		case int(p.Index) != x.channel || x.peer >= 0 && int(p.Peer) != x.peer:
			return fmt.Errorf("%s is on channel %d with peer %d", x.what, p.Index, p.Peer)
		case int(p.Rank) != g.Rank() || int(p.World) != size || p.Channels != channels:
			return fmt.Errorf("%s is of rank %d of %d, with %d channels", x.what, p.Rank, p.World, p.Channels)
		case x.unseen != (l.FaultCell == nil) || x.unseen != (p.Fault != 0) || x.plan != (p.Dead != 0):
			return fmt.Errorf("%s tells of failures at %v and %#x, and its dead word is at %#x", x.what, l.FaultCell, p.Fault, p.Dead)
		}
		pads := map[uint64]bool{}
		for r := range size {
			pad := uint64(0)
			if size <= ptx.Inline {
				pad = p.Workspace[r]
			} else {
				var word [8]byte
				if err := dev.CopyToHost(word[:], device.Ptr(p.Table).Add(int64(8*(2*size+r)))); err != nil {
					return err
				}
				pad = binary.LittleEndian.Uint64(word[:])
			}
			pads[pad] = true
			of, err := c.Peer(r)
			if err != nil {
				return err
			}
			if mine := pad == uint64(of.Add(offset)); mine != x.plan {
				return fmt.Errorf("%s has rank %d's pad at %#x, and the channel is at %s", x.what, r, pad, of)
			}
		}
		if len(pads) != size || pads[0] {
			return fmt.Errorf("%s has %d pads for %d ranks", x.what, len(pads), size)
		}
	}
	prepared := dev.prepared
	if err := errors.Join(m.Signal(s, last, 1), m.Signal(s, 0, 1), m.Barrier(s, 1)); err != nil || dev.prepared != prepared {
		return fmt.Errorf("launches are prepared again: %w", err)
	}
	return errors.Join(launchesOfPuts(ctx, m, dev, s), s.Close(), g.Barrier(ctx, "done"), c.Close(ctx), signals.Close())
}

// TestImagesAreLoadedOnce: an image is loaded once for a memory, however many ask for its kernels.
func TestImagesAreLoadedOnce(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		dev := &launchNoter{Device: near.Device()}
		return backendtest.WithMemory(ctx, g, noteBackend{near, dev}, func(m *memory.Memory) error {
			for want, image := range []string{"one image", "another image"} {
				for _, name := range []string{"kernel", "another kernel", "kernel"} {
					if _, err := m.Function([]byte(image), name); err != nil {
						return err
					}
					if dev.loaded != want+1 {
						return fmt.Errorf("%d images are loaded for %s of %s", dev.loaded, name, image)
					}
				}
			}
			return nil
		})
	}))
}

// TestLossStopsKernels: when a rank is lost the word is set by which kernels give up that wait, and not before.
func TestLossStopsKernels(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		dev := &launchNoter{Device: near.Device()}
		m := memory.New(noteBackend{near, dev}, g, nil)
		if _, err := m.StopWord(); err != nil {
			return err
		}
		if dev.stopped.Load() {
			return errors.New("kernels are stopped, and no rank is lost")
		}
		if err := g.Barrier(ctx, "all have a word"); err != nil {
			return err
		}
		if g.Rank() == 1 {
			g.Abort("a test")
			_ = m.Close(ctx)
			return nil
		}
		within, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		for !dev.stopped.Load() {
			select {
			case <-within.Done():
				return fmt.Errorf("kernels wait on: %w", within.Err())
			case <-time.After(time.Millisecond):
			}
		}
		if err := m.Close(ctx); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("closing the memory: %w", err)
		}
		return nil
	}))
}

// TestFullQueue: a signal, a wait, a put or a step that waits for room in the driver's queue of its stream, and so perhaps for a peer, holds up none on another stream, for which the peer may
// wait: neither what was launched before nor what was not.
func TestFullQueue(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := noteBackend{near, &launchNoter{Device: near.Device()}}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return fullQueues(ctx, m, b.dev) })
	}))
}

func fullQueues(ctx context.Context, m *memory.Memory, dev *launchNoter) error {
	a, err := m.Allocate(ctx, 64<<10, "")
	if err != nil {
		return err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	if err != nil {
		return err
	}
	peer := 1 - m.Group().Rank()
	full, err1 := dev.NewStream()
	free, err2 := dev.NewStream()
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	step := func(s device.Stream, bytes int64) error {
		return m.PutSignalWait(s, peer, w, 0, a.Ptr(), bytes, peer, 1)
	}
	put := func(s device.Stream, bytes int64) error { return m.PutSignal(s, peer, w, 0, a.Ptr(), bytes, 1) }
	if err := errors.Join(step(free, 16), put(free, 16)); err != nil { // these are prepared
		return err
	}
	const kept = 256 + 20 // launches of puts and steps, and a few of signals, waits and barriers
	for i, hold := range []func() error{
		func() error { return step(full, 16) }, func() error { return put(full, 16) }, func() error { return step(full, 48) },
		func() error { return m.Signal(full, peer, 1) }, func() error { return m.Wait(full, peer, 1) }, func() error { return m.Barrier(full, 1) },
	} {
		q := &fullQueue{stream: full, came: make(chan struct{}, 1), hasSpace: make(chan struct{})}
		dev.full.Store(q)
		held, others := make(chan error, 1), make(chan error, 1)
		go func() { held <- hold() }()
		<-q.came
		go func() {
			n := int64(1000 * (i + 1)) // of which none was prepared
			var err error
			for more := range int64(300) { // more than are kept, so that what is held up is kept no longer
				err = errors.Join(err, step(free, n+more), put(free, n+more))
			}
			others <- errors.Join(err, step(free, 16), m.Signal(free, i%2, 0), m.Wait(free, i%2, 0), m.Barrier(free, 0))
		}()
		var failed error
		select {
		case failed = <-others:
		case <-time.After(5 * time.Second):
			failed = fmt.Errorf("call %d, which waits for room, holds up another stream", i)
		}
		close(q.hasSpace)
		if err := errors.Join(failed, <-held); err != nil {
			return err
		}
		if failed != nil {
			<-others
		}
		if n := dev.open.Load(); n > kept {
			return fmt.Errorf("%d launches are prepared, and at most %d are kept", n, kept)
		}
	}
	return errors.Join(full.Close(), free.Close(), m.Free(ctx, a))
}

// launchesOfPuts is what a step of a ring is launched with: one kernel to 64 KiB, as wide as it loads at once, also where nothing is to be copied, and behind a
// copy two.
func launchesOfPuts(ctx context.Context, m *memory.Memory, dev *launchNoter, s device.Stream) error {
	const room = 256 << 10
	a, err := m.Allocate(ctx, room, "")
	if err != nil {
		return err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	if err != nil {
		return err
	}
	me, size := m.Group().Rank(), m.Group().Size()
	next, last := (me+1)%size, (me+size-1)%size
	to, err := w.Peer(next, 16)
	if err != nil {
		return err
	}
	one, two := []string{ptx.PutSignalWait.Name}, []string{ptx.Signal.Name, ptx.Wait.Name}
	for _, x := range []struct {
		peer    int
		bytes   int64
		offset  int64 // of what is put; it goes to 16
		kernels []string
		count   uint64
		threads uint32
	}{
		{next, 1, 32, one, 1, 32}, {next, 16 << 10, 0, one, 16 << 10, 256}, {next, 64 << 10, 0, one, 64 << 10, 512}, {next, 64<<10 + 1, 0, two, 0, 32},
		{next, 0, 0, one, 0, 32}, {me, 100, 16, one, 0, 32},
	} {
		what := fmt.Sprintf("a step of %d bytes to rank %d", x.bytes, x.peer)
		dev.launched = nil
		if err := m.PutSignalWait(s, x.peer, w, 16, a.Ptr().Add(x.offset), x.bytes, last, 1); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if len(dev.launched) != len(x.kernels) {
			return fmt.Errorf("%s launches %+v", what, dev.launched)
		}
		for i, l := range dev.launched {
			if l.kernel != x.kernels[i] || l.Block != [3]uint32{x.threads} || l.params.Index != 1 || l.FaultCell == nil {
				return fmt.Errorf("%s launches %s with %v threads on channel %d, and tells of failures at %v", what, l.kernel, l.Block, l.params.Index, l.FaultCell)
			}
		}
		p := dev.launched[0].params
		if int(p.Peer) != x.peer || len(x.kernels) == 1 && (int(p.Shard) != last || p.Count != x.count) {
			return fmt.Errorf("%s is to rank %d, waits for %d and copies %d bytes", what, p.Peer, p.Shard, p.Count)
		}
		if x.count > 0 && (p.Out[0] != uint64(to) || p.In[0] != uint64(a.Ptr().Add(x.offset))) {
			return fmt.Errorf("%s copies from %#x to %#x", what, p.In[0], p.Out[0])
		}
	}
	dev.launched = nil
	for _, bytes := range []int64{17, 64 << 10, 64<<10 + 1} { // from 32 to 16, of this rank's own memory
		put, step := m.PutSignal(s, me, w, 16, a.Ptr().Add(32), bytes, 1), m.PutSignalWait(s, me, w, 16, a.Ptr().Add(32), bytes, last, 1)
		if !errors.Is(put, errs.ErrInvalid) || !errors.Is(step, errs.ErrInvalid) || len(dev.launched) != 0 {
			return fmt.Errorf("%d bytes over themselves launch %+v: %w", bytes, dev.launched, errors.Join(put, step))
		}
	}
	if err := m.PutSignal(s, me, w, 16, a.Ptr().Add(32), 16, 1); err != nil || len(dev.launched) != 1 {
		return fmt.Errorf("16 bytes beside themselves launch %+v: %w", dev.launched, err)
	}
	return errors.Join(s.Synchronize(ctx), m.Free(ctx, a))
}
