package testneed_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/testneed"
)

// recorder is a test that notes how it ends.
type recorder struct {
	testing.TB
	end string
}

func (r *recorder) Helper() {}

func (r *recorder) Skip(args ...any) {
	r.end = "skipped: " + fmt.Sprint(args...)
	runtime.Goexit()
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.end = "failed: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// TestMissing: what is required is never skipped, and nothing else fails.
func TestMissing(t *testing.T) {
	for _, tt := range []struct {
		require     string
		missing     string // skipped for cuda
		missingGPUs string // skipped for 2 GPUs
	}{
		{"", "skipped: cuda is missing: why", "skipped: there are fewer than 2 GPUs: why"},
		{"nccl,cudas,gpus=1", "skipped: cuda is missing: why", "skipped: there are fewer than 2 GPUs: why"},
		{"nccl, cuda ,gpus=2", "failed: SYMMEM_TEST_REQUIRE names cuda, which is missing: why", "failed: SYMMEM_TEST_REQUIRE has gpus=2, and there are fewer than 2 GPUs: why"},
		{"cuda,gpus=16", "failed: SYMMEM_TEST_REQUIRE names cuda, which is missing: why", "failed: SYMMEM_TEST_REQUIRE has gpus=16, and there are fewer than 2 GPUs: why"},
		{"gpus=two", "skipped: cuda is missing: why", "failed: SYMMEM_TEST_REQUIRE has gpus=two, and there are fewer than 2 GPUs: why"},
	} {
		t.Setenv("SYMMEM_TEST_REQUIRE", tt.require)
		run := func(f func(t testing.TB)) string {
			r := &recorder{TB: t}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				f(r)
			}()
			<-ended
			return r.end
		}
		require.Equal(t, tt.missing, run(func(t testing.TB) { testneed.Missing(t, "cuda", "why") }), tt.require)
		require.Equal(t, tt.missingGPUs, run(func(t testing.TB) { testneed.MissingGPUs(t, 2, "why") }), tt.require)
	}
}
