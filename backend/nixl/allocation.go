package nixl

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

const (
	// roundTo is the alignment of the pad, in bytes.
	roundTo = 256
	// gpuBlock is the unit, in bytes, in which memory of a GPU is allocated. cuMemAlloc cuts smaller pieces from one block, and other processes can
	// only map the whole block. UCX maps each piece separately, and drops all its mappings of that process when the block is mapped already
	// (uct_cuda_ipc_cache_put_region in uct/cuda/cuda_ipc/cuda_ipc_cache.c of UCX 1.23): the next transfer maps it again, while streams wait for the
	// transfer.
	gpuBlock = 2 << 20
)

// allocation is one rank's memory: its own, or adopted.
type allocation struct {
	backend *Backend
	ptr     device.Ptr
	bytes   int64
	rounded int64
	pad     int64 // where the pad begins, counting from ptr; 0 if there is none
	adopted bool
	near    backend.Allocation // the memory as the island shares it; nil if it does not
	shares  string             // how; the same on two ranks that can share it; "" if it cannot be shared
	region  nixl.Block
}

// ownMemory is how memory is shared that this backend has made.
const ownMemory = "own"

// Allocate allocates memory of the device, filled with zeros, and registers it. On a GPU that shares memory with another rank's it is memory of
// cuMemCreate, as that of backend native; else of cuMemAlloc, which every UCX can pass to other processes.
func (b *Backend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if bytes <= 0 {
		return nil, errs.Invalid("Allocate", "bytes", bytes, "1 and more")
	}
	if bytes > math.MaxInt64-gpuBlock-padBytes-max(b.granularity, roundTo) {
		return nil, fmt.Errorf("%d bytes are asked for: %w", bytes, errs.ErrNoMemory)
	}
	if b.isle != nil {
		return b.allocateShared(ctx, bytes)
	}
	rounded, pad := b.size(bytes)
	p, err := b.device.Alloc(rounded)
	if err != nil {
		return nil, err
	}
	if hm, ok := b.device.(device.HostMemory); ok {
		mem, err := hm.Bytes(p, rounded)
		if err != nil {
			return nil, errors.Join(err, b.device.Free(p))
		}
		preferHugePages(mem)
	}
	a := &allocation{backend: b, ptr: p, bytes: bytes, rounded: rounded, pad: pad, shares: ownMemory}
	if a.region, err = b.node.register(b.node.memory, p, rounded); err != nil {
		return nil, errors.Join(err, b.device.Free(p))
	}
	return a, nil
}

// size returns how many bytes to allocate for so many, the same on every rank, and where the pad begins; 0 if there is none.
func (b *Backend) size(bytes int64) (rounded, pad int64) {
	unit := max(b.granularity, roundTo)
	if b.device.Kind() == device.CUDA {
		unit = max(unit, gpuBlock)
	}
	if b.node.pads {
		pad = roundUp(bytes, roundTo)
		return roundUp(pad+padBytes, unit), pad
	}
	return roundUp(bytes, unit), 0
}

// roundUp returns the least multiple of unit that is not less than n.
func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// allocateShared allocates memory that the ranks of the island can map, and registers it for the others.
func (b *Backend) allocateShared(ctx context.Context, bytes int64) (backend.Allocation, error) {
	rounded, pad := b.size(bytes)
	near, err := b.isle.near.Allocate(ctx, rounded)
	if err != nil {
		return nil, err
	}
	a := &allocation{backend: b, ptr: near.Ptr(), bytes: bytes, rounded: near.RoundedBytes(), pad: pad, near: near, shares: ownMemory}
	if a.region, err = b.node.register(b.node.memory, a.ptr, a.rounded); err != nil {
		return nil, errors.Join(err, near.Release(ctx))
	}
	return a, nil
}

// Register adopts memory of this rank's device that the caller keeps until the allocation is released. It must lie in one
// allocation, and be memory of the device.
func (b *Backend) Register(ctx context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	if bytes <= 0 || p.IsNil() || p.Add(bytes) < p {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s", bytes, p),
			"at least 1 byte at an address that is not nil")
	}
	if err := b.adoptable(p, bytes); err != nil {
		return nil, err
	}
	region, err := b.node.register(b.node.memory, p, bytes)
	if err != nil {
		return nil, err
	}
	a := &allocation{backend: b, ptr: p, bytes: bytes, rounded: bytes, adopted: true, region: region}
	a.share(ctx)
	return a, nil
}

// kinder is an allocation of backend native, which says how it is shared.
type kinder interface{ Kind() string }

// share finds out whether the island can share adopted memory. If not, the library moves it.
func (a *allocation) share(ctx context.Context) {
	b := a.backend
	if b.isle == nil || !b.isle.near.Capabilities().Register {
		return
	}
	near, err := b.isle.near.Register(ctx, a.ptr, a.bytes)
	if err != nil {
		b.log.Debug("adopted memory is not shared", "address", a.ptr, "bytes", a.bytes, "error", err)
		return
	}
	a.near = near
	if k, ok := near.(kinder); ok {
		a.shares = k.Kind()
	}
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return a.rounded }

// Release deregisters the memory, and frees it unless it was adopted.
func (a *allocation) Release(ctx context.Context) error {
	err := a.backend.node.deregister(a.backend.node.memory, a.region)
	switch {
	case a.near != nil:
		err = errors.Join(err, between(a.backend.device, func() error { return a.near.Release(ctx) }))
	case !a.adopted:
		err = errors.Join(err, a.backend.device.Free(a.ptr))
	}
	if err != nil {
		return fmt.Errorf("releasing %d bytes at %s: %w", a.bytes, a.ptr, err)
	}
	return nil
}
