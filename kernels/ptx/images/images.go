// Package images carries the compiled CUDA kernels that [ptx.Kernel] names. A program has them if it imports this package, directly
// or through a backend whose devices run them: backend/native, nccl, nvshmem and nixl import it for their own. Whoever writes another
// such backend imports it too:
//
//	import _ "github.com/symmem/symmem/kernels/ptx/images"
//
// A program without such a backend carries none of it.
//
// kernels.z is made from kernels/cuda by kernels/gen, which `go generate ./kernels/...` runs; kernels/gen/archive.py says what is in
// it, and prints it. Its files are for compute capability 8.0 and any later, those whose names end in _sm90 and multimem.ptx for 9.0
// and later; PTX ISA 8.4 needs a driver of the 550 series or later.
package images

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/symmem/symmem/kernels/ptx"
)

//go:generate python3 ../../gen/gen.py

//go:embed kernels.z
var compressed []byte

// Opening the archive costs some milliseconds and a megabyte, once, when the first kernel is loaded.
var opened = sync.OnceValues(func() (*archive, error) { return open(compressed) })

func init() { ptx.Register(Image) }

// texts are the files that somebody asked for: a program makes many plans of few kernels.
var texts sync.Map

// Image is the PTX of a file that a [ptx.Kernel] names, to be given to the driver, and must not be changed. Safe for concurrent use. It
// fails if there is no such file.
func Image(file string) ([]byte, error) {
	if text, ok := texts.Load(file); ok {
		return text.([]byte), nil
	}
	a, err := opened()
	if err != nil {
		return nil, fmt.Errorf("reading the compiled kernels: %w", err)
	}
	image, err := a.image(file)
	if err != nil {
		return nil, fmt.Errorf("reading the compiled kernels: %w", err)
	}
	texts.Store(file, image)
	return image, nil
}

// Files lists all files, sorted.
func Files() ([]string, error) {
	a, err := opened()
	if err != nil {
		return nil, fmt.Errorf("reading the compiled kernels: %w", err)
	}
	return slices.Sorted(maps.Keys(a.modules)), nil
}
