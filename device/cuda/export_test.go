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
