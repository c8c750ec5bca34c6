package native

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/memory"
)

// TestErrorsKeepTheCode: what the driver has said of a call can be asked of the error that a rank gets at the end, through the backend,
// the vote of the ranks and the memory above them.
func TestErrorsKeepTheCode(t *testing.T) {
	for call, inRendezvous := range map[string]bool{
		"cuMemCreate": false, "cuMemMap": false, "cuMemSetAccess": false, "cuMemExportToShareableHandle": true, "cuMemImportFromShareableHandle": true,
	} {
		t.Run(call, func(t *testing.T) {
			const victim = 1
			m := newMachine(2)
			name, text := []byte("CUDA_ERROR_OPERATING_SYSTEM\x00"), []byte("OS call failed\x00")
			failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o := m.plain(g.Rank())
				o.Driver.GetErrorName = func(_ cu.Result, p **byte) cu.Result { *p = &name[0]; return cu.Success }
				o.Driver.GetErrorString = func(_ cu.Result, p **byte) cu.Result { *p = &text[0]; return cu.Success }
				return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
					if err := backendtest.WithWindow(ctx, mem, 64, nil); err != nil {
						return err
					}
					if g.Rank() == victim {
						m.failing(call, victim, 0, cu.OperatingSystem)
					}
					if err := g.Barrier(ctx, "failing"); err != nil {
						return err
					}
					return backendtest.WithWindow(ctx, mem, 3*granule, nil)
				})
			})
			require.ErrorContains(t, failed[0], "rank 1")
			var native *cuda.Error
			require.ErrorAs(t, failed[victim], &native)
			assert.Equal(t, cuda.Error{Library: "CUDA driver", Call: call, Code: 304, Name: "CUDA_ERROR_OPERATING_SYSTEM", Text: "OS call failed"}, *native)
			if inRendezvous { // those who only hear of it are told as much
				assert.ErrorContains(t, failed[0], native.Error())
			}
			assert.Empty(t, m.left())
		})
	}
}
