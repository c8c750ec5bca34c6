package cuda

import "sync/atomic"

// SkipWork makes the numbers of the stream's work of the CPU go on as if so many more works, each directly behind the one before, had ended. There was one at
// least, and none is under way.
func SkipWork(s *Stream, works uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.work
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last += works
	atomic.StoreUint32(l.words.ended, l.last)
}

// AskStreams asks all streams whether they have work, as the freeing of memory does.
func AskStreams(d *Device) {
	if d.push() == nil {
		_, _ = d.whileIdle(func() error { return nil })
		d.pop()
	}
}
