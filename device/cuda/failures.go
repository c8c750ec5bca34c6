package cuda

import (
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
)

// failures are the failed works of a stream that were not returned yet: the first, and how many more.
type failures struct {
	some atomic.Bool // whether there are any; asked without the lock

	mu    sync.Mutex
	first *device.WorkError
}

// add keeps err if it is the first, and else counts it.
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

// take returns the first failure, telling how many others there were, and forgets them. It is nil if there was none.
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
