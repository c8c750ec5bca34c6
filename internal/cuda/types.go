package cuda

import (
	"fmt"
	"structs"
)

// The driver's handles. Their values are opaque; zero is no handle. DeviceOrdinal is a CUdevice.
type (
	DeviceOrdinal   int32
	ContextHandle   uintptr
	StreamHandle    uintptr
	EventHandle     uintptr
	ModuleHandle    uintptr
	FunctionHandle  uintptr
	GraphHandle     uintptr
	GraphNodeHandle uintptr
	GraphExecHandle uintptr
	UserObject      uintptr
	MemHandle       uint64 // CUmemGenericAllocationHandle, for multicast objects too
)

// The numbers and structs of this file are those of cuda.h, for 64-bit systems, in all versions that TestHeader compares them with.

// UUID is a CUuuid, 16 bytes.
type UUID [16]byte

// String is the form that nvidia-smi prints: "GPU-" and 32 hexadecimal digits in five groups.
func (u UUID) String() string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}

// MemLocation is a CUmemLocation, 8 bytes.
type MemLocation struct {
	_    structs.HostLayout
	Type LocationType `c:"type"`
	ID   int32        `c:"id"` // the device's ordinal
}

// LocationType is a CUmemLocationType.
type LocationType int32

// Where memory is.
const (
	LocationDevice LocationType = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	LocationHost   LocationType = 2 // CU_MEM_LOCATION_TYPE_HOST
)

// MemAllocationProp is a CUmemAllocationProp, 32 bytes.
type MemAllocationProp struct {
	_                    structs.HostLayout
	Type                 AllocationType `c:"type"`
	RequestedHandleTypes HandleType     `c:"requestedHandleTypes"`
	Location             MemLocation    `c:"location"`
	Win32HandleMetaData  uintptr        `c:"win32HandleMetaData"` // always 0
	CompressionType      uint8          `c:"allocFlags.compressionType"`
	GPUDirectRDMACapable uint8          `c:"allocFlags.gpuDirectRDMACapable"`
	Usage                uint16         `c:"allocFlags.usage"`
	_                    [4]uint8
}

// AllocationType is a CUmemAllocationType.
type AllocationType int32

// AllocationPinned is the only kind of allocation.
const AllocationPinned AllocationType = 1 // CU_MEM_ALLOCATION_TYPE_PINNED

// HandleType is a CUmemAllocationHandleType, a set of bits.
type HandleType int32

// How an allocation can be given to another process.
const (
	HandleFD     HandleType = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: a POSIX file descriptor
	HandleFabric HandleType = 8 // CU_MEM_HANDLE_TYPE_FABRIC: 64 bytes that are good on every host of an NVLink domain
)

// FabricHandle is a CUmemFabricHandle, 64 bytes.
type FabricHandle [64]byte

// MemAccessDesc is a CUmemAccessDesc, 12 bytes.
type MemAccessDesc struct {
	_        structs.HostLayout
	Location MemLocation `c:"location"`
	Flags    AccessFlags `c:"flags"`
}

// AccessFlags is a CUmemAccess_flags.
type AccessFlags int32

// AccessReadWrite is all that a device may do with mapped memory.
const AccessReadWrite AccessFlags = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

// Granularity is a CUmemAllocationGranularity_flags.
type Granularity int32

// Which granularity is asked for.
const (
	GranularityMinimum     Granularity = 0 // CU_MEM_ALLOC_GRANULARITY_MINIMUM
	GranularityRecommended Granularity = 1 // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
)

// MulticastObjectProp is a CUmulticastObjectProp, 32 bytes.
type MulticastObjectProp struct {
	_           structs.HostLayout
	NumDevices  uint32 `c:"numDevices"`
	Size        uint64 `c:"size"`
	HandleTypes uint64 `c:"handleTypes"`
	Flags       uint64 `c:"flags"`
}

// IPCMemHandle is a CUipcMemHandle, 64 bytes, for memory of cuMemAlloc.
type IPCMemHandle struct {
	_        structs.HostLayout
	Reserved [8]uint64 `c:"reserved"`
}

// IPCLazyEnablePeerAccess is the only flag of cuIpcOpenMemHandle.
const IPCLazyEnablePeerAccess uint32 = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

// LaunchConfig is a CUlaunchConfig, 56 bytes.
type LaunchConfig struct {
	_           structs.HostLayout
	Grid        [3]uint32        `c:"gridDimX,gridDimY,gridDimZ"`
	Block       [3]uint32        `c:"blockDimX,blockDimY,blockDimZ"`
	SharedBytes uint32           `c:"sharedMemBytes"`
	Stream      StreamHandle     `c:"hStream"`
	Attrs       *LaunchAttribute `c:"attrs"`
	NumAttrs    uint32           `c:"numAttrs"`
}

// LaunchAttribute is a CUlaunchAttribute, 72 bytes. The value begins with the field that the ID says.
type LaunchAttribute struct {
	_     structs.HostLayout
	ID    LaunchAttributeID `c:"id"`
	_     [4]byte
	Value [16]uint32 `c:"value"`
}

// LaunchAttributeID is a CUlaunchAttributeID.
type LaunchAttributeID int32

// LaunchClusterDimension is how many blocks a cluster has.
const LaunchClusterDimension LaunchAttributeID = 4 // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: three uints

// LaunchProgrammaticStreamSerialization lets a launch begin before the one in front of it on the stream has ended.
const LaunchProgrammaticStreamSerialization LaunchAttributeID = 6 // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: one int

// BatchMemOp is a CUstreamBatchMemOpParams, 48 bytes, as the variants for values have it.
type BatchMemOp struct {
	_       structs.HostLayout
	Op      MemOp `c:"operation"`
	_       [4]byte
	Address uint64 `c:"waitValue.address"`
	Value   uint64 `c:"waitValue.value64"` // the low half for a 32-bit operation
	Flags   uint32 `c:"waitValue.flags"`
	_       [4]byte
	Alias   uint64 `c:"waitValue.alias"`
	_       [8]byte
}

// MemOp is a CUstreamBatchMemOpType.
type MemOp int32

// The operations of a batch.
const (
	MemOpWait32  MemOp = 1 // CU_STREAM_MEM_OP_WAIT_VALUE_32
	MemOpWrite32 MemOp = 2 // CU_STREAM_MEM_OP_WRITE_VALUE_32
)

// GraphEdgeData is a CUgraphEdgeData, 8 bytes.
type GraphEdgeData struct {
	_        structs.HostLayout
	FromPort uint8 `c:"from_port"`
	ToPort   uint8 `c:"to_port"`
	Type     uint8 `c:"type"`
	_        [5]uint8
}

// Flags of single calls.
const (
	StreamNonBlocking uint32 = 1 // CU_STREAM_NON_BLOCKING: not ordered against the NULL stream

	EventDefault       uint32 = 0 // CU_EVENT_DEFAULT: with timing
	EventDisableTiming uint32 = 2 // CU_EVENT_DISABLE_TIMING

	CaptureRelaxed int32 = 2 // CU_STREAM_CAPTURE_MODE_RELAXED

	CaptureStatusActive int32 = 1 // CU_STREAM_CAPTURE_STATUS_ACTIVE

	CaptureSetDependencies uint32 = 1 // CU_STREAM_SET_CAPTURE_DEPENDENCIES

	WaitValueGEQ uint32 = 0 // CU_STREAM_WAIT_VALUE_GEQ: counting in a circle

	WriteValueDefault uint32 = 0 // CU_STREAM_WRITE_VALUE_DEFAULT: behind a memory fence; the flag 1, without one, is refused by the functions of the table

	HostAllocPortable  uint32 = 1 // CU_MEMHOSTALLOC_PORTABLE: for all contexts
	HostAllocDeviceMap uint32 = 2 // CU_MEMHOSTALLOC_DEVICEMAP

	UserObjectNoDestructorSync uint32 = 1 // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
	GraphUserObjectMove        uint32 = 1 // CU_GRAPH_USER_OBJECT_MOVE
)

// DeviceAttribute is a CUdevice_attribute.
type DeviceAttribute int32

// The attributes of a device that are of use here.
const (
	AttrMaxThreadsPerBlock     DeviceAttribute = 1   // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
	AttrMaxBlockDimX           DeviceAttribute = 2   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
	AttrMaxBlockDimY           DeviceAttribute = 3   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y
	AttrMaxBlockDimZ           DeviceAttribute = 4   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z
	AttrMaxGridDimX            DeviceAttribute = 5   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X
	AttrMaxGridDimY            DeviceAttribute = 6   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y
	AttrMaxGridDimZ            DeviceAttribute = 7   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z
	AttrMaxSharedPerBlock      DeviceAttribute = 8   // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK
	AttrMultiprocessors        DeviceAttribute = 16  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
	AttrComputeCapabilityMajor DeviceAttribute = 75  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
	AttrComputeCapabilityMinor DeviceAttribute = 76  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
	AttrMaxSharedPerBlockOptin DeviceAttribute = 97  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
	AttrVMM                    DeviceAttribute = 102 // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
	AttrHandlePosixFD          DeviceAttribute = 103 // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
	AttrGPUDirectRDMAWithVMM   DeviceAttribute = 110 // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
	AttrHandleFabric           DeviceAttribute = 128 // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
	AttrMulticast              DeviceAttribute = 132 // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
)

// P2PAttribute is a CUdevice_P2PAttribute.
type P2PAttribute int32

// P2PNativeAtomics asks whether the link of two devices carries atomic operations.
const P2PNativeAtomics P2PAttribute = 3 // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

// PointerAttribute is a CUpointer_attribute.
type PointerAttribute int32

// What the driver can be asked about an address.
const (
	PointerMemoryType    PointerAttribute = 2 // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: a MemoryType
	PointerDeviceOrdinal PointerAttribute = 9 // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: an int32
)

// MemoryType is a CUmemorytype.
type MemoryType int32

// Where the memory at an address is.
const (
	MemoryHost   MemoryType = 1 // CU_MEMORYTYPE_HOST
	MemoryDevice MemoryType = 2 // CU_MEMORYTYPE_DEVICE
)

// FuncAttribute is a CUfunction_attribute.
type FuncAttribute int32

// The attributes of a function that are of use here.
const (
	FuncMaxThreadsPerBlock    FuncAttribute = 0  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
	FuncSharedBytes           FuncAttribute = 1  // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
	FuncMaxDynamicSharedBytes FuncAttribute = 8  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
	FuncClusterWidth          FuncAttribute = 11 // CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: blocks; 0 where the kernel was compiled for none
	FuncClusterHeight         FuncAttribute = 12 // CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT
	FuncClusterDepth          FuncAttribute = 13 // CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH
	FuncSharedCarveout        FuncAttribute = 9  // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: percent of the most shared memory that a multiprocessor has; a preference
)

// JITOption is a CUjit_option.
type JITOption int32

// The options of loading a module that are of use here.
const (
	JITErrorLogBuffer     JITOption = 5 // CU_JIT_ERROR_LOG_BUFFER
	JITErrorLogBufferSize JITOption = 6 // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
)
