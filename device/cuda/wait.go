package cuda

import (
	"context"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/futex"
)

const (
	// A wait polls in batches of asksABatch, and between them checks the context and pauses. The pause is a small part of the time that the wait has
	// lasted, so that it ends about equally late, in proportion, after microseconds and after minutes. During the first awakeFor the pause is a busy
	// one, because a thread that sleeps may sleep much longer; it still leaves the driver to other calls, which would wait for those that poll.
	asksABatch   = 4
	awakeFor     = 2 * time.Millisecond
	pausePart    = 64
	longestPause = time.Millisecond
)

// pauseBetween waits a little before what has been waited for since begin is looked at again.
func pauseBetween(begin time.Time) {
	waited := time.Since(begin)
	pause := min(waited/pausePart, longestPause)
	if waited >= awakeFor {
		futex.Doze(pause)
		return
	}
	for now := time.Now(); ; {
		runtime.Gosched()
		if time.Since(now) >= pause {
			return
		}
	}
}

// await waits until e is complete (no event, 0, always is), until ctx ends, or until deadline unless that is zero (os.ErrDeadlineExceeded). The
// caller has the device in use. It allocates nothing.
func (d *Device) await(ctx context.Context, e cu.EventHandle, deadline time.Time) error {
	if e == 0 {
		return nil
	}
	begin := time.Now()
	for {
		if done, err := d.ask(e); done || err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if !deadline.IsZero() && time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		pauseBetween(begin)
	}
}

// order tells Go's memory model, and so its race detector, what it cannot see as the GPU and the driver are in between: that work of the CPU comes before what waits for it on a
// stream. What has seen work of a stream to be complete comes after all of it that had ended then.
type order struct{ ends atomic.Uint64 }

// end is called behind work of the CPU, before the GPU is told.
func (o *order) end() { o.ends.Add(1) }

// see is called when the driver has said that work is complete.
func (o *order) see() { o.ends.Load() }

// ask asks some times whether e is complete.
func (d *Device) ask(e cu.EventHandle) (bool, error) {
	if err := d.push(); err != nil {
		return false, err
	}
	defer d.pop()
	for range asksABatch {
		switch r := d.drv.EventQuery(e); r {
		case cu.Success:
			d.ran.see()
			return true, nil
		case cu.NotReady:
		default:
			return false, d.drv.Check("cuEventQuery", r)
		}
	}
	return false, nil
}

// takeMark returns an event for waiting, which dropMark takes back. The context is current.
func (d *Device) takeMark() (cu.EventHandle, error) {
	d.mu.Lock()
	if n := len(d.marks); n > 0 {
		e := d.marks[n-1]
		d.marks = d.marks[:n-1]
		d.mu.Unlock()
		return e, nil
	}
	d.mu.Unlock()
	var e cu.EventHandle
	if err := d.drv.Check("cuEventCreate", d.drv.EventCreate(&e, cu.EventDisableTiming)); err != nil {
		return 0, err
	}
	return e, nil
}

// dropMark keeps e, which nobody waits for any more, for the next wait. It need not be complete: recording it again is allowed.
func (d *Device) dropMark(e cu.EventHandle) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dropMarkLocked(e)
}

func (d *Device) dropMarkLocked(e cu.EventHandle) {
	switch n := d.shared[e]; {
	case n > 1:
		d.shared[e]--
	case n == 1:
		delete(d.shared, e)
	default:
		d.marks = append(d.marks, e)
	}
}

// shareMark gives e one more owner. It is for other waits when each has dropped it.
func (d *Device) shareMark(e cu.EventHandle) mark {
	if e != 0 {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.shared[e]++
	}
	return mark{event: e}
}

// markShared reports whether e has more than one owner.
func (d *Device) markShared(e cu.EventHandle) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shared[e] > 0
}

// keepMark keeps e until the device is closed: it is not for other waits any more.
func (d *Device) keepMark(e cu.EventHandle) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kept = append(d.kept, e)
}
