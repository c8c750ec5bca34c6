// Package device defines what a device is: memory with 64-bit addresses, asynchronous streams, events, and graphs
// recorded from streams. Two packages implement it: device/host runs on the CPU, device/cuda on NVIDIA GPUs through the
// driver.
//
// # Streams
//
// A [Stream] runs its work in order and asynchronously: every method that enqueues work returns at once, and the
// work begins when all that was enqueued before it has ended. Different streams are not ordered unless an [Event] orders
// them. A stream is safe for use by several goroutines at once; the order of their work is then the order of their calls.
//
// # Graphs
//
// Between [Stream.BeginCapture] and [Stream.EndCapture] work is recorded instead of run. The [Graph] replays it as often as
// wanted with one call.
//
// # Errors
//
// A call returns ErrClosed if its object, or the object's device, was closed; ErrInvalid if an argument is outside of what is allowed; ErrNoMemory if
// the device or the host has not enough; ErrUnsupported if the device cannot do it; a [*CaptureError], which is ErrInvalid, if it is not allowed in a
// capture, or only in one; and the error of its context if that ended first. On a GPU, a driver call that failed is a *cuda.Error in the chain, and
// every call fails with cuda.ErrContextLost once device work has ended the context.
//
// Work that fails after its call returned (a kernel whose peer died, a copy outside of mapped memory) makes the next
// [Stream.Synchronize] return the first such error, once. Later work of the stream still runs.
//
// # Memory
//
// A [Ptr] is an address in the device's memory. It is a number, never a Go pointer: it may name memory that this process cannot touch. This package
// does not depend on groups, ranks or backends.
package device
