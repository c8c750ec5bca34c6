package chart

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"image/color"
	"io"
)

// svg is a canvas of SVG elements.
type svg struct{ b bytes.Buffer }

func newSVG(width, height int) *svg {
	c := &svg{}
	fmt.Fprintf(&c.b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="Go, Arial, Helvetica, sans-serif">`+"\n",
		width, height, width, height)
	fmt.Fprintf(&c.b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	return c
}

func (c *svg) stroke(points []Point, width float64, of color.RGBA) {
	fmt.Fprintf(&c.b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="%g"/>`+"\n", coordinates(points), hex(of), width)
}

func (c *svg) fill(corners []Point, of color.RGBA) {
	fmt.Fprintf(&c.b, `<polygon points="%s" fill="%s"/>`+"\n", coordinates(corners), hex(of))
}

func (c *svg) text(at Point, s string, size float64, anchor anchor) {
	// Whatever font there is, the text is as wide as its place.
	fmt.Fprintf(&c.b, `<text x="%.1f" y="%.1f" font-size="%g" text-anchor="%s" textLength="%.1f" lengthAdjust="spacingAndGlyphs" fill="%s">`,
		at.X, at.Y, size, []string{begins: "start", centred: "middle", ends: "end"}[anchor], textWidth(s, size), hex(black))
	_ = xml.EscapeText(&c.b, []byte(s)) // a buffer takes everything
	c.b.WriteString("</text>\n")
}

func (c *svg) write(w io.Writer) error {
	c.b.WriteString("</svg>\n")
	_, err := c.b.WriteTo(w)
	return err
}

func coordinates(points []Point) string {
	var b bytes.Buffer
	for i, p := range points {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%.1f,%.1f", p.X, p.Y)
	}
	return b.String()
}

func hex(c color.RGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }
