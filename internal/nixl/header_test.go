package nixl

import (
	"encoding/binary"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/internal/cheader"
)

// TestHeader compares what this package knows of NIXL's functions, values and structures with the header of its C interface. The
// statuses that only the interface to come has are in no header that was published, and so are not compared.
func TestHeader(t *testing.T) {
	cheader.Run(t, "nixl", readHeader, func(c *cheader.Check) {
		for s, name := range statusNames {
			if s > NotFound || s == NotFound && c.Version != "1.0.0" {
				c.Const("NIXL_CAPI_"+name, int64(s))
			}
		}
		c.Const("NIXL_CAPI_MEM_"+DRAM.String(), int64(DRAM))
		c.Const("NIXL_CAPI_MEM_"+VRAM.String(), int64(VRAM))
		c.Const("NIXL_CAPI_XFER_OP_READ", int64(Read))
		c.Const("NIXL_CAPI_XFER_OP_WRITE", int64(Write))
		c.Const("NIXL_CAPI_THREAD_SYNC_RW", syncRW)

		const name, delay = "nixl_capi_agent_config_t", 12345
		config := newAgentConfig(true, delay)
		c.Size(name, int64(len(config)))
		for _, f := range []struct {
			name             string
			offset, size, is int
		}{
			{"enable_prog_thread", 0, 1, 1}, {"enable_listen_thread", 1, 1, 0}, {"thread_sync", 8, 4, syncRW}, {"pthr_delay_us", 16, 8, delay},
			{"lthr_delay_us", 24, 8, delay}, {"capture_telemetry", 32, 1, 0},
		} {
			c.Field(name, f.name, int64(f.offset), int64(f.size))
			var b [8]byte
			copy(b[:], config[f.offset:f.offset+f.size])
			assert.EqualValues(t, f.is, binary.LittleEndian.Uint64(b[:]), f.name)
		}
		for _, one := range new(functions).table() {
			if one.name != "free" { // of the C library
				c.Func(one.name, reflect.TypeOf(one.fn).Elem())
			}
		}
	})
}

func readHeader(folder string) (*cheader.Header, error) {
	return cheader.Read(cheader.Options{Files: []string{filepath.Join(folder, "wrapper.h")}})
}
