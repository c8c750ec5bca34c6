package chart

import (
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"
	"sync"

	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"
	"golang.org/x/image/vector"
)

// goFont is the font of all text, which is compiled in.
var goFont = sync.OnceValues(func() (*opentype.Font, error) { return opentype.Parse(goregular.TTF) })

// face returns the font in a size. One goroutine at a time may use a face, so each call makes one.
func face(size float64) font.Face {
	f, err := goFont()
	if err != nil {
		panic(err) // nobody can change it, and tests draw with it
	}
	face, err := opentype.NewFace(f, &opentype.FaceOptions{Size: size, DPI: 72, Hinting: font.HintingFull})
	if err != nil {
		panic(err) // the options are constant
	}
	return face
}

// textWidth returns the width of a text in pixels.
func textWidth(s string, size float64) float64 {
	return float64(font.MeasureString(face(size), s)) / 64
}

// raster is a canvas of pixels.
type raster struct{ img *image.RGBA }

func newRaster(width, height int) *raster {
	img := image.NewRGBA(image.Rect(0, 0, width, height))
	draw.Draw(img, img.Bounds(), image.White, image.Point{}, draw.Src)
	return &raster{img: img}
}

func (r *raster) stroke(points []Point, width float64, c color.RGBA) {
	var shapes [][]Point
	for i := 1; i < len(points); i++ {
		a, b := points[i-1], points[i]
		dx, dy := b.X-a.X, b.Y-a.Y
		length := math.Hypot(dx, dy)
		if length == 0 {
			continue
		}
		if dx == 0 || dy == 0 { // lines of a grid are sharp
			a, b = sharp(a, width), sharp(b, width)
		}
		x, y := -dy/length*width/2, dx/length*width/2
		shapes = append(shapes, []Point{{a.X + x, a.Y + y}, {b.X + x, b.Y + y}, {b.X - x, b.Y - y}, {a.X - x, a.Y - y}})
	}
	r.shapes(shapes, c)
}

// sharp moves a point so that the edges of a line through it are on the edges of pixels.
func sharp(p Point, width float64) Point {
	half := math.Mod(math.Round(width), 2) / 2
	return Point{math.Floor(p.X) + half, math.Floor(p.Y) + half}
}

func (r *raster) fill(corners []Point, c color.RGBA) { r.shapes([][]Point{corners}, c) }

// shapes fills shapes whose corners all go round the same way. They are filled as one, so that overlaps do not show.
func (r *raster) shapes(all [][]Point, c color.RGBA) {
	box := image.Rectangle{}
	for _, shape := range all {
		for _, p := range shape {
			x, y := int(math.Floor(p.X)), int(math.Floor(p.Y))
			box = box.Union(image.Rect(x, y, x+2, y+2))
		}
	}
	box = box.Intersect(r.img.Bounds())
	if box.Empty() {
		return
	}
	z := vector.NewRasterizer(box.Dx(), box.Dy())
	for _, shape := range all {
		for i, p := range shape {
			x, y := float32(p.X-float64(box.Min.X)), float32(p.Y-float64(box.Min.Y))
			if i == 0 {
				z.MoveTo(x, y)
			} else {
				z.LineTo(x, y)
			}
		}
		z.ClosePath()
	}
	z.Draw(r.img, box, image.NewUniform(c), image.Point{})
}

func (r *raster) text(at Point, s string, size float64, anchor anchor) {
	switch anchor {
	case centred:
		at.X -= textWidth(s, size) / 2
	case ends:
		at.X -= textWidth(s, size)
	}
	d := font.Drawer{Dst: r.img, Src: image.NewUniform(black), Face: face(size), Dot: fixed.P(int(math.Round(at.X)), int(math.Round(at.Y)))}
	d.DrawString(s)
}

func (r *raster) write(w io.Writer) error { return png.Encode(w, r.img) }
