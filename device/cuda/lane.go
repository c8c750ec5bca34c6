package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// stageBytes is the size of one of the two buffers that copies between the host and the device go through.
const stageBytes = 4 << 20

// lane is a stream of the device's own, with pinned memory, for copies that must not wait for the program's streams. It is made when it is first
// needed. It has the highest priority, which puts it into another queue of the hardware than streams that wait for a word and could block their
// queue.
type lane struct {
	dev *Device

	mu     sync.Mutex
	stream cu.StreamHandle
	stages [2]stage
	broken error // why it cannot be used until its stream says that it has nothing left to do

	left atomic.Bool // whether it is broken, for those who do not hold mu: copies may be under way that nobody waits for
}

// stage is one pinned buffer.
type stage struct {
	mem    unsafe.Pointer
	ready  cu.EventHandle // complete when the last copy from or to it has run
	queued bool           // ready was recorded
}

// bytes returns the first n bytes of the buffer.
func (g *stage) bytes(n int) []byte { return unsafe.Slice((*byte)(g.mem), n) }

// open makes the stream and the buffers; mu is held.
func (l *lane) open() error {
	if err := l.mend(); err != nil || l.stream != 0 {
		return err
	}
	d := l.dev
	if err := d.push(); err != nil {
		return err
	}
	defer d.pop()
	if err := l.make(); err != nil {
		return errors.Join(err, l.release(d.retire))
	}
	return nil
}

// createUrgent creates a stream of the highest priority, or any where the driver has no priorities; the context is current.
func (d *Device) createUrgent(stream *cu.StreamHandle) error {
	drv := d.drv
	if drv.StreamCreateWithPriority == nil || drv.CtxGetStreamPriorityRange == nil {
		return drv.Check("cuStreamCreate", drv.StreamCreate(stream, cu.StreamNonBlocking))
	}
	var least, greatest int32
	if err := drv.Check("cuCtxGetStreamPriorityRange", drv.CtxGetStreamPriorityRange(&least, &greatest)); err != nil {
		return err
	}
	return drv.Check("cuStreamCreateWithPriority", drv.StreamCreateWithPriority(stream, cu.StreamNonBlocking, greatest))
}

// make makes the stream and the buffers; the context is current.
func (l *lane) make() error {
	drv := l.dev.drv
	if err := l.dev.createUrgent(&l.stream); err != nil {
		return err
	}
	for i := range l.stages {
		g := &l.stages[i]
		if err := drv.Check("cuMemHostAlloc", drv.MemHostAlloc(&g.mem, stageBytes, cu.HostAllocPortable)); err != nil {
			return err
		}
		if err := drv.Check("cuEventCreate", drv.EventCreate(&g.ready, cu.EventDisableTiming)); err != nil {
			return err
		}
	}
	return nil
}

// release returns the memory to free, and destroys the rest of what was made; the context is current and no copy is under way.
func (l *lane) release(free func(retired) error) error {
	drv := l.dev.drv
	var failed []error
	for i := range l.stages {
		g := &l.stages[i]
		if g.ready != 0 {
			failed = append(failed, drv.Check("cuEventDestroy", drv.EventDestroy(g.ready)))
		}
		if g.mem != nil {
			failed = append(failed, free(retired{host: g.mem}))
		}
		*g = stage{}
	}
	if l.stream != 0 {
		failed = append(failed, drv.Check("cuStreamDestroy", drv.StreamDestroy(l.stream)))
		l.stream = 0
	}
	return errors.Join(failed...)
}

// close releases the lane of a device that is being closed, and returns the memory to free; the context is current. After a failure that left copies under
// way, the buffers are left to them.
func (l *lane) close(free func(retired) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.mend(); err != nil && !errors.Is(err, cu.ErrContextLost) {
		return err
	}
	return l.release(free)
}

// mend makes a broken lane usable again if no copy is under way any more; else it returns what broke it, and that the context is lost if it is by now. mu is held.
func (l *lane) mend() error {
	if l.broken == nil {
		return nil
	}
	switch done, err := l.ended(); {
	case errors.Is(err, cu.ErrContextLost) && !errors.Is(l.broken, cu.ErrContextLost):
		return fmt.Errorf("%w; by now %w", l.broken, err)
	case !done || err != nil:
		return l.broken
	}
	l.mended()
	return nil
}

// ended reports whether no copy of a broken lane is under way any more; mu is held.
func (l *lane) ended() (bool, error) {
	if err := l.dev.push(); err != nil {
		return false, err
	}
	defer l.dev.pop()
	r := l.dev.drv.StreamQuery(l.stream)
	if r == cu.NotReady {
		return false, nil
	}
	return true, l.dev.drv.Check("cuStreamQuery", r)
}

// mended makes the lane usable after its copies have ended; mu is held.
func (l *lane) mended() {
	for i := range l.stages {
		l.stages[i].queued = false
	}
	l.broken = nil
	l.left.Store(false)
}

// breaks notes why nobody can tell what the lane still does; mu is held.
func (l *lane) breaks(why error) error {
	l.broken = why
	l.left.Store(true)
	return why
}

// idle reports whether no copy is under way that a call has left behind when it failed, without waiting. A lost context has no copies; a stream of which the driver
// does not say it counts as at work, and so does a lane that another call has just now.
func (l *lane) idle() bool {
	if !l.left.Load() {
		return true
	}
	if !l.mu.TryLock() {
		return false
	}
	defer l.mu.Unlock()
	if l.broken == nil { // somebody else has mended it
		return true
	}
	done, err := l.ended()
	if done && err == nil {
		l.mended()
	}
	return done && err == nil || errors.Is(err, cu.ErrContextLost)
}

// drain waits until no copy is under way that a call has left behind when it failed: the memory of such a copy must not be freed. It does not wait for
// copies of calls that have not returned.
func (l *lane) drain(ctx context.Context) error {
	for begin := time.Now(); l.left.Load(); pauseBetween(begin) {
		if l.mu.TryLock() {
			var done bool
			var err error
			if l.broken != nil { // else somebody else has mended it
				done, err = l.ended()
			}
			if done && err == nil {
				l.mended()
			}
			l.mu.Unlock()
			if err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil && l.left.Load() {
			return fmt.Errorf("a copy that has failed is still under way: %w", err)
		}
	}
	return nil
}

// drainBy is drain until deadline. A lost context has no copies.
func (l *lane) drainBy(deadline time.Time) error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if err := l.drain(ctx); !errors.Is(err, cu.ErrContextLost) {
		return err
	}
	return nil
}

// run calls enqueue with the context current.
func (l *lane) run(enqueue func() error) error {
	if err := l.dev.push(); err != nil {
		return err
	}
	defer l.dev.pop()
	return enqueue()
}

// record records that the copies of the stage enqueued so far are what it is busy with; the context is current.
func (l *lane) record(g *stage) error {
	if err := l.dev.drv.Check("cuEventRecord", l.dev.drv.EventRecord(g.ready, l.stream)); err != nil {
		return l.breaks(fmt.Errorf("a copy between host and device cannot be waited for: %w", err))
	}
	g.queued = true
	return nil
}

// await waits until the stage's last copy has run, for at most the device's WaitTimeout.
func (l *lane) await(g *stage) error {
	if !g.queued {
		return nil
	}
	if err := l.dev.await(context.Background(), g.ready, time.Now().Add(l.dev.waitTimeout)); err != nil {
		return l.breaks(fmt.Errorf("a copy between host and device did not end: %w", err))
	}
	g.queued = false
	return nil
}

// settle waits for both stages, so that nothing uses them when the next copy begins, and joins its error to err.
func (l *lane) settle(err error) error {
	return errors.Join(err, l.await(&l.stages[0]), l.await(&l.stages[1]))
}

// in copies b to the memory at p.
func (l *lane) in(p device.Ptr, b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.open(); err != nil {
		return err
	}
	var err error
	for i := 0; len(b) > 0 && err == nil; i++ {
		g := &l.stages[i%2]
		if err = l.await(g); err != nil {
			break
		}
		n := copy(g.bytes(stageBytes), b)
		err = l.run(func() error {
			r := l.dev.drv.MemcpyHtoDAsync(p, g.mem, uint64(n), l.stream)
			if err := l.dev.drv.Check("cuMemcpyHtoDAsync", r); err != nil {
				return err
			}
			return l.record(g)
		})
		b, p = b[n:], p.Add(int64(n))
	}
	return l.settle(err)
}

// out copies the memory at p to b.
func (l *lane) out(b []byte, p device.Ptr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.open(); err != nil {
		return err
	}
	var pieces [2][]byte // where what is in each stage belongs
	arrive := func(i int) error {
		if err := l.await(&l.stages[i]); err != nil {
			return err
		}
		copy(pieces[i], l.stages[i].bytes(len(pieces[i])))
		pieces[i] = nil
		return nil
	}
	var err error
	for i := 0; len(b) > 0 && err == nil; i++ {
		g := &l.stages[i%2]
		if err = arrive(i % 2); err != nil {
			break
		}
		n := min(len(b), stageBytes)
		err = l.run(func() error {
			r := l.dev.drv.MemcpyDtoHAsync(g.mem, p, uint64(n), l.stream)
			if err := l.dev.drv.Check("cuMemcpyDtoHAsync", r); err != nil {
				return err
			}
			return l.record(g)
		})
		if err == nil {
			pieces[i%2] = b[:n]
		}
		b, p = b[n:], p.Add(int64(n))
	}
	if err == nil {
		err = errors.Join(arrive(0), arrive(1))
	}
	return l.settle(err)
}

// fill sets n bytes at p to value.
func (l *lane) fill(p device.Ptr, value byte, n int64) error {
	return l.do(func() error {
		return l.dev.drv.Check("cuMemsetD8Async", l.dev.drv.MemsetD8Async(p, value, uint64(n), l.stream))
	})
}

// store writes the word at p as a stream does.
func (l *lane) store(p device.Ptr, value uint32) error {
	return l.do(func() error {
		return l.dev.drv.Check("cuStreamWriteValue32", l.dev.drv.StreamWriteValue32(l.stream, p, value, cu.WriteValueDefault))
	})
}

// do enqueues work that needs no stage and waits for it.
func (l *lane) do(enqueue func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.open(); err != nil {
		return err
	}
	g := &l.stages[0]
	return l.settle(l.run(func() error {
		if err := enqueue(); err != nil {
			return err
		}
		return l.record(g)
	}))
}
