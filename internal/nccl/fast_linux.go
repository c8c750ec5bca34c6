//go:build amd64 || arm64

package nccl

import "github.com/symmem/symmem/internal/dl"

// bindFast binds the function that is called again and again with [dl.Call], which is faster. All of its arguments are numbers.
func bindFast(lib *dl.Library, f *Functions) {
	p, err := lib.Symbol("ncclAllReduce")
	if err != nil {
		return // the table says so
	}
	f.AllReduce = func(send, recv uint64, count uintptr, t DataType, op Op, comm CommHandle, stream uintptr) Result {
		return Result(int32(dl.Call(p, 7, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(comm), stream)))
	}
}
