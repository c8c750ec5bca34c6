package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels/tuning"
)

// Tuning is by what auto chooses the forms of collectives here.
type Tuning struct {
	Table string   `json:"table"` // in words; "" if no backend can be used
	File  string   `json:"file"`  // that the setting tuning names
	Notes []string `json:"notes"` // of the table: what of it was measured
	Error string   `json:"error"` // why the file cannot be used: then no program starts
}

// tune finds the table for the devices of the backend that a program would take.
func (d *Diagnosis) tune(cfg config.Config) {
	d.Tuning = Tuning{File: cfg.Tuning, Notes: []string{}}
	if d.Verdict.Backend == "" {
		return
	}
	link, names := tuning.LinkHost, []string{d.Machine.CPU}
	if !d.find(d.Verdict.Backend).Capabilities.OnHost {
		link, names = "", d.gpus()
	}
	if cfg.Tuning != "" {
		d.tuneByFile(cfg, names, link)
		return
	}
	d.Tuning.Table = "a model of the links, which are measured when a group is opened: no table comes with symmem for " + strings.Join(names, " and ")
	switch {
	case len(names) == 0:
		d.Tuning.Table = "not known, as the driver does not say which GPUs there are"
	case len(names) > 1:
		d.Tuning.Table = "a model of the links, which are measured when a group is opened, where its GPUs are not alike: there are " + strings.Join(names, " and ")
	default:
		if t := tuning.Shipped(names[0], link); t != nil {
			d.Tuning.Table, d.Tuning.Notes = t.Name, slices.Clone(t.Notes)
		}
	}
}

// tuneByFile reads the file of the setting, and sees whether it is for the devices.
func (d *Diagnosis) tuneByFile(cfg config.Config, names []string, link string) {
	t, _, err := tuning.Read(cfg.Tuning)
	if err == nil {
		for _, name := range names {
			if name != "" && !t.For(name, link) && !(link == "" && t.For(name, t.Link)) {
				err = fmt.Errorf("it is for %q over %s, and this machine has %s", t.Devices, t.Link, strings.Join(names, " and "))
			}
		}
	}
	if err != nil {
		d.Tuning.Error = err.Error()
		d.Verdict.OK = false
		d.Verdict.Text = fmt.Sprintf("the table that the setting tuning names (%s) cannot be used, so no program starts: %s", cfg.Source("tuning"), terminal.OneLine(strings.ReplaceAll(err.Error(), "\n", "; ")))
		return
	}
	d.Tuning.Table, d.Tuning.Notes = fmt.Sprintf("the file %s, of %s", cfg.Tuning, said(t.Date)), slices.Clone(t.Notes)
}

// said is a date that may be left out.
func said(date string) string {
	if date == "" {
		return "an unknown day"
	}
	return date
}

// gpus lists the names of the GPUs that the driver has, each once.
func (d *Diagnosis) gpus() (names []string) {
	for _, b := range d.Backends {
		for _, l := range b.Libraries {
			for _, name := range l.Devices {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names
}

// writeTuning prints which table is in use.
func (d *Diagnosis) writeTuning(t io.Writer) {
	switch {
	case d.Tuning.Error != "":
		fmt.Fprintf(t, "\nTuning\n%s %s\t%s\n", terminal.MarkBad, terminal.OneLine(d.Tuning.File), terminal.OneLine(strings.ReplaceAll(d.Tuning.Error, "\n", "; ")))
	case d.Tuning.Table != "":
		fmt.Fprintf(t, "\nTuning\n  auto chooses forms by %s\n", terminal.OneLine(d.Tuning.Table))
	}
}
