package cublas

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/symmem/symmem/internal/cheader"
)

// TestHeader compares what this package knows of cuBLAS's functions and values with its header.
func TestHeader(t *testing.T) {
	read := func(folder string) (*cheader.Header, error) {
		return cheader.Read(cheader.Options{
			Files: []string{filepath.Join(folder, "cublas_api.h")}, Folders: []string{folder}, Defines: map[string]string{"CUBLASAPI": ""},
			// Of CUDA's other headers.
			Prelude: "typedef struct CUstream_st *cudaStream_t; typedef enum cudaDataType_t { CUDA_R_16BF = 14 } cudaDataType_t; typedef cudaDataType_t cudaDataType;",
		})
	}
	cheader.Run(t, "cublas", read, func(c *cheader.Check) {
		for status, name := range statusNames {
			c.Const(name, int64(status))
		}
		c.Const("CUBLAS_OP_N", opN)
		c.Const("CUBLAS_COMPUTE_32F", compute32F)
		c.Const("CUBLAS_GEMM_DEFAULT", defaultWay)
		for _, one := range new(functions).table() {
			c.Func(one.symbol, reflect.TypeOf(one.fn).Elem())
		}
	})
}
