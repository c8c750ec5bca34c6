// Package terminal prints for people: marks, colours on terminals that have them, and a line of progress.
package terminal

import (
	"io"
	"os"
	"strings"

	"github.com/fatih/color"
	"golang.org/x/term"
)

// The marks that findings begin with.
const (
	MarkGood    = "✓"
	MarkBad     = "✗"
	MarkWarning = "!"
)

// Mark returns MarkGood or MarkBad.
func Mark(good bool) string {
	if good {
		return MarkGood
	}
	return MarkBad
}

// descriptor returns the descriptor of w if it is a terminal.
func descriptor(w any) (fd int, ok bool) {
	f, ok := w.(*os.File)
	if !ok {
		return -1, false
	}
	fd = int(f.Fd())
	return fd, term.IsTerminal(fd)
}

// Is reports whether w is a terminal.
func Is(w any) bool {
	_, ok := descriptor(w)
	return ok
}

// Painter colours text. The zero value leaves it as it is.
type Painter struct{ on bool }

// PainterFor returns a painter for text that goes to w. It colours if w is a terminal that has colours, unless NO_COLOR is set
// (https://no-color.org). getenv reads the environment.
func PainterFor(w io.Writer, getenv func(string) string) Painter {
	return Painter{on: getenv("NO_COLOR") == "" && getenv("TERM") != "dumb" && Is(w)}
}

func (p Painter) paint(text string, as color.Attribute) string {
	if !p.on {
		return text
	}
	c := color.New(as)
	c.EnableColor() // the library's own choice is by this process's standard output, which w need not be
	return c.Sprint(text)
}

// Good returns text in the colour of what works.
func (p Painter) Good(text string) string { return p.paint(text, color.FgGreen) }

// Bad returns text in the colour of what does not.
func (p Painter) Bad(text string) string { return p.paint(text, color.FgRed) }

// warning returns text in the colour of what may not work.
func (p Painter) warning(text string) string { return p.paint(text, color.FgYellow) }

// Marks colours the mark at the beginning of each line, if there is one. Tables are laid out before, without colours.
func (p Painter) Marks(text string) string {
	if !p.on {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, MarkGood):
			line = p.Good(MarkGood) + line[len(MarkGood):]
		case strings.HasPrefix(line, MarkBad):
			line = p.Bad(MarkBad) + line[len(MarkBad):]
		case strings.HasPrefix(line, MarkWarning):
			line = p.warning(MarkWarning) + line[len(MarkWarning):]
		}
		b.WriteString(line)
	}
	return b.String()
}

// OneLine returns a text on one line with single spaces, so that it does not break a table.
func OneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
