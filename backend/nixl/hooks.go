package nixl

import (
	"fmt"
	"os"
	"strings"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// UCX remembers what it has found out about memory of GPUs, and forgets it when it sees the memory freed. That is the task of a separate module,
// libucm_cuda.so, which needs the toolkit's runtime library. If the module does not load, UCX only says so in its debugging log and goes on: memory
// is taken for the CPU's, peers cannot open it, or data goes to what was at an address before (seen on H200 with nixl-cu12 1.5.1 where
// libcudart.so.12 is missing).

// checkHooks refuses a library whose UCX reaches GPUs but does not see their memory freed.
func checkHooks(lib *nixl.Library) error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil // the system does not tell
	}
	if !unwatched(string(maps)) {
		return nil
	}
	runtime := "libcudart.so"
	if v := lib.CUDA(); v > 0 {
		runtime = fmt.Sprintf("libcudart.so.%d", v)
	}
	return fmt.Errorf("NIXL is there (%s), and its UCX does not see when memory of GPUs is freed, so transfers could go wrong: its module libucm_cuda.so "+
		"does not load, most likely for want of %s; install the CUDA runtime of that version where the loader finds it (the Python package "+
		"nvidia-cuda-runtime has it; LD_LIBRARY_PATH), or NIXL for the CUDA that is installed: %w", lib.Path(), runtime, errs.ErrUnsupported)
}

// unwatched reports whether UCX's module for GPUs is among the mapped files, and the module that watches their memory is not.
func unwatched(maps string) bool {
	return strings.Contains(maps, "/libuct_cuda.so") && !strings.Contains(maps, "/libucm_cuda.so")
}
