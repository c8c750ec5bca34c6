package cuda

import (
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/dl"
)

// libraryName is what errors call the driver.
const libraryName = "CUDA driver"

// LibraryEnv names the environment variable with the driver library's path, which [Load] reads if it is given none.
const LibraryEnv = "SYMMEM_CUDA_LIBRARY"

// MinVersion is the oldest driver API that a device can be opened with: CUDA 12.4, of the driver series 550.
const MinVersion = 12040

// Driver is the part of the CUDA driver API that this library uses, one function for each symbol. The tags name the symbols,
// with their versions. The functions block, need a current context and fail as the driver's documentation says; sizes are in
// bytes. A nil function is one that the driver lacks. The table must not be changed once a device was opened with it.
//
// Pointers are only used during the call, unless a comment says otherwise.
type Driver struct {
	// Path is where the driver was loaded from; "" for a table that was not loaded.
	Path string

	Init             func(flags uint32) Result             `cuda:"cuInit,required"`
	DriverGetVersion func(version *int32) Result           `cuda:"cuDriverGetVersion,required"`
	GetErrorName     func(code Result, name **byte) Result `cuda:"cuGetErrorName"`
	GetErrorString   func(code Result, text **byte) Result `cuda:"cuGetErrorString"`

	DeviceGetCount        func(count *int32) Result                                            `cuda:"cuDeviceGetCount,required"`
	DeviceGet             func(dev *DeviceOrdinal, index int32) Result                         `cuda:"cuDeviceGet,required"`
	DeviceGetName         func(name *byte, size int32, dev DeviceOrdinal) Result               `cuda:"cuDeviceGetName,required"`
	DeviceGetUUID         func(uuid *UUID, dev DeviceOrdinal) Result                           `cuda:"cuDeviceGetUuid_v2,required"`
	DeviceGetPCIBusID     func(id *byte, size int32, dev DeviceOrdinal) Result                 `cuda:"cuDeviceGetPCIBusId,required"`
	DeviceGetAttribute    func(value *int32, attr DeviceAttribute, dev DeviceOrdinal) Result   `cuda:"cuDeviceGetAttribute,required"`
	DeviceTotalMem        func(bytes *uint64, dev DeviceOrdinal) Result                        `cuda:"cuDeviceTotalMem_v2"`
	DeviceCanAccessPeer   func(can *int32, dev, peer DeviceOrdinal) Result                     `cuda:"cuDeviceCanAccessPeer"`
	DeviceGetP2PAttribute func(value *int32, attr P2PAttribute, src, dst DeviceOrdinal) Result `cuda:"cuDeviceGetP2PAttribute"`

	PrimaryCtxRetain          func(ctx *ContextHandle, dev DeviceOrdinal) Result           `cuda:"cuDevicePrimaryCtxRetain,required"`
	PrimaryCtxRelease         func(dev DeviceOrdinal) Result                               `cuda:"cuDevicePrimaryCtxRelease_v2,required"`
	PrimaryCtxSetFlags        func(dev DeviceOrdinal, flags uint32) Result                 `cuda:"cuDevicePrimaryCtxSetFlags_v2"`
	PrimaryCtxGetState        func(dev DeviceOrdinal, flags *uint32, active *int32) Result `cuda:"cuDevicePrimaryCtxGetState"`
	CtxSetCurrent             func(ctx ContextHandle) Result                               `cuda:"cuCtxSetCurrent"`
	CtxGetCurrent             func(ctx *ContextHandle) Result                              `cuda:"cuCtxGetCurrent"`
	CtxPushCurrent            func(ctx ContextHandle) Result                               `cuda:"cuCtxPushCurrent_v2,required"`
	CtxPopCurrent             func(ctx *ContextHandle) Result                              `cuda:"cuCtxPopCurrent_v2,required"` // ctx may be nil
	CtxGetDevice              func(dev *DeviceOrdinal) Result                              `cuda:"cuCtxGetDevice"`
	CtxSynchronize            func() Result                                                `cuda:"cuCtxSynchronize"`
	CtxGetStreamPriorityRange func(least, greatest *int32) Result                          `cuda:"cuCtxGetStreamPriorityRange"`
	CtxEnablePeerAccess       func(peer ContextHandle, flags uint32) Result                `cuda:"cuCtxEnablePeerAccess"`
	CtxDisablePeerAccess      func(peer ContextHandle) Result                              `cuda:"cuCtxDisablePeerAccess"`

	MemGetAllocationGranularity          func(bytes *uint64, prop *MemAllocationProp, option Granularity) Result            `cuda:"cuMemGetAllocationGranularity"`
	MemCreate                            func(h *MemHandle, bytes uint64, prop *MemAllocationProp, flags uint64) Result     `cuda:"cuMemCreate"`
	MemRelease                           func(h MemHandle) Result                                                           `cuda:"cuMemRelease"`
	MemAddressReserve                    func(p *device.Ptr, bytes, alignment uint64, hint device.Ptr, flags uint64) Result `cuda:"cuMemAddressReserve"`
	MemAddressFree                       func(p device.Ptr, bytes uint64) Result                                            `cuda:"cuMemAddressFree"`
	MemMap                               func(p device.Ptr, bytes, offset uint64, h MemHandle, flags uint64) Result         `cuda:"cuMemMap"`
	MemUnmap                             func(p device.Ptr, bytes uint64) Result                                            `cuda:"cuMemUnmap"`
	MemSetAccess                         func(p device.Ptr, bytes uint64, desc *MemAccessDesc, count uint64) Result         `cuda:"cuMemSetAccess"`
	MemGetAccess                         func(flags *uint64, location *MemLocation, p device.Ptr) Result                    `cuda:"cuMemGetAccess"`
	MemExportFD                          func(fd *int32, h MemHandle, kind HandleType, flags uint64) Result                 `cuda:"cuMemExportToShareableHandle"`   // kind is HandleFD; the caller closes fd
	MemExportFabric                      func(handle *FabricHandle, h MemHandle, kind HandleType, flags uint64) Result      `cuda:"cuMemExportToShareableHandle"`   // kind is HandleFabric
	MemImportFD                          func(h *MemHandle, fd uintptr, kind HandleType) Result                             `cuda:"cuMemImportFromShareableHandle"` // kind is HandleFD; fd stays the caller's
	MemImportFabric                      func(h *MemHandle, handle *FabricHandle, kind HandleType) Result                   `cuda:"cuMemImportFromShareableHandle"` // kind is HandleFabric
	MemRetainAllocationHandle            func(h *MemHandle, p device.Ptr) Result                                            `cuda:"cuMemRetainAllocationHandle"`
	MemGetAllocationPropertiesFromHandle func(prop *MemAllocationProp, h MemHandle) Result                                  `cuda:"cuMemGetAllocationPropertiesFromHandle"`
	MemGetAddressRange                   func(base *device.Ptr, bytes *uint64, p device.Ptr) Result                         `cuda:"cuMemGetAddressRange_v2"`
	MemGetHandleForAddressRange          func(fd *int32, p device.Ptr, bytes uint64, kind int32, flags uint64) Result       `cuda:"cuMemGetHandleForAddressRange"`
	PointerGetAttribute                  func(value unsafe.Pointer, attr PointerAttribute, p device.Ptr) Result             `cuda:"cuPointerGetAttribute"`
	PointerSetAttribute                  func(value unsafe.Pointer, attr PointerAttribute, p device.Ptr) Result             `cuda:"cuPointerSetAttribute"`

	MemAlloc                func(p *device.Ptr, bytes uint64) Result                     `cuda:"cuMemAlloc_v2,required"`
	MemFree                 func(p device.Ptr) Result                                    `cuda:"cuMemFree_v2,required"`
	MemHostAlloc            func(p *unsafe.Pointer, bytes uint64, flags uint32) Result   `cuda:"cuMemHostAlloc,required"`
	MemFreeHost             func(p unsafe.Pointer) Result                                `cuda:"cuMemFreeHost,required"`
	MemHostRegister         func(p unsafe.Pointer, bytes uint64, flags uint32) Result    `cuda:"cuMemHostRegister_v2"` // the memory stays in use until MemHostUnregister
	MemHostUnregister       func(p unsafe.Pointer) Result                                `cuda:"cuMemHostUnregister"`
	MemHostGetDevicePointer func(dev *device.Ptr, p unsafe.Pointer, flags uint32) Result `cuda:"cuMemHostGetDevicePointer_v2,required"`
	MemGetInfo              func(free, total *uint64) Result                             `cuda:"cuMemGetInfo_v2"`
	IPCGetMemHandle         func(h *IPCMemHandle, p device.Ptr) Result                   `cuda:"cuIpcGetMemHandle"`
	IPCOpenMemHandle        func(p *device.Ptr, h IPCMemHandle, flags uint32) Result     `cuda:"cuIpcOpenMemHandle_v2"`
	IPCCloseMemHandle       func(p device.Ptr) Result                                    `cuda:"cuIpcCloseMemHandle"`

	MemcpyHtoD         func(dst device.Ptr, src unsafe.Pointer, bytes uint64) Result                                                                                                  `cuda:"cuMemcpyHtoD_v2"`
	MemcpyDtoH         func(dst unsafe.Pointer, src device.Ptr, bytes uint64) Result                                                                                                  `cuda:"cuMemcpyDtoH_v2"`
	MemcpyDtoD         func(dst, src device.Ptr, bytes uint64) Result                                                                                                                 `cuda:"cuMemcpyDtoD_v2"`
	MemcpyHtoDAsync    func(dst device.Ptr, src unsafe.Pointer, bytes uint64, s StreamHandle) Result                                                                                  `cuda:"cuMemcpyHtoDAsync_v2,required"` // src stays in use until the copy has run
	MemcpyDtoHAsync    func(dst unsafe.Pointer, src device.Ptr, bytes uint64, s StreamHandle) Result                                                                                  `cuda:"cuMemcpyDtoHAsync_v2,required"` // dst stays in use until the copy has run
	MemcpyDtoDAsync    func(dst, src device.Ptr, bytes uint64, s StreamHandle) Result                                                                                                 `cuda:"cuMemcpyDtoDAsync_v2,required"`
	MemcpyAsync        func(dst, src device.Ptr, bytes uint64, s StreamHandle) Result                                                                                                 `cuda:"cuMemcpyAsync"`
	MemcpyPeerAsync    func(dst device.Ptr, dstCtx ContextHandle, src device.Ptr, srcCtx ContextHandle, bytes uint64, s StreamHandle) Result                                          `cuda:"cuMemcpyPeerAsync"`
	MemcpyBatchAsync   func(dsts, srcs *device.Ptr, sizes *uint64, count uint64, attrs *MemcpyAttributes, attrsIdxs *uint64, numAttrs uint64, failIdx *uint64, s StreamHandle) Result `cuda:"cuMemcpyBatchAsync"`    // 12.8 to 12.9
	MemcpyBatchAsyncV2 func(dsts, srcs *device.Ptr, sizes *uint64, count uint64, attrs *MemcpyAttributes, attrsIdxs *uint64, numAttrs uint64, s StreamHandle) Result                  `cuda:"cuMemcpyBatchAsync_v2"` // 13.0 and later
	MemsetD8           func(p device.Ptr, value uint8, count uint64) Result                                                                                                           `cuda:"cuMemsetD8_v2"`
	MemsetD32          func(p device.Ptr, value uint32, count uint64) Result                                                                                                          `cuda:"cuMemsetD32_v2"`
	MemsetD8Async      func(p device.Ptr, value uint8, count uint64, s StreamHandle) Result                                                                                           `cuda:"cuMemsetD8Async,required"`
	MemsetD32Async     func(p device.Ptr, value uint32, count uint64, s StreamHandle) Result                                                                                          `cuda:"cuMemsetD32Async"`

	StreamCreate                    func(s *StreamHandle, flags uint32) Result                                                                                           `cuda:"cuStreamCreate,required"`
	StreamCreateWithPriority        func(s *StreamHandle, flags uint32, priority int32) Result                                                                           `cuda:"cuStreamCreateWithPriority"`
	StreamDestroy                   func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamDestroy_v2,required"`
	StreamSynchronize               func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamSynchronize"`
	StreamQuery                     func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamQuery,required"`
	StreamWaitEvent                 func(s StreamHandle, e EventHandle, flags uint32) Result                                                                             `cuda:"cuStreamWaitEvent,required"`
	StreamGetCtx                    func(s StreamHandle, ctx *ContextHandle) Result                                                                                      `cuda:"cuStreamGetCtx"`
	StreamBeginCapture              func(s StreamHandle, mode int32) Result                                                                                              `cuda:"cuStreamBeginCapture_v2,required"`
	StreamEndCapture                func(s StreamHandle, g *GraphHandle) Result                                                                                          `cuda:"cuStreamEndCapture,required"`
	StreamIsCapturing               func(s StreamHandle, status *int32) Result                                                                                           `cuda:"cuStreamIsCapturing"`
	ThreadExchangeStreamCaptureMode func(mode *int32) Result                                                                                                             `cuda:"cuThreadExchangeStreamCaptureMode"`
	StreamGetCaptureInfo            func(s StreamHandle, status *int32, id *uint64, g *GraphHandle, deps **GraphNodeHandle, edges **GraphEdgeData, count *uint64) Result `cuda:"cuStreamGetCaptureInfo_v3"`
	StreamUpdateCaptureDependencies func(s StreamHandle, deps *GraphNodeHandle, count uint64, flags uint32) Result                                                       `cuda:"cuStreamUpdateCaptureDependencies"`
	StreamWaitValue32               func(s StreamHandle, p device.Ptr, value, flags uint32) Result                                                                       `cuda:"cuStreamWaitValue32_v2"`
	StreamWaitValue64               func(s StreamHandle, p device.Ptr, value uint64, flags uint32) Result                                                                `cuda:"cuStreamWaitValue64_v2"`
	StreamWriteValue32              func(s StreamHandle, p device.Ptr, value, flags uint32) Result                                                                       `cuda:"cuStreamWriteValue32_v2,required"`
	StreamWriteValue64              func(s StreamHandle, p device.Ptr, value uint64, flags uint32) Result                                                                `cuda:"cuStreamWriteValue64_v2"`
	StreamBatchMemOp                func(s StreamHandle, count uint32, ops *BatchMemOp, flags uint32) Result                                                             `cuda:"cuStreamBatchMemOp_v2,required"`
	LaunchHostFunc                  func(s StreamHandle, fn, data uintptr) Result                                                                                        `cuda:"cuLaunchHostFunc,required"` // fn is a C function; a simulator calls RunHostFunc(data)

	EventCreate        func(e *EventHandle, flags uint32) Result                  `cuda:"cuEventCreate,required"`
	EventDestroy       func(e EventHandle) Result                                 `cuda:"cuEventDestroy_v2,required"`
	EventRecord        func(e EventHandle, s StreamHandle) Result                 `cuda:"cuEventRecord,required"`
	EventQuery         func(e EventHandle) Result                                 `cuda:"cuEventQuery,required"`
	EventSynchronize   func(e EventHandle) Result                                 `cuda:"cuEventSynchronize"`
	EventElapsedTime   func(milliseconds *float32, start, end EventHandle) Result `cuda:"cuEventElapsedTime,required"`
	IPCGetEventHandle  func(h *IPCEventHandle, e EventHandle) Result              `cuda:"cuIpcGetEventHandle"`
	IPCOpenEventHandle func(e *EventHandle, h IPCEventHandle) Result              `cuda:"cuIpcOpenEventHandle"`

	ModuleLoadDataEx  func(m *ModuleHandle, image unsafe.Pointer, count uint32, options *JITOption, values *uintptr) Result                                                  `cuda:"cuModuleLoadDataEx,required"`
	ModuleUnload      func(m ModuleHandle) Result                                                                                                                            `cuda:"cuModuleUnload,required"`
	ModuleGetFunction func(f *FunctionHandle, m ModuleHandle, name string) Result                                                                                            `cuda:"cuModuleGetFunction,required"`
	ModuleGetGlobal   func(p *device.Ptr, bytes *uint64, m ModuleHandle, name string) Result                                                                                 `cuda:"cuModuleGetGlobal_v2"`
	LibraryLoadData   func(l *LibraryHandle, code unsafe.Pointer, jit *JITOption, jitValues *uintptr, jitCount uint32, options *int32, values *uintptr, count uint32) Result `cuda:"cuLibraryLoadData"`
	LibraryUnload     func(l LibraryHandle) Result                                                                                                                           `cuda:"cuLibraryUnload"`
	LibraryGetKernel  func(k *KernelHandle, l LibraryHandle, name string) Result                                                                                             `cuda:"cuLibraryGetKernel"`
	KernelGetFunction func(f *FunctionHandle, k KernelHandle) Result                                                                                                         `cuda:"cuKernelGetFunction"`

	FuncLoad                 func(f FunctionHandle) Result                                                                                                                 `cuda:"cuFuncLoad"`
	FuncGetAttribute         func(value *int32, attr FuncAttribute, f FunctionHandle) Result                                                                               `cuda:"cuFuncGetAttribute,required"`
	FuncSetAttribute         func(f FunctionHandle, attr FuncAttribute, value int32) Result                                                                                `cuda:"cuFuncSetAttribute,required"`
	FuncGetParamInfo         func(f FunctionHandle, index uint64, offset, bytes *uint64) Result                                                                            `cuda:"cuFuncGetParamInfo"`
	OccupancyMaxActiveBlocks func(blocks *int32, f FunctionHandle, threads int32, sharedBytes uint64) Result                                                               `cuda:"cuOccupancyMaxActiveBlocksPerMultiprocessor,required"`
	LaunchKernel             func(f FunctionHandle, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes uint32, s StreamHandle, params, extra *unsafe.Pointer) Result `cuda:"cuLaunchKernel"`
	LaunchKernelEx           func(config *LaunchConfig, f FunctionHandle, params, extra *unsafe.Pointer) Result                                                            `cuda:"cuLaunchKernelEx,required"`
	LaunchCooperativeKernel  func(f FunctionHandle, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes uint32, s StreamHandle, params *unsafe.Pointer) Result        `cuda:"cuLaunchCooperativeKernel"`

	GraphInstantiateWithFlags  func(exec *GraphExecHandle, g GraphHandle, flags uint64) Result                                           `cuda:"cuGraphInstantiateWithFlags,required"`
	GraphInstantiateWithParams func(exec *GraphExecHandle, g GraphHandle, params *GraphInstantiateParams) Result                         `cuda:"cuGraphInstantiateWithParams"`
	GraphUpload                func(exec GraphExecHandle, s StreamHandle) Result                                                         `cuda:"cuGraphUpload"`
	GraphLaunch                func(exec GraphExecHandle, s StreamHandle) Result                                                         `cuda:"cuGraphLaunch,required"`
	GraphExecDestroy           func(exec GraphExecHandle) Result                                                                         `cuda:"cuGraphExecDestroy,required"`
	GraphDestroy               func(g GraphHandle) Result                                                                                `cuda:"cuGraphDestroy,required"`
	GraphAddChildGraphNode     func(node *GraphNodeHandle, g GraphHandle, deps *GraphNodeHandle, count uint64, child GraphHandle) Result `cuda:"cuGraphAddChildGraphNode"`
	UserObjectCreate           func(o *UserObject, data, destroy uintptr, count, flags uint32) Result                                    `cuda:"cuUserObjectCreate,required"` // destroy is a C function; a simulator calls RunHostFunc(data)
	UserObjectRelease          func(o UserObject, count uint32) Result                                                                   `cuda:"cuUserObjectRelease,required"`
	GraphRetainUserObject      func(g GraphHandle, o UserObject, count, flags uint32) Result                                             `cuda:"cuGraphRetainUserObject,required"`

	// MulticastSource looks up the multicast functions. It is called by ResolveMulticast only; nil is a driver without them.
	MulticastSource func() (*Multicast, error)
}

// Multicast is the driver's functions for NVLink multicast. Its functions may be nil one by one, as those of [Driver].
type Multicast struct {
	Create         func(h *MemHandle, prop *MulticastObjectProp) Result                                   `cuda:"cuMulticastCreate,required"`
	AddDevice      func(h MemHandle, dev DeviceOrdinal) Result                                            `cuda:"cuMulticastAddDevice,required"`
	BindMem        func(h MemHandle, offset uint64, mem MemHandle, memOffset, bytes, flags uint64) Result `cuda:"cuMulticastBindMem,required"`
	BindAddr       func(h MemHandle, offset uint64, p device.Ptr, bytes, flags uint64) Result             `cuda:"cuMulticastBindAddr"`
	Unbind         func(h MemHandle, dev DeviceOrdinal, offset, bytes uint64) Result                      `cuda:"cuMulticastUnbind,required"`
	GetGranularity func(bytes *uint64, prop *MulticastObjectProp, option Granularity) Result              `cuda:"cuMulticastGetGranularity,required"`
}

// LoadOptions says where the driver is. Nil or zero values are the defaults.
type LoadOptions struct {
	// Path is the driver library's file, or the folder it is in; "" looks at the environment variable LibraryEnv, then where
	// the system keeps libraries.
	Path string
	// Logger gets what was loaded, at debug level. Nil is silence.
	Logger *slog.Logger
}

// ResolveMulticast looks up the multicast functions. Nothing else does: a program that never calls it cannot create a
// multicast object, whatever else it asks of this package. A driver without them is ErrUnsupported.
func (d *Driver) ResolveMulticast() (*Multicast, error) {
	if d.MulticastSource == nil {
		return nil, &dl.SymbolError{Library: libraryName, Symbols: []string{"cuMulticastCreate"}, Hint: "multicast needs driver 530 or newer"}
	}
	m, err := d.MulticastSource()
	if err != nil {
		return nil, fmt.Errorf("resolving the multicast functions: %w", err)
	}
	if lacking := missing(m, true); len(lacking) > 0 {
		return nil, &dl.SymbolError{Library: libraryName, Symbols: lacking, Hint: "multicast needs driver 530 or newer"}
	}
	return m, nil
}

// Missing gives the symbols whose functions are nil, in the order of the table.
func (d *Driver) Missing() []string { return missing(d, false) }

// Require is the error, which is ErrUnsupported, of a driver that lacks any of the named symbols, and nil for one that has
// them all. A name that the table does not know counts as missing.
func (d *Driver) Require(symbols ...string) error {
	present := make(map[string]bool)
	eachFunction(d, func(_ reflect.Value, s symbolTag, isNil bool) { present[s.name] = present[s.name] || !isNil })
	lacking := slices.DeleteFunc(slices.Clone(symbols), func(name string) bool { return present[name] })
	if len(lacking) == 0 {
		return nil
	}
	return &dl.SymbolError{Library: libraryName, Symbols: lacking, Hint: "a newer driver may have what is missing"}
}

// Version asks the driver for the newest API that it speaks: 12040 is CUDA 12.4. It needs no GPU.
func (d *Driver) Version() (int, error) {
	if d.DriverGetVersion == nil {
		return 0, d.Require("cuDriverGetVersion")
	}
	var version int32
	if err := d.Check("cuDriverGetVersion", d.DriverGetVersion(&version)); err != nil {
		return 0, err
	}
	return int(version), nil
}

// symbolTag is what the tag of a field of the table says.
type symbolTag struct {
	name     string
	required bool
}

// eachFunction calls fn for every function of the table that p points to.
func eachFunction(p any, fn func(field reflect.Value, s symbolTag, isNil bool)) {
	v := reflect.ValueOf(p).Elem()
	for i := range v.NumField() {
		if tag, ok := v.Type().Field(i).Tag.Lookup("cuda"); ok {
			name, rest, _ := strings.Cut(tag, ",")
			fn(v.Field(i), symbolTag{name: name, required: rest == "required"}, v.Field(i).IsNil())
		}
	}
}

// missing gives the symbols whose functions are nil in the table that p points to.
func missing(p any, onlyRequired bool) []string {
	var names []string
	eachFunction(p, func(_ reflect.Value, s symbolTag, isNil bool) {
		if isNil && (s.required || !onlyRequired) && !slices.Contains(names, s.name) {
			names = append(names, s.name)
		}
	})
	return names
}
