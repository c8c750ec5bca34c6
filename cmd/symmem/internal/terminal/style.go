// Package terminal prints for people: marks, colours where a terminal knows them, and a line of progress.
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

// Mark is the mark of something that is well, or is not.
func Mark(good bool) string {
	if good {
		return MarkGood
	}
	return MarkBad
}

// descriptor gives the descriptor of w if it is a terminal.
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

// PainterFor gives a painter for w. It colours what goes to a terminal that knows colours, unless NO_COLOR says otherwise
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

// Good colours what is well.
func (p Painter) Good(text string) string { return p.paint(text, color.FgGreen) }

// Bad colours what is not.
func (p Painter) Bad(text string) string { return p.paint(text, color.FgRed) }

// Warning colours what may not be well.
func (p Painter) Warning(text string) string { return p.paint(text, color.FgYellow) }

// Marks colours the mark that each line of a laid-out text begins with, if it begins with one.
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
			line = p.Warning(MarkWarning) + line[len(MarkWarning):]
		}
		b.WriteString(line)
	}
	return b.String()
}

// OneLine makes one line of a text, so that it does not break a table.
func OneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
