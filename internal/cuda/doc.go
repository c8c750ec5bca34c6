// Package cuda is the raw binding of the driver of NVIDIA GPUs, libcuda.so.1: its functions, handles, structs, constants and result codes. Package
// device/cuda and the backends build on it, and nothing outside this module can import it. It is imported as cu, as in the driver's own names.
//
// [Driver] is every driver function that this module uses, as one table of Go functions. [Load] fills it from the driver; a test may put a simulator
// or a fault injector in their place. A function that the driver lacks is nil in the table: a missing capability, which [Driver.Require] turns into
// an error. The multicast functions are not part of the table and are not even looked up before [Driver.ResolveMulticast] is called.
//
// # Contexts, threads and errors
//
// Nothing here chooses a context or locks a thread: that is up to the caller, as it is in C. [Driver.Check] makes an error of a result, a [*dl.Error]
// with the call, its code and the driver's name and text for it. The error says what to do next, and wraps the condition that the code stands for
// (ErrNoMemory, ErrUnavailable, [ErrContextLost]).
//
// # Where the numbers come from
//
// Every number is checked against cuda.h. Each constant is followed by its name in cuda.h, each field of a struct by a tag with the field's name
// there, and each function by a tag with its symbol. TestHeader reads cuda.h of several versions of CUDA and compares all of them: values, sizes,
// offsets, the version in the symbol's name, and the number and width of arguments. A constant without a name fails the test. CI runs it (.ci/run
// headers).
//
// # What it may know
//
// This package imports the loader of native libraries and, for addresses and conditions, package device. It uses no device.
package cuda
