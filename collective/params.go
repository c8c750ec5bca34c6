package collective

import (
	"encoding/binary"
	"fmt"

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

// param is one parameter. A struct is as it is in memory if it has no padding, or names it.
func param(i int, v any) ([]byte, error) {
	if b, ok := v.([]byte); ok {
		return b, nil
	}
	b, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil || len(b) == 0 {
		return nil, errs.Invalid("New", fmt.Sprintf("Params[%d]", i), fmt.Sprintf("%T", v),
			"int8 to int64, uint8 to uint64, float32, float64, device.Ptr, a struct or an array of these, or []byte")
	}
	return b, nil
}
