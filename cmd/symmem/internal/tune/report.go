package tune

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/kernels/tuning"
)

// write prints what was found beside what was there. incomplete says why that is not all; "" if it is.
func write(w io.Writer, m *measure.TunedMachine, points []measure.Point, incomplete string) error {
	fmt.Fprintf(w, "%d ranks of %v over %s, backend %s; in use is %s\n", m.Ranks, m.Devices, m.Link, m.Backend, m.Tables)
	won := 0
	for _, s := range seriesOf(points) {
		what := ""
		if s.dtypes != nil {
			what = " of " + s.points[0].DType
		}
		if s.multicast {
			what += ", with multicast"
		}
		fmt.Fprintf(w, "\n%s%s\n", s.collective, what)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "  bytes\tin use\tus\tfound\tus\tfaster by\tother forms")
		for _, p := range s.points {
			fmt.Fprintf(t, "  %s\t%s\t%.2f\t", bytesize.Text(p.Bytes), p.Default.Candidate, p.Default.Median)
			if p.Best.Candidate == p.Default.Candidate {
				fmt.Fprint(t, "the same\t\t\t")
			} else {
				won++
				gain := fmt.Sprintf("%.0f%%", 100*(1-p.Best.Median/p.Default.Median))
				if p.Best.Median >= p.Default.Median {
					gain = "leaves room"
				}
				fmt.Fprintf(t, "%s\t%.2f\t%s\t", p.Best.Candidate, p.Best.Median, gain)
			}
			fmt.Fprintln(t, others(p))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "\n%d of %d sizes have another form, number of blocks or lap that is faster by more than noise, or leaves room\n", won, len(points))
	if err == nil && incomplete != "" {
		_, err = fmt.Fprintf(w, "\nincomplete: %s\n", incomplete)
	}
	return err
}

// writeIncomplete prints, as JSON, the table of what was measured until something ended that, and why. Nothing takes it for a table: reading one refuses keys that
// tables do not have.
func writeIncomplete(w io.Writer, table *tuning.Table, incomplete string) error {
	text, err := json.MarshalIndent(struct {
		Incomplete string `json:"incomplete"`
		*tuning.Table
	}{incomplete, table}, "", "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}

// others are the forms that were measured beside, each at its fastest.
func others(p measure.Point) string {
	text := ""
	seen := map[string]bool{p.Default.Form: true, p.Best.Form: true}
	for _, c := range p.All {
		if seen[c.Form] {
			continue
		}
		seen[c.Form] = true
		least := c.Median
		for _, o := range p.All {
			if o.Form == c.Form {
				least = min(least, o.Median)
			}
		}
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("%s %.2f", c.Form, least)
	}
	return text
}
