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
	Success                  Result = 0
	InvalidValue             Result = 1
	OutOfMemory              Result = 2
	NotInitialized           Result = 3
	Deinitialized            Result = 4
	StubLibrary              Result = 34
	DeviceUnavailable        Result = 46
	NoDevice                 Result = 100
	InvalidDevice            Result = 101
	InvalidImage             Result = 200
	InvalidContext           Result = 201
	MapFailed                Result = 205
	NoBinaryForGPU           Result = 209
	ECCUncorrectable         Result = 214
	PeerAccessUnsupported    Result = 217
	InvalidPTX               Result = 218
	NVLinkUncorrectable      Result = 220
	UnsupportedPTXVersion    Result = 222
	Contained                Result = 226
	OperatingSystem          Result = 304
	InvalidHandle            Result = 400
	NotFound                 Result = 500
	NotReady                 Result = 600
	IllegalAddress           Result = 700
	LaunchOutOfResources     Result = 701
	LaunchTimeout            Result = 702
	PeerAccessAlreadyEnabled Result = 704
	ContextIsDestroyed       Result = 709
	Assert                   Result = 710
	HardwareStackError       Result = 714
	IllegalInstruction       Result = 715
	MisalignedAddress        Result = 716
	InvalidAddressSpace      Result = 717
	InvalidPC                Result = 718
	LaunchFailed             Result = 719
	CooperativeTooLarge      Result = 720
	NotPermitted             Result = 800
	NotSupported             Result = 801
	SystemNotReady           Result = 802
	SystemDriverMismatch     Result = 803
	CompatNotSupported       Result = 804
	CaptureUnsupported       Result = 900
	CaptureInvalidated       Result = 901
	CaptureUnjoined          Result = 904
	CaptureIsolation         Result = 905
	CapturedEvent            Result = 907
	Timeout                  Result = 909
	ExternalDevice           Result = 911
	Unknown                  Result = 999
)

// needs says which driver is needed.
const needs = "CUDA 12.4 or newer is needed, which comes with the driver series 550"

// Error is a driver call that failed: the call, its code, the driver's name and text for it, and what to do next.
type Error = dl.Error

// ErrContextLost is in the errors of calls after device work has failed in a way that ends the context, such as an access to
// memory that is not mapped. The GPU is of no use to this process any more; others are not concerned.
var ErrContextLost = errs.ErrContextLost

// sticky reports whether a context that gave r gives nothing else any more.
func (r Result) sticky() bool {
	switch r {
	case ECCUncorrectable, NVLinkUncorrectable, Contained, IllegalAddress, LaunchTimeout, ContextIsDestroyed, Assert,
		HardwareStackError, IllegalInstruction, MisalignedAddress, InvalidAddressSpace, InvalidPC, LaunchFailed, ExternalDevice:
		return true
	}
	return false
}

// condition gives what to do next and the error that callers may look for; either may be nothing.
func (r Result) condition() (hint string, is error) {
	if r.sticky() {
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

// Check makes an [*Error] of the result of a call, or nil of Success.
func (d *Driver) Check(call string, r Result) error {
	if r == Success {
		return nil
	}
	hint, err := r.condition()
	return &Error{
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
	return cString(p, 256)
}

// cString copies the text that p points to, up to its zero byte or at most limit bytes of it.
func cString(p *byte, limit int) string {
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
