package device

// HostWork is work that the CPU does for a stream without blocking a goroutine, such as a transfer that a library carries out. The stream waits from
// when it comes to the work until the work has ended.
type HostWork interface {
	// Start begins a run of the work, when a stream has come to it: all that the stream wrote before is visible. It does not block, and may be called
	// for several streams at once. An error becomes the stream's, which then goes on.
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
