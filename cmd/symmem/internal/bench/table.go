package bench

import (
	"cmp"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

// writeTable prints the rows for people, in a table for each backend and kind. What a peer took is in the row that it was measured
// beside.
func (r *Report) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	m := r.Machine
	fmt.Fprintf(t, "%s\n%s, %s, %s %s\n", r.Version, m.Processor(), m.CoreCount(), m.OS, m.Kernel)
	table, compared := "", false
	for i, row := range r.Rows {
		if row.Beside != "" && row.Kind != measure.AllReduceMatMul { // which has more of a peer than the row that it was measured beside
			continue
		}
		title := fmt.Sprintf("%s on %s, %d ranks", row.Kind, cmp.Or(row.Beside, row.Backend), row.Ranks)
		switch {
		case row.Op != "":
			title += fmt.Sprintf(", %s of %s", row.Op, row.DType)
		case row.DType != "":
			title += ", " + row.DType
		}
		if row.Tensors > 0 {
			title += fmt.Sprintf(", %d tensors", row.Tensors)
		}
		if row.Mode != "" {
			title += ", " + row.Mode
		}
		if row.Place != "" {
			title += ", " + row.Place
		}
		if row.Exclusive {
			title += ", exclusive"
		}
		if title != table {
			table, compared = title, r.compared(&r.Rows[i])
			fmt.Fprintf(t, "\n%s\n", title)
			fmt.Fprint(t, "bytes\t\tmedian us\tmin us\tmax us\tGB/s\tbus GB/s\t")
			if compared {
				for _, name := range r.peers(&r.Rows[i]) {
					fmt.Fprintf(t, "%s us\t%s bus\t", name, name)
				}
				fmt.Fprint(t, "ratio\t")
			}
			fmt.Fprintln(t)
		}
		note := row.Note
		if row.Algorithm != "" {
			note = row.Chosen
			if row.Algorithm != row.Chosen {
				note = row.Algorithm + ": " + row.Chosen
			}
		}
		if row.Wire > 0 {
			note += fmt.Sprintf(", %d bytes sent", row.Wire)
		}
		if row.Kind == measure.AllReduceMatMul {
			if row.Beside != "" {
				note = row.Backend
			}
			note += fmt.Sprintf(", alone %s, products alone %s", figure(row.Alone), figure(row.MatMul))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t", bytesize.Text(row.Bytes), note, figure(row.Median), figure(row.Min),
			figure(row.Max), rate(row.Bandwidth), rate(row.Bus))
		if compared {
			for _, name := range r.peers(&r.Rows[i]) { // none of a peer's own row
				var p measure.Row
				if of := r.peerOf(&r.Rows[i], name); of != nil {
					p = *of
				}
				fmt.Fprintf(t, "%s\t%s\t", rate(p.Median), rate(p.Bus))
			}
			fmt.Fprintf(t, "%s\t", rate(row.PeerRatio))
		}
		fmt.Fprintln(t)
	}
	for _, about := range r.abouts() {
		fmt.Fprintf(t, "\n%s; ratio: the fastest peer's time divided by ours\n", about)
	}
	for _, row := range r.Rows {
		if row.Kind == measure.AllReduceMatMul && row.Beside == "" {
			fmt.Fprintf(t, "\nproducts: %s; times are those of one all-reduce with its share of the products, together and alone\n", row.Note)
			break
		}
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(t, "\nskipped: %s: %s\n", s.Backend, s.Reason)
	}
	if r.Incomplete != "" {
		fmt.Fprintf(t, "\nincomplete: %s\n", r.Incomplete)
	}
	return t.Flush()
}

// compared reports whether a row of the same table as row was compared with a peer.
func (r *Report) compared(row *measure.Row) bool {
	for i := range r.Rows {
		if other := &r.Rows[i]; other.Kind == row.Kind && other.Backend == row.Backend && other.PeerRatio > 0 {
			return true
		}
	}
	return false
}

// figure formats a time in microseconds, or a rate, with about three digits.
func figure(x float64) string {
	switch {
	case x < 10:
		return fmt.Sprintf("%.2f", x)
	case x < 100:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.0f", x)
}

// rate formats a rate, as "" if there is none.
func rate(x float64) string {
	if x == 0 {
		return ""
	}
	return figure(x)
}
