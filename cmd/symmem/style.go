package main

import (
	"io"
	"os"
	"strings"

	"github.com/fatih/color"
	"golang.org/x/term"
)

// The marks that findings begin with.
const (
	markGood    = "✓"
	markBad     = "✗"
	markWarning = "!"
)

// mark is the mark of something that is well, or is not.
func mark(good bool) string {
	if good {
		return markGood
	}
	return markBad
}

// terminal gives the descriptor of w if it is a terminal.
func terminal(w any) (fd int, ok bool) {
	f, ok := w.(*os.File)
	if !ok {
		return -1, false
	}
	fd = int(f.Fd())
	return fd, term.IsTerminal(fd)
}

// isTerminal reports whether w is a terminal.
func isTerminal(w any) bool {
	_, ok := terminal(w)
	return ok
}

// painter colours text. The zero value leaves it as it is.
type painter struct{ on bool }

// painterFor colours what goes to a terminal that knows colours, unless NO_COLOR says otherwise (https://no-color.org).
func (a *app) painterFor(w io.Writer) painter {
	return painter{on: a.getenv("NO_COLOR") == "" && a.getenv("TERM") != "dumb" && isTerminal(w)}
}

func (p painter) paint(text string, as color.Attribute) string {
	if !p.on {
		return text
	}
	c := color.New(as)
	c.EnableColor() // the library's own choice is by this process's standard output, which w need not be
	return c.Sprint(text)
}

func (p painter) good(text string) string    { return p.paint(text, color.FgGreen) }
func (p painter) bad(text string) string     { return p.paint(text, color.FgRed) }
func (p painter) warning(text string) string { return p.paint(text, color.FgYellow) }

// marks colours the mark that each line of a laid-out text begins with, if it begins with one.
func (p painter) marks(text string) string {
	if !p.on {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, markGood):
			line = p.good(markGood) + line[len(markGood):]
		case strings.HasPrefix(line, markBad):
			line = p.bad(markBad) + line[len(markBad):]
		case strings.HasPrefix(line, markWarning):
			line = p.warning(markWarning) + line[len(markWarning):]
		}
		b.WriteString(line)
	}
	return b.String()
}
