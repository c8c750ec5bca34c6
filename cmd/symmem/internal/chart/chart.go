// Package chart draws line charts with logarithmic axes, as PNG and as SVG. Both come from one layout.
package chart

import (
	"errors"
	"image/color"
	"io"
	"math"
	"slices"
)

// Page is one picture: charts below each other, with one legend. Lines with the same name look the same in every chart.
type Page struct {
	Title  string
	Charts []Chart
}

// Chart is a pair of axes and the lines between them.
type Chart struct {
	X, Y  Axis
	Lines []Line
}

// Axis is a logarithmic axis. It is as long as the points need.
type Axis struct {
	Label  string // what is shown and its unit
	Base   int    // 2 marks powers of two, 10 marks powers of ten and, on short axes, 2 and 5 between them
	Format func(value float64) string
}

// Line is one series of points, from left to right.
type Line struct {
	Name   string
	Points []Point
}

// Point is a point of a line. It is left out unless both values are finite and above 0, because logarithmic axes have no other place.
type Point struct{ X, Y float64 }

// ErrEmpty is returned if there is no point to draw.
var ErrEmpty = errors.New("there is nothing to draw")

// WritePNG writes the page as a PNG, 1200 pixels wide. It returns ErrEmpty if no chart has a point, or the error of w.
func (p *Page) WritePNG(w io.Writer) error {
	l, err := p.layout()
	if err != nil {
		return err
	}
	c := newRaster(pageWidth, l.height)
	l.draw(c)
	return c.write(w)
}

// WriteSVG writes the page as an SVG, 1200 units wide. It returns ErrEmpty if no chart has a point, or the error of w.
func (p *Page) WriteSVG(w io.Writer) error {
	l, err := p.layout()
	if err != nil {
		return err
	}
	c := newSVG(pageWidth, l.height)
	l.draw(c)
	return c.write(w)
}

// The measures of a page, in pixels.
const (
	pageWidth   = 1200
	plotHeight  = 400
	margin      = 24
	textSize    = 15
	titleSize   = 19
	lineHeight  = 22
	sampleWidth = 44 // of a line in the legend
	tickGap     = 8  // between an axis and what stands at its marks
)

var (
	black = color.RGBA{0x22, 0x22, 0x22, 0xff}
	grid  = color.RGBA{0xd0, 0xd0, 0xd0, 0xff}
	faint = color.RGBA{0xec, 0xec, 0xec, 0xff}

	// colours are those of Okabe and Ito, without the yellow. People with colour blindness can tell them apart.
	colours = []color.RGBA{
		{0x00, 0x72, 0xb2, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff}, {0xcc, 0x79, 0xa7, 0xff},
		{0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff}, {0x00, 0x00, 0x00, 0xff},
	}
	// corners are those of the marks at points; a mark with many corners is a circle. Their number and that of the colours have no
	// divisor in common, so that many lines can be told apart.
	corners = []int{24, 4, 3, 5}
)

// canvas is what a page is drawn on. Coordinates are pixels from the upper left corner.
type canvas interface {
	stroke(points []Point, width float64, c color.RGBA)
	fill(corners []Point, c color.RGBA)
	// text writes one line of text with its baseline at at.Y, which begins, is centred or ends at at.X.
	text(at Point, s string, size float64, anchor anchor)
}

type anchor int

const (
	begins anchor = iota
	centred
	ends
)

// layout is where everything is on a page.
type layout struct {
	page   *Page
	names  []string // of all lines, in the order of their colours
	left   float64  // of the plots
	legend []Point  // where the entries are
	top    float64  // of the first chart
	height int
	scales [][2]scale // of each chart, X and Y
}

func (p *Page) layout() (*layout, error) {
	l := &layout{page: p}
	for _, c := range p.Charts {
		var xs, ys []float64
		for _, line := range c.Lines {
			points := placed(line.Points)
			if len(points) > 0 && !slices.Contains(l.names, line.Name) {
				l.names = append(l.names, line.Name)
			}
			for _, at := range points {
				xs, ys = append(xs, at.X), append(ys, at.Y)
			}
		}
		x, y := newScale(c.X.Base, xs), newScale(c.Y.Base, ys)
		l.scales = append(l.scales, [2]scale{x, y})
		for _, v := range y.labels {
			l.left = max(l.left, margin+textWidth(c.Y.Format(v), textSize)+tickGap)
		}
	}
	if len(l.names) == 0 {
		return nil, ErrEmpty
	}
	at := Point{margin, margin + titleSize + tickGap + lineHeight}
	for _, name := range l.names {
		width := sampleWidth + tickGap + otherFonts*textWidth(name, textSize) + margin
		if at.X > margin && at.X+width > pageWidth {
			at = Point{margin, at.Y + lineHeight}
		}
		l.legend = append(l.legend, at)
		at.X += width
	}
	l.top = at.Y + lineHeight
	l.height = int(l.top) + len(p.Charts)*chartHeight + margin
	return l, nil
}

// otherFonts is how much wider a text may be where an SVG is drawn with another font and without regard to the width that is asked for.
const otherFonts = 1.12

// chartHeight is the height of a chart with a label above, and the values and a label below.
const chartHeight = lineHeight + plotHeight + 3*lineHeight

func (l *layout) draw(c canvas) {
	c.text(Point{margin, margin + titleSize}, l.page.Title, titleSize, begins)
	for i, at := range l.legend {
		look := lookOf(i)
		y := at.Y - textSize/3
		c.stroke([]Point{{at.X, y}, {at.X + sampleWidth, y}}, 2, look.colour)
		c.fill(look.mark(Point{at.X + sampleWidth/2, y}), look.colour)
		c.text(Point{at.X + sampleWidth + tickGap, at.Y}, l.names[i], textSize, begins)
	}
	for i, chart := range l.page.Charts {
		l.chart(c, chart, l.scales[i], l.top+float64(i)*chartHeight)
	}
}

// chart draws one chart below y.
func (l *layout) chart(c canvas, chart Chart, scales [2]scale, y float64) {
	c.text(Point{margin, y + textSize}, chart.Y.Label, textSize, begins)
	top, bottom := y+lineHeight+tickGap, y+lineHeight+plotHeight
	right := float64(pageWidth - 2*margin)
	place := func(at Point) Point {
		return Point{l.left + scales[0].at(at.X)*(right-l.left), bottom - scales[1].at(at.Y)*(bottom-top)}
	}
	for _, v := range scales[1].minor {
		at := place(Point{scales[0].low, v})
		c.stroke([]Point{at, {right, at.Y}}, 1, faint)
	}
	for _, v := range scales[1].labels {
		at := place(Point{scales[0].low, v})
		c.stroke([]Point{at, {right, at.Y}}, 1, grid)
		c.text(Point{l.left - tickGap, at.Y + textSize/3}, chart.Y.Format(v), textSize, ends)
	}
	for _, v := range scales[0].labels {
		at := place(Point{v, scales[1].low})
		c.stroke([]Point{at, {at.X, top}}, 1, grid)
		c.text(Point{at.X, bottom + tickGap + textSize}, chart.X.Format(v), textSize, centred)
	}
	c.stroke([]Point{{l.left, top}, {l.left, bottom}, {right, bottom}}, 1.5, black)
	c.text(Point{(l.left + right) / 2, bottom + tickGap + textSize + lineHeight}, chart.X.Label, textSize, centred)
	for _, line := range chart.Lines {
		var points []Point
		for _, at := range placed(line.Points) {
			points = append(points, place(at))
		}
		if len(points) == 0 {
			continue
		}
		look := lookOf(slices.Index(l.names, line.Name))
		c.stroke(points, 2, look.colour)
		for _, at := range points {
			c.fill(look.mark(at), look.colour)
		}
	}
}

// look is how a line looks.
type look struct {
	colour  color.RGBA
	corners int
}

func lookOf(number int) look {
	return look{colours[number%len(colours)], corners[number%len(corners)]}
}

// mark returns the corners of the mark at a point.
func (l look) mark(at Point) []Point {
	const radius = 5
	all := make([]Point, l.corners)
	for i := range all {
		sin, cos := math.Sincos(2 * math.Pi * float64(i) / float64(l.corners))
		all[i] = Point{at.X + radius*sin, at.Y - radius*cos}
	}
	return all
}

// placed returns the points that have a place on logarithmic axes.
func placed(all []Point) []Point {
	var points []Point
	for _, p := range all {
		if p.X > 0 && p.Y > 0 && !math.IsInf(p.X, 0) && !math.IsInf(p.Y, 0) {
			points = append(points, p)
		}
	}
	return points
}
