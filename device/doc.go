// Package device says what a device is to symmem: memory with 64-bit addresses, asynchronous streams, events, and graphs
// recorded from streams. Two packages implement it: device/host runs on the CPU, device/cuda on NVIDIA GPUs through the
// driver.
//
// # Streams
//
// A [Stream] runs its work in order and behind the caller's back: every method that enqueues work returns at once, and the
// work begins when all that was enqueued before it has ended. Different streams are not ordered unless an [Event] orders
// them. A stream is safe for use by several goroutines at once; the order of their work is then the order of their calls.
//
// # Graphs
//
// Between [Stream.BeginCapture] and [Stream.EndCapture] work is recorded instead of run. The [Graph] replays it as often as
// wanted with one call.
//
// # Errors of work that runs later
//
// Work that fails after its call returned (a kernel whose peer died, a copy outside of mapped memory) makes the next
// [Stream.Synchronize] return the first such error, once. Later work of the stream still runs.
//
// # Memory
//
// A [Ptr] is an address in the device's memory. It is a number, never a Go pointer: it may name memory that this process
// cannot touch. This package knows nothing of groups, ranks or backends.
package device
