package tensor

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// View is elements at an address of this rank's device: this rank's copy of a tensor, another rank's, or all of them. It owns nothing and
// never changes, so several goroutines may use it. After the tensor it came from was closed its address must not be used any more, and what
// moves elements is ErrClosed.
type View struct {
	device  device.Device
	ptr     device.Ptr
	name    string // of the tensor; "" if it has none
	dtype   DType
	shape   Shape
	strides []int64 // in elements
	alive   func() error
}

// newView makes a row-major view.
func newView(d device.Device, p device.Ptr, name string, dtype DType, shape Shape, alive func() error) *View {
	strides := make([]int64, len(shape))
	step := int64(1)
	for i, dim := range slices.Backward(shape) {
		strides[i] = step
		step *= dim
	}
	return &View{device: d, ptr: p, name: name, dtype: dtype, shape: slices.Clone(shape), strides: strides, alive: alive}
}

// orZero is the view, or a zero one for nil.
func (v *View) orZero() *View {
	if v == nil {
		return new(View)
	}
	return v
}

// Ptr is the address of the first element; nil if there are none.
func (v *View) Ptr() device.Ptr { return v.orZero().ptr }

// DType is the type of the elements.
func (v *View) DType() DType { return v.orZero().dtype }

// Shape is the size of each dimension. It must not be changed.
func (v *View) Shape() Shape { return v.orZero().shape }

// Strides gives for each dimension the distance from one index to the next, in elements. It must not be changed.
func (v *View) Strides() []int64 { return v.orZero().strides }

// NumElements is the number of elements.
func (v *View) NumElements() int64 {
	if v == nil || v.alive == nil {
		return 0 // and no scalar
	}
	return v.shape.NumElements()
}

// Bytes is the size of all elements together, gaps between them not counted.
func (v *View) Bytes() int64 { return v.NumElements() * v.DType().Bytes() }

// Device is the device that the view's address is one of: this rank's, for other ranks' copies too.
func (v *View) Device() device.Device { return v.orZero().device }

// Index gives the view of the i-th part along the first dimension, from 0. ErrInvalid for a scalar, and for an i that does not exist.
func (v *View) Index(i int64) (*View, error) {
	v = v.orZero()
	if len(v.shape) == 0 {
		return nil, named(v.name, errs.Invalid("Index", "view", "a scalar", "a view of at least one dimension"))
	}
	if i < 0 || i >= v.shape[0] {
		return nil, named(v.name, errs.Invalid("Index", "i", i, fmt.Sprintf("0 to %d", v.shape[0]-1)))
	}
	part := *v
	part.shape, part.strides = v.shape[1:], v.strides[1:]
	if part.shape.NumElements() > 0 {
		part.ptr = v.ptr.Add(i * v.strides[0] * v.dtype.Bytes())
	}
	return &part, nil
}

// gaps reports whether there is anything between the elements of v. Only the first dimension can have gaps.
func (v *View) gaps() bool {
	return len(v.shape) > 0 && v.shape[0] > 1 && v.strides[0]*v.shape[0] != v.NumElements()
}

// rows calls f for each run of elements without a gap, in order: first element, number of elements, address.
func (v *View) rows(f func(first, n int64, p device.Ptr) error) error {
	total := v.NumElements()
	if total == 0 {
		return nil
	}
	if !v.gaps() {
		return f(0, total, v.ptr)
	}
	row := total / v.shape[0]
	for i := range v.shape[0] {
		if err := f(i*row, row, v.ptr.Add(i*v.strides[0]*v.dtype.Bytes())); err != nil {
			return err
		}
	}
	return nil
}

// Read copies len(dst) elements, from the one at offset on in row-major order, to dst, on any device, and blocks until they are there. It is
// ordered with no stream: synchronize first. T must be the Go type of the dtype. ErrInvalid where it is not, for no view, and for a range
// outside of it; ErrClosed once the tensor was closed; the device's error otherwise.
func Read[T Element](v *View, dst []T, offset int64) error {
	if err := v.check("Read", DTypeOf[T](), offset, int64(len(dst))); err != nil {
		return err
	}
	return v.overlap(offset, int64(len(dst)), func(p device.Ptr, at, n int64) error {
		return v.device.CopyToHost(bytesOf(dst[at:at+n]), p)
	})
}

// Write copies src to the elements from offset on in row-major order, on any device, and blocks until they are there. It is ordered with no
// stream: synchronize first. T must be the Go type of the dtype. Its errors are those of [Read].
func Write[T Element](v *View, src []T, offset int64) error {
	if err := v.check("Write", DTypeOf[T](), offset, int64(len(src))); err != nil {
		return err
	}
	return v.overlap(offset, int64(len(src)), func(p device.Ptr, at, n int64) error {
		return v.device.CopyFromHost(p, bytesOf(src[at:at+n]))
	})
}

// ReadAll gives a copy of all elements in row-major order. See [Read].
func ReadAll[T Element](v *View) ([]T, error) {
	if err := errs.Given("ReadAll", "view", v, "a view of a tensor"); err != nil {
		return nil, err
	}
	if err := v.check("ReadAll", DTypeOf[T](), 0, 0); err != nil {
		return nil, err // before there is room made for them
	}
	all := make([]T, v.NumElements())
	if err := Read(v, all, 0); err != nil {
		return nil, err
	}
	return all, nil
}

func (v *View) check(op string, dtype DType, offset, n int64) error {
	if err := errs.Given(op, "view", v, "a view of a tensor"); err != nil {
		return err
	}
	if v.alive == nil {
		return errs.Invalid(op, "view", "the zero View", "a view of a tensor")
	}
	if err := v.alive(); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return named(v.name, v.fits(op, dtype, offset, n))
}

// fits says what is wrong with n elements of dtype from offset on.
func (v *View) fits(op string, dtype DType, offset, n int64) error {
	if dtype != v.dtype {
		return errs.Invalid(op, "element type", dtype, v.dtype.String()+", the dtype of the view")
	}
	if total := v.NumElements(); offset < 0 || offset > total || n > total-offset {
		return errs.Invalid(op, "range", fmt.Sprintf("%d elements at %d", n, offset), fmt.Sprintf("inside the %d elements of the view", total))
	}
	return nil
}

// overlap calls f for each run without a gap that has some of the n elements from offset on: the address of the first of
// them, its place counted from offset, and how many there are.
func (v *View) overlap(offset, n int64, f func(p device.Ptr, at, n int64) error) error {
	return v.rows(func(first, count int64, p device.Ptr) error {
		from, to := max(first, offset), min(first+count, offset+n)
		if from >= to {
			return nil
		}
		return f(p.Add((from-first)*v.dtype.Bytes()), from-offset, to-from)
	})
}

// bytesOf is the memory of s as bytes.
func bytesOf[T Element](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), uintptr(len(s))*unsafe.Sizeof(*new(T)))
}
