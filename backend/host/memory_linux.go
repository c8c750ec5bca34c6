package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/memfd"
)

// works is set when what the backend needs was there.
var works atomic.Bool

// supported tries what the backend needs, until it has succeeded once: a system without memory or files now may have some later.
func supported() error {
	if works.Load() {
		return nil
	}
	f, err := memfd.New(int64(os.Getpagesize()))
	if err != nil {
		return fmt.Errorf("shared memory by memfd: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("shared memory by memfd: %w", err)
	}
	works.Store(true)
	return nil
}

// allocation is one memfd, mapped in this process.
type allocation struct {
	backend *Backend
	file    *os.File // kept, so that a rendezvous that failed can be tried again
	mem     []byte
	ptr     device.Ptr
	bytes   int64
}

// Allocate makes a memfd and maps it. ErrInvalid if bytes is not positive; ErrNoMemory, with the values, if the host or a control group of this
// process does not have that much left, the process has too few mappings left, or the system refuses it. Memory that other ranks have allocated and not touched yet is not counted.
func (b *Backend) Allocate(_ context.Context, bytes int64) (backend.Allocation, error) {
	page := int64(os.Getpagesize())
	switch {
	case bytes <= 0:
		return nil, errs.Invalid("Allocate", "bytes", bytes, "1 and more")
	case bytes > math.MaxInt64-page: // whole pages of it would overflow
		return nil, cmp.Or(enough(bytes), fmt.Errorf("%d bytes are asked for: %w", bytes, errs.ErrNoMemory))
	}
	rounded := (bytes + page - 1) / page * page
	if err := enough(rounded); err != nil {
		return nil, err
	}
	if err := takeMappings(1); err != nil {
		return nil, err
	}
	a, err := b.allocate(bytes, rounded)
	if err != nil {
		giveMappings(1)
		return nil, err
	}
	return a, nil
}

// allocate is Allocate for a size of whole pages that may be had.
func (b *Backend) allocate(bytes, rounded int64) (*allocation, error) {
	f, err := memfd.New(rounded)
	if err != nil {
		return nil, err
	}
	mem, err := memfd.Map(f, rounded)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // fewer page faults where the system allows it for shared memory
	p, err := b.device.Map(mem)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(mem), f.Close())
	}
	return &allocation{backend: b, file: f, mem: mem, ptr: p, bytes: bytes}, nil
}

// Register returns ErrUnsupported: see Capabilities.
func (b *Backend) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	return nil, capabilities.Missing(Name, "register")
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return int64(len(a.mem)) }

// Release unmaps the memory. It is gone when the last peer has unmapped it too.
func (a *allocation) Release(context.Context) error {
	err := a.backend.device.Unmap(a.ptr)
	giveMappings(1)
	return errors.Join(err, unix.Munmap(a.mem), a.file.Close())
}

// mapping is every rank's memfd side by side in one range of this process.
type mapping struct {
	backend *Backend
	alloc   *allocation
	ptr     device.Ptr // of the range
	base    unsafe.Pointer
	bytes   int64 // of the whole range
	rank    int
	ranks   int
}

// Rendezvous sends each rank's descriptor to the others and maps all of them. ErrNotReachable on every rank if the ranks are on several
// hosts; ErrInvalid for an allocation of another backend; ErrNoMemory if there are not enough addresses, or mappings of the process.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation) (backend.Mapping, error) {
	members := b.group.Members()
	for r, m := range members {
		if m.BootID != members[0].BootID {
			// Every rank sees the same members, so every rank stops here, whatever its allocation is: none may be in an exchange that the others never begin.
			return nil, fmt.Errorf("rank %d is on another host than rank 0, and shared memory ends at the host; use backend nixl: %w",
				r, errs.ErrNotReachable)
		}
	}
	a, ok := ba.(*allocation)
	if !ok || a.backend != b {
		// The others are in the exchange, which fails on all ranks for want of this one's file.
		_, err := b.group.ExchangeFile(ctx, "shared memory", nil)
		return nil, errors.Join(fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid), err)
	}
	files, err := b.group.ExchangeFile(ctx, "shared memory", a.file)
	if err != nil {
		return nil, err
	}
	m, err := mapAll(b, a, files)
	for _, f := range files {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	// The vote that follows in Memory tells whether the others have succeeded.
	if err != nil {
		if m != nil {
			err = errors.Join(err, m.Unmap(ctx))
		}
		return nil, err
	}
	return m, nil
}

// mapAll maps the files one after the other in a range reserved for all of them.
func mapAll(b *Backend, a *allocation, files []*os.File) (*mapping, error) {
	if err := takeMappings(len(files)); err != nil {
		return nil, err
	}
	m, err := mapInOne(b, a, files)
	if err != nil {
		giveMappings(len(files))
	}
	return m, err
}

// mapInOne is mapAll where there are enough mappings left.
func mapInOne(b *Backend, a *allocation, files []*os.File) (*mapping, error) {
	each := a.RoundedBytes()
	if each > math.MaxInt64/int64(len(files)) {
		return nil, fmt.Errorf("%d ranks times %d bytes: %w", len(files), each, errs.ErrNoMemory)
	}
	total := each * int64(len(files))
	base, err := reserve(total, len(files))
	if err != nil {
		return nil, err
	}
	m := &mapping{backend: b, alloc: a, base: base, bytes: total, rank: b.group.Rank(), ranks: len(files)}
	for r, f := range files {
		if f == nil {
			f = a.file
		} else if err := memfd.Check(f, each); err != nil {
			return nil, errors.Join(fmt.Errorf("memory of rank %d: %w", r, err), unix.MunmapPtr(base, uintptr(total)))
		}
		_, err := unix.MmapPtr(int(f.Fd()), 0, unsafe.Add(base, int64(r)*each), uintptr(each), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("mapping %d bytes of rank %d: %w", each, r, memfd.NoMemory(err)), unix.MunmapPtr(base, uintptr(total)))
		}
	}
	whole := unsafe.Slice((*byte)(base), total)
	_ = unix.Madvise(whole, unix.MADV_HUGEPAGE)
	if m.ptr, err = b.device.Map(whole); err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(base, uintptr(total)))
	}
	return m, nil
}

// reserve reserves a range of addresses for the memory of that many ranks.
func reserve(bytes int64, ranks int) (unsafe.Pointer, error) {
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(bytes), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserving %d bytes of addresses for %d ranks: %w", bytes, ranks, memfd.NoMemory(err))
	}
	return base, nil
}

// Peer returns the place of rank's memory in the range, and for this rank the allocation itself.
func (m *mapping) Peer(rank int) (device.Ptr, error) {
	if rank == m.rank {
		return m.alloc.ptr, nil
	}
	return m.ptr.Add(int64(rank) * m.alloc.RoundedBytes()), nil
}

// Contiguous returns the range: the ranks' copies lie one rounded size apart.
func (m *mapping) Contiguous() (device.Ptr, int64, error) {
	return m.ptr, m.alloc.RoundedBytes(), nil
}

// Unmap unmaps the range.
func (m *mapping) Unmap(context.Context) error {
	err := m.backend.device.Unmap(m.ptr)
	giveMappings(m.ranks)
	return errors.Join(err, unix.MunmapPtr(m.base, uintptr(m.bytes)))
}
