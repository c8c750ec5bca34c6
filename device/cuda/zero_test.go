package cuda_test

import (
	"context"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

// TestZeroDevice: methods of a Device that Open did not give do not panic: what can fail is ErrInvalid.
func TestZeroDevice(t *testing.T) {
	for i := range reflect.TypeFor[*cuda.Device]().NumMethod() {
		v := reflect.ValueOf(&cuda.Device{}) // a new one each time: one call may be Close
		call := v.Type().Method(i).Name
		var args []reflect.Value
		for n := range v.Method(i).Type().NumIn() {
			in := v.Method(i).Type().In(n)
			if in == reflect.TypeFor[context.Context]() {
				args = append(args, reflect.ValueOf(t.Context()))
				continue
			}
			args = append(args, reflect.Zero(in))
		}
		var results []reflect.Value
		if assert.NotPanics(t, func() { results = v.Method(i).Call(args) }, call) && len(results) > 0 {
			if last := results[len(results)-1]; last.Type() == reflect.TypeFor[error]() {
				err, _ := last.Interface().(error)
				assert.ErrorIs(t, err, device.ErrInvalid, call)
			}
		}
	}
}
