package kernels

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// TestRegisterAllReduce: a form is found by its name; a name that is taken, stands for something or is none is refused, and nothing is
// registered then.
func TestRegisterAllReduce(t *testing.T) {
	form := func(name string) AllReduceForm {
		return AllReduceForm{
			Name: name, AnyOrder: true, NeedsPeerPointers: true,
			Supports: func(kind device.Kind, _ tensor.DType, op Op, worldSize int) bool {
				return kind == device.CUDA && op == Max && worldSize == 3
			},
			Spec: func(tensor.SymmetricTensor, tensor.SymmetricTensor, Op, *AllReduceOptions) (collective.Spec, error) {
				return collective.Spec{}, nil
			},
		}
	}
	t.Cleanup(func() { registered.forms = nil })
	a := RegisterAllReduce(form("first"))
	b := RegisterAllReduce(form("second_2"))
	require.NotEqual(t, a, b)
	for name, want := range map[string]Algorithm{"first": a, "second_2": b} {
		got, err := ParseAlgorithm(name)
		require.NoError(t, err)
		assert.Equal(t, want, got)
		assert.Equal(t, name, got.String())
		assert.Contains(t, Algorithms(device.Host), got)
		assert.Contains(t, Algorithms(device.CUDA), got)
		assert.True(t, got.NeedsPeerPointers())
		assert.False(t, got.NeedsMulticast())
		assert.False(t, got.RankOrder())
		assert.Empty(t, got.Backend())
		assert.True(t, Supported(device.CUDA, got, tensor.Float32, Max, 3))
		assert.False(t, Supported(device.CUDA, got, tensor.Float32, Sum, 3))
		assert.False(t, Supported(device.Host, got, tensor.Float32, Max, 3))
	}
	_, err := ParseAlgorithm("third")
	require.ErrorIs(t, err, errs.ErrInvalid)
	assert.Contains(t, err.Error(), "two_shot_flow")
	assert.Contains(t, err.Error(), "second_2", "what there is")
	assert.False(t, (b + 1).known())
	assert.Contains(t, (b + 1).String(), "Algorithm(")

	noSupports, noSpec := form("third"), form("third")
	noSupports.Supports, noSpec.Spec = nil, nil
	for what, f := range map[string]AllReduceForm{
		"taken by this package": form("two_shot"), "taken by another": form("first"), "for all forms": form("all"), "for a choice": form("auto"),
		"empty": form(""), "capital": form("Mine"), "digit first": form("2nd"), "hyphen": form("a-b"), "long": form(strings.Repeat("a", 33)),
		"no Supports": noSupports, "no Spec": noSpec,
	} {
		_, err := register(f)
		require.ErrorIs(t, err, errs.ErrInvalid, what)
		assert.ErrorContains(t, err, "RegisterAllReduce", what)
		assert.Panics(t, func() { RegisterAllReduce(f) }, what)
	}
	assert.Len(t, registered.forms, 2)
}
