package cuda

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// image is what was loaded from one image, for all modules that were made of it: loading waits for what the GPU has under way, and so
// may unloading.
type image struct {
	sum    [sha256.Size]byte
	handle cu.ModuleHandle
	users  int // modules; under the device's loading
}

// loadingWait is how long a call that loads or unloads kernels waits for a moment at which no stream has work of the CPU. The driver waits then for what the GPU
// has under way, and other calls wait for the driver: also those of the work of the CPU that the GPU waits for. There may be no such moment before a peer has gone on
// that waits for this rank; most often the driver need not wait then.
const loadingWait = time.Second

// Module is kernels that were loaded. It implements [device.Module].
type Module struct {
	dev    *Device
	image  *image
	handle cu.ModuleHandle
	closed atomic.Bool
	mu     sync.RWMutex // held for reading during calls that use the handle, or one of a kernel's; for writing by destroy alone; taken before the lock of a stream
}

// LoadModule loads kernels from PTX, a cubin or a fat binary. PTX is compiled for the GPU, which takes some milliseconds to seconds; the driver keeps
// what it compiled in a cache of the user. Loading waits for what the GPU has under way, and up to a second for work of the CPU in streams to end; an image that is loaded already is shared, and nobody waits.
// The error contains what the compiler says about faulty PTX.
func (d *Device) LoadModule(code []byte) (device.Module, error) {
	const call = "LoadModule"
	text, err := checkImage(code)
	if err != nil {
		return nil, errs.Invalid(call, "image", fmt.Sprintf("%d bytes", len(code)), "PTX, a cubin or a fat binary: "+err.Error())
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	d.loading.Lock()
	defer d.loading.Unlock()
	sum := sha256.Sum256(code)
	img := d.images[sum]
	if img == nil {
		img = &image{sum: sum}
		if img.handle, err = d.load(code, text); err != nil {
			return nil, err
		}
		d.images[sum] = img
	}
	img.users++
	m := &Module{dev: d, image: img, handle: img.handle}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.modules[m] = struct{}{}
	return m, nil
}

// load loads an image that was checked. The context is current.
func (d *Device) load(code []byte, text bool) (cu.ModuleHandle, error) {
	if text {
		code = append(bytes.Clone(code), 0)
	}
	const logBytes = 16 << 10
	log := make([]byte, logBytes)
	options := []cu.JITOption{cu.JITErrorLogBuffer, cu.JITErrorLogBufferSize}
	values := []uintptr{uintptr(unsafe.Pointer(&log[0])), logBytes}
	var handle cu.ModuleHandle
	err := d.betweenWork(loadingWait, func() error {
		r := d.drv.ModuleLoadDataEx(&handle, unsafe.Pointer(&code[0]), uint32(len(options)), &options[0], &values[0])
		return d.drv.Check("cuModuleLoadDataEx", r)
	})
	runtime.KeepAlive(log) // only its address, as a number, was passed
	if err != nil {
		if said := strings.TrimSpace(cu.GoString(&log[0], logBytes)); said != "" {
			err = fmt.Errorf("%w: %s", err, said)
		}
		return 0, fmt.Errorf("loading kernels for %s: %w", d.name, err)
	}
	return handle, nil
}

// checkImage checks what the driver does not check: that the image is complete. It reports whether it is text.
func checkImage(image []byte) (text bool, err error) {
	const fatMagic, fatHeader = 0xba55ed50, 16
	switch {
	case len(image) == 0:
		return false, errors.New("it is empty")
	case bytes.HasPrefix(image, []byte(elf.ELFMAG)):
		return false, checkELF(image)
	case len(image) >= fatHeader && binary.LittleEndian.Uint32(image) == fatMagic:
		// u32 magic, u16 version, u16 header bytes, u64 bytes behind the header
		header, body := uint64(binary.LittleEndian.Uint16(image[6:])), binary.LittleEndian.Uint64(image[8:])
		if header < fatHeader || header > uint64(len(image)) || body > uint64(len(image))-header {
			return false, errors.New("the fat binary is cut short")
		}
		return false, nil
	case bytes.IndexByte(image, 0) >= 0 && bytes.IndexByte(image, 0) < len(image)-1:
		return false, errors.New("it is none of them")
	case !bytes.Contains(image, []byte(".version")):
		return false, errors.New("it is text, but without the .version of PTX")
	}
	return true, nil
}

// checkELF checks that all sections of the ELF file lie inside it.
func checkELF(image []byte) (err error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return fmt.Errorf("the cubin is damaged: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, s := range f.Sections {
		if s.Type == elf.SHT_NOBITS || s.Type == elf.SHT_NULL {
			continue // these have no bytes in the file
		}
		if s.Offset > uint64(len(image)) || s.FileSize > uint64(len(image))-s.Offset {
			return fmt.Errorf("the cubin is cut short in section %s", s.Name)
		}
	}
	return nil
}

// hold locks the module for reading, or refuses if it is closed or being closed. It does not wait: what is being closed may wait for a launch that waits for room in a
// queue, which work of the CPU makes by calls like this one.
func (m *Module) hold(call string) error {
	if !m.mu.TryRLock() { // only destroy locks it for writing
		return closed(call, "module")
	}
	if m.closed.Load() {
		m.mu.RUnlock()
		return closed(call, "module")
	}
	return nil
}

// begin begins a call that uses the module's handle; end must follow unless there is an error.
func (m *Module) begin(call string) error {
	if err := m.hold(call); err != nil {
		return err
	}
	if err := m.dev.enter(call); err != nil {
		m.mu.RUnlock()
		return err
	}
	return nil
}

// end ends what begin began.
func (m *Module) end() {
	m.dev.leave()
	m.mu.RUnlock()
}

// Function finds a kernel by its name in the image. The first call for a kernel may wait for what the GPU has under way: drivers load a kernel only
// when it is asked for, and launching it then loads nothing.
func (m *Module) Function(name string) (device.Function, error) {
	const call = "Function"
	if name == "" || strings.ContainsRune(name, 0) {
		return nil, errs.Invalid(call, "name", fmt.Sprintf("%q", name), "the name of a kernel")
	}
	if err := m.begin(call); err != nil {
		return nil, err
	}
	defer m.end()
	f := &Function{module: m, name: name}
	drv := m.dev.drv
	r, loaded := cu.Success, cu.Success
	_ = m.dev.betweenWork(loadingWait, func() error {
		if r = drv.ModuleGetFunction(&f.handle, m.handle, name); r == cu.Success && drv.FuncLoad != nil {
			loaded = drv.FuncLoad(f.handle)
		}
		return nil
	})
	switch r {
	case cu.Success:
	case cu.NotFound:
		return nil, errs.Invalid(call, "name", fmt.Sprintf("%q", name),
			"the name of a kernel that is in the image, as the compiler made it")
	default:
		return nil, fmt.Errorf("finding the kernel %q: %w", name, drv.Check("cuModuleGetFunction", r))
	}
	if err := drv.Check("cuFuncLoad", loaded); err != nil {
		return nil, fmt.Errorf("loading the kernel %q: %w", name, err)
	}
	for _, a := range []struct {
		value *int
		attr  cu.FuncAttribute
	}{{&f.maxThreads, cu.FuncMaxThreadsPerBlock}, {&f.shared, cu.FuncSharedBytes}} {
		var value int32
		if err := drv.Check("cuFuncGetAttribute", drv.FuncGetAttribute(&value, a.attr, f.handle)); err != nil {
			return nil, fmt.Errorf("asking about the kernel %q: %w", name, err)
		}
		*a.value = int(value)
	}
	for i, a := range []cu.FuncAttribute{cu.FuncClusterWidth, cu.FuncClusterHeight, cu.FuncClusterDepth} {
		var blocks int32
		// Drivers that are older than clusters do not know the attribute.
		if r := drv.FuncGetAttribute(&blocks, a, f.handle); r != cu.InvalidValue {
			if err := drv.Check("cuFuncGetAttribute", r); err != nil {
				return nil, fmt.Errorf("asking about the kernel %q: %w", name, err)
			}
		}
		f.cluster[i] = uint32(max(blocks, 1))
	}
	if err := f.askParams(); err != nil {
		return nil, fmt.Errorf("asking about the kernel %q: %w", name, err)
	}
	return f, nil
}

// Close unloads the kernels, unless another module of the same image is open. It waits for launches that are being made, but no work that uses the kernels may be
// queued. A second Close returns ErrClosed.
func (m *Module) Close() error {
	const call = "Close"
	d := m.dev
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	_, open := d.modules[m]
	delete(d.modules, m)
	d.mu.Unlock()
	if !open {
		return closed(call, "module")
	}
	return m.destroy(func(r retired) error { return d.betweenWork(loadingWait, func() error { return d.give(r) }) })
}

// destroy closes the module if it is open, and returns the kernels to unload if no other module has them; the context is current.
func (m *Module) destroy(unload func(retired) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.Swap(true) {
		return nil
	}
	d := m.dev
	d.loading.Lock()
	defer d.loading.Unlock()
	if m.image.users--; m.image.users > 0 {
		return nil
	}
	delete(d.images, m.image.sum)
	return unload(retired{module: m.handle})
}
