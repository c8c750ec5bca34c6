package nixl

import (
	"cmp"
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
	region  nixl.Block
}

// Allocate allocates memory of the device, filled with zeros, and registers it. On a GPU it is memory of cuMemAlloc, which
// every UCX can pass to other processes.
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
	to := cmp.Or(b.granularity, roundTo)
	rounded, pad := (bytes+to-1)/to*to, int64(0)
	if b.node.pads {
		pad = rounded
		rounded += padBytes
	}
	if b.device.Kind() == device.CUDA {
		rounded = (rounded + gpuBlock - 1) / gpuBlock * gpuBlock
	}
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
	a := &allocation{backend: b, ptr: p, bytes: bytes, rounded: rounded, pad: pad}
	if a.region, err = b.node.register(b.node.memory, p, rounded); err != nil {
		return nil, errors.Join(err, b.device.Free(p))
	}
	return a, nil
}

// allocateShared allocates memory that the ranks of the island can map, and registers it for the others.
func (b *Backend) allocateShared(ctx context.Context, bytes int64) (backend.Allocation, error) {
	near, err := b.isle.near.Allocate(ctx, (bytes+b.granularity-1)/b.granularity*b.granularity)
	if err != nil {
		return nil, err
	}
	a := &allocation{backend: b, ptr: near.Ptr(), bytes: bytes, rounded: near.RoundedBytes(), near: near}
	if a.region, err = b.node.register(b.node.memory, a.ptr, a.rounded); err != nil {
		return nil, errors.Join(err, near.Release(ctx))
	}
	return a, nil
}

// Register adopts memory of this rank's device that the caller keeps until the allocation is released. It must lie in one
// allocation, and be memory of the device.
func (b *Backend) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
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
	return &allocation{backend: b, ptr: p, bytes: bytes, rounded: bytes, adopted: true, region: region}, nil
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return a.rounded }

// Release deregisters the memory, and frees it unless it was adopted.
func (a *allocation) Release(ctx context.Context) error {
	err := a.backend.node.deregister(a.backend.node.memory, a.region)
	switch {
	case a.adopted:
	case a.near != nil:
		err = errors.Join(err, a.near.Release(ctx))
	default:
		err = errors.Join(err, a.backend.device.Free(a.ptr))
	}
	if err != nil {
		return fmt.Errorf("releasing %d bytes at %s: %w", a.bytes, a.ptr, err)
	}
	return nil
}
