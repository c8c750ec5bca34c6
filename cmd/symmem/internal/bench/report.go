package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/machine"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/outfile"
)

// Report is what bench finds out: the document that --json prints and --output writes.
type Report struct {
	Version build.Info      `json:"version"`
	Date    time.Time       `json:"date"`
	Machine machine.Machine `json:"machine"`
	Command []string        `json:"command"`
	// Launcher names what has started the ranks, as group.Launch.Source does; "" if bench has. The machine is rank 0's then.
	Launcher string    `json:"launcher,omitempty"`
	Skipped  []Skipped `json:"skipped,omitempty"`
	// Incomplete says why bench ended before it had measured everything; "" if it has.
	Incomplete string        `json:"incomplete,omitempty"`
	Rows       []measure.Row `json:"rows"`
}

// Skipped is a backend that cannot be used here, or a peer that cannot be measured.
type Skipped struct {
	Backend string `json:"backend"`
	Reason  string `json:"reason"`
}

// write writes the report everywhere that o says.
func (r *Report) write(out io.Writer, o Options, to outputFiles) error {
	r.compare()
	// The files come first: where nobody reads the standard output any more, writing to it ends the process.
	var err error
	if to.json != nil {
		err = whole(to.json, r.writeJSON)
	}
	if to.plot != nil {
		err = errors.Join(err, whole(to.plot, func(w io.Writer) error { return r.writePlot(w, o.PlotFile) }))
	}
	if o.JSON {
		return errors.Join(err, r.writeJSON(out))
	}
	return errors.Join(err, r.writeTable(out))
}

// whole writes a file if all of it can be made.
func whole(to *outfile.File, write func(io.Writer) error) error {
	var b bytes.Buffer
	if err := write(&b); err != nil {
		return err
	}
	return to.Write(b.Bytes())
}

// writeJSON writes the document with each row on a line of its own, for people and for tools that work on lines.
func (r *Report) writeJSON(w io.Writer) error {
	head := *r
	head.Rows = nil
	text, err := json.MarshalIndent(head, "", "  ")
	if err != nil {
		return err
	}
	// The rows are last in the document.
	at := bytes.LastIndex(text, []byte("null"))
	var b bytes.Buffer
	b.Write(text[:at])
	b.WriteString("[")
	for i, row := range r.Rows {
		line, err := json.Marshal(row)
		if err != nil {
			return err
		}
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n    ")
		b.Write(line)
	}
	b.WriteString("\n  ]\n}\n")
	_, err = w.Write(b.Bytes())
	return err
}

// besidePeers are the kinds that peers have, too.
var besidePeers = append(slices.Clone(measure.NCCLKinds), measure.AllReduceRMSNorm)

// compare sets in each of our rows what the fastest peer took for the same in the same run.
func (r *Report) compare() {
	for i := range r.Rows {
		row := &r.Rows[i]
		if !slices.Contains(besidePeers, row.Kind) || row.Beside != "" {
			continue
		}
		for _, name := range r.peers(row) {
			p := r.peerOf(row, name)
			if p != nil && p.Median > 0 && row.Median > 0 && (row.PeerMedian == 0 || p.Median < row.PeerMedian) {
				row.PeerMedian, row.PeerBus, row.PeerRatio = p.Median, p.Bus, p.Median/row.Median
			}
		}
	}
}

// peers lists the peers that were measured beside the backend of a row, in the order in which they were.
func (r *Report) peers(row *measure.Row) []string {
	var names []string
	for i := range r.Rows {
		if p := &r.Rows[i]; p.Beside != "" && p.Beside == row.Backend &&
			p.Kind == row.Kind && p.Iterations > 0 && !slices.Contains(names, p.Backend) {
			names = append(names, p.Backend)
		}
	}
	return names
}

// peerOf returns the named peer's row beside one of ours, or nil.
func (r *Report) peerOf(row *measure.Row, name string) *measure.Row {
	for i := range r.Rows {
		p := &r.Rows[i]
		if p.Beside != "" && p.Backend == name && p.Beside == row.Backend &&
			p.Kind == row.Kind && p.Ranks == row.Ranks && p.Bytes == row.Bytes && p.Tensors == row.Tensors &&
			p.DType == row.DType && p.Op == row.Op && p.Mode == row.Mode && p.Place == row.Place {
			return p
		}
	}
	return nil
}

// abouts lists what the rows of the peers say about them, each once, after the name of the peer.
func (r *Report) abouts() []string {
	var all []string
	for _, row := range r.Rows {
		if about := row.Backend + ": " + row.Note; row.Beside != "" && !slices.Contains(all, about) {
			all = append(all, about)
		}
	}
	return all
}
