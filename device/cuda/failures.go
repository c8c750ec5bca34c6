package cuda

import (
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
)

// failures are the failures of a stream's work that were not returned yet: the first, and the number of others.
type failures struct {
	some atomic.Bool // whether there are any; asked without the lock

	mu    sync.Mutex
	first *device.WorkError
}

// add keeps err if it is the first, and otherwise counts it.
func (f *failures) add(err *device.WorkError) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.first != nil {
		f.first.More++
		return
	}
	f.first = err
	f.some.Store(true)
}

// take returns the first failure, with the number of others, and forgets them all. It returns nil if there was none.
func (f *failures) take() error {
	if !f.some.Load() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	first := f.first
	f.first = nil
	f.some.Store(false)
	if first == nil {
		return nil
	}
	return first
}
