package nixl

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
)

// The library's thread makes a GPU's copies wait for the CPU (see nixl.AgentOptions), and transfers of GPU memory between the processes of one host
// need no help from the far end. So there an agent has no such thread: whatever waits for a transfer or a flag drives the agent, and a driver does so
// now and then, for peers that connect or write words by way of this process. Between hosts, much arrives that this process has to handle, and the
// thread is worth its price.
//
// Where all ranks map each other's memory, of the CPU too, hardly anything goes through the library. A thread that wakes a thousand times a second
// would only take the processor from ranks that look for each other. There a driver looks seldom, and
// often again as long as this rank has transfers, or once memory is there that the ranks do not map.

const (
	// driveEvery is the time between two looks of a driver, and restEvery that of one that rests.
	driveEvery = 500 * time.Microsecond
	restEvery  = 20 * time.Millisecond
	// leastPause is the least time between two looks, whoever takes them: a look takes a microsecond or two, and many may wait.
	leastPause = 5 * time.Microsecond
)

// needsThread reports whether the agent of a rank with memory of that device needs the library's thread. whole says that all ranks map each other's memory.
func needsThread(d device.Device, members []group.Member, whole bool) bool {
	return !whole && (d.Kind() != device.CUDA || !oneHost(members))
}

// driver drives an agent that has no thread of the library's.
type driver struct {
	began   time.Time
	latest  atomic.Int64 // look, in ns since then
	resting atomic.Bool
	roused  chan struct{} // holds one: there is work
	end     sync.Once
	stopped chan struct{}
	done    sync.WaitGroup
}

// due reports whether it is time for another look, which the caller then takes.
func (d *driver) due() bool {
	now, latest := int64(time.Since(d.began)), d.latest.Load()
	return now-latest >= int64(leastPause) && d.latest.CompareAndSwap(latest, now)
}

// drive begins to drive the agent.
func (n *node) drive() {
	d := &driver{began: time.Now(), roused: make(chan struct{}, 1), stopped: make(chan struct{})}
	n.driver = d
	d.done.Go(func() {
		tick := time.NewTimer(driveEvery)
		defer tick.Stop()
		for {
			select {
			case <-d.stopped:
				return
			case <-d.roused:
			case <-tick.C:
				_ = within(n.device, func() error { n.progress(); return nil })
			}
			if d.resting.Load() && !n.hasOpen() {
				tick.Reset(restEvery)
			} else {
				tick.Reset(driveEvery)
			}
		}
	})
}

// rest makes the driver look seldom while this rank has no transfers. rouse ends that. Without a driver they do nothing.
func (d *driver) rest() {
	if d != nil {
		d.resting.Store(true)
	}
}

func (d *driver) rouse() {
	if d != nil && d.resting.Swap(false) {
		d.look()
	}
}

// look makes a driver that rests find out whether it is to go on resting.
func (d *driver) look() {
	select {
	case d.roused <- struct{}{}:
	default:
	}
}

// stop ends the driving, and waits until it has ended.
func (d *driver) stop() {
	if d != nil {
		d.end.Do(func() { close(d.stopped) })
		d.done.Wait()
	}
}
