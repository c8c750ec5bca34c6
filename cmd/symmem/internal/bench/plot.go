package bench

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/chart"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

// The endings of the files that a picture is written to.
const (
	endingPNG = ".png"
	endingSVG = ".svg"
)

// drawable reports whether the name of a file says that it is a picture.
func drawable(name string) bool { return hasEnding(name, endingPNG) || hasEnding(name, endingSVG) }

func hasEnding(name, ending string) bool { return strings.HasSuffix(strings.ToLower(name), ending) }

// writePlot draws time and bandwidth by size, in the format that the ending of the name says.
func (r *Report) writePlot(w io.Writer, name string) error {
	page := r.page()
	write := page.WritePNG
	if hasEnding(name, endingSVG) {
		write = page.WriteSVG
	}
	err := write(w)
	if errors.Is(err, chart.ErrEmpty) {
		return errors.New("drawing the picture: nothing with sizes was measured")
	}
	if err != nil {
		return fmt.Errorf("writing the picture: %w", err)
	}
	return nil
}

// page is the picture: a chart of times and one of bandwidths.
func (r *Report) page() *chart.Page {
	size := chart.Axis{Label: "size of a message", Base: 2, Format: func(bytes float64) string {
		return strings.Replace(bytesize.Human(int64(bytes)), ".0 ", " ", 1)
	}}
	figures := func(label string) chart.Axis {
		return chart.Axis{Label: label, Base: 10, Format: func(x float64) string { return strconv.FormatFloat(x, 'g', 10, 64) }}
	}
	times := chart.Chart{X: size, Y: figures("time of the slowest rank, µs")}
	rates := chart.Chart{X: size, Y: figures("bandwidth (collectives: bus), GB/s")}
	for _, name := range r.lines() {
		time, rate := chart.Line{Name: name}, chart.Line{Name: name}
		for _, row := range r.Rows {
			if line(&row) != name {
				continue
			}
			time.Points = append(time.Points, chart.Point{X: float64(row.Bytes), Y: row.Median})
			bandwidth := row.Bandwidth
			if !transfers(row.Kind) {
				bandwidth = row.Bus // 0 for one rank: nothing is on the bus, and there is no point
			}
			rate.Points = append(rate.Points, chart.Point{X: float64(row.Bytes), Y: bandwidth})
		}
		times.Lines, rates.Lines = append(times.Lines, time), append(rates.Lines, rate)
	}
	return &chart.Page{
		Title:  fmt.Sprintf("symmem bench: %s, %s", r.Machine.Processor(), r.Machine.CoreCount()),
		Charts: []chart.Chart{times, rates},
	}
}

// transfers reports whether a kind of measurement is of transfers between two ranks, which have no bus bandwidth.
func transfers(kind string) bool {
	return kind == measure.Put || kind == measure.Get || kind == measure.PutSignal || kind == measure.PutSignalWait
}

// line returns the name of the line that a row belongs to, "" if it belongs to none.
func line(r *measure.Row) string {
	switch r.Kind {
	case measure.AllReduce, measure.AllReduceRMSNorm:
		if r.Beside != "" {
			return fmt.Sprintf("peer %s %s beside %s, %d ranks, %s", r.Backend, r.Kind, r.Beside, r.Ranks, r.Mode)
		}
		return fmt.Sprintf("%s %s %s, %d ranks, %s", r.Backend, r.Kind, r.Algorithm, r.Ranks, r.Mode)
	case measure.Broadcast, measure.Reduce, measure.AllGather, measure.ReduceScatter, measure.AllToAll, measure.AllToAllV, measure.AllReduceMany, measure.AllGatherMany, measure.ReduceScatterMany, measure.BroadcastMany:
		if r.Beside != "" {
			return fmt.Sprintf("peer %s %s beside %s, %d ranks, %s", r.Backend, r.Kind, r.Beside, r.Ranks, r.Mode)
		}
		name := fmt.Sprintf("%s %s", r.Backend, r.Kind)
		if r.Algorithm != "auto" {
			name += " " + r.Algorithm
		}
		return fmt.Sprintf("%s, %d ranks, %s", name, r.Ranks, r.Mode)
	}
	if transfers(r.Kind) || r.Kind == measure.HeapAlloc { // which has times only
		return fmt.Sprintf("%s %s, %d ranks", r.Backend, r.Kind, r.Ranks)
	}
	return ""
}

// lines lists the names of all lines, in the order in which they were measured.
func (r *Report) lines() []string {
	var names []string
	seen := map[string]bool{"": true}
	for i := range r.Rows {
		if name := line(&r.Rows[i]); !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}
