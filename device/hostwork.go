package device

import "fmt"

// HostWork is work that the CPU does for a stream without blocking a goroutine, such as a transfer that a library carries out. The stream waits from
// when it comes to the work until the work has ended.
type HostWork interface {
	// Start begins a run of the work, when a stream has come to it: all that the stream wrote before is visible. It does not block, and may be called
	// for several streams at once. An error becomes the stream's, which then goes on. A nil HostProgress without an error is a run that has ended.
	Start() (HostProgress, error)
}

// HostProgress is one run of a HostWork.
type HostProgress interface {
	// Poll makes progress with the run and reports whether it has ended. It is called until it has, by one goroutine at a time. An error ends the run
	// too, and becomes the stream's. Poll does not block. It must bound the run, because not every device does. A device that lets the stream go on
	// without the run keeps polling until the run has ended.
	Poll() (ended bool, err error)
}

// HostWorkFailer is implemented by HostWork that must learn of failures that otherwise only its stream reports: that a run was cut off because it
// lasted too long, or that it panicked. The program may never ask that stream for errors.
type HostWorkFailer interface {
	// Failed is called with the error of a run before the stream goes on. It must be quick and call nothing of the device. A run that was
	// cut off may be polled at the same time.
	Failed(err error)
}

// HostWorker is implemented by streams that can wait for work of the CPU.
type HostWorker interface {
	// HostWork enqueues w, or records it, and returns at once. The same work may be enqueued many times. Its runs overlap only if it is
	// enqueued on several streams, or if its stream had to go on without the run before.
	HostWork(w HostWork) error
}

// EnqueueHostWork enqueues w on s as its HostWork does. ErrUnsupported for a stream that cannot wait for work of the CPU.
func EnqueueHostWork(s Stream, w HostWork) error {
	h, ok := s.(HostWorker)
	if !ok {
		return fmt.Errorf("stream of %s cannot wait for work of the CPU: %w", s.Device().Name(), ErrUnsupported)
	}
	return h.HostWork(w)
}

// WorkStreamer is implemented by devices whose work of the CPU can have the device do something, such as a copy whose size only that work finds out.
type WorkStreamer interface {
	// NewWorkStream returns a stream for what work of the CPU enqueues. Streams that wait for work of the CPU do not hold it up, as they may hold up
	// other streams.
	NewWorkStream() (Stream, error)
	// NewHostBuffer returns bytes (> 0) of memory of the host, all 0, that copies of the device read and write. Its errors are those of Alloc.
	NewHostBuffer(bytes int64) (HostBuffer, error)
}

// HostBuffer is memory of the host that copies of a device read and write.
type HostBuffer interface {
	// Bytes is the memory itself. It must not be used after Close.
	Bytes() []byte
	// Ptr is its address for the device, aligned to 8 bytes.
	Ptr() Ptr
	// Close frees it; no queued work may still use it. Twice is ErrClosed.
	Close() error
}
