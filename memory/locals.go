package memory

import (
	"context"
	"sync"
)

// locals counts local calls under way that make or give back memory, so that Close does not take the backend away under them. None waits for Close: what
// would begin while the backend is being closed is refused. It has a lock of its own, which is held for no longer than counting takes.
type locals struct {
	mu    sync.Mutex
	under int
	shut  bool          // no call begins any more
	ended chan struct{} // closed when the last call under way ends; nil if Close does not wait for that
}

// enter begins a call and reports whether it may go on. leave ends it then.
func (l *locals) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut {
		return false
	}
	l.under++
	return true
}

func (l *locals) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.under--
	if l.under == 0 && l.ended != nil {
		close(l.ended)
		l.ended = nil
	}
}

// end waits until no call is under way, and lets none begin any more. If ctx ends before, calls go on as ever. For one goroutine at a time.
func (l *locals) end(ctx context.Context) error {
	for {
		l.mu.Lock()
		if l.under == 0 {
			l.shut = true
			l.mu.Unlock()
			return nil
		}
		if l.ended == nil {
			l.ended = make(chan struct{})
		}
		ended := l.ended
		l.mu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
