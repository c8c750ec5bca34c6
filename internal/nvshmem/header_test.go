package nvshmem

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/symmem/symmem/internal/cheader"
)

// TestHeader compares what this package knows of NVSHMEM's functions, values and structures with its headers.
func TestHeader(t *testing.T) {
	cheader.Run(t, "nvshmem", readHeader, func(c *cheader.Check) {
		for i, name := range resultNames {
			c.Const(name, int64(i))
		}
		for name, s := range map[string]Status{
			"NVSHMEM_STATUS_NOT_INITIALIZED": NotStarted, "NVSHMEM_STATUS_IS_BOOTSTRAPPED": Bootstrapped, "NVSHMEM_STATUS_IS_INITIALIZED": Started,
			"NVSHMEM_STATUS_LIMITED_MPG": LimitedMPG, "NVSHMEM_STATUS_FULL_MPG": FullMPG,
		} {
			c.Const(name, int64(s))
		}
		c.Const("NVSHMEM_TEAM_INVALID", int64(TeamInvalid))
		c.Const("NVSHMEM_TEAM_WORLD", int64(TeamWorld))
		c.Const("NVSHMEMX_INIT_WITH_UNIQUEID", withUniqueID)
		c.Const("NVSHMEM_VENDOR_MAJOR_VERSION", 3)

		c.Struct("nvshmemx_uniqueid_v1", reflect.TypeFor[UniqueID]())
		c.Struct("nvshmemx_init_attr_v1", reflect.TypeFor[initAttr]())
		c.Struct("nvshmemx_init_args_v1", reflect.TypeFor[initArgs]())
		c.Struct("nvshmemx_uniqueid_args_v1", reflect.TypeFor[idArgs]())
		c.Element("NVSHMEMX_UNIQUEID_INITIALIZER", 0, uniqueIDVersion)
		// NVSHMEM has a second version of the attributes since, and takes the first one all the same.
		initializer, a := "NVSHMEMX_INIT_ATTR_INITIALIZER", newInitAttr()
		if c.HasElement("NVSHMEMX_INIT_ATTR_V1_INITIALIZER", 0) {
			initializer = "NVSHMEMX_INIT_ATTR_V1_INITIALIZER"
		}
		// The second is the communicator of MPI, and the fifth the id: both NULL.
		for i, have := range map[int]int32{0: a.version, 2: a.args.version, 3: a.args.id.version, 5: a.args.id.rank, 6: a.args.id.ranks} {
			c.Element(initializer, i, int64(have))
		}

		for _, one := range new(functions).table(true) {
			c.Func(one.symbol, reflect.TypeOf(one.fn).Elem())
		}
		for dtype := range typeNames {
			for op := range opNames {
				c.Func(symbolOf(Reduce, dtype, op), reflect.TypeFor[collective]())
				c.Func(symbolOf(ReduceScatter, dtype, op), reflect.TypeFor[collective]())
			}
		}
		for _, dtype := range []string{"u8", "u32"} { // what the backend asks for
			c.Func(symbolOf(Broadcast, dtype, ""), reflect.TypeFor[broadcast]())
			c.Func(symbolOf(Collect, dtype, ""), reflect.TypeFor[collective]())
			c.Func(symbolOf(AllToAll, dtype, ""), reflect.TypeFor[collective]())
		}
	})
}

func readHeader(folder string) (*cheader.Header, error) {
	return cheader.Read(cheader.Options{
		Files:   []string{filepath.Join(folder, "nvshmem.h"), filepath.Join(folder, "nvshmemx.h")},
		Folders: []string{folder},
		Prelude: `typedef struct CUstream_st *cudaStream_t; typedef struct { short x; } half; typedef struct { short x; } __nv_bfloat16;`,
	})
}
