package nccl

import (
	"fmt"
	"strconv"
)

// The values and layouts below are those of nccl.h of NCCL 2.23 to 2.32, in which they are the same.

// Result is an ncclResult_t.
type Result int32

// The results.
const (
	Success            Result = 0
	UnhandledCudaError Result = 1
	SystemError        Result = 2
	InternalError      Result = 3
	InvalidArgument    Result = 4
	InvalidUsage       Result = 5
	RemoteError        Result = 6 // another rank has died, or the network to it
	InProgress         Result = 7 // only of communicators that do not block
)

var resultNames = [...]string{
	Success: "ncclSuccess", UnhandledCudaError: "ncclUnhandledCudaError", SystemError: "ncclSystemError",
	InternalError: "ncclInternalError", InvalidArgument: "ncclInvalidArgument", InvalidUsage: "ncclInvalidUsage",
	RemoteError: "ncclRemoteError", InProgress: "ncclInProgress",
}

// String returns the name in nccl.h.
func (r Result) String() string { return nameOf(resultNames[:], int(r), "ncclResult_t") }

// DataType is an ncclDataType_t.
type DataType int32

// The types of elements.
const (
	Int8     DataType = 0
	Uint8    DataType = 1
	Int32    DataType = 2
	Uint32   DataType = 3
	Int64    DataType = 4
	Uint64   DataType = 5
	Float16  DataType = 6
	Float32  DataType = 7
	Float64  DataType = 8
	BFloat16 DataType = 9
)

var dataTypeNames = [...]string{
	Int8: "ncclInt8", Uint8: "ncclUint8", Int32: "ncclInt32", Uint32: "ncclUint32", Int64: "ncclInt64", Uint64: "ncclUint64",
	Float16: "ncclFloat16", Float32: "ncclFloat32", Float64: "ncclFloat64", BFloat16: "ncclBfloat16",
}

// String returns the name in nccl.h.
func (t DataType) String() string { return nameOf(dataTypeNames[:], int(t), "ncclDataType_t") }

// Bytes returns the size of one element.
func (t DataType) Bytes() int64 {
	switch t {
	case Int8, Uint8:
		return 1
	case Float16, BFloat16:
		return 2
	case Int32, Uint32, Float32:
		return 4
	}
	return 8
}

// Op is an ncclRedOp_t.
type Op int32

// The operations. The order differs from that of other libraries.
const (
	Sum  Op = 0
	Prod Op = 1
	Max  Op = 2
	Min  Op = 3
	Avg  Op = 4
)

var opNames = [...]string{Sum: "ncclSum", Prod: "ncclProd", Max: "ncclMax", Min: "ncclMin", Avg: "ncclAvg"}

// String returns the name in nccl.h.
func (op Op) String() string { return nameOf(opNames[:], int(op), "ncclRedOp_t") }

// WindowFlags are the NCCL_WIN_ flags of a registration.
type WindowFlags int32

// The flags.
const (
	WindowDefault   WindowFlags = 0 // peer pointers
	WindowSymmetric WindowFlags = 1 // NCCL_WIN_COLL_SYMMETRIC: and NCCL's collectives take its symmetric kernels
)

// WindowAlignment is NCCL_WIN_REQUIRED_ALIGNMENT: the offset in bytes of a window in its allocation is a multiple of it.
const WindowAlignment = 4096

// nameOf returns the name of a value of an enumeration, or its type and number.
func nameOf(names []string, i int, kind string) string {
	if i >= 0 && i < len(names) {
		return names[i]
	}
	return kind + "(" + strconv.Itoa(i) + ")"
}

// UniqueIDBytes is the size of a UniqueID, NCCL_UNIQUE_ID_BYTES.
const UniqueIDBytes = 128

// UniqueID is an ncclUniqueId: the place where the ranks of one communicator meet. Rank 0 makes it and tells the others.
type UniqueID [UniqueIDBytes]byte

// Version is the result of ncclGetVersion: 10000 times the major number, 100 times the minor and the patch.
type Version int32

// String returns the version as people write it: "2.28.9".
func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }
