package device

import (
	"context"
	"time"
)

// Stream is a queue of work on one device, run in order, each after the one before it has ended. Methods that enqueue
// return at once, before the work has run. During capture they record instead.
type Stream interface {
	// Device returns the device that the stream's work runs on.
	Device() Device

	// Copy enqueues a copy of bytes from src to dst. The two must not overlap. 0 bytes is no work.
	Copy(dst, src Ptr, bytes int64) error
	// Fill enqueues setting bytes at dst to value.
	Fill(dst Ptr, value byte, bytes int64) error
	// HostFunc enqueues a call of fn, on a goroutine of the device. fn must not call any method of this device or of its streams.
	HostFunc(fn func()) error

	// WriteValue32 enqueues writing value to the aligned 32-bit word at p; all earlier writes of the stream are visible to everybody who sees it, on
	// every device and in every process.
	WriteValue32(p Ptr, value uint32) error
	// WaitValue32 makes the stream wait until the aligned 32-bit word at p is value or beyond it, modulo 2^32: int32(word-value) >= 0. The wait is
	// bounded: when it lasts too long, or a peer is lost, the stream has an error.
	WaitValue32(p Ptr, value uint32) error

	// Record enqueues e, an event of the same device. It is complete when all work enqueued before it has ended.
	Record(e Event) error
	// WaitEvent makes the stream's later work wait until the latest Record of e so far is complete. It does nothing if e was never recorded.
	WaitEvent(e Event) error

	// BeginCapture makes the stream record what is enqueued instead of running it. Another stream that waits for an event recorded in a capturing
	// stream joins the capture. An event must join it back before EndCapture. The error is a [*CaptureError] if the stream is capturing already.
	BeginCapture() error
	// EndCapture ends recording and returns the graph, ready to be launched. The error is a [*CaptureError] if the stream did not begin the capture,
	// or if a stream that joined it was not joined back.
	EndCapture() (Graph, error)
	// Capturing reports whether the stream is recording.
	Capturing() bool

	// Query reports without waiting whether all work has ended.
	Query() (bool, error)
	// Synchronize waits until all work enqueued before the call has ended or ctx ends, and returns the first error of that work that was not returned
	// yet. If ctx ends first, the work goes on.
	Synchronize(ctx context.Context) error

	// Close waits for the work, for a bounded time, and releases the stream. It returns the first error of the work that Synchronize has not
	// returned. A second Close returns ErrClosed.
	Close() error
}

// HostLauncher is implemented by streams whose kernels are Go code.
type HostLauncher interface {
	// Launch enqueues k. It allocates nothing, so that a plan can launch the same kernel again and again.
	Launch(k HostKernel) error
}

// HostKernel is device work written in Go. RunKernel runs in stream order on a goroutine of the stream; an error
// becomes the stream's. Every wait in it must be bounded. The same kernel may be queued several times, but its runs never
// overlap unless it is launched on two streams.
type HostKernel interface {
	RunKernel() error
}

// Event marks a place in a stream.
type Event interface {
	// Query reports without waiting whether the latest record is complete; true if never recorded.
	Query() (bool, error)
	// Synchronize waits until the latest record is complete, or until ctx ends.
	Synchronize(ctx context.Context) error
	// Since returns the time from when start was complete to when this event was; both must be recorded and complete, on
	// streams of the same device.
	Since(start Event) (time.Duration, error)
	// Close releases the event. A second Close returns ErrClosed.
	Close() error
}

// Graph is recorded work. Launches of one graph never overlap: a launch begins when the one before it has ended.
type Graph interface {
	// Launch enqueues all of the recorded work on s, in the recorded order.
	Launch(s Stream) error
	// Close releases the graph. Launches already enqueued still run.
	Close() error
}
