package nvshmem

import (
	"fmt"
	"structs"
	"unsafe"
)

// The values and layouts below are those of the headers of NVSHMEM 3.4.5: nvshmem_uniqueid.h, nvshmem_types.h, nvshmem_error.h,
// nvshmem_constants.h. Structs carry a version word, 1<<16 plus the size of the struct.

// result is an nvshmemx_status: what functions return that return something.
type result int32

var resultNames = [...]string{
	0: "NVSHMEMX_SUCCESS", 1: "NVSHMEMX_ERROR_INVALID_VALUE", 2: "NVSHMEMX_ERROR_OUT_OF_MEMORY", 3: "NVSHMEMX_ERROR_NOT_SUPPORTED",
	4: "NVSHMEMX_ERROR_SYMMETRY", 5: "NVSHMEMX_ERROR_GPU_NOT_SELECTED", 6: "NVSHMEMX_ERROR_COLLECTIVE_LAUNCH_FAILED",
	7: "NVSHMEMX_ERROR_INTERNAL",
}

func (r result) String() string {
	if r >= 0 && int(r) < len(resultNames) {
		return resultNames[r]
	}
	return fmt.Sprintf("nvshmemx_status(%d)", int32(r))
}

// Status is how far the library is started, what nvshmemx_init_status gives.
type Status int32

// The stages.
const (
	NotStarted   Status = 0
	Bootstrapped Status = 1 // the PEs have met, but the GPU half of the start failed
	Started      Status = 2
	LimitedMPG   Status = 3 // several PEs share a GPU, and most of the library does not work
	FullMPG      Status = 4 // several PEs share a GPU under MPS
)

var statusNames = [...]string{
	NotStarted: "not initialized", Bootstrapped: "bootstrapped only", Started: "initialized", LimitedMPG: "limited MPG", FullMPG: "full MPG",
}

// String returns the stage in words.
func (s Status) String() string {
	if s >= 0 && int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("nvshmemx_init_status %d", int32(s))
}

// Team is an nvshmem_team_t: some of the PEs, as collectives know them.
type Team int32

// The teams that always are.
const (
	TeamInvalid Team = -1
	TeamWorld   Team = 0 // all PEs
)

// UniqueIDBytes is the size of a UniqueID.
const UniqueIDBytes = 128

// UniqueID is an nvshmemx_uniqueid_t: the place where the PEs of one start meet. PE 0 makes it and tells the others.
type UniqueID struct {
	_        structs.HostLayout
	Version  int32                   `c:"version"`
	Internal [UniqueIDBytes - 4]byte `c:"internal"`
}

// Bytes returns the id as it is sent to other processes.
func (id *UniqueID) Bytes() []byte {
	b := make([]byte, UniqueIDBytes)
	copy(b, unsafe.Slice((*byte)(unsafe.Pointer(id)), UniqueIDBytes))
	return b
}

// ParseUniqueID takes an id that another process sent.
func ParseUniqueID(b []byte) (*UniqueID, error) {
	if len(b) != UniqueIDBytes {
		return nil, fmt.Errorf("a unique id of NVSHMEM has %d bytes, and %d came", UniqueIDBytes, len(b))
	}
	id := new(UniqueID)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(id)), UniqueIDBytes), b)
	if id.Version != uniqueIDVersion {
		return nil, fmt.Errorf("a unique id of NVSHMEM of version %#x came; %#x is known", id.Version, uniqueIDVersion)
	}
	return id, nil
}

// The version words.
const (
	uniqueIDVersion = 1<<16 + 128
	attrVersion     = 1<<16 + 144
	argsVersion     = 1<<16 + 128
	idArgsVersion   = 1<<16 + 24
)

// initAttr is an nvshmemx_init_attr_t, 144 bytes.
type initAttr struct {
	_       structs.HostLayout
	version int32    `c:"version"`
	mpiComm uintptr  `c:"mpi_comm"`
	args    initArgs `c:"args"`
}

// initArgs is an nvshmemx_init_args_t, 128 bytes.
type initArgs struct {
	_       structs.HostLayout
	version int32    `c:"version"`
	id      idArgs   `c:"uid_args"`
	content [96]byte `c:"content"`
}

// idArgs is an nvshmemx_uniqueid_args_t, 24 bytes.
type idArgs struct {
	_       structs.HostLayout
	version int32     `c:"version"`
	id      *UniqueID `c:"id"`
	rank    int32     `c:"myrank"`
	ranks   int32     `c:"nranks"`
}

// newInitAttr returns NVSHMEMX_INIT_ATTR_INITIALIZER, without a rank yet.
func newInitAttr() *initAttr {
	return &initAttr{version: attrVersion, args: initArgs{version: argsVersion, id: idArgs{version: idArgsVersion, rank: -1, ranks: -1}}}
}

// withUniqueID is NVSHMEMX_INIT_WITH_UNIQUEID, the flag for a start by unique id.
const withUniqueID = 1 << 3

// Version is what nvshmemx_vendor_get_version_info gives.
type Version struct{ Major, Minor, Patch int32 }

// String returns the version as people write it: "3.4.5".
func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch) }
