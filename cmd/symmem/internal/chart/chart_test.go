package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func figure(x float64) string { return strconv.FormatFloat(x, 'g', 10, 64) }

// sample returns a page of two charts, of which the second has one line less.
func sample() *Page {
	slow, fast := Line{Name: "slow <&> old"}, Line{Name: "fast"}
	for n := 1024.0; n <= 1<<30; n *= 2 {
		slow.Points = append(slow.Points, Point{n, 9 + n/2e5})
		fast.Points = append(fast.Points, Point{n, 2 + n/3e5})
	}
	x, y := Axis{Label: "size, bytes", Base: 2, Format: figure}, Axis{Label: "time, µs", Base: 10, Format: figure}
	return &Page{Title: "two lines", Charts: []Chart{{x, y, []Line{slow, fast}}, {x, y, []Line{fast}}}}
}

func TestScale(t *testing.T) {
	for name, tt := range map[string]struct {
		base      int
		values    []float64
		low, high float64
		labels    int
		has       []float64
	}{
		"few sizes":           {2, []float64{1 << 10, 1 << 14}, 1 << 10, 1 << 14, 5, []float64{1 << 11}},
		"many sizes":          {2, []float64{1 << 10, 1 << 30}, 1 << 10, 1 << 30, 11, []float64{1 << 20}},
		"sizes between marks": {2, []float64{1000, 5000}, 512, 8192, 5, nil},
		"one size":            {2, []float64{4096}, 4096, 8192, 2, nil},
		"all sizes":           {2, []float64{1, 1 << 40}, 1, 1 << 40, 11, []float64{1 << 20}},
		"short":               {10, []float64{3, 17}, 2, 20, 4, []float64{5, 10}},
		"exact":               {10, []float64{0.1, 100}, 0.1, 100, 4, []float64{1, 10}},
		"long":                {10, []float64{2.2, 5200}, 2, 10000, 4, []float64{10, 100, 1000}},
		"small":               {10, []float64{0.0003, 0.0004}, 0.0002, 0.0005, 2, nil},
		"one value":           {10, []float64{7}, 5, 10, 2, nil},
		"none":                {10, nil, 1, 10, 4, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScale(tt.base, tt.values)
			assert.InEpsilon(t, tt.low, s.low, 1e-6)
			assert.InEpsilon(t, tt.high, s.high, 1e-6)
			assert.Len(t, s.labels, tt.labels)
			for _, v := range tt.has {
				assert.Contains(t, s.labels, v)
			}
			assert.LessOrEqual(t, len(s.labels), mostLabels)
			for _, v := range append(tt.values, s.labels...) {
				assert.GreaterOrEqual(t, s.at(v), -1e-6)
				assert.LessOrEqual(t, s.at(v), 1+1e-6)
			}
		})
	}
	s := newScale(10, []float64{1, 10000})
	assert.InDelta(t, 0.25, s.at(10), 1e-9, "equal factors are equal ways")
	assert.InDelta(t, 0.5, s.at(100), 1e-9)
	assert.Contains(t, s.minor, 20.0)
}

// TestPNG looks for the lines where they have to be.
func TestPNG(t *testing.T) {
	p := sample()
	var out bytes.Buffer
	require.NoError(t, p.WritePNG(&out))
	picture, err := png.Decode(&out)
	require.NoError(t, err)
	assert.Equal(t, pageWidth, picture.Bounds().Dx())
	l, err := p.layout()
	require.NoError(t, err)
	assert.Equal(t, l.height, picture.Bounds().Dy())

	same := func(at Point, c color.RGBA) bool {
		for dx := -1; dx <= 1; dx++ {
			for dy := -1; dy <= 1; dy++ {
				if color.RGBAModel.Convert(picture.At(int(at.X)+dx, int(at.Y)+dy)) == c {
					return true
				}
			}
		}
		return false
	}
	// The first and the last point of the fast line, which is drawn last, in both charts; its entry in the legend.
	rec := &recorder{}
	l.draw(rec)
	require.Len(t, rec.lines[colours[1]], 3, "in the legend and in both charts")
	for _, line := range rec.lines[colours[1]] {
		assert.True(t, same(line[0], colours[1]))
		assert.True(t, same(line[len(line)-1], colours[1]))
	}
	require.Len(t, rec.lines[colours[0]], 2)
	assert.True(t, same(rec.lines[colours[0]][1][0], colours[0]), "the slow line begins apart")
	assert.Equal(t, color.RGBA{0xff, 0xff, 0xff, 0xff}, color.RGBAModel.Convert(picture.At(2, 2)))

	// Text leaves ink where it belongs.
	for _, text := range rec.texts {
		width := textWidth(text.s, text.size)
		x := text.at.X - map[anchor]float64{begins: 0, centred: width / 2, ends: width}[text.anchor]
		assert.GreaterOrEqual(t, x, 0.0, text.s)
		assert.LessOrEqual(t, x+width, float64(pageWidth), text.s)
		ink := 0
		box := image.Rect(int(x), int(text.at.Y-text.size), int(x+width), int(text.at.Y))
		for y := box.Min.Y; y < box.Max.Y; y++ {
			for x := box.Min.X; x < box.Max.X; x++ {
				if color.GrayModel.Convert(picture.At(x, y)).(color.Gray).Y < 0x60 {
					ink++
				}
			}
		}
		assert.Positive(t, ink, "%q at %v", text.s, box)
	}
}

// recorder is a canvas that notes what is drawn.
type recorder struct {
	lines map[color.RGBA][][]Point
	texts []drawnText
}

type drawnText struct {
	at     Point
	s      string
	size   float64
	anchor anchor
}

func (r *recorder) stroke(points []Point, _ float64, c color.RGBA) {
	if r.lines == nil {
		r.lines = map[color.RGBA][][]Point{}
	}
	r.lines[c] = append(r.lines[c], points)
}

func (r *recorder) fill([]Point, color.RGBA) {}

func (r *recorder) text(at Point, s string, size float64, anchor anchor) {
	r.texts = append(r.texts, drawnText{at, s, size, anchor})
}

// TestSVG holds that it is well-formed, and has the texts as they are and a mark for each point.
func TestSVG(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample().WriteSVG(&out))
	var texts []string
	count := map[string]int{}
	for d := xml.NewDecoder(&out); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		switch e := token.(type) {
		case xml.StartElement:
			count[e.Name.Local]++
		case xml.CharData:
			if s := strings.TrimSpace(string(e)); s != "" {
				texts = append(texts, s)
			}
		}
	}
	assert.Subset(t, texts, []string{"two lines", "slow <&> old", "fast", "size, bytes", "time, µs", "1024", "1073741824", "10", "10000"})
	assert.Equal(t, 3*21+2, count["polygon"], "a mark for each point and for each line of the legend")
	assert.Equal(t, 1, count["svg"])
}

// TestPointsWithoutAPlace: what logarithmic axes cannot show does no harm.
func TestPointsWithoutAPlace(t *testing.T) {
	x := Axis{Base: 2, Format: figure}
	y := Axis{Base: 10, Format: figure}
	bad := []Point{{0, 1}, {1, 0}, {-1, 3}, {math.NaN(), 1}, {1, math.NaN()}, {math.Inf(1), 1}, {1, math.Inf(1)}}
	assert.Empty(t, placed(bad))
	p := &Page{Charts: []Chart{{x, y, []Line{{"bad", bad}}}}}
	require.ErrorIs(t, p.WritePNG(io.Discard), ErrEmpty)
	require.ErrorIs(t, p.WriteSVG(io.Discard), ErrEmpty)
	require.ErrorIs(t, (&Page{}).WritePNG(io.Discard), ErrEmpty)

	// A line beside it, of a single point, is drawn, and so is a chart without any.
	p.Charts = append(p.Charts, Chart{x, y, []Line{{"good", []Point{{5, 5}}}}})
	require.NoError(t, p.WritePNG(io.Discard))
	l, err := p.layout()
	require.NoError(t, err)
	assert.Equal(t, []string{"good"}, l.names)
}

// TestLooks: no two of many lines look alike.
func TestLooks(t *testing.T) {
	seen := map[look]bool{}
	for i := range 28 {
		assert.False(t, seen[lookOf(i)], "line %d", i)
		seen[lookOf(i)] = true
	}
}

// TestLegendFits: however many lines there are, and however long their names.
func TestLegendFits(t *testing.T) {
	p := &Page{Charts: []Chart{{Axis{Base: 2, Format: figure}, Axis{Base: 10, Format: figure}, nil}}}
	for i := range 30 {
		p.Charts[0].Lines = append(p.Charts[0].Lines, Line{strings.Repeat("name ", 1+i%9) + strconv.Itoa(i), []Point{{2, 3}}})
	}
	l, err := p.layout()
	require.NoError(t, err)
	for i, at := range l.legend {
		width := sampleWidth + tickGap + textWidth(l.names[i], textSize)
		assert.LessOrEqual(t, at.X+width, float64(pageWidth))
		if i > 0 && at.Y == l.legend[i-1].Y {
			before := l.legend[i-1].X + sampleWidth + tickGap + textWidth(l.names[i-1], textSize)
			assert.Greater(t, at.X, before, "entry %d begins within the one before it", i)
		}
	}
}
