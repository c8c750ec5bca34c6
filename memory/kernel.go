package memory

import (
	"errors"
	"fmt"
	"sync"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// compiled is the compiled kernels that a Memory has loaded, and the word that ends their waiting when a peer is lost.
type compiled struct {
	mu        sync.Mutex
	modules   map[string]device.Module // by file
	functions map[ptx.Kernel]device.Function
	stop      device.StopWord
	ended     chan struct{} // closed when the watcher of the group need not watch any more
	watcher   sync.WaitGroup
}

// Kernel returns a compiled kernel of this module, loaded for the memory's device. Each is loaded once. Loading may wait for what the device
// has under way, so it belongs where plans are prepared, and never where they are enqueued. Local; ErrUnsupported on a device that runs no
// compiled kernels.
func (m *Memory) Kernel(k ptx.Kernel) (device.Function, error) {
	loader, ok := m.device.(device.KernelLoader)
	if !ok {
		return nil, fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	c := &m.compiled
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.functions[k]; f != nil {
		return f, nil
	}
	module := c.modules[k.File]
	if module == nil {
		image, err := ptx.Image(k.File)
		if err != nil {
			return nil, err
		}
		if module, err = loader.LoadModule(image); err != nil {
			return nil, fmt.Errorf("loading %s: %w", k.File, err)
		}
		if c.modules == nil {
			c.modules = map[string]device.Module{}
		}
		c.modules[k.File] = module
	}
	f, err := module.Function(k.Name)
	if err != nil {
		return nil, err
	}
	if f, ok := f.(sharer); ok {
		if err := f.ShareMultiprocessors(); err != nil {
			return nil, err
		}
	}
	if c.functions == nil {
		c.functions = map[ptx.Kernel]device.Function{}
	}
	c.functions[k] = f
	return f, nil
}

// sharer is a kernel that can leave room for others' shared memory: all of this module's wait for peers, which may need that others run.
type sharer interface{ ShareMultiprocessors() error }

// StopWord is the address of a 32-bit word that compiled kernels read while they wait: it becomes other than 0 when a member
// of the group is lost, or the memory closes, and they give up. Local; ErrUnsupported on a device without such words.
func (m *Memory) StopWord() (device.Ptr, error) {
	faults, ok := m.device.(device.FaultReporter)
	if !ok {
		return 0, fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	c := &m.compiled
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop != nil {
		return c.stop.Ptr(), nil
	}
	stop, err := faults.NewStopWord()
	if err != nil {
		return 0, err
	}
	c.stop, c.ended = stop, make(chan struct{})
	c.watcher.Go(func() {
		select {
		case <-m.group.Lost():
			stop.Stop()
		case <-c.ended:
		}
	})
	return stop.Ptr(), nil
}

// close gives it all back; the device has nothing left to do for it.
func (c *compiled) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if c.stop != nil {
		close(c.ended)
		c.watcher.Wait()
		err = c.stop.Close()
		c.stop = nil
	}
	for _, module := range c.modules {
		err = errors.Join(err, module.Close())
	}
	c.modules, c.functions = nil, nil
	return err
}
