package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// value is what rank has at element i before an all-reduce by op: small integers, so that results are exact in every dtype.
func value(dtype tensor.DType, op kernels.Op, rank int, i int64) int64 {
	mix := uint64(i)*0x9e3779b97f4a7c15 + uint64(rank)*0xbf58476d1ce4e5b9
	mix ^= mix >> 29
	switch {
	case op == kernels.Prod:
		return []int64{1, 2, 1, 3}[mix%4]
	case dtype >= tensor.Uint8:
		return int64(mix % 13)
	}
	return int64(mix%17) - 8
}

// expected is the bytes of the all-reduce of value over size ranks, elements 0 to n-1.
func expected(dtype tensor.DType, op kernels.Op, size int, n int64) []byte {
	return expectedOf(dtype, op, 0, size, 0, n)
}

// expectedOf is that of the values of size ranks from first on, elements lo to hi-1.
func expectedOf(dtype tensor.DType, op kernels.Op, first, size int, lo, hi int64) []byte {
	out := make([]byte, 0, (hi-lo)*dtype.Bytes())
	for i := lo; i < hi; i++ {
		acc := value(dtype, op, first, i)
		for r := first + 1; r < first+size; r++ {
			v := value(dtype, op, r, i)
			switch op {
			case kernels.Sum, kernels.Avg:
				acc += v
			case kernels.Prod:
				acc *= v
			case kernels.Min:
				acc = min(acc, v)
			case kernels.Max:
				acc = max(acc, v)
			}
		}
		if op == kernels.Avg {
			out = appendAverage(out, dtype, acc, size)
		} else {
			out = appendValue(out, dtype, acc)
		}
	}
	return out
}

// appendValue appends the bits of an element of that value; integers wrap around.
func appendValue(b []byte, dtype tensor.DType, v int64) []byte {
	switch dtype {
	case tensor.Float16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.F16From(float32(v))))
	case tensor.BFloat16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.BF16From(float32(v))))
	case tensor.Float32:
		return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
	case tensor.Float64:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(v)))
	}
	switch dtype.Bytes() {
	case 1:
		return append(b, byte(v))
	case 2:
		return binary.LittleEndian.AppendUint16(b, uint16(v))
	case 4:
		return binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	return binary.LittleEndian.AppendUint64(b, uint64(v))
}

// appendAverage appends the bits of sum/size as kernels.Avg defines it.
func appendAverage(b []byte, dtype tensor.DType, sum int64, size int) []byte {
	switch dtype {
	case tensor.Float16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.F16From(float32(sum)/float32(size))))
	case tensor.BFloat16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.BF16From(float32(sum)/float32(size))))
	case tensor.Float32:
		return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(sum)/float32(size)))
	case tensor.Float64:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(sum)/float64(size)))
	}
	return appendValue(b, dtype, sum/int64(size))
}

// input is the bytes of value for this rank.
func input(dtype tensor.DType, op kernels.Op, rank int, n int64) []byte {
	in := make([]byte, 0, n*dtype.Bytes())
	for i := range n {
		in = appendValue(in, dtype, value(dtype, op, rank, i))
	}
	return in
}

// poison is what memory holds that nobody has written.
const poison = 0xab

func poisoned(n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = poison
	}
	return b
}

// guarded is a tensor with a guard band of poison on both sides, at an odd element offset in its allocation.
type guarded struct {
	tensor.SymmetricTensor
	whole  *tensor.Tensor
	before int64 // bytes of the band in front
}

// guardElements is how many elements are in front of a guarded tensor, and behind it: odd, so that nothing is aligned to
// more than its elements.
const guardElements = 7

// newGuarded allocates a guarded tensor of n elements and makes its rendezvous.
func newGuarded(ctx context.Context, e *Env, dtype tensor.DType, n int64) (*guarded, error) {
	return newGuardedAt(ctx, e, dtype, n, guardElements)
}

// newGuardedAt is newGuarded with another number of elements in front and behind.
func newGuardedAt(ctx context.Context, e *Env, dtype tensor.DType, n, band int64) (*guarded, error) {
	whole, err := e.R.Zeros(ctx, dtype, n+2*band)
	if err != nil {
		return nil, err
	}
	// Before the rendezvous: after it, a peer may already write.
	if err := writeBytes(whole.Local(), poisoned(whole.Bytes())); err != nil {
		return nil, err
	}
	if err := whole.Rendezvous(ctx); err != nil {
		return nil, err
	}
	part, err := whole.Slice(band, band+n)
	if err != nil {
		return nil, err
	}
	return &guarded{SymmetricTensor: part, whole: whole, before: band * dtype.Bytes()}, nil
}

// bands says whether a guard band was written.
func (g *guarded) bands() error {
	all, err := readBytes(g.whole.Local())
	if err != nil {
		return err
	}
	for i, b := range all {
		if in := int64(i) >= g.before && int64(i) < g.before+g.Bytes(); !in && b != poison {
			return fmt.Errorf("byte %d outside of the tensor (bytes %d to %d) was written: %#x", i, g.before, g.before+g.Bytes(), b)
		}
	}
	return nil
}

// Close frees the whole allocation.
func (g *guarded) Close(ctx context.Context) error { return g.whole.Close(ctx) }

// writeBytes and readBytes move a view's elements as they are.
func writeBytes(v *tensor.View, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return v.Device().CopyFromHost(v.Ptr(), b)
}

func readBytes(v *tensor.View) ([]byte, error) {
	b := make([]byte, v.Bytes())
	if len(b) == 0 {
		return b, nil
	}
	return b, v.Device().CopyToHost(b, v.Ptr())
}

// sameBytes compares element by element and names the first difference.
func sameBytes(dtype tensor.DType, got, want []byte) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, expected %d", len(got), len(want))
	}
	w := int(dtype.Bytes())
	wrong, first := 0, -1
	for i := 0; i < len(got); i += w {
		if string(got[i:i+w]) != string(want[i:i+w]) {
			if wrong++; first < 0 {
				first = i
			}
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d elements of %s are wrong; first at %d: % x, expected % x", wrong, len(got)/w, dtype, first/w, got[first:first+w], want[first:first+w])
	}
	return nil
}

// sameEverywhere compares this rank's bytes with all others' by checksum. Collective.
func sameEverywhere(ctx context.Context, e *Env, b []byte) error {
	sum := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b))
	all, err := e.R.Group().AllGather(ctx, "checksum", sum)
	if err != nil {
		return err
	}
	for r, s := range all {
		if string(s) != string(all[0]) {
			return fmt.Errorf("rank %d has other bits than rank 0: checksums %x and %x", r, s, all[0])
		}
	}
	return nil
}

// mapped is a tensor after its rendezvous.
func (e *Env) mapped(ctx context.Context, dtype tensor.DType, shape ...int64) (*tensor.Tensor, error) {
	t, err := e.R.Zeros(ctx, dtype, shape...)
	if err != nil {
		return nil, err
	}
	return t, t.Rendezvous(ctx)
}

// private is memory of the device that is not symmetric.
func private(e *Env, bytes int64) (device.Ptr, func() error, error) {
	p, err := e.R.Device().Alloc(max(bytes, 1))
	if err != nil {
		return 0, nil, err
	}
	return p, func() error { return e.R.Device().Free(p) }, nil
}

// closeAll closes in order and joins the errors.
func closeAll(ctx context.Context, closers ...interface{ Close(context.Context) error }) error {
	var err error
	for _, c := range closers {
		err = errors.Join(err, c.Close(ctx))
	}
	return err
}
