// Package cuda is the driver of NVIDIA GPUs, libcuda.so.1, as it is: its functions, handles, structs, constants and result codes. It is
// the raw binding that the device in device/cuda and the backends stand on, and nothing outside of this module can import it. Where
// it is imported, it is called cu, as in the driver's own names.
//
// [Driver] is every driver function that this module uses, as one table of Go functions. [Load] fills it from the driver; a test
// may put a simulator or a fault injector in their place. A function that the driver lacks is nil in the table: a missing
// capability, which [Driver.Require] turns into an error. Multicast is not part of the table and not even looked up before
// somebody calls [Driver.ResolveMulticast].
//
// # Contexts, threads and errors
//
// Nothing here chooses a context or stays on a thread: that is the caller's, as it is in C. [Driver.Check] makes an error of a
// result, a [*dl.Error] with the call, its code and the driver's name and text for it. It says what to do next, and is the
// condition that the code stands for (ErrNoMemory, ErrUnavailable, [ErrContextLost]).
//
// # Where the numbers come from
//
// No number is here because somebody has copied it. Each constant is followed by the name that cuda.h has for it, each field of a
// struct by a tag with the field's, and each function by a tag with its symbol; TestHeader reads cuda.h of several versions of
// CUDA and compares all of them: values, sizes, offsets, the version in the symbol's name, and the number and width of arguments.
// A constant without a name fails the test. CI runs it (.ci/run headers).
//
// # What it may know
//
// This package knows the loader of native libraries and the addresses and conditions of package device. It knows no device.
package cuda
