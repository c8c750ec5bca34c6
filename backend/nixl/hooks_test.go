package nixl

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestUnwatched: what matters is that UCX reaches GPUs without its module that watches their memory.
func TestUnwatched(t *testing.T) {
	const (
		line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 1234 /opt/nixl_cu12.libs/ucx/"
		uct  = line + "libuct_cuda.so.0.0.0\n"
		ucm  = line + "libucm_cuda.so.0.0.0\n"
		cpu  = line + "libuct_cma.so.0.0.0\n"
	)
	for maps, want := range map[string]bool{"": false, cpu: false, cpu + uct: true, uct + ucm: false, ucm: false} {
		assert.Equal(t, want, unwatched(maps), "%q", maps)
	}
}
