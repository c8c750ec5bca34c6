package nixl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	devhost "github.com/symmem/symmem/device/host"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// place is the device whose memory the backend works on.
type place struct {
	kind   device.Kind
	driver *cu.Driver // of kind CUDA
	cuda   int        // the major version of CUDA that the driver speaks; 0 without a driver
}

// choosePlace chooses the place: by the open device if there is one, by name, or by whether there is a driver.
func choosePlace(o *Options) (*place, error) {
	p := &place{kind: device.Host}
	switch {
	case o.Opened != nil:
		p.kind = o.Opened.Kind()
		if d, ok := o.Opened.(*cuda.Device); ok {
			p.driver = d.Driver()
		}
	case o.Device == hostDevice:
	default:
		drv, err := cu.Load(&cu.LoadOptions{Logger: o.Logger})
		switch {
		case err == nil && (o.Device != "" || count(drv) > 0):
			p.kind, p.driver = device.CUDA, drv
		case o.Device == "" && (err == nil || errors.Is(err, errs.ErrUnavailable)):
		case err == nil:
			err = fmt.Errorf("no GPU is there: %w", errs.ErrUnavailable)
			fallthrough
		default:
			return nil, fmt.Errorf("device %q: %w (device %s is the CPU)", o.Device, err, hostDevice)
		}
	}
	if p.driver != nil {
		version, err := p.driver.Version()
		if err != nil {
			return nil, err
		}
		p.cuda = version / 1000
	}
	return p, nil
}

// count returns how many GPUs the process sees; 0 if the driver does not say.
func count(drv *cu.Driver) int {
	var n int32
	if drv.Init == nil || drv.DeviceGetCount == nil || drv.Init(0) != cu.Success || drv.DeviceGetCount(&n) != cu.Success {
		return 0
	}
	return int(n)
}

// open opens the device.
func (p *place) open(o *Options, lost func() error) (device.Device, error) {
	if p.kind == device.Host {
		return devhost.New(&devhost.Options{WaitTimeout: o.KernelTimeout, Err: lost, Logger: o.Logger})
	}
	c := &cuda.Options{
		Driver: p.driver, Device: o.Device, LocalRank: o.LocalRank, Logger: o.Logger, WaitTimeout: o.KernelTimeout, Err: lost,
	}
	if n := count(p.driver); o.ShareDevice && o.Device == "" && n > 0 {
		c.LocalRank %= n
	}
	d, err := cuda.Open(c)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// libraries remembers what was loaded, or why nothing was: a process loads one library, and UCX reads its settings once.
var libraries struct {
	sync.Mutex
	loaded *nixl.Library
}

// load loads the library, once.
func load(path string, cudaVersion int, log *slog.Logger) (*nixl.Library, error) {
	libraries.Lock()
	defer libraries.Unlock()
	if libraries.loaded != nil {
		return libraries.loaded, nil
	}
	lib, err := nixl.Load(&nixl.Options{Path: path, CUDA: cudaVersion, Logger: log})
	if err != nil {
		return nil, err
	}
	libraries.loaded = lib
	return lib, nil
}

// probes remembers, by device, that the library works on it, and whether it does without a network.
var probes struct {
	sync.Mutex
	found map[string]bool
}

// probeTimeout bounds the trial. Making an engine takes half a second, and now and then several.
const probeTimeout = 30 * time.Second

// probe tries, once for each device in a process, whether the library recognizes the device's memory when it is registered, and whether the library
// works without a network. What does not work, or not without one, is tried again the next time: the process may have lacked files, or the host shared memory.
func probe(ctx context.Context, lib *nixl.Library, d device.Device) (alone bool, err error) {
	key := d.Kind().String()
	if d.Kind() == device.CUDA {
		key = d.UUID()
	}
	probes.Lock()
	defer probes.Unlock()
	if found, known := probes.found[key]; known {
		return found, nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	alone, err = try(ctx, lib, d)
	if err == nil && (alone || chosenByUser() != "") {
		if probes.found == nil {
			probes.found = map[string]bool{}
		}
		probes.found[key] = alone
	}
	return alone, err
}

// try registers one byte of the device's memory with an agent of its own, and makes what a transfer of it takes.
func try(ctx context.Context, lib *nixl.Library, d device.Device) (alone bool, err error) {
	if err := holdContext(d); err != nil {
		return false, err
	}
	a, on, err := firstAgent(func(n route) (*nixl.Agent, error) { return makeAgent(ctx, lib, d, "probe-"+nonce(), n, false) })
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	if d.Kind() == device.CUDA {
		if err := checkHooks(lib); err != nil {
			return false, err
		}
	}
	return on.reach == reachNothing, tryMemory(lib, a, d)
}

// tryMemory registers one byte of the device's memory.
func tryMemory(lib *nixl.Library, a *nixl.Agent, d device.Device) (err error) {
	p, err := d.Alloc(1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Free(p)) }()
	memory := memoryOf(d)
	one := nixl.Block{Addr: uint64(p), Bytes: 1, Device: deviceNumber(d, 1)}
	failed := within(d, func() error { return a.Register(memory, one) })
	if failed == nil {
		failed = within(d, func() error {
			_, err := a.MetadataOf(memory, one)
			return errors.Join(err, a.Deregister(memory, one))
		})
	}
	if failed != nil && memory == nixl.VRAM {
		return fmt.Errorf("NIXL is there (%s), and its UCX cannot reach the memory of %s: the module libuct_cuda.so is not beside it, does "+
			"not load, or is for another CUDA; install nixl-cu%d, or set device to %s for memory of the CPU (%w): %w",
			lib.Path(), d.Name(), max(lib.CUDA(), 12), hostDevice, failed, errs.ErrUnsupported)
	}
	return failed
}

// held are the GPUs whose primary context this process keeps until it ends.
var held struct {
	sync.Mutex
	gpus map[cu.DeviceOrdinal]bool
}

// holdContext keeps the primary context of a GPU until the process ends: UCX, once it is loaded, remembers what it has seen and made there.
func holdContext(d device.Device) error {
	g, ok := d.(*cuda.Device)
	if !ok {
		return nil
	}
	held.Lock()
	defer held.Unlock()
	if held.gpus[g.Ordinal()] {
		return nil
	}
	var c cu.ContextHandle
	if err := g.Driver().Check("cuDevicePrimaryCtxRetain", g.Driver().PrimaryCtxRetain(&c, g.Ordinal())); err != nil {
		return err
	}
	if held.gpus == nil {
		held.gpus = map[cu.DeviceOrdinal]bool{}
	}
	held.gpus[g.Ordinal()] = true
	return nil
}

// memoryOf returns NIXL's kind of the device's memory.
func memoryOf(d device.Device) nixl.Memory {
	if d.Kind() == device.CUDA {
		return nixl.VRAM
	}
	return nixl.DRAM
}

// deviceNumber returns the number that a registration has besides its address, unique in this process. The UCX engine ignores it (from NIXL 1.3 on,
// for GPU memory), but metadata is found by it.
func deviceNumber(d device.Device, registration uint64) uint64 {
	return registration<<16 | uint64(d.Index())&0xffff
}

// between calls f at a moment when no stream waits for the CPU, if such a moment comes soon. If the device is a GPU, its context is current.
func between(d device.Device, f func() error) error {
	if g, ok := d.(*cuda.Device); ok {
		return g.BetweenWork(betweenWork, f)
	}
	return f()
}

// within calls f. If the device is a GPU, its context is current.
func within(d device.Device, f func() error) error {
	if g, ok := d.(*cuda.Device); ok {
		return g.WithContext(f)
	}
	return f()
}
