package launch

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"syscall"
)

// maxLine is how much of a line is held back, in bytes. A longer line is broken.
const maxLine = 1 << 20

// lineWriter writes whole lines, each with a prefix, to a writer that it shares with others under one lock. One goroutine
// uses a lineWriter at a time.
type lineWriter struct {
	mu     *sync.Mutex // of to
	to     io.Writer
	prefix string
	held   []byte // the beginning of an unfinished line
	err    error  // the first failure of to
	gone   func() // is called when nobody reads what to takes; may be nil
}

// Write never fails, because a rank that writes on while the others end must not be held up. The failure is kept in err.
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

// flush writes a last line that has no newline.
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
		if w.gone != nil && errors.Is(err, syscall.EPIPE) {
			w.gone()
		}
	}
}
