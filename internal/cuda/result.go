package cuda

import (
	"fmt"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// Result is a CUresult.
type Result int32

// The results that this library tells apart.
const (
	Success                  Result = 0   // CUDA_SUCCESS
	InvalidValue             Result = 1   // CUDA_ERROR_INVALID_VALUE
	OutOfMemory              Result = 2   // CUDA_ERROR_OUT_OF_MEMORY
	NotInitialized           Result = 3   // CUDA_ERROR_NOT_INITIALIZED
	Deinitialized            Result = 4   // CUDA_ERROR_DEINITIALIZED
	StubLibrary              Result = 34  // CUDA_ERROR_STUB_LIBRARY
	DeviceUnavailable        Result = 46  // CUDA_ERROR_DEVICE_UNAVAILABLE
	NoDevice                 Result = 100 // CUDA_ERROR_NO_DEVICE
	InvalidDevice            Result = 101 // CUDA_ERROR_INVALID_DEVICE
	InvalidImage             Result = 200 // CUDA_ERROR_INVALID_IMAGE
	InvalidContext           Result = 201 // CUDA_ERROR_INVALID_CONTEXT
	MapFailed                Result = 205 // CUDA_ERROR_MAP_FAILED
	NoBinaryForGPU           Result = 209 // CUDA_ERROR_NO_BINARY_FOR_GPU
	ECCUncorrectable         Result = 214 // CUDA_ERROR_ECC_UNCORRECTABLE
	PeerAccessUnsupported    Result = 217 // CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
	InvalidPTX               Result = 218 // CUDA_ERROR_INVALID_PTX
	NVLinkUncorrectable      Result = 220 // CUDA_ERROR_NVLINK_UNCORRECTABLE
	UnsupportedPTXVersion    Result = 222 // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
	Contained                Result = 226 // CUDA_ERROR_CONTAINED
	OperatingSystem          Result = 304 // CUDA_ERROR_OPERATING_SYSTEM
	InvalidHandle            Result = 400 // CUDA_ERROR_INVALID_HANDLE
	NotFound                 Result = 500 // CUDA_ERROR_NOT_FOUND
	NotReady                 Result = 600 // CUDA_ERROR_NOT_READY
	InvalidClusterSize       Result = 912 // CUDA_ERROR_INVALID_CLUSTER_SIZE
	IllegalAddress           Result = 700 // CUDA_ERROR_ILLEGAL_ADDRESS
	LaunchTimeout            Result = 702 // CUDA_ERROR_LAUNCH_TIMEOUT
	PeerAccessAlreadyEnabled Result = 704 // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
	ContextIsDestroyed       Result = 709 // CUDA_ERROR_CONTEXT_IS_DESTROYED
	Assert                   Result = 710 // CUDA_ERROR_ASSERT
	HardwareStackError       Result = 714 // CUDA_ERROR_HARDWARE_STACK_ERROR
	IllegalInstruction       Result = 715 // CUDA_ERROR_ILLEGAL_INSTRUCTION
	MisalignedAddress        Result = 716 // CUDA_ERROR_MISALIGNED_ADDRESS
	InvalidAddressSpace      Result = 717 // CUDA_ERROR_INVALID_ADDRESS_SPACE
	InvalidPC                Result = 718 // CUDA_ERROR_INVALID_PC
	LaunchFailed             Result = 719 // CUDA_ERROR_LAUNCH_FAILED
	TensorMemoryLeak         Result = 721 // CUDA_ERROR_TENSOR_MEMORY_LEAK
	NotPermitted             Result = 800 // CUDA_ERROR_NOT_PERMITTED
	NotSupported             Result = 801 // CUDA_ERROR_NOT_SUPPORTED
	SystemNotReady           Result = 802 // CUDA_ERROR_SYSTEM_NOT_READY
	SystemDriverMismatch     Result = 803 // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
	CompatNotSupported       Result = 804 // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
	MPSClientTerminated      Result = 810 // CUDA_ERROR_MPS_CLIENT_TERMINATED
	CaptureUnjoined          Result = 904 // CUDA_ERROR_STREAM_CAPTURE_UNJOINED
	ExternalDevice           Result = 911 // CUDA_ERROR_EXTERNAL_DEVICE
	Unknown                  Result = 999 // CUDA_ERROR_UNKNOWN
)

// needs says which driver is needed.
const needs = "CUDA 12.4 or newer is needed, which comes with the driver series 550"

// ErrContextLost is in the errors of calls after device work has failed in a way that ends the context, such as an access to memory that is not
// mapped. This process can no longer use the GPU; other processes are not affected.
var ErrContextLost = errs.ErrContextLost

// Sticky reports whether a context that has returned r returns nothing else from then on.
func (r Result) Sticky() bool {
	switch r {
	case ECCUncorrectable, NVLinkUncorrectable, Contained, IllegalAddress, LaunchTimeout, ContextIsDestroyed, Assert,
		HardwareStackError, IllegalInstruction, MisalignedAddress, InvalidAddressSpace, InvalidPC, LaunchFailed, TensorMemoryLeak,
		MPSClientTerminated, ExternalDevice:
		return true
	}
	return false
}

// condition returns what to do next, which may be empty, and the condition that callers may look for, which may be nil.
func (r Result) condition() (hint string, is error) {
	if r == MPSClientTerminated {
		return "the MPS server has ended what this process had on the GPU, maybe since another client of it failed; end the process, and see the server's log", ErrContextLost
	}
	if r.Sticky() {
		return "device work has failed and ended the context, so that every later call fails; end the process, " +
			"and run it under compute-sanitizer to find the work", ErrContextLost
	}
	switch r {
	case InvalidValue, InvalidHandle:
		return "", device.ErrInvalid
	case OutOfMemory:
		return "free memory on the GPU; nvidia-smi shows which processes hold it", device.ErrNoMemory
	case NotInitialized, Deinitialized, Unknown:
		return "look into the kernel's log (dmesg) for messages of the driver", device.ErrUnavailable
	case StubLibrary:
		return "this is the toolkit's stub, which only serves to link against; " +
			"take the toolkit's stubs folder out of LD_LIBRARY_PATH, so that the driver's own libcuda.so.1 is found", device.ErrUnavailable
	case NoDevice:
		return "no GPU is visible; nvidia-smi lists those of the machine", device.ErrUnavailable
	case InvalidDevice:
		return "the GPU is not there or not visible to this process", device.ErrUnavailable
	case DeviceUnavailable:
		return "another process uses the GPU exclusively, or the GPU has failed; see nvidia-smi", device.ErrUnavailable
	case SystemNotReady:
		return "on a machine with NVSwitch the service nvidia-fabricmanager must run, in the driver's version", device.ErrUnavailable
	case SystemDriverMismatch:
		return "the kernel module and the driver library have different versions; " +
			"restart the machine or the container", device.ErrUnavailable
	case CompatNotSupported:
		return "forward compatibility does not work with this GPU; use the driver's own libcuda.so.1", device.ErrUnavailable
	case NoBinaryForGPU, InvalidPTX, InvalidImage, UnsupportedPTXVersion:
		return "the kernels were not compiled for this GPU and driver", device.ErrUnsupported
	case NotSupported, PeerAccessUnsupported:
		return "", device.ErrUnsupported
	case NotPermitted:
		return "the process has not the permission", device.ErrUnsupported
	}
	return "", nil
}

// Check returns a [*dl.Error] for the result of a call, with the driver's name and text for the code, or nil for Success.
func (d *Driver) Check(call string, r Result) error {
	if r == Success {
		return nil
	}
	hint, err := r.condition()
	return &dl.Error{
		Library: libraryName,
		Call:    call,
		Code:    int(r),
		Name:    d.text(d.GetErrorName, r),
		Text:    d.text(d.GetErrorString, r),
		Hint:    hint,
		Err:     err,
	}
}

// text asks the driver for the name or the text of a code; "" if it knows none.
func (d *Driver) text(ask func(Result, **byte) Result, r Result) string {
	if ask == nil {
		return ""
	}
	var p *byte
	if ask(r, &p) != Success || p == nil {
		return ""
	}
	return GoString(p, 256)
}

// GoString copies the text that p points to, up to its zero byte or at most limit bytes of it.
func GoString(p *byte, limit int) string {
	n := 0
	for n < limit && *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

// unavailableError makes err, which says why the driver cannot be used, ErrUnavailable.
type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return fmt.Sprintf("%v: %v", device.ErrUnavailable, e.err) }

func (e *unavailableError) Unwrap() []error { return []error{device.ErrUnavailable, e.err} }
