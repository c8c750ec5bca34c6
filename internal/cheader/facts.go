package cheader

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// none is the answer to a question about something that is not in the header, or not understood.
const none = "none"

// facts are answers about a header: of the header itself, or recorded.
type facts struct {
	header  *Header // nil if they are recorded
	answers map[string]string
	rest    *facts // of a header that is not whole: what is recorded of the rest
}

// recorded reads the facts of a file.
func recorded(path string) (*facts, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	f := &facts{answers: make(map[string]string)}
	for _, line := range strings.Split(string(text), "\n") {
		if question, answer, ok := strings.Cut(line, " = "); ok {
			f.answers[question] = answer
		}
	}
	return f, nil
}

// String is how facts are recorded.
func (f *facts) String() string {
	var lines []string
	for question, answer := range f.answers {
		lines = append(lines, question+" = "+answer+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// ask answers a question; ok is false if nobody has recorded an answer.
func (f *facts) ask(question string, look func(h *Header) (string, bool)) (answer string, ok bool) {
	if f.header == nil {
		answer, ok = f.answers[question]
		return answer, ok
	}
	answer, ok = look(f.header)
	if !ok && f.rest != nil {
		return f.rest.ask(question, nil)
	}
	if !ok {
		answer = none
	}
	f.answers[question] = answer
	return answer, true
}

func (f *facts) constant(name string) (string, bool) {
	return f.ask("const "+name, func(h *Header) (string, bool) {
		v, ok := h.Const(name)
		return fmt.Sprint(v), ok
	})
}

func (f *facts) element(name string, i int) (string, bool) {
	return f.ask(fmt.Sprintf("element %d of %s", i, name), func(h *Header) (string, bool) {
		v, ok := h.Element(name, i)
		return fmt.Sprint(v), ok
	})
}

func (f *facts) size(name string) (string, bool) {
	return f.ask("size "+name, func(h *Header) (string, bool) {
		v, ok := h.Size(name)
		return fmt.Sprint(v), ok
	})
}

func (f *facts) field(name, field string) (string, bool) {
	return f.ask("field "+name+"."+field, func(h *Header) (string, bool) {
		offset, size, ok := h.Offset(name, field)
		return place(offset, size), ok
	})
}

func (f *facts) function(name string) (string, bool) {
	return f.ask("func "+name, func(h *Header) (string, bool) {
		fn, ok := h.Func(name)
		return fn.String(), ok
	})
}

// place is where a field is.
func place(offset, size int64) string { return fmt.Sprintf("%d bytes at %d", size, offset) }

// String returns the bytes of each argument, and of the result.
func (f Func) String() string { return fmt.Sprintf("%d of %d", f.Result, f.Args) }
