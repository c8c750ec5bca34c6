package memory

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// putSignalBytes is how many bytes at most PutSignal and PutSignalWait move by the kernel that signals. Up to there its one block of threads is faster than a
// copy of the device's with a launch behind it: see docs/hardware.md.
const putSignalBytes = 64 << 10

// mostPutLaunches is how many launches of PutSignal and PutSignalWait are kept for the next ones like them. Preparing takes some microseconds, and a program puts
// the same few pieces again and again.
const mostPutLaunches = 256

// putKey is what a launch of PutSignal or PutSignalWait does.
type putKey struct {
	peer, channel int
	awaited       int // the rank to wait for, or nobody
	to, from      device.Ptr
	bytes         int64
}

// nobody is no rank.
const nobody = -1

// putLaunches are the launches of PutSignal and PutSignalWait that are prepared.
type putLaunches struct {
	kernel, waiting device.Function // without and with a wait

	mu       sync.RWMutex // never held while something is launched: that may wait for room in the driver's queue, and so for peers
	closed   bool
	prepared map[putKey]*putLaunch
	order    []putKey // the oldest first
}

// putLaunch is one of them. It is closed when it is kept no longer and nobody launches it.
type putLaunch struct {
	device.PreparedLaunch
	users atomic.Int64 // who launches it, and one more while it is kept
}

// unuse ends a use.
func (l *putLaunch) unuse() error {
	if l.users.Add(-1) > 0 {
		return nil
	}
	return l.Close() // what was launched still runs
}

// putSignal enqueues a copy of at most putSignalBytes from memory of this rank to memory of a peer, a signal to it behind the copy, and behind that,
// unless it is for nobody, a wait.
func (d *deviceSignals) putSignal(s device.Stream, key putKey) error {
	for {
		if is, err := d.puts.launch(s, key); is {
			return err
		}
		if err := d.preparePut(key); err != nil {
			return err
		}
	}
}

// launch enqueues the launch for key, if there is one.
func (c *putLaunches) launch(s device.Stream, key putKey) (is bool, err error) {
	c.mu.RLock()
	l, is := c.prepared[key]
	if is {
		l.users.Add(1)
	}
	c.mu.RUnlock()
	if !is {
		return false, nil
	}
	err = l.Launch(s)
	return true, errors.Join(err, l.unuse())
}

// preparePut prepares a launch, in the place of the oldest if there are many.
func (d *deviceSignals) preparePut(key putKey) error {
	c := &d.puts
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("signals: %w", errs.ErrClosed)
	}
	if _, ok := c.prepared[key]; ok {
		return nil
	}
	params := d.params
	params.Index, params.Peer = uint32(key.channel), uint32(key.peer)
	params.Out[0], params.In[0], params.Count = uint64(key.to), uint64(key.from), uint64(key.bytes)
	kernel, each, most := c.kernel, int64(16), int64(ptx.MaxPutThreads)
	if key.awaited != nobody {
		params.Shard = uint64(key.awaited)
		// As many bytes as a thread loads at once: the block keeps its room while it waits.
		kernel, each, most = c.waiting, 64, ptx.MaxPutWaitThreads
	}
	threads := uint32(min(max(key.bytes/each, 32), most)+31) / 32 * 32
	prepared, err := kernel.Prepare(device.Launch{
		Grid: [3]uint32{1}, Block: [3]uint32{threads}, Overlap: d.overlap, Params: [][]byte{params.Bytes()},
		FaultCell: &device.FaultCellParam{Word: d.fault, Offset: ptx.FaultOffset},
	})
	if err != nil {
		return err
	}
	if c.prepared == nil {
		c.prepared = map[putKey]*putLaunch{}
	}
	l := &putLaunch{PreparedLaunch: prepared}
	l.users.Store(1)
	c.prepared[key] = l
	c.order = append(c.order, key)
	if len(c.order) <= mostPutLaunches {
		return nil
	}
	oldest := c.order[0]
	c.order = c.order[1:]
	err = c.prepared[oldest].unuse()
	delete(c.prepared, oldest)
	return err
}

// close releases the launches. Nobody launches any.
func (c *putLaunches) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	for _, key := range c.order {
		err = errors.Join(err, c.prepared[key].unuse())
	}
	c.prepared, c.order = nil, nil
	return err
}
