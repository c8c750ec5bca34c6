package cuda

import "sync/atomic"

// Thread is a thread of the operating system that has a device's primary context current until it is closed. It is for calls that take all ranks: a rank
// whose context cannot be made current then learns it before it agrees with the others, and not when they wait for it already. It is safe for use by
// several goroutines.
type Thread struct {
	calls chan func()
	over  chan struct{} // closed by Close
	left  chan struct{} // closed when the thread is free again
	under atomic.Int32  // calls that have come and not returned
}

// NewThread makes a thread. Close must follow unless there is an error.
func (d *Device) NewThread() (*Thread, error) {
	t := &Thread{calls: make(chan func()), over: make(chan struct{}), left: make(chan struct{})}
	ready := make(chan struct{})
	var failed error
	go func() {
		defer close(t.left)
		failed = d.WithContext(func() error {
			close(ready)
			for {
				select {
				case call := <-t.calls:
					call()
				case <-t.over:
					return nil
				}
			}
		})
	}()
	select {
	case <-ready:
		return t, nil
	case <-t.left:
		return nil, failed
	}
}

// Do calls fn on the thread, one call after the other, and waits for it. The error is that of fn, or ErrClosed if the thread was closed before fn began.
func (t *Thread) Do(fn func() error) error {
	t.under.Add(1)
	defer t.under.Add(-1)
	select {
	case <-t.over:
		return closed("Do", "thread")
	default:
	}
	done := make(chan error, 1)
	select {
	case t.calls <- func() { done <- fn() }:
		return <-done
	case <-t.over:
		return closed("Do", "thread")
	}
}

// Close gives the thread back. It does not wait for a call that has not returned: the thread is free when that does, and the device cannot close before.
// It is called once.
func (t *Thread) Close() {
	close(t.over)
	if t.under.Load() == 0 { // what comes later finds that it is over
		<-t.left
	}
}
