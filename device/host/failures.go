package host

import (
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
)

// mostFailures bounds how many failures a stream keeps that nobody asked for.
const mostFailures = 64

// failures are the failures of a stream's work that were not returned yet, in order.
type failures struct {
	some atomic.Bool // whether the list may hold any; asked without the lock

	mu   sync.Mutex
	list []failure
}

// failure is one of them, and the number of its work in the stream.
type failure struct {
	seq uint64
	err *device.WorkError
}

// add keeps err; when there are too many, it is only counted with the last that is kept.
func (f *failures) add(seq uint64, err *device.WorkError) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.list); n >= mostFailures {
		f.list[n-1].err.More++
		return
	}
	f.list = append(f.list, failure{seq, err})
	f.some.Store(true)
}

// take returns the first failure among the first target works, telling how many others there were, and forgets them. It is
// nil if there was none.
func (f *failures) take(target uint64) error {
	if !f.some.Load() {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for n < len(f.list) && f.list[n].seq <= target {
		n++
	}
	if n == 0 {
		return nil
	}
	first := f.list[0].err
	for _, other := range f.list[1:n] {
		first.More += 1 + other.err.More
	}
	f.list = append(f.list[:0], f.list[n:]...)
	clear(f.list[len(f.list):cap(f.list)])
	f.some.Store(len(f.list) > 0)
	return first
}

// adopt moves what another list has here, as failures of work seq.
func (f *failures) adopt(seq uint64, from *failures) {
	if !from.some.Load() {
		return
	}
	from.mu.Lock()
	list := from.list
	from.list = nil
	from.some.Store(false)
	from.mu.Unlock()
	for _, other := range list {
		f.add(seq, other.err)
	}
}
