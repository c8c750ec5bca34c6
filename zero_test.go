package symmem_test

import (
	"context"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestZeroValues: methods of a zero value, and of a nil pointer, do not panic: what can fail is ErrInvalid, and the rest gives what there is, which is nothing.
func TestZeroValues(t *testing.T) {
	for _, zero := range []any{
		&memory.Memory{}, &memory.Heap{}, &memory.HeapAllocation{}, &memory.Window{}, &memory.Transfer{}, &memory.Signals{}, &memory.PreparedSend{}, &memory.WorkCopies{}, &memory.Workspace{},
		&tensor.Tensor{}, &tensor.View{}, &collective.Plan{}, &symmem.Rank{}, &group.Group{}, &group.Store{}, &kernels.Plan{}, &tensor.Heap{},
	} {
		for _, v := range []reflect.Value{reflect.ValueOf(zero), reflect.Zero(reflect.TypeOf(zero))} {
			for i := range v.NumMethod() {
				if slices.Contains([]string{"KeepPlans", "KeptPlans", "MakesSub", "Open"}, v.Type().Method(i).Name) {
					continue // of tests
				}
				call := v.Type().String() + "." + v.Type().Method(i).Name
				if v.IsNil() {
					call += " of nil"
				}
				var results []reflect.Value
				if assert.NotPanics(t, func() { results = v.Method(i).Call(arguments(t, v.Method(i).Type())) }, call) && len(results) > 0 {
					if last := results[len(results)-1]; last.Type() == reflect.TypeFor[error]() {
						err, _ := last.Interface().(error)
						assert.ErrorIs(t, err, symmem.ErrInvalid, call)
					}
				}
			}
		}
	}
}

// TestZeroMemory: whatever is made on a memory refuses a zero one.
func TestZeroMemory(t *testing.T) {
	ctx, m := t.Context(), &memory.Memory{}
	for call, err := range map[string]func() error{
		"collective.New":       func() error { _, err := collective.New(ctx, m, collective.Spec{Name: "none"}); return err },
		"kernels.NewBarrier":   func() error { _, err := kernels.NewBarrier(ctx, m, nil); return err },
		"kernels.MeasureSpeed": func() error { _, err := kernels.MeasureSpeed(ctx, m); return err },
		"tensor.Zeros":         func() error { _, err := tensor.Zeros(ctx, m, tensor.Float32, 1); return err },
		"tensor.FromPtr":       func() error { _, err := tensor.FromPtr(ctx, m, 16, tensor.Float32, 1); return err },
		"tensor.NewHeap":       func() error { _, err := tensor.NewHeap(ctx, m, 1); return err },
	} {
		assert.NotPanics(t, func() { assert.ErrorIs(t, err(), symmem.ErrInvalid, call) }, call)
	}
}

// arguments are a context for each of a function, and zero values for the rest.
func arguments(t *testing.T, f reflect.Type) []reflect.Value {
	var all []reflect.Value
	for i := range f.NumIn() {
		switch in := f.In(i); {
		case f.IsVariadic() && i == f.NumIn()-1:
		case in == reflect.TypeFor[context.Context]():
			all = append(all, reflect.ValueOf(t.Context()))
		default:
			all = append(all, reflect.Zero(in))
		}
	}
	return all
}
