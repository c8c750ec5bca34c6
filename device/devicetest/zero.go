package devicetest

import (
	"context"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
)

// Zero calls every exported method of devices that were not opened, with zero arguments: none panics, and what can fail is ErrInvalid. zero returns a new one each
// time, as one call may be Close.
func Zero(t *testing.T, zero func() device.Device) {
	for i := range reflect.TypeOf(zero()).NumMethod() {
		v := reflect.ValueOf(zero())
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
