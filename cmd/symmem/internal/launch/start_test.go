package launch

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRankEnviron(t *testing.T) {
	got := rankEnviron(
		[]string{"PATH=/bin", "SYMMEM_RANK=7", "SYMMEM_TOKEN=old", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=x", "SYMMEM_TIMEOUT=9s",
			"SYMMEM_BACKEND=a", "RANK=5", "GROUP_RANK=3", "OMPI_COMM_WORLD_RANK=2"},
		[]string{"SYMMEM_RANK=0", "SYMMEM_BACKEND=b"})
	assert.Equal(t, []string{"PATH=/bin", "SYMMEM_TIMEOUT=9s", "OMPI_COMM_WORLD_RANK=2", "SYMMEM_RANK=0", "SYMMEM_BACKEND=b"}, got)
}
