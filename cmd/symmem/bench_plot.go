package main

import (
	"errors"
	"fmt"
	"io"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// writePlot draws time and bandwidth by size, both axes logarithmic, as a PNG.
func (r *benchReport) writePlot(w io.Writer) error {
	latency, bandwidth := plot.New(), plot.New()
	latency.Title.Text = fmt.Sprintf("%s, %d cores", orUnknown(r.Machine.CPU), r.Machine.Cores)
	latency.Y.Label.Text = "time of the slowest rank, us"
	bandwidth.Y.Label.Text = "bandwidth (all_reduce: bus), GB/s"
	for _, p := range []*plot.Plot{latency, bandwidth} {
		p.X.Label.Text = "bytes"
		p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
		p.X.Tick.Marker, p.Y.Tick.Marker = sizeTicks{}, plot.LogTicks{Prec: 3}
		p.Legend.Top, p.Legend.Left = true, true
		p.Add(plotter.NewGrid())
	}

	lines := 0
	for _, name := range r.lines() {
		var times, rates plotter.XYs
		for _, row := range r.Rows {
			if row.line() != name || row.Median <= 0 {
				continue
			}
			times = append(times, plotter.XY{X: float64(row.Bytes), Y: row.Median})
			y := row.Bandwidth
			if row.Kind == kindAllReduce {
				y = row.Bus
			}
			if y > 0 { // with one rank nothing is on the bus
				rates = append(rates, plotter.XY{X: float64(row.Bytes), Y: y})
			}
		}
		if err := addLine(latency, lines, name, times); err != nil {
			return err
		}
		if err := addLine(bandwidth, lines, name, rates); err != nil {
			return err
		}
		lines++
	}
	if lines == 0 {
		return errors.New("drawing the picture: nothing with sizes was measured; add all_reduce, put or get to --kind")
	}
	for _, p := range []*plot.Plot{latency, bandwidth} {
		widen(&p.X)
		widen(&p.Y)
	}

	img := vgimg.New(25*vg.Centimeter, 26*vg.Centimeter)
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadX: vg.Centimeter, PadY: vg.Centimeter,
		PadTop: vg.Centimeter / 2, PadBottom: vg.Centimeter / 2, PadLeft: vg.Centimeter / 2, PadRight: vg.Centimeter / 2}
	plots := [][]*plot.Plot{{latency}, {bandwidth}}
	for i, row := range plot.Align(plots, tiles, draw.New(img)) {
		plots[i][0].Draw(row[0])
	}
	if _, err := (vgimg.PngCanvas{Canvas: img}).WriteTo(w); err != nil {
		return fmt.Errorf("writing the picture: %w", err)
	}
	return nil
}

// line is the name of the line that the row belongs to, "" if it is no point of one.
func (r *benchRow) line() string {
	switch r.Kind {
	case kindAllReduce:
		if r.Beside != "" {
			return fmt.Sprintf("peer %s %s beside %s, %d ranks, %s", r.Backend, r.Kind, r.Beside, r.Ranks, r.Mode)
		}
		return fmt.Sprintf("%s %s %s, %d ranks, %s", r.Backend, r.Kind, r.Algorithm, r.Ranks, r.Mode)
	case kindPut, kindGet, kindPutSignal:
		return fmt.Sprintf("%s %s, %d ranks", r.Backend, r.Kind, r.Ranks)
	}
	return ""
}

// lines lists the names of all lines, in the order in which they were measured.
func (r *benchReport) lines() []string {
	var names []string
	seen := map[string]bool{"": true}
	for i := range r.Rows {
		if name := r.Rows[i].line(); !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}

// addLine draws one line with its points.
func addLine(p *plot.Plot, number int, name string, points plotter.XYs) error {
	if len(points) == 0 {
		return nil
	}
	line, dots, err := plotter.NewLinePoints(points)
	if err != nil {
		return fmt.Errorf("drawing %s: %w", name, err)
	}
	line.Color, dots.Color = plotutil.Color(number), plotutil.Color(number)
	dots.Shape = plotutil.Shape(number)
	p.Add(line, dots)
	p.Legend.Add(name, line, dots)
	return nil
}

// widen makes room around what is drawn: an axis that begins at its end cannot be drawn, nor one without points.
func widen(a *plot.Axis) {
	if a.Min > a.Max || a.Min <= 0 || math.IsInf(a.Min, 0) || math.IsInf(a.Max, 0) {
		a.Min, a.Max = 1, 10
	}
	a.Min /= 1.5
	a.Max *= 3 // the legend lies at the top
}

// sizeTicks marks powers of four, as sizes are written.
type sizeTicks struct{}

// Ticks gives the marks between low and high.
func (sizeTicks) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for n := int64(1); n > 0 && float64(n) <= high; n *= 4 {
		if float64(n) >= low {
			ticks = append(ticks, plot.Tick{Value: float64(n), Label: sizeText(n)})
		}
	}
	return ticks
}
