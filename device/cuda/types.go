package cuda

import "structs"

// The driver's handles. Their values mean nothing outside of the driver; zero is none. DeviceOrdinal is a CUdevice.
type (
	DeviceOrdinal   int32
	ContextHandle   uintptr
	StreamHandle    uintptr
	EventHandle     uintptr
	ModuleHandle    uintptr
	FunctionHandle  uintptr
	LibraryHandle   uintptr
	KernelHandle    uintptr
	GraphHandle     uintptr
	GraphNodeHandle uintptr
	GraphExecHandle uintptr
	UserObject      uintptr
	MemHandle       uint64 // CUmemGenericAllocationHandle, for multicast objects too
)

// The structs of this file have the layout of cuda.h 12.4 to 13.0 for 64-bit systems; all of it is the same in these versions.

// UUID is a CUuuid, 16 bytes.
type UUID [16]byte

// MemLocation is a CUmemLocation, 8 bytes.
type MemLocation struct {
	_    structs.HostLayout
	Type LocationType
	ID   int32 // the device's ordinal
}

// LocationType is a CUmemLocationType.
type LocationType int32

// Where memory is.
const (
	LocationDevice   LocationType = 1
	LocationHost     LocationType = 2
	LocationHostNUMA LocationType = 3
)

// MemAllocationProp is a CUmemAllocationProp, 32 bytes.
type MemAllocationProp struct {
	_                    structs.HostLayout
	Type                 AllocationType
	RequestedHandleTypes HandleType
	Location             MemLocation
	Win32HandleMetaData  uintptr // always 0
	CompressionType      uint8
	GPUDirectRDMACapable uint8
	Usage                uint16
	_                    [4]uint8
}

// AllocationType is a CUmemAllocationType.
type AllocationType int32

// AllocationPinned is the only kind of allocation.
const AllocationPinned AllocationType = 1

// HandleType is a CUmemAllocationHandleType, a set of bits.
type HandleType int32

// How an allocation can be given to another process.
const (
	HandleNone   HandleType = 0
	HandleFD     HandleType = 1 // a POSIX file descriptor
	HandleFabric HandleType = 8 // 64 bytes that are good on every host of an NVLink domain
)

// FabricHandle is a CUmemFabricHandle, 64 bytes.
type FabricHandle [64]byte

// MemAccessDesc is a CUmemAccessDesc, 12 bytes.
type MemAccessDesc struct {
	_        structs.HostLayout
	Location MemLocation
	Flags    AccessFlags
}

// AccessFlags is a CUmemAccess_flags.
type AccessFlags int32

// What a device may do with mapped memory.
const (
	AccessNone      AccessFlags = 0
	AccessRead      AccessFlags = 1
	AccessReadWrite AccessFlags = 3
)

// Granularity is a CUmemAllocationGranularity_flags.
type Granularity int32

// Which granularity is asked for.
const (
	GranularityMinimum     Granularity = 0
	GranularityRecommended Granularity = 1
)

// MulticastObjectProp is a CUmulticastObjectProp, 32 bytes.
type MulticastObjectProp struct {
	_           structs.HostLayout
	NumDevices  uint32
	Size        uint64
	HandleTypes uint64
	Flags       uint64
}

// IPCMemHandle is a CUipcMemHandle, 64 bytes, for memory of cuMemAlloc.
type IPCMemHandle struct {
	_        structs.HostLayout
	Reserved [8]uint64
}

// IPCEventHandle is a CUipcEventHandle, 64 bytes.
type IPCEventHandle struct {
	_        structs.HostLayout
	Reserved [8]uint64
}

// IPCLazyEnablePeerAccess is the only flag of cuIpcOpenMemHandle.
const IPCLazyEnablePeerAccess uint32 = 1

// LaunchConfig is a CUlaunchConfig, 56 bytes.
type LaunchConfig struct {
	_           structs.HostLayout
	Grid        [3]uint32
	Block       [3]uint32
	SharedBytes uint32
	Stream      StreamHandle
	Attrs       *LaunchAttribute
	NumAttrs    uint32
}

// LaunchAttribute is a CUlaunchAttribute, 72 bytes. The value begins with the field that the ID says.
type LaunchAttribute struct {
	_     structs.HostLayout
	ID    LaunchAttributeID
	_     [4]byte
	Value [16]uint32
}

// LaunchAttributeID is a CUlaunchAttributeID.
type LaunchAttributeID int32

// The attributes of a launch that are of use here.
const (
	LaunchCooperative                     LaunchAttributeID = 2 // one int
	LaunchClusterDimension                LaunchAttributeID = 4 // three
	LaunchProgrammaticStreamSerialization LaunchAttributeID = 6 // one int
	LaunchPriority                        LaunchAttributeID = 8 // one int
	LaunchMemSyncDomain                   LaunchAttributeID = 10
)

// BatchMemOp is a CUstreamBatchMemOpParams, 48 bytes, as the variants for values have it.
type BatchMemOp struct {
	_       structs.HostLayout
	Op      MemOp
	_       [4]byte
	Address uint64
	Value   uint64 // the low half for a 32-bit operation
	Flags   uint32
	_       [4]byte
	Alias   uint64
	_       [8]byte
}

// MemOp is a CUstreamBatchMemOpType.
type MemOp int32

// The operations of a batch.
const (
	MemOpWait32  MemOp = 1
	MemOpWrite32 MemOp = 2
	MemOpFlush   MemOp = 3
	MemOpWait64  MemOp = 4
	MemOpWrite64 MemOp = 5
	MemOpBarrier MemOp = 6
)

// MemcpyAttributes is a CUmemcpyAttributes, 24 bytes.
type MemcpyAttributes struct {
	_              structs.HostLayout
	SrcAccessOrder int32
	SrcHint        MemLocation
	DstHint        MemLocation
	Flags          uint32
}

// GraphInstantiateParams is a CUDA_GRAPH_INSTANTIATE_PARAMS, 32 bytes.
type GraphInstantiateParams struct {
	_            structs.HostLayout
	Flags        uint64
	UploadStream StreamHandle
	ErrNode      GraphNodeHandle
	Result       int32
	_            [4]byte
}

// GraphEdgeData is a CUgraphEdgeData, 8 bytes.
type GraphEdgeData struct {
	_        structs.HostLayout
	FromPort uint8
	ToPort   uint8
	Type     uint8
	_        [5]uint8
}

// Flags of single calls.
const (
	CtxSchedBlockingSync uint32 = 4 // CU_CTX_SCHED_BLOCKING_SYNC

	StreamNonBlocking uint32 = 1 // CU_STREAM_NON_BLOCKING: not ordered against the NULL stream

	EventDefault       uint32 = 0 // CU_EVENT_DEFAULT: with timing
	EventBlockingSync  uint32 = 1
	EventDisableTiming uint32 = 2
	EventInterprocess  uint32 = 4

	CaptureGlobal      int32 = 0 // CU_STREAM_CAPTURE_MODE_GLOBAL
	CaptureThreadLocal int32 = 1
	CaptureRelaxed     int32 = 2

	CaptureStatusNone        int32 = 0
	CaptureStatusActive      int32 = 1
	CaptureStatusInvalidated int32 = 2

	CaptureAddDependencies uint32 = 0 // CU_STREAM_ADD_CAPTURE_DEPENDENCIES
	CaptureSetDependencies uint32 = 1 // CU_STREAM_SET_CAPTURE_DEPENDENCIES

	WaitValueGEQ   uint32 = 0 // CU_STREAM_WAIT_VALUE_GEQ: counting in a circle
	WaitValueEQ    uint32 = 1
	WaitValueAND   uint32 = 2
	WaitValueNOR   uint32 = 3
	WaitValueFlush uint32 = 1 << 30

	WriteValueDefault uint32 = 0 // behind a memory fence; the flag 1, without one, is refused by the functions of the table

	HostAllocPortable      uint32 = 1 // CU_MEMHOSTALLOC_PORTABLE: for all contexts
	HostAllocDeviceMap     uint32 = 2
	HostAllocWriteCombined uint32 = 4

	HostRegisterPortable  uint32 = 1 // CU_MEMHOSTREGISTER_PORTABLE
	HostRegisterDeviceMap uint32 = 2
	HostRegisterReadOnly  uint32 = 8

	RangeHandleDMABufFD int32 = 1 // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

	UserObjectNoDestructorSync uint32 = 1 // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
	GraphUserObjectMove        uint32 = 1 // CU_GRAPH_USER_OBJECT_MOVE

	GraphInstantiateAutoFree     uint64 = 1
	GraphInstantiateUpload       uint64 = 2
	GraphInstantiateNodePriority uint64 = 8
)

// DeviceAttribute is a CUdevice_attribute.
type DeviceAttribute int32

// The attributes of a device that are of use here.
const (
	AttrMaxThreadsPerBlock     DeviceAttribute = 1
	AttrMaxBlockDimX           DeviceAttribute = 2
	AttrMaxBlockDimY           DeviceAttribute = 3
	AttrMaxBlockDimZ           DeviceAttribute = 4
	AttrMaxGridDimX            DeviceAttribute = 5
	AttrMaxGridDimY            DeviceAttribute = 6
	AttrMaxGridDimZ            DeviceAttribute = 7
	AttrMaxSharedPerBlock      DeviceAttribute = 8
	AttrMultiprocessors        DeviceAttribute = 16
	AttrIntegrated             DeviceAttribute = 18
	AttrComputeMode            DeviceAttribute = 20
	AttrUnifiedAddressing      DeviceAttribute = 41
	AttrComputeCapabilityMajor DeviceAttribute = 75
	AttrComputeCapabilityMinor DeviceAttribute = 76
	AttrHostNativeAtomics      DeviceAttribute = 86
	AttrCooperativeLaunch      DeviceAttribute = 95
	AttrMaxSharedPerBlockOptin DeviceAttribute = 97
	AttrFlushRemoteWrites      DeviceAttribute = 98
	AttrVMM                    DeviceAttribute = 102
	AttrHandlePosixFD          DeviceAttribute = 103
	AttrGPUDirectRDMAWithVMM   DeviceAttribute = 110
	AttrGPUDirectRDMA          DeviceAttribute = 116
	AttrGPUDirectRDMAFlush     DeviceAttribute = 117
	AttrGPUDirectRDMAOrdering  DeviceAttribute = 118
	AttrMempoolHandleTypes     DeviceAttribute = 119
	AttrStreamMemOps64         DeviceAttribute = 122
	AttrStreamWaitValueNOR     DeviceAttribute = 123
	AttrDMABuf                 DeviceAttribute = 124
	AttrIPCEvents              DeviceAttribute = 125
	AttrHandleFabric           DeviceAttribute = 128
	AttrNUMAID                 DeviceAttribute = 131
	AttrMulticast              DeviceAttribute = 132
	AttrHostNUMAID             DeviceAttribute = 134
)

// P2PAttribute is a CUdevice_P2PAttribute.
type P2PAttribute int32

// What two devices can do with each other.
const (
	P2PPerformanceRank P2PAttribute = 1
	P2PAccess          P2PAttribute = 2
	P2PNativeAtomics   P2PAttribute = 3
	P2PArrayAccess     P2PAttribute = 4
)

// PointerAttribute is a CUpointer_attribute.
type PointerAttribute int32

// What the driver tells of an address.
const (
	PointerContext            PointerAttribute = 1  // a ContextHandle
	PointerMemoryType         PointerAttribute = 2  // a MemoryType
	PointerSyncMemops         PointerAttribute = 6  // an int32, which can be set
	PointerDeviceOrdinal      PointerAttribute = 9  // an int32
	PointerRangeStart         PointerAttribute = 11 // a uint64
	PointerRangeSize          PointerAttribute = 12 // a uint64
	PointerAllowedHandleTypes PointerAttribute = 14 // a uint64
	PointerGPUDirectRDMA      PointerAttribute = 15 // an int32
)

// MemoryType is a CUmemorytype.
type MemoryType int32

// Where the memory at an address is.
const (
	MemoryHost   MemoryType = 1
	MemoryDevice MemoryType = 2
)

// FuncAttribute is a CUfunction_attribute.
type FuncAttribute int32

// The attributes of a function that are of use here.
const (
	FuncMaxThreadsPerBlock    FuncAttribute = 0
	FuncSharedBytes           FuncAttribute = 1
	FuncLocalBytes            FuncAttribute = 3
	FuncRegisters             FuncAttribute = 4
	FuncMaxDynamicSharedBytes FuncAttribute = 8
	FuncSharedCarveout        FuncAttribute = 9 // percent of the most shared memory that a multiprocessor has; a preference
)

// JITOption is a CUjit_option.
type JITOption int32

// The options of loading a module that are of use here.
const (
	JITInfoLogBuffer      JITOption = 3
	JITInfoLogBufferSize  JITOption = 4
	JITErrorLogBuffer     JITOption = 5
	JITErrorLogBufferSize JITOption = 6
)
