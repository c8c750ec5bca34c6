package launch

import (
	"bytes"
	"io"
	"sync"
)

// maxLine is the most of a line that is held back, in bytes; what is longer is written in several lines.
const maxLine = 1 << 20

// lineWriter writes whole lines, each with a prefix, to a writer that it shares with others under one lock. One goroutine
// uses a lineWriter at a time.
type lineWriter struct {
	mu     *sync.Mutex // of to
	to     io.Writer
	prefix string
	held   []byte // the begin of a line that has not ended yet
	err    error  // the first failure of to
}

// Write never fails: a rank must not be stopped by a reader that is gone. The failure is in err.
func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for {
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			break
		}
		w.held = append(w.held, p[:end]...)
		w.line()
		p = p[end+1:]
	}
	for len(w.held)+len(p) > maxLine {
		room := maxLine - len(w.held)
		w.held = append(w.held, p[:room]...)
		w.line()
		p = p[room:]
	}
	w.held = append(w.held, p...)
	return n, nil
}

// flush writes the begin of a line that will not be ended any more.
func (w *lineWriter) flush() {
	if len(w.held) > 0 {
		w.line()
	}
}

func (w *lineWriter) line() {
	line := make([]byte, 0, len(w.prefix)+len(w.held)+1)
	line = append(append(append(line, w.prefix...), w.held...), '\n')
	w.held = w.held[:0]
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.to.Write(line); err != nil && w.err == nil {
		w.err = err
	}
}
