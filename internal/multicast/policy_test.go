package multicast

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

func TestPolicy(t *testing.T) {
	for _, tt := range []struct {
		setting, name, value string
		must, forbidden      bool
	}{
		{"", "", "", false, false},
		{"auto", "NCCL_NVLS_ENABLE", "0", false, true},
		{"auto", "NCCL_NVLS_ENABLE", " 0 ", false, true},
		{"auto", "NCCL_NVLS_ENABLE", "2", false, false},
		{"auto", "NVSHMEM_DISABLE_NVLS", "1", false, true},
		{"auto", "NVSHMEM_DISABLE_NVLS", "No", false, false},
		{"", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "yes", false, true},
		{"off", "", "", false, true},
		{"on", "NCCL_NVLS_ENABLE", "0", true, false}, // what is asked for goes before what others were told
	} {
		p, err := NewPolicy("New", tt.setting, func(name string) string {
			if name == tt.name {
				return tt.value
			}
			return ""
		})
		require.NoError(t, err)
		assert.Equal(t, tt.must, p.Must, "%+v", tt)
		assert.Equal(t, tt.forbidden, p.Forbidden != "", "%+v", tt)
		if tt.name != "" && tt.forbidden {
			assert.Contains(t, p.Forbidden, tt.name)
		}
	}
	_, err := NewPolicy("New", "perhaps", func(string) string { return "" })
	require.ErrorIs(t, err, errs.ErrInvalid)
	assert.ErrorContains(t, err, "auto, on or off")
}
