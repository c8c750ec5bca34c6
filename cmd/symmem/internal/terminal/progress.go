package terminal

import (
	"fmt"
	"io"
	"strings"

	"github.com/cheggaaa/pb/v3"
	"golang.org/x/term"
)

// Progress is one line on a terminal, which is overwritten again and again: how much of how much is done, how long the rest may take,
// and what is being done. It is never wider than the terminal. On anything but a terminal it is silent. One goroutine uses it at a time.
type Progress struct {
	to    io.Writer
	on    bool
	width func() int // that a line may have now
	bar   *pb.ProgressBar
}

// lineTemplate begins with what a narrow terminal must still show. The bar takes what is left.
const lineTemplate = `{{string . "where"}} {{counters . "%s of %s"}} {{rtime . "%s left" "" ""}} {{string . "what"}} {{bar . "[" "=" ">" " " "]"}}`

// defaultWidth is the width of a terminal that does not report its own.
const defaultWidth = 80

// NewProgress returns a line of progress on w. It is silent unless w is a terminal.
func NewProgress(w io.Writer) *Progress {
	fd, on := descriptor(w)
	return &Progress{to: w, on: on, width: func() int {
		columns, _, err := term.GetSize(fd)
		if err != nil || columns <= 0 {
			columns = defaultWidth
		}
		return columns - 1 // a terminal may begin a new line after the last column
	}}
}

// Say shows a text instead, before it is known how much there is to do.
func (p *Progress) Say(format string, args ...any) {
	p.Clear()
	if p.on {
		fmt.Fprint(p.to, "\r"+pb.StripString(fmt.Sprintf(format, args...), p.width()))
	}
}

// Show shows that done of total are done at that place, and what comes next.
func (p *Progress) Show(where string, done, total int, what string) {
	if !p.on || total <= 0 {
		return
	}
	if p.bar == nil || p.bar.Total() != int64(total) {
		p.Clear()
		p.bar = pb.New(total).SetTemplateString(lineTemplate).SetWriter(p.to).
			Set(pb.Static, true).Set(pb.Terminal, true).Set(pb.ReturnSymbol, "\r").Set(pb.Color, false)
		p.bar.SetWidth(p.width()).Start()
	}
	p.bar.SetWidth(p.width()).SetCurrent(int64(done)).Set("where", where).Set("what", what).Write()
}

// Clear removes the line.
func (p *Progress) Clear() {
	p.bar = nil
	if p.on {
		fmt.Fprint(p.to, "\r"+strings.Repeat(" ", max(p.width(), 0))+"\r")
	}
}
