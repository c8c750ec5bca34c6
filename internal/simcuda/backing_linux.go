package simcuda

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// file names an open file for all processes of the host.
type file struct{ device, inode uint64 }

// physical is memory of a GPU: a file in memory, so that other processes can map it too. What it is stands in its last page.
type physical struct {
	machine *Machine
	file    file
	fd      int
	mem     []byte // all of it, without the last page
	gpu     int
	legacy  bool
	own     bool // made by this process, and counted as used
	prop    cu.MemAllocationProp
	refs    int               // handles, mappings, bindings
	cells   *ptxvm.Allocation // with weak memory
}

const (
	page  = 4096
	magic = 0x5173_7563_6d69_7301 // of the last page of memory
)

// card is what the last page says.
type card struct {
	Magic   uint64
	Bytes   uint64
	GPU     int32
	Kind    int32
	Handles int32
	RDMA    int32
	Devices int32 // of a multicast object
	_       int32
}

const (
	kindVirtual int32 = iota + 1
	kindLegacy
	kindCast
)

func (c *card) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c))
}

// createFile makes a file of whole pages with the card behind them.
func createFile(bytes uint64, c card) (fd int, id file, err error) {
	fd, err = unix.MemfdCreate("simulated GPU memory", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, file{}, err
	}
	c.Magic, c.Bytes = magic, bytes
	if err = unix.Ftruncate(fd, int64(bytes+page)); err == nil {
		_, err = unix.Pwrite(fd, c.bytes(), int64(bytes))
	}
	if err == nil {
		id, err = identify(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, file{}, err
	}
	return fd, id, nil
}

// readCard reads what a descriptor is, or says that it is nothing of ours.
func readCard(fd int) (c card, ok bool) {
	var stat unix.Stat_t
	if unix.Fstat(fd, &stat) != nil || stat.Size <= page || stat.Size%page != 0 {
		return card{}, false
	}
	n, err := unix.Pread(fd, c.bytes(), stat.Size-page)
	return c, err == nil && n == len(c.bytes()) && c.Magic == magic && c.Bytes == uint64(stat.Size-page)
}

func identify(fd int) (file, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return file{}, err
	}
	return file{uint64(stat.Dev), stat.Ino}, nil
}

// create makes memory of a GPU. What is in it is not defined, which the first word of each stretch shows.
func (m *Machine) create(g *gpu, bytes uint64, kind int32, prop cu.MemAllocationProp) (*physical, cu.Result) {
	if bytes > g.Memory || g.used > g.Memory-bytes {
		return nil, cu.OutOfMemory
	}
	whole := (bytes + page - 1) / page * page
	fd, id, err := createFile(whole, card{GPU: int32(g.ordinal), Kind: kind, Handles: int32(prop.RequestedHandleTypes), RDMA: int32(prop.GPUDirectRDMACapable)})
	if err != nil {
		return nil, cu.OperatingSystem
	}
	p := &physical{machine: m, file: id, fd: fd, gpu: g.ordinal, legacy: kind == kindLegacy, own: true, prop: prop}
	if r := p.attach(whole); r != cu.Success {
		return nil, r
	}
	for i := uint64(0); i+8 <= whole; i += 64 << 10 {
		binary.LittleEndian.PutUint64(p.mem[i:], 0xa5a5_a5a5_a5a5_a5a5)
	}
	g.used += whole
	return p, cu.Success
}

// attach maps the file and makes the memory known. It closes the descriptor if that fails.
func (p *physical) attach(bytes uint64) cu.Result {
	mem, err := unix.Mmap(p.fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(p.fd)
		return cu.OutOfMemory
	}
	p.mem = mem
	p.machine.physicals[p.file] = p
	return cu.Success
}

// find gives the memory that a descriptor is of, or maps it here. The descriptor stays the caller's.
func (m *Machine) find(fd int, c card) (*physical, cu.Result) {
	id, err := identify(fd)
	if err != nil {
		return nil, cu.InvalidValue
	}
	if p := m.physicals[id]; p != nil {
		return p, cu.Success
	}
	if m.config.Weak {
		return nil, m.foreign()
	}
	if int(c.GPU) >= len(m.gpus) || c.GPU < 0 {
		return nil, cu.InvalidDevice
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, cu.OperatingSystem
	}
	p := &physical{machine: m, file: id, fd: own, gpu: int(c.GPU), legacy: c.Kind == kindLegacy, prop: cu.MemAllocationProp{
		Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleType(c.Handles), GPUDirectRDMACapable: uint8(c.RDMA),
		Location: cu.MemLocation{Type: cu.LocationDevice, ID: c.GPU},
	}}
	return p, p.attach(c.Bytes)
}

// drop gives back a reference. CUDA driver API, cuMemRelease: the memory is freed "once all the outstanding mappings to the memory are unmapped and
// all outstanding references to the handle are also released".
func (p *physical) drop() {
	if p.refs--; p.refs > 0 {
		return
	}
	m := p.machine
	delete(m.physicals, p.file)
	if p.own {
		m.gpus[p.gpu].used -= uint64(len(p.mem))
	}
	_ = unix.Munmap(p.mem)
	_ = unix.Close(p.fd)
	p.mem = nil
}

// zero makes memory zeros. Whole pages are given back to the system, which has new ones when they are needed.
func (p *physical) zero(at, n uint64) {
	first, end := (at+page-1)/page*page, (at+n)/page*page
	if n >= 16*page && unix.Fallocate(p.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(first), int64(end-first)) == nil {
		clear(p.mem[at:first])
		clear(p.mem[end : at+n])
		return
	}
	clear(p.mem[at : at+n])
}

// open opens a file that another process has open, by its number there.
func open(pid, fd int64) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
}
