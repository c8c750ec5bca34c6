// Package cuda is the device of NVIDIA GPUs. It calls the driver, libcuda.so.1, which it finds and loads when a device is
// opened: building needs no toolkit, no headers and no C compiler. Driver 550 (CUDA 12.4) or newer is needed.
//
// The driver's functions, structs and constants are in internal/cuda. Calls of a program's own to the driver, or to a library that
// stands on it, take the numbers that [Device.Context], [Device.Ordinal] and [Stream.Handle] give.
//
// # Contexts and threads
//
// A [Device] holds the GPU's primary context, which it shares with the runtime API and all libraries of the process. The current context is a
// property of an OS thread, and goroutines move between threads. So every exported method locks its thread, makes the context current, calls the
// driver, restores the context that was current before, and unlocks. Callers need not care; for calls of their own they have [Device.WithContext].
// Enqueueing work needs none of that: the driver takes the context from the stream, unless it refuses.
//
// # Waits
//
// No method waits inside the driver: it polls, at first without pause and then with pauses of up to a millisecond, so that a context can end the
// wait. Close of a stream or the device waits no longer than [Options].WaitTimeout. What the GPU still works on then is left to the driver, and
// memory that it may use is not freed but reported.
//
// A WaitValue32 makes the GPU wait until somebody writes the word, and nothing but a write can end it. The GPU reports in a word of pinned memory
// which wait it is in, and a goroutine, which runs only while there are waits, looks at that fifty times a second. When a wait lasts longer than
// WaitTimeout, when Options.Err reports a lost peer, or when the stream is being closed and WaitTimeout has passed, the device writes the awaited
// value itself, so that the stream goes on, and the stream's Synchronize returns the reason as a [*device.WorkError].
//
// Work of the CPU ([Stream.HostWork]) is two words of pinned memory and a wait of that kind: the GPU writes one word when it has
// come to the work, a goroutine that watches these words runs the work, and writes the other one, for which the GPU waits.
//
// The driver's queue of a stream holds about a thousand items. Enqueueing more waits for room.
//
// # Errors
//
// A failed driver call is an [*Error] with the call, its code, name and text, however many layers have wrapped it. Some failures of device work (an access to memory
// that is not mapped, say) end the context: then every later call of the process on that GPU fails, with errors that are
// [ErrContextLost], until the process ends.
//
// Kernels report failures in memory that they share with the host: fault words and fault cells ([device.FaultWord], [device.FaultCell]). Each
// stream knows which of them its launches write, by themselves and in graphs, and looks at them when it is synchronized.
//
// # Graphs
//
// A capture spreads to the streams that wait for its events. Captures are relaxed, in the driver's word: calls of other threads, memory among them,
// do not disturb them. Calls that cannot be recorded return a [*device.CaptureError] without calling the driver, and the capture goes on. A graph
// that is launched inside a capture becomes part of the new graph, and launches of the two never overlap.
//
// # Imports
//
// This package imports the device interfaces, the driver, and the errors of native libraries, but no groups or backends.
package cuda
