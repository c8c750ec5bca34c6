// Package host is the device that every machine has: the CPU and its memory. It runs what a GPU would run, in the same order
// and with the same errors, so that a program can be tried and tested where there is no GPU.
//
// # Memory
//
// A [device.Ptr] of this device is an address in this process. The device touches only memory that it knows: what [Device.Alloc] returned, and what
// [Device.Map] was called for. Every access is checked against these mappings, once when it is enqueued and again when it runs. Two mappings are
// never treated as one, even if they are adjacent.
//
// # Streams
//
// Each stream is a queue with one goroutine, which starts with the first work and ends with Close. Enqueueing takes some
// tens of nanoseconds and, apart from the growth of the queue and from HostFunc closures that the caller makes, allocates
// nothing. An idle stream looks for new work for a few microseconds before its goroutine parks.
//
// Work that fails, panics, touches memory that is not there, or ends its goroutine becomes a [*device.WorkError] that the next Synchronize or the
// Close of the stream returns. What was enqueued after it still runs.
//
// # Waits
//
// A WaitValue32 ends with an error when [Options].WaitTimeout has passed, when Options.Err reports one, and when its memory is unmapped. Closing a
// stream or the device lets queued work run to its end, but all WaitValue32 of the stream together may last no longer than WaitTimeout from then on.
// So Close lasts WaitTimeout at most, plus the time of the kernels, host functions and copies, plus that of other streams' work which the stream was
// told to wait for.
//
// # Graphs
//
// A capture spreads to the streams that wait for its events. The work of each of them is a branch of the graph. A launch runs the branches side by
// side, ordered by the events only: so work of one may wait for something that another rank does behind the work of another. A graph that is launched
// inside a capture becomes part of the new graph, and launches of the two never overlap.
//
// Calls that cannot be recorded (Query, Synchronize and Close of a capturing stream or of an event recorded in it, a wait for
// an event from outside) return a [*device.CaptureError]; the capture goes on. Moving memory with the methods of Device is not part of
// any stream and stays allowed.
//
// # Imports
//
// This package imports the device interfaces and the futex that processes wait with. It does not depend on groups or backends; a backend makes peers'
// memory known with Map, and ends waits for lost peers through Options.Err.
package host
