package cublas

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// LibraryEnv names the environment variable with the library's file or the folder it is in, which [Load] reads.
const LibraryEnv = "SYMMEM_CUBLAS_LIBRARY"

const libraryName = "cuBLAS"

// Status is a cublasStatus_t.
type Status int32

// Success is the status of a call that has not failed.
const Success Status = 0

var statusNames = map[Status]string{
	Success: "CUBLAS_STATUS_SUCCESS", 1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED", 7: "CUBLAS_STATUS_INVALID_VALUE",
	8: "CUBLAS_STATUS_ARCH_MISMATCH", 11: "CUBLAS_STATUS_MAPPING_ERROR", 13: "CUBLAS_STATUS_EXECUTION_FAILED", 14: "CUBLAS_STATUS_INTERNAL_ERROR",
	15: "CUBLAS_STATUS_NOT_SUPPORTED", 16: "CUBLAS_STATUS_LICENSE_ERROR",
}

// String returns the name in cublas_api.h.
func (s Status) String() string {
	if name, known := statusNames[s]; known {
		return name
	}
	return fmt.Sprintf("cublasStatus_t %d", int32(s))
}

// check is nil after success, and else an error that has the call and the status.
func check(call string, s Status) error {
	if s == Success {
		return nil
	}
	return fmt.Errorf("%s: %v (%d)", call, s, int32(s))
}

// The values of arguments of cublasGemmEx.
const (
	opN        = 0  // CUBLAS_OP_N: as it lies
	r16BF      = 14 // CUDA_R_16BF, of library_types.h
	compute32F = 68 // CUBLAS_COMPUTE_32F
	defaultWay = -1 // CUBLAS_GEMM_DEFAULT
)

// functions are the library's functions. Each has the type that cublas_api.h declares, with the GPU's addresses as numbers.
type functions struct {
	create    func(handle *uintptr) Status
	destroy   func(handle uintptr) Status
	version   func(handle uintptr, version *int32) Status
	setStream func(handle, stream uintptr) Status
	gemmEx    func(handle uintptr, transA, transB, m, n, k int32, alpha *float32, a uint64, typeA, ldA int32, b uint64, typeB, ldB int32,
		beta *float32, c uint64, typeC, ldC int32, compute, algorithm int32) Status
}

// table lists the functions with their symbols.
func (f *functions) table() []function {
	return []function{
		{"cublasCreate_v2", &f.create}, {"cublasDestroy_v2", &f.destroy}, {"cublasGetVersion_v2", &f.version},
		{"cublasSetStream_v2", &f.setStream}, {"cublasGemmEx", &f.gemmEx},
	}
}

type function struct {
	symbol string
	fn     any
}

// Library is a loaded cuBLAS, which is never unloaded. It may be used by several goroutines at once.
type Library struct {
	path string
	call functions
}

// search says where the library may be: where the loader looks, where CUDA's own installation is, and where Python's package managers put it.
func search() dl.Search {
	s := dl.Search{
		Library: libraryName, Env: LibraryEnv, Names: []string{"libcublas.so.13", "libcublas.so.12"}, Logger: slog.New(slog.DiscardHandler),
		Hint: "install cuBLAS (the Python package nvidia-cublas), or name its file in " + LibraryEnv,
	}
	roots := []string{"/usr/local", "/usr", "~/.local", "/opt/*/.venv", "/opt/*"}
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		roots = append([]string{venv}, roots...)
	}
	for _, root := range roots {
		for _, wheel := range []string{"cu13", "cublas"} { // the packages for CUDA 13, and 12
			s.Folders = append(s.Folders, filepath.Join(root, "lib/python3*/*-packages/nvidia", wheel, "lib"))
		}
	}
	s.Folders = append(s.Folders, "/usr/local/cuda/lib64")
	return s
}

// Load finds and loads the library. It starts nothing and touches no GPU. A library that is not there is ErrUnavailable, with all places where it
// was looked for; one that lacks a function is ErrUnsupported.
func Load() (*Library, error) {
	lib, err := dl.Open(search())
	if err != nil {
		return nil, err
	}
	l := &Library{path: lib.Path()}
	for _, one := range l.call.table() {
		if err := lib.Bind(one.fn, one.symbol); err != nil {
			return nil, fmt.Errorf("binding %s: %w", libraryName, err)
		}
	}
	return l, nil
}

// Path is the library's file.
func (l *Library) Path() string { return l.path }

// Handle is cuBLAS on the context that was current when it was made. It is for one goroutine at a time.
type Handle struct {
	lib     *Library
	handle  uintptr
	version int32
}

// New makes a handle, with what cuBLAS takes of the GPU's memory for itself.
func (l *Library) New() (*Handle, error) {
	h := &Handle{lib: l}
	if err := check("cublasCreate", l.call.create(&h.handle)); err != nil {
		return nil, err
	}
	if err := check("cublasGetVersion", l.call.version(h.handle, &h.version)); err != nil {
		l.call.destroy(h.handle)
		return nil, err
	}
	return h, nil
}

// Version is that of the library: "12.4.5".
func (h *Handle) Version() string {
	return fmt.Sprintf("%d.%d.%d", h.version/10000, h.version/100%100, h.version%100)
}

// SetStream lets products that are enqueued from now on go to a stream, of which it takes the handle.
func (h *Handle) SetStream(stream uintptr) error {
	return check("cublasSetStream", h.lib.call.setStream(h.handle, stream))
}

// Multiply enqueues c = a × b of square matrices of bf16, with side × side elements each, whose products are added in float32. A side is at least 1.
func (h *Handle) Multiply(side int32, a, b, c uint64) error {
	if side < 1 {
		return errs.Invalid("Multiply", "side", side, "at least 1")
	}
	one, zero := float32(1), float32(0)
	return check("cublasGemmEx", h.lib.call.gemmEx(h.handle, opN, opN, side, side, side, &one, a, r16BF, side, b, r16BF, side, &zero, c, r16BF, side,
		compute32F, defaultWay))
}

// Close waits for what was enqueued and gives the handle back.
func (h *Handle) Close() error {
	return check("cublasDestroy", h.lib.call.destroy(h.handle))
}
