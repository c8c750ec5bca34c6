package device

// HostWork is work that the CPU does for a stream without blocking a goroutine for it: a transfer that a library carries out,
// say. The stream is held up from when it comes to the work until the work has ended.
type HostWork interface {
	// Start begins a run of the work, when a stream has come to it: all that the stream wrote before is visible. It does not
	// block, and may be called for several streams at once. An error is the stream's, which then goes on.
	Start() (HostProgress, error)
}

// HostProgress is one run of a HostWork.
type HostProgress interface {
	// Poll drives the run on and reports whether it has ended. It is called again and again, by one goroutine at a time, until
	// it has; an error ends the run too and becomes the stream's. It does not block, and it bounds the run: not every device does, and
	// one that lets the stream go on without the run asks on until the run has ended.
	Poll() (ended bool, err error)
}

// HostWorkFailer is implemented by HostWork whose user must know of what its stream is told, which may be nobody's who looks for
// errors: that a run was let go because it lasted too long, or that it panicked.
type HostWorkFailer interface {
	// Failed is told of the error of a run before the stream goes on. It is quick and calls nothing of the device; a run that was let go
	// may be polled meanwhile.
	Failed(err error)
}

// HostWorker is implemented by streams that can wait for work of the CPU.
type HostWorker interface {
	// HostWork enqueues w, or records it, and returns at once. The same work may be enqueued many times; its runs overlap only if
	// it is enqueued on several streams, or if its stream had to go on without the last one.
	HostWork(w HostWork) error
}
