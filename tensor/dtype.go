package tensor

import (
	"fmt"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// DType is the type of a tensor's elements.
type DType int

// The dtypes.
const (
	Float16  DType = iota + 1 // IEEE 754 binary16
	BFloat16                  // the upper half of a float32
	Float32
	Float64
	Int8
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
)

var dtypes = [...]struct {
	name  string
	bytes int64
}{
	Float16: {"f16", 2}, BFloat16: {"bf16", 2}, Float32: {"f32", 4}, Float64: {"f64", 8},
	Int8: {"i8", 1}, Int16: {"i16", 2}, Int32: {"i32", 4}, Int64: {"i64", 8},
	Uint8: {"u8", 1}, Uint16: {"u16", 2}, Uint32: {"u32", 4}, Uint64: {"u64", 8},
}

// DTypes lists all dtypes, in a slice of the caller's own.
func DTypes() []DType {
	all := make([]DType, 0, len(dtypes)-1)
	for d := Float16; d <= Uint64; d++ {
		all = append(all, d)
	}
	return all
}

// Valid reports whether d is one of the dtypes.
func (d DType) Valid() bool { return d >= Float16 && d <= Uint64 }

// Bytes is the size of one element in bytes; 0 for an unknown dtype.
func (d DType) Bytes() int64 {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].bytes
}

// IsFloat reports whether d is a floating-point type.
func (d DType) IsFloat() bool { return d >= Float16 && d <= Float64 }

// String gives the short name, as "bf16", and "DType(99)" for an unknown dtype.
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", int(d))
	}
	return dtypes[d].name
}

// ParseDType gives the dtype of a short name, such as "bf16". ErrInvalid, with all names, for any other.
func ParseDType(name string) (DType, error) {
	var names []string
	for _, d := range DTypes() {
		if d.String() == name {
			return d, nil
		}
		names = append(names, d.String())
	}
	return 0, errs.Invalid("ParseDType", "name", fmt.Sprintf("%q", name), strings.Join(names, ", "))
}

// Element is a Go type that holds one element of a tensor, each of one dtype: see [DTypeOf]. 16-bit floats have types of their own, which
// hold their bits.
type Element interface {
	F16 | BF16 | float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

// DTypeOf is the dtype whose elements have the Go type T.
func DTypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case F16:
		return Float16
	case BF16:
		return BFloat16
	case float32:
		return Float32
	case float64:
		return Float64
	case int8:
		return Int8
	case int16:
		return Int16
	case int32:
		return Int32
	case int64:
		return Int64
	case uint8:
		return Uint8
	case uint16:
		return Uint16
	case uint32:
		return Uint32
	}
	return Uint64
}
