package tensor

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Shape is the size of each dimension, the slowest first. An empty shape is a scalar: one element.
type Shape []int64

// NumElements is the product of the dimensions: 1 for a scalar, 0 if one of them is. Shapes of tensors were checked; in others it may overflow.
func (s Shape) NumElements() int64 {
	n := int64(1)
	for _, d := range s {
		n *= d
	}
	return n
}

// String gives the shape as [4096 1024].
func (s Shape) String() string {
	dims := make([]string, len(s))
	for i, d := range s {
		dims[i] = strconv.FormatInt(d, 10)
	}
	return "[" + strings.Join(dims, " ") + "]"
}

// checkShape gives the number of bytes that a tensor of the shape and dtype takes, or says what is wrong with them.
func checkShape(op string, dtype DType, shape Shape) (int64, error) {
	if !dtype.Valid() {
		return 0, errs.Invalid(op, "dtype", dtype, fmt.Sprint(DTypes()))
	}
	for i, d := range shape {
		if d < 0 {
			return 0, errs.Invalid(op, fmt.Sprintf("shape[%d]", i), d, "0 or more")
		}
	}
	bytes := uint64(dtype.Bytes())
	for _, d := range shape {
		if d == 0 {
			return 0, nil
		}
	}
	for i, d := range shape {
		over, product := bits.Mul64(bytes, uint64(d))
		if over != 0 || product > math.MaxInt64 {
			return 0, errs.Invalid(op, fmt.Sprintf("shape[%d]", i), d, fmt.Sprintf("a shape of at most %d bytes in all (%v of %s has more)", int64(math.MaxInt64), shape, dtype))
		}
		bytes = product
	}
	return int64(bytes), nil
}
