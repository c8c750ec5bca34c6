package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
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

// MinVersion is the oldest API version that this module can use: CUDA 12.4, of the driver series 550.
const MinVersion = 12040

// Driver is the part of the CUDA driver API that this library uses, one function for each symbol. The tags name the symbols,
// with their versions. The functions block, need a current context and fail as the driver's documentation says; sizes are in
// bytes. A nil function is one that the driver lacks. The table must not be changed once a device was opened with it.
//
// Pointers are only used during the call, unless a comment says otherwise.
type Driver struct {
	// Path is where the driver was loaded from; "" for a table that was not loaded.
	Path string
	// Origin is the same in the tables of one driver, and in no other. Without it, nil, the table is the only one of its driver.
	Origin any

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

	PrimaryCtxRetain          func(ctx *ContextHandle, dev DeviceOrdinal) Result `cuda:"cuDevicePrimaryCtxRetain,required"`
	PrimaryCtxRelease         func(dev DeviceOrdinal) Result                     `cuda:"cuDevicePrimaryCtxRelease_v2,required"`
	CtxGetCurrent             func(ctx *ContextHandle) Result                    `cuda:"cuCtxGetCurrent"`
	CtxPushCurrent            func(ctx ContextHandle) Result                     `cuda:"cuCtxPushCurrent_v2,required"`
	CtxPopCurrent             func(ctx *ContextHandle) Result                    `cuda:"cuCtxPopCurrent_v2,required"` // ctx may be nil
	CtxGetStreamPriorityRange func(least, greatest *int32) Result                `cuda:"cuCtxGetStreamPriorityRange"`
	CtxEnablePeerAccess       func(peer ContextHandle, flags uint32) Result      `cuda:"cuCtxEnablePeerAccess"`

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
	PointerGetAttribute                  func(value unsafe.Pointer, attr PointerAttribute, p device.Ptr) Result             `cuda:"cuPointerGetAttribute"`

	MemAlloc                func(p *device.Ptr, bytes uint64) Result                     `cuda:"cuMemAlloc_v2,required"`
	MemFree                 func(p device.Ptr) Result                                    `cuda:"cuMemFree_v2,required"`
	MemHostAlloc            func(p *unsafe.Pointer, bytes uint64, flags uint32) Result   `cuda:"cuMemHostAlloc,required"`
	MemFreeHost             func(p unsafe.Pointer) Result                                `cuda:"cuMemFreeHost,required"`
	MemHostGetDevicePointer func(dev *device.Ptr, p unsafe.Pointer, flags uint32) Result `cuda:"cuMemHostGetDevicePointer_v2,required"`
	MemGetInfo              func(free, total *uint64) Result                             `cuda:"cuMemGetInfo_v2"`
	IPCGetMemHandle         func(h *IPCMemHandle, p device.Ptr) Result                   `cuda:"cuIpcGetMemHandle"`
	IPCOpenMemHandle        func(p *device.Ptr, h IPCMemHandle, flags uint32) Result     `cuda:"cuIpcOpenMemHandle_v2"`
	IPCCloseMemHandle       func(p device.Ptr) Result                                    `cuda:"cuIpcCloseMemHandle"`

	MemcpyHtoDAsync func(dst device.Ptr, src unsafe.Pointer, bytes uint64, s StreamHandle) Result `cuda:"cuMemcpyHtoDAsync_v2,required"` // src stays in use until the copy has run
	MemcpyDtoHAsync func(dst unsafe.Pointer, src device.Ptr, bytes uint64, s StreamHandle) Result `cuda:"cuMemcpyDtoHAsync_v2,required"` // dst stays in use until the copy has run
	MemcpyDtoDAsync func(dst, src device.Ptr, bytes uint64, s StreamHandle) Result                `cuda:"cuMemcpyDtoDAsync_v2,required"`
	MemsetD8Async   func(p device.Ptr, value uint8, count uint64, s StreamHandle) Result          `cuda:"cuMemsetD8Async,required"`

	StreamCreate                    func(s *StreamHandle, flags uint32) Result                                                                                           `cuda:"cuStreamCreate,required"`
	StreamCreateWithPriority        func(s *StreamHandle, flags uint32, priority int32) Result                                                                           `cuda:"cuStreamCreateWithPriority"`
	StreamDestroy                   func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamDestroy_v2,required"`
	StreamSynchronize               func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamSynchronize"`
	StreamQuery                     func(s StreamHandle) Result                                                                                                          `cuda:"cuStreamQuery,required"`
	StreamWaitEvent                 func(s StreamHandle, e EventHandle, flags uint32) Result                                                                             `cuda:"cuStreamWaitEvent,required"`
	StreamBeginCapture              func(s StreamHandle, mode int32) Result                                                                                              `cuda:"cuStreamBeginCapture_v2,required"`
	StreamEndCapture                func(s StreamHandle, g *GraphHandle) Result                                                                                          `cuda:"cuStreamEndCapture,required"`
	StreamGetCaptureInfo            func(s StreamHandle, status *int32, id *uint64, g *GraphHandle, deps **GraphNodeHandle, edges **GraphEdgeData, count *uint64) Result `cuda:"cuStreamGetCaptureInfo_v3"`
	StreamUpdateCaptureDependencies func(s StreamHandle, deps *GraphNodeHandle, count uint64, flags uint32) Result                                                       `cuda:"cuStreamUpdateCaptureDependencies"`
	StreamWriteValue32              func(s StreamHandle, p device.Ptr, value, flags uint32) Result                                                                       `cuda:"cuStreamWriteValue32_v2,required"`
	StreamBatchMemOp                func(s StreamHandle, count uint32, ops *BatchMemOp, flags uint32) Result                                                             `cuda:"cuStreamBatchMemOp_v2,required"`
	LaunchHostFunc                  func(s StreamHandle, fn, data uintptr) Result                                                                                        `cuda:"cuLaunchHostFunc,required"` // fn is a C function; a simulator calls RunHostFunc(data)

	EventCreate      func(e *EventHandle, flags uint32) Result                  `cuda:"cuEventCreate,required"`
	EventDestroy     func(e EventHandle) Result                                 `cuda:"cuEventDestroy_v2,required"`
	EventRecord      func(e EventHandle, s StreamHandle) Result                 `cuda:"cuEventRecord,required"`
	EventQuery       func(e EventHandle) Result                                 `cuda:"cuEventQuery,required"`
	EventElapsedTime func(milliseconds *float32, start, end EventHandle) Result `cuda:"cuEventElapsedTime,required"`

	ModuleLoadDataEx  func(m *ModuleHandle, image unsafe.Pointer, count uint32, options *JITOption, values *uintptr) Result `cuda:"cuModuleLoadDataEx,required"`
	ModuleUnload      func(m ModuleHandle) Result                                                                           `cuda:"cuModuleUnload,required"`
	ModuleGetFunction func(f *FunctionHandle, m ModuleHandle, name string) Result                                           `cuda:"cuModuleGetFunction,required"`

	FuncLoad                   func(f FunctionHandle) Result                                                      `cuda:"cuFuncLoad"`
	FuncGetAttribute           func(value *int32, attr FuncAttribute, f FunctionHandle) Result                    `cuda:"cuFuncGetAttribute,required"`
	FuncSetAttribute           func(f FunctionHandle, attr FuncAttribute, value int32) Result                     `cuda:"cuFuncSetAttribute,required"`
	FuncGetParamInfo           func(f FunctionHandle, index uint64, offset, bytes *uint64) Result                 `cuda:"cuFuncGetParamInfo"`
	OccupancyMaxActiveBlocks   func(blocks *int32, f FunctionHandle, threads int32, sharedBytes uint64) Result    `cuda:"cuOccupancyMaxActiveBlocksPerMultiprocessor,required"`
	OccupancyMaxActiveClusters func(clusters *int32, f FunctionHandle, config *LaunchConfig) Result               `cuda:"cuOccupancyMaxActiveClusters"`
	LaunchKernelEx             func(config *LaunchConfig, f FunctionHandle, params, extra *unsafe.Pointer) Result `cuda:"cuLaunchKernelEx,required"`

	GraphInstantiateWithFlags func(exec *GraphExecHandle, g GraphHandle, flags uint64) Result                                           `cuda:"cuGraphInstantiateWithFlags,required"`
	GraphUpload               func(exec GraphExecHandle, s StreamHandle) Result                                                         `cuda:"cuGraphUpload"`
	GraphLaunch               func(exec GraphExecHandle, s StreamHandle) Result                                                         `cuda:"cuGraphLaunch,required"`
	GraphExecDestroy          func(exec GraphExecHandle) Result                                                                         `cuda:"cuGraphExecDestroy,required"`
	GraphDestroy              func(g GraphHandle) Result                                                                                `cuda:"cuGraphDestroy,required"`
	GraphAddChildGraphNode    func(node *GraphNodeHandle, g GraphHandle, deps *GraphNodeHandle, count uint64, child GraphHandle) Result `cuda:"cuGraphAddChildGraphNode"`
	UserObjectCreate          func(o *UserObject, data, destroy uintptr, count, flags uint32) Result                                    `cuda:"cuUserObjectCreate,required"` // destroy is a C function; a simulator calls RunHostFunc(data)
	UserObjectRelease         func(o UserObject, count uint32) Result                                                                   `cuda:"cuUserObjectRelease,required"`
	GraphRetainUserObject     func(g GraphHandle, o UserObject, count, flags uint32) Result                                             `cuda:"cuGraphRetainUserObject,required"`

	// MulticastSource looks up the multicast functions. Only ResolveMulticast calls it; nil is a driver without them.
	MulticastSource func() (*Multicast, error)
}

// Multicast holds the driver's functions for NVLink multicast. Each may be nil, like those of [Driver].
type Multicast struct {
	Create         func(h *MemHandle, prop *MulticastObjectProp) Result                                   `cuda:"cuMulticastCreate,required"`
	AddDevice      func(h MemHandle, dev DeviceOrdinal) Result                                            `cuda:"cuMulticastAddDevice,required"`
	BindMem        func(h MemHandle, offset uint64, mem MemHandle, memOffset, bytes, flags uint64) Result `cuda:"cuMulticastBindMem,required"`
	Unbind         func(h MemHandle, dev DeviceOrdinal, offset, bytes uint64) Result                      `cuda:"cuMulticastUnbind,required"`
	GetGranularity func(bytes *uint64, prop *MulticastObjectProp, option Granularity) Result              `cuda:"cuMulticastGetGranularity,required"`
}

// LoadOptions says where the driver is. Nil or zero values are the defaults.
type LoadOptions struct {
	// Path is the driver library's file, or the folder it is in; "" looks at the environment variable LibraryEnv, then where
	// the system keeps libraries.
	Path string
	// Logger receives what was loaded, at debug level. Nil logs nothing.
	Logger *slog.Logger
}

// ResolveMulticast looks up the multicast functions. Nothing else does, so a program that never calls it cannot create a multicast object. The error
// is ErrUnsupported if the driver does not have them.
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

// Missing returns the symbols whose functions are nil, in the order of the table.
func (d *Driver) Missing() []string { return missing(d, false) }

// Require returns ErrUnsupported if the driver lacks any of the named symbols, and nil if it has them all. A name that is not in the table counts as
// missing.
func (d *Driver) Require(symbols ...string) error {
	present := make(map[string]bool)
	eachFunction(d, func(_ reflect.Value, s symbolTag, isNil bool) { present[s.name] = present[s.name] || !isNil })
	lacking := slices.DeleteFunc(slices.Clone(symbols), func(name string) bool { return present[name] })
	if len(lacking) == 0 {
		return nil
	}
	return &dl.SymbolError{Library: libraryName, Symbols: lacking, Hint: "a newer driver may have what is missing"}
}

// Start initialises the driver and checks that it is new enough.
func (d *Driver) Start() error {
	if lacking := missing(d, true); len(lacking) > 0 {
		return &unavailableError{d.Require(lacking...)}
	}
	if err := d.Check("cuInit", d.Init(0)); err != nil {
		var failed *dl.Error
		if value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set && errors.As(err, &failed) && Result(failed.Code) == NoDevice {
			failed.Hint = fmt.Sprintf("CUDA_VISIBLE_DEVICES is %q, which shows this process no GPU; unset it or list some", value)
		}
		return err
	}
	version, err := d.Version()
	if err != nil {
		return err
	}
	if version < MinVersion {
		return fmt.Errorf("the driver %s speaks CUDA %d.%d; %s: %w", d.Path, version/1000, version%1000/10, needs,
			device.ErrUnavailable)
	}
	return nil
}

// Version returns the newest API version that the driver supports: 12040 is CUDA 12.4. It needs no GPU.
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

// missing returns the symbols whose functions are nil in the table that p points to.
func missing(p any, onlyRequired bool) []string {
	var names []string
	eachFunction(p, func(_ reflect.Value, s symbolTag, isNil bool) {
		if isNil && (s.required || !onlyRequired) && !slices.Contains(names, s.name) {
			names = append(names, s.name)
		}
	})
	return names
}
