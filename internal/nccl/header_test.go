package nccl

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/cheader"
)

// TestHeader compares what this package knows of NCCL's functions, values and structures with nccl.h and the headers of its device
// interface, for each version with other ones.
func TestHeader(t *testing.T) {
	cheader.Run(t, "nccl", readHeader, func(c *cheader.Check) {
		var major, minor, patch int32
		_, err := fmt.Sscanf(c.Version, "%d.%d.%d", &major, &minor, &patch)
		require.NoError(t, err)
		v := Version(10000*major + 100*minor + patch)

		c.Const("NCCL_VERSION_CODE", int64(v))
		for _, names := range [][]string{resultNames[:], dataTypeNames[:], opNames[:]} {
			for i, name := range names {
				c.Const(name, int64(i))
			}
		}
		c.Const("NCCL_WIN_DEFAULT", int64(WindowDefault))
		c.Const("NCCL_WIN_COLL_SYMMETRIC", int64(WindowSymmetric))
		c.Const("NCCL_WIN_REQUIRED_ALIGNMENT", WindowAlignment)
		c.Const("NCCL_UNIQUE_ID_BYTES", UniqueIDBytes)
		c.Size("ncclUniqueId", UniqueIDBytes)
		for _, table := range []any{Functions{}, Multicast{}} {
			eachFunction(ptr(table), func(f reflect.Value, symbol string, _ bool) {
				if v >= introduced[symbol] {
					c.Func(symbol, f.Type())
				} else {
					c.NoFunc(symbol)
				}
			})
		}
		compareConfig(c, v)
		if v >= firstLayout && v <= lastLayout {
			compareWindow(t, c)
			compareDevComm(t, c, v)
		}
		c.Struct("ncclTeam_t", reflect.TypeFor[Team]())
		if v >= introduced["ncclCommQueryProperties"] {
			c.Field("ncclCommProperties_t", "size", 0, 8)
			c.Field("ncclCommProperties_t", "magic", 8, 4)
			c.Field("ncclCommProperties_t", "version", 12, 4)
			c.Field("ncclCommProperties_t", "multimemSupport", propertiesMultimemSupport, 1)
		}
		switch at, bytes, version := putProperty(v); {
		case bytes == 0:
		case version == propertiesVersion:
			c.Field("ncclCommProperties_t", "ginType", int64(at), 1)
		default:
			c.Field("ncclCommProperties_t", "hostRmaSupport", int64(at), 1)
			assert.LessOrEqual(t, at, bytes)
		}
		if v == putProperties {
			c.Size("ncclCommProperties_t", putPropertiesBytes)
		}
		if v == propertiesVersion {
			c.Size("ncclCommProperties_t", propertiesBytes)
		}
	})
}

// ptr returns the address of a copy of a table.
func ptr(table any) any {
	p := reflect.New(reflect.TypeOf(table))
	p.Elem().Set(reflect.ValueOf(table))
	return p.Interface()
}

// readHeader reads the headers, or what NVIDIA's package for Python has of them: the library's own package is large.
func readHeader(folder string) (*cheader.Header, error) {
	if cython := filepath.Join(folder, "cynccl.pxd"); exists(cython) && !exists(filepath.Join(folder, "nccl.h")) {
		return cheader.ReadCython(cython)
	}
	return cheader.Read(cheader.Options{
		Files:   []string{filepath.Join(folder, "nccl.h"), filepath.Join(folder, "nccl_device.h")},
		Folders: []string{folder},
		Prelude: "typedef struct CUstream_st *cudaStream_t; typedef struct CUevent_st *cudaEvent_t;",
		Defines: map[string]string{"CUDART_VERSION": "12040"},
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// compareConfig compares as much of ncclConfig_t as this version of the library is given.
func compareConfig(c *cheader.Check, v Version) {
	const name = "ncclConfig_t"
	given := new(Config).layout(v)
	of := reflect.TypeFor[ConfigLayout]()
	for i := range of.NumField() {
		if f := of.Field(i); f.Offset < given.Size {
			c.Field(name, f.Tag.Get("c"), int64(f.Offset), int64(f.Type.Size()))
		}
	}
	if v >= configFirst232 {
		c.Size(name, int64(given.Size))
		c.Const("ncclNvlsHostModeDisable", nvlsHostDisable)
	}
	c.Const("NCCL_CONFIG_UNDEF_INT", undefined)
	c.Element("NCCL_CONFIG_INITIALIZER", 1, configMagic)
}

// compareWindow compares where DecodeWindow finds the fields of a window's structure.
func compareWindow(t *testing.T, c *cheader.Check) {
	const name = "struct ncclWindow_vidmem"
	l, b := WindowLayout{FlatBase: 1 << 40, LsaRank: 2, WorldRank: 3, Stride4G: 4}, make([]byte, LayoutBytes)
	for _, f := range []struct {
		name         string
		offset, size int
		value        uint64
	}{
		{"lsaFlatBase", 8, 8, l.FlatBase}, {"lsaRank", 16, 4, uint64(l.LsaRank)}, {"worldRank", 20, 4, uint64(l.WorldRank)}, {"stride4G", 24, 4, uint64(l.Stride4G)},
	} {
		c.Field(name, f.name, int64(f.offset), int64(f.size))
		if f.size == 8 {
			binary.LittleEndian.PutUint64(b[f.offset:], f.value)
		} else {
			binary.LittleEndian.PutUint32(b[f.offset:], uint32(f.value))
		}
	}
	found, err := DecodeWindow(firstLayout, b)
	require.NoError(t, err)
	assert.Equal(t, l, found)
}

// compareDevComm compares the structures of a device communicator, and what devCommRequirements fills in.
func compareDevComm(t *testing.T, c *cheader.Check, v Version) {
	const name = "ncclDevCommRequirements_t"
	const barriers = 0x1234
	b, size, err := devCommRequirements(v, barriers)
	require.NoError(t, err)
	c.Size(name, int64(len(b)))
	c.Size("ncclDevComm_t", int64(size))
	number := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	layout := devCommLayouts[0]
	for _, l := range devCommLayouts {
		if v >= l.from {
			layout = l
		}
	}
	c.Field(name, "lsaBarrierCount", int64(layout.lsaBarriers), 4)
	assert.EqualValues(t, barriers, number(layout.lsaBarriers))
	if layout.header {
		c.Field(name, "size", 0, 8)
		c.Field(name, "magic", 8, 4)
		c.Field(name, "version", 12, 4)
		c.Element("NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER", 1, int64(number(8)))
		c.Element("NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER", 2, int64(number(12)))
	}
	if layout.contexts > 0 {
		c.Field(name, "ginContextCount", int64(layout.contexts), 4)
		// Size, magic, version, two lists, whether multicast, two counts of barriers, one of rails, two of slots, whether to force: the
		// twelve before it.
		c.Element("NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER", 12, int64(number(layout.contexts)))
	}
}
