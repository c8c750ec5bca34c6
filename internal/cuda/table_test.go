package cuda_test

import (
	"reflect"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"

	cu "github.com/symmem/symmem/internal/cuda"
)

// Every function of the table must name its symbol, and pass only what the calling convention passes in integer registers.
func TestTableIsWellFormed(t *testing.T) {
	symbol := regexp.MustCompile(`^cu[A-Z][A-Za-z0-9]*(_v[2-9])?$`)
	seen := map[string]string{}
	for _, table := range []any{cu.Driver{}, cu.Multicast{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(table)) {
			if field.Type.Kind() != reflect.Func || field.Name == "MulticastSource" {
				continue
			}
			tag, ok := field.Tag.Lookup("cuda")
			if !assert.True(t, ok, field.Name) {
				continue
			}
			name, rest := tag, ""
			for i, r := range tag {
				if r == ',' {
					name, rest = tag[:i], tag[i+1:]
				}
			}
			assert.Regexp(t, symbol, name)
			assert.Contains(t, []string{"", "required"}, rest, field.Name)
			if other := seen[name]; other != "" {
				assert.Contains(t, []string{"MemExportFabric", "MemImportFabric"}, field.Name, "%s is bound to %s twice", name, other)
			}
			seen[name] = field.Name
			require := reflect.TypeFor[cu.Result]()
			if assert.Equal(t, 1, field.Type.NumOut(), field.Name) {
				assert.Equal(t, require, field.Type.Out(0), field.Name)
			}
			for i := range field.Type.NumIn() {
				switch in := field.Type.In(i); in.Kind() {
				case reflect.Float32, reflect.Float64, reflect.Int, reflect.Uint, reflect.Interface, reflect.Slice, reflect.Map:
					assert.Failf(t, "a type that C does not have there", "%s: %v", field.Name, in)
				}
			}
		}
	}
	// The old names of these have another meaning: 32-bit sizes, or other structs.
	for _, old := range []string{"cuMemAlloc", "cuMemFree", "cuMemcpyHtoD", "cuStreamWaitValue32", "cuStreamDestroy", "cuEventDestroy",
		"cuCtxPushCurrent", "cuDevicePrimaryCtxRelease", "cuMemHostGetDevicePointer", "cuIpcOpenMemHandle", "cuDeviceGetUuid"} {
		assert.NotContains(t, seen, old)
	}
}
