//go:build amd64 || arm64

package nccl

import "github.com/symmem/symmem/internal/dl"

// bindFast binds the functions that are called again and again with [dl.Call], which is faster. All of their arguments are numbers.
func bindFast(lib *dl.Library, f *Functions) {
	// Where there is no such symbol, the table says so.
	if p, err := lib.Symbol("ncclAllReduce"); err == nil {
		f.AllReduce = func(send, recv uint64, count uintptr, t DataType, op Op, comm CommHandle, stream uintptr) Result {
			return Result(int32(dl.Call(p, 7, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(comm), stream)))
		}
	}
	if p, err := lib.Symbol("ncclBroadcast"); err == nil {
		f.Broadcast = func(send, recv uint64, count uintptr, t DataType, root int32, comm CommHandle, stream uintptr) Result {
			return Result(int32(dl.Call(p, 7, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(comm), stream)))
		}
	}
	if p, err := lib.Symbol("ncclReduceScatter"); err == nil {
		f.ReduceScatter = func(send, recv uint64, count uintptr, t DataType, op Op, comm CommHandle, stream uintptr) Result {
			return Result(int32(dl.Call(p, 7, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(comm), stream)))
		}
	}
	if p, err := lib.Symbol("ncclAllGather"); err == nil {
		f.AllGather = func(send, recv uint64, count uintptr, t DataType, comm CommHandle, stream uintptr) Result {
			return Result(int32(dl.Call(p, 6, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(comm), stream, 0)))
		}
	}
	for symbol, message := range map[string]*func(p uint64, count uintptr, t DataType, peer int32, comm CommHandle, stream uintptr) Result{
		"ncclSend": &f.Send, "ncclRecv": &f.Recv,
	} {
		if at, err := lib.Symbol(symbol); err == nil {
			*message = func(p uint64, count uintptr, t DataType, peer int32, comm CommHandle, stream uintptr) Result {
				return Result(int32(dl.Call(at, 6, uintptr(p), count, uintptr(t), uintptr(peer), uintptr(comm), stream, 0)))
			}
		}
	}
	if p, err := lib.Symbol("ncclAlltoAll"); err == nil {
		f.AllToAll = func(send, recv uint64, count uintptr, t DataType, comm CommHandle, stream uintptr) Result {
			return Result(int32(dl.Call(p, 6, uintptr(send), uintptr(recv), count, uintptr(t), uintptr(comm), stream, 0)))
		}
	}
}
