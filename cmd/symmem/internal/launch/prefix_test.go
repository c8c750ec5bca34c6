package launch

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// failingWriter takes some writes and then none.
type failingWriter struct {
	left int
	b    strings.Builder
}

var errFull = errors.New("full")

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.left--; w.left < 0 {
		return 0, errFull
	}
	return w.b.Write(p)
}

func TestLineWriter(t *testing.T) {
	var mu sync.Mutex
	out := &failingWriter{left: 100}
	w := &lineWriter{mu: &mu, to: out, prefix: "[7] "}
	for _, part := range []string{"a", "b\nc\n\nd", "", "e\r\n", "last"} {
		n, err := w.Write([]byte(part))
		require.NoError(t, err)
		assert.Equal(t, len(part), n)
	}
	w.flush()
	w.flush()
	assert.Equal(t, "[7] ab\n[7] c\n[7] \n[7] de\r\n[7] last\n", out.b.String())
	assert.NoError(t, w.err)
}

func TestLineWriterBreaksEndlessLines(t *testing.T) {
	var mu sync.Mutex
	out := &failingWriter{left: 100}
	w := &lineWriter{mu: &mu, to: out, prefix: "> "}
	text := strings.Repeat("x", maxLine*5/2)
	for at := 0; at < len(text); at += 300_000 {
		_, err := w.Write([]byte(text[at:min(at+300_000, len(text))]))
		require.NoError(t, err)
		assert.LessOrEqual(t, len(w.held), maxLine)
	}
	w.flush()
	lines := strings.Split(strings.TrimSuffix(out.b.String(), "\n"), "\n")
	require.Len(t, lines, 3)
	assert.Equal(t, text, strings.ReplaceAll(strings.Join(lines, ""), "> ", ""))
}

func TestLineWriterRemembersAFailure(t *testing.T) {
	var mu sync.Mutex
	w := &lineWriter{mu: &mu, to: &failingWriter{left: 1}, prefix: ""}
	n, err := w.Write([]byte("a\nb\nc\n"))
	require.NoError(t, err, "a rank is not stopped by a reader that is gone")
	assert.Equal(t, 6, n)
	assert.ErrorIs(t, w.err, errFull)
}
