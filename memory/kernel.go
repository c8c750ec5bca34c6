package memory

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// compiled is the compiled kernels that a Memory has loaded, and the word that ends their waiting when a peer is lost.
type compiled struct {
	mu      sync.Mutex
	closed  bool                          // what is loaded now, nobody would give back
	modules map[[sha256.Size]byte]*loaded // by the sum of the image
	stop    device.StopWord
	ended   chan struct{} // closed when the watcher of the group need not watch any more
	watcher sync.WaitGroup
}

// loaded is an image that was loaded, and the kernels of it that somebody asked for.
type loaded struct {
	device.Module
	functions map[string]device.Function
}

// kernel returns a compiled kernel of this module.
func (m *Memory) kernel(k ptx.Kernel) (device.Function, error) {
	image, err := ptx.Image(k.File)
	if err != nil {
		return nil, err
	}
	return m.Function(image, k.Name)
}

// Function returns the kernel called name of an image: PTX, a cubin or a fat binary. Each is loaded once for the memory's device. Loading may
// wait for what the device has under way, so it belongs where plans are prepared, and never where they are enqueued. The kernel prefers the
// most shared memory on a multiprocessor, so that it leaves others room for theirs while it waits. Local. ErrUnsupported on a device
// that runs no compiled kernels; ErrInvalid for an image that is damaged or has no such kernel; ErrClosed once the memory is closed.
func (m *Memory) Function(image []byte, name string) (device.Function, error) {
	if err := m.made("Function"); err != nil {
		return nil, err
	}
	loader, ok := m.device.(device.KernelLoader)
	if !ok {
		return nil, fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	c := &m.compiled
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("loading the kernel %s: symmetric memory: %w", name, errs.ErrClosed)
	}
	sum := sha256.Sum256(image)
	l := c.modules[sum]
	if l == nil {
		module, err := loader.LoadModule(image)
		if err != nil {
			return nil, fmt.Errorf("loading the kernel %s: %w", name, err)
		}
		l = &loaded{Module: module, functions: map[string]device.Function{}}
		if c.modules == nil {
			c.modules = map[[sha256.Size]byte]*loaded{}
		}
		c.modules[sum] = l
	}
	if f := l.functions[name]; f != nil {
		return f, nil
	}
	f, err := l.Module.Function(name)
	if err != nil {
		return nil, err
	}
	if f, ok := f.(sharer); ok {
		if err := f.ShareMultiprocessors(); err != nil {
			return nil, err
		}
	}
	l.functions[name] = f
	return f, nil
}

// sharer is a kernel that can leave room for others' shared memory: those of collectives wait for peers, which may need that others run.
type sharer interface{ ShareMultiprocessors() error }

// StopWord is the address of a 32-bit word that compiled kernels read while they wait: it becomes other than 0 when a member
// of the group is lost, and they give up. Local; ErrUnsupported on a device without such words, ErrClosed once the memory is closed.
func (m *Memory) StopWord() (device.Ptr, error) {
	if err := m.made("StopWord"); err != nil {
		return 0, err
	}
	faults, ok := m.device.(device.FaultReporter)
	if !ok {
		return 0, fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	c := &m.compiled
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, fmt.Errorf("a word that ends waits: symmetric memory: %w", errs.ErrClosed)
	}
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
	c.closed = true
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
	c.modules = nil
	return err
}
