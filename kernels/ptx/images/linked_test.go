package images_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	// The programs' own imports, so that a result in the cache of go test is not one of other code.
	_ "github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	_ "github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/ptx/images"
)

// TestLinked builds programs, and looks for kernels in them: those without a GPU backend have none, neither compressed nor as text,
// and those with one have the archive once and no more.
func TestLinked(t *testing.T) {
	compressed, err := os.ReadFile("kernels.z")
	require.NoError(t, err)
	text, err := images.Image(ptx.Barrier.File)
	require.NoError(t, err)
	traces := map[string][]byte{
		"the archive":          compressed,
		"its beginning":        compressed[:64],
		"PTX":                  text[bytes.Index(text, []byte(".version 8.4")):][:64],
		"the name of a kernel": []byte("symmem_allreduce_oneshot_ll_f32"),
		"this package":         []byte("symmem/kernels/ptx/images.Image"),
	}
	for program, want := range map[string]map[string]int{
		"host": {},
		"gpu":  {"the archive": 1, "its beginning": 1, "this package": -1},
	} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			binary := filepath.Join(t.TempDir(), program)
			build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./testdata/"+program)
			build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
			out, err := build.CombinedOutput()
			require.NoErrorf(t, err, "%s", out)
			b, err := os.ReadFile(binary)
			require.NoError(t, err)
			for what, trace := range traces {
				n := bytes.Count(b, trace)
				if want[what] < 0 {
					assert.Positive(t, n, what)
				} else {
					assert.Equal(t, want[what], n, what)
				}
			}
		})
	}
}
