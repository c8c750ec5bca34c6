package collective

import (
	"encoding/binary"
	"fmt"
	"reflect"

	"github.com/symmem/symmem/internal/errs"
)

// params lays the parameters out as the kernel takes them.
func (k *Kernel) params(a *Addresses) ([][]byte, error) {
	if k.Params == nil {
		return nil, nil
	}
	var all [][]byte
	for i, v := range k.Params(a) {
		b, err := param(i, v)
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return all, a.err
}

// param is one parameter: as it is in memory.
func param(i int, v any) ([]byte, error) {
	if b, ok := v.([]byte); ok {
		return b, nil
	}
	what := fmt.Sprintf("%T", v)
	t := reflect.TypeOf(v)
	if t != nil && fixed(t) {
		b, err := binary.Append(nil, binary.NativeEndian, v)
		if err == nil && len(b) > 0 && uintptr(len(b)) == t.Size() {
			return b, nil
		}
		what += fmt.Sprintf(" of %d bytes, of which %d are in fields", t.Size(), len(b))
	}
	return nil, errs.Invalid("New", fmt.Sprintf("Params[%d]", i), what,
		"int8 to int64, uint8 to uint64, float32, float64, device.Ptr, an array of these or a struct whose padding is in fields called _, or []byte")
}

// fixed reports whether values of the type are the same on every computer, and in kernels.
func fixed(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64:
		return true
	case reflect.Array:
		return fixed(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if !fixed(t.Field(i).Type) {
				return false
			}
		}
		return true
	}
	return false
}
