package command

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

func TestPeerUsage(t *testing.T) {
	for says, args := range map[string][]string{
		"auto, nccl, nvshmem, sglang, none": {"--peer", "mpi"},
		"has no u16":                        {"--peer", "nccl", "--dtype", "u16"},
		"no --peer-library":                 {"--peer", "sglang", "--dtype", "bf16"},
		"add that to --kind":                {"--peer", "nccl", "--kind", measure.Put},
	} {
		r := call(t, "", environ(), append([]string{"bench"}, args...)...)
		assert.Equal(t, exit.Usage, r.status, says)
		assert.Contains(t, r.err, says)
	}
}
