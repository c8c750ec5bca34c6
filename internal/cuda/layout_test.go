package cuda_test

import (
	"reflect"
	"regexp"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"

	cu "github.com/symmem/symmem/internal/cuda"
)

// The sizes and offsets are what a C compiler gave for cuda.h.
func TestLayouts(t *testing.T) {
	var (
		prop   cu.MemAllocationProp
		access cu.MemAccessDesc
		multi  cu.MulticastObjectProp
		config cu.LaunchConfig
		attr   cu.LaunchAttribute
		memOp  cu.BatchMemOp
		edge   cu.GraphEdgeData
	)
	for what, c := range map[string]struct{ got, want uintptr }{
		"UUID":         {unsafe.Sizeof(cu.UUID{}), 16},
		"FabricHandle": {unsafe.Sizeof(cu.FabricHandle{}), 64},
		"IPCMemHandle": {unsafe.Sizeof(cu.IPCMemHandle{}), 64},
		"MemHandle":    {unsafe.Sizeof(cu.MemHandle(0)), 8},
		"Result":       {unsafe.Sizeof(cu.Result(0)), 4},

		"MemLocation": {unsafe.Sizeof(prop.Location), 8},

		"MemAllocationProp":         {unsafe.Sizeof(prop), 32},
		"prop.requestedHandleTypes": {unsafe.Offsetof(prop.RequestedHandleTypes), 4},
		"prop.location.type":        {unsafe.Offsetof(prop.Location) + unsafe.Offsetof(prop.Location.Type), 8},
		"prop.location.id":          {unsafe.Offsetof(prop.Location) + unsafe.Offsetof(prop.Location.ID), 12},
		"prop.win32HandleMetaData":  {unsafe.Offsetof(prop.Win32HandleMetaData), 16},
		"prop.compressionType":      {unsafe.Offsetof(prop.CompressionType), 24},
		"prop.gpuDirectRDMACapable": {unsafe.Offsetof(prop.GPUDirectRDMACapable), 25},
		"prop.usage":                {unsafe.Offsetof(prop.Usage), 26},

		"MemAccessDesc":      {unsafe.Sizeof(access), 12},
		"MemAccessDesc[2]":   {unsafe.Sizeof([2]cu.MemAccessDesc{}), 24},
		"access.location.id": {unsafe.Offsetof(access.Location) + unsafe.Offsetof(access.Location.ID), 4},
		"access.flags":       {unsafe.Offsetof(access.Flags), 8},

		"MulticastObjectProp": {unsafe.Sizeof(multi), 32},
		"multi.size":          {unsafe.Offsetof(multi.Size), 8},
		"multi.handleTypes":   {unsafe.Offsetof(multi.HandleTypes), 16},
		"multi.flags":         {unsafe.Offsetof(multi.Flags), 24},

		"LaunchConfig":        {unsafe.Sizeof(config), 56},
		"config.blockDim":     {unsafe.Offsetof(config.Block), 12},
		"config.sharedMem":    {unsafe.Offsetof(config.SharedBytes), 24},
		"config.hStream":      {unsafe.Offsetof(config.Stream), 32},
		"config.attrs":        {unsafe.Offsetof(config.Attrs), 40},
		"config.numAttrs":     {unsafe.Offsetof(config.NumAttrs), 48},
		"LaunchAttribute":     {unsafe.Sizeof(attr), 72},
		"attr.value":          {unsafe.Offsetof(attr.Value), 8},
		"LaunchAttribute[2]":  {unsafe.Sizeof([2]cu.LaunchAttribute{}), 144},
		"BatchMemOp":          {unsafe.Sizeof(memOp), 48},
		"memOp.address":       {unsafe.Offsetof(memOp.Address), 8},
		"memOp.value":         {unsafe.Offsetof(memOp.Value), 16},
		"memOp.flags":         {unsafe.Offsetof(memOp.Flags), 24},
		"memOp.alias":         {unsafe.Offsetof(memOp.Alias), 32},
		"GraphEdgeData":       {unsafe.Sizeof(edge), 8},
		"edge.type":           {unsafe.Offsetof(edge.Type), 2},
		"IPCMemHandle.align4": {unsafe.Sizeof(cu.IPCMemHandle{}) % 8, 0},
	} {
		assert.Equal(t, c.want, c.got, what)
	}
}

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
