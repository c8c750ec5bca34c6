// Package doctor finds out what works on this machine, and says what to do about what does not.
package doctor

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/machine"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
)

// Diagnosis is what doctor finds out; its JSON form is what --json prints.
type Diagnosis struct {
	Version   build.Info      `json:"version"`
	Machine   machine.Machine `json:"machine"`
	Backends  []probe.Finding `json:"backends"`
	Launchers []Launcher      `json:"launchers"`
	Limits    []machine.Limit `json:"limits"`
	Config    Config          `json:"config"`
	Tuning    Tuning          `json:"tuning"`
	Verdict   Verdict         `json:"verdict"`
}

// Verdict is whether a program could start here with this configuration.
type Verdict struct {
	OK      bool   `json:"ok"`
	Backend string `json:"backend"` // that it would take; "" if there is none
	Text    string `json:"text"`
}

// Launcher is one launcher that may have started this process.
type Launcher struct {
	Name      string   `json:"name"`
	Variables []string `json:"variables"` // that are set, as NAME=value
	Started   bool     `json:"started"`
	Chosen    bool     `json:"chosen"`
	Why       string   `json:"why"`
}

// Config is every setting and where it came from, or why there is no configuration.
type Config struct {
	Error    string    `json:"error"`
	Settings []Setting `json:"settings"`
}

// Setting is one setting and where it came from.
type Setting struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

// Diagnose looks at everything. flags are the settings that the command p was given. An invalid configuration is a finding too. It
// blocks until all backends have been probed, for about a minute at most.
func Diagnose(ctx context.Context, p *process.Process, flags *pflag.FlagSet) Diagnosis {
	d := Diagnosis{Version: build.Read(), Machine: machine.Read(), Limits: machine.Limits()}
	cfg, cfgErr := settings.Load(flags, p.Environ)
	probing := p
	if cfgErr == nil {
		probing = probe.With(p, settings.File(flags), cfg)
	}
	names := backend.Names()
	d.Backends = make([]probe.Finding, len(names))
	var probes sync.WaitGroup
	for i, name := range names {
		probes.Go(func() {
			b := probe.Apart(ctx, probing, name)
			b.Libraries = probe.LibrariesApart(ctx, probing, name)
			d.Backends[i] = b
		})
	}
	probes.Wait()
	var launch *group.LaunchOptions // without a configuration, what variables say
	if cfgErr == nil {
		launch = fleet.LaunchOptions(cfg)
	}
	for _, r := range group.Launchers(p.Getenv, launch) {
		d.Launchers = append(d.Launchers, Launcher{
			Name: r.Launcher, Variables: append([]string{}, r.Found...), Started: r.Started, Chosen: r.Chosen, Why: r.Why,
		})
	}
	d.Config.Settings = []Setting{}
	if cfgErr != nil {
		d.Config.Error = cfgErr.Error()
	} else {
		for _, key := range config.Keys() {
			d.Config.Settings = append(d.Config.Settings, Setting{
				Key: key.Name, Value: settings.Text(cfg.Value(key.Name)), Source: cfg.Source(key.Name).String(),
			})
		}
	}
	d.judge(cfg)
	d.tune(cfg)
	return d
}

// judge finds the backend that a program would take here, by the rules of backend.Choose.
func (d *Diagnosis) judge(cfg config.Config) {
	if d.Config.Error != "" {
		d.Verdict.Text = "the configuration is not valid: " + terminal.OneLine(strings.ReplaceAll(d.Config.Error, "\n", "; "))
		return
	}
	if unknown := fleet.UnknownLauncher(cfg); unknown != "" {
		d.Verdict.Text = unknown
		return
	}
	chosen, wanted, err := backend.Pick(cfg.Backend, func(name string) (usable, onHost bool, err error) {
		b := d.find(name)
		return b.Available, b.Capabilities.OnHost, nil
	})
	if err != nil {
		d.Verdict.Text = terminal.OneLine(err.Error())
		if unknown := fleet.UnknownBackend(cfg); unknown != "" {
			d.Verdict.Text = unknown
		}
		return
	}
	d.Verdict.Backend = chosen
	d.Verdict.OK = d.Verdict.Backend != ""
	asked := strings.Join(cfg.Backend, ",")
	switch {
	case d.Verdict.OK && asked == d.Verdict.Backend:
		d.Verdict.Text = fmt.Sprintf("backend %s can be used", asked)
	case d.Verdict.OK:
		d.Verdict.Text = fmt.Sprintf("backend %s can be used, which %s takes here", d.Verdict.Backend, asked)
	case len(wanted) == 1:
		b := d.find(wanted[0])
		d.Verdict.Text = fmt.Sprintf("backend %s cannot be used: %s", b.Name, terminal.OneLine(b.Reason))
		if b.Fix != "" {
			d.Verdict.Text += "; " + terminal.OneLine(b.Fix)
		}
	default:
		d.Verdict.Text = fmt.Sprintf("none of the backends %s can be used", strings.Join(wanted, ", "))
	}
}

// find returns the finding of a registered backend.
func (d *Diagnosis) find(name string) *probe.Finding {
	for i := range d.Backends {
		if d.Backends[i].Name == name {
			return &d.Backends[i]
		}
	}
	return &probe.Finding{Name: name, Reason: "it was not probed"}
}

// Write prints the diagnosis for people: what works and what does not, all details if verbose, and the verdict last.
func (d *Diagnosis) Write(w io.Writer, verbose bool, paint terminal.Painter) error {
	var text bytes.Buffer
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	m := d.Machine
	fmt.Fprintln(t, d.Version)
	fmt.Fprintf(t, "machine: %s, %s, %s of memory, %s %s\n", m.Processor(), m.CoreCount(), bytesize.Human(m.Memory), m.OS, m.Kernel)
	fmt.Fprintln(t, "\nBackends, the best first")
	d.writeBackends(t, verbose)
	d.writeLibraries(t, verbose)
	d.writeLimits(t, verbose)
	if verbose {
		d.writeLaunchers(t)
	}
	d.writeSettings(t, verbose)
	d.writeTuning(t)
	if !verbose {
		fmt.Fprintln(t, "\nsymmem doctor --verbose shows capabilities, where libraries were looked for, launchers, limits and all settings")
	}
	fmt.Fprintf(t, "\n%s %s\n", terminal.Mark(d.Verdict.OK), d.Verdict.Text)
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, paint.Marks(text.String()))
	return err
}

// writeBackends prints whether each backend can be used, or why it cannot and what to do about that.
func (d *Diagnosis) writeBackends(t io.Writer, verbose bool) {
	for _, b := range d.Backends {
		what := terminal.OneLine(b.Reason)
		if b.Available {
			what = strings.ReplaceAll(b.Capabilities.String(), ",", ", ")
		}
		fmt.Fprintf(t, "%s %s\t%s\n", terminal.Mark(b.Available), b.Name, what)
		if !b.Available && b.Fix != "" {
			fmt.Fprintf(t, "  \tto do: %s\n", terminal.OneLine(b.Fix))
		}
		if !b.Available || !verbose {
			continue
		}
		for _, c := range b.Capabilities.List() {
			if c.Why != "" {
				fmt.Fprintf(t, "  \tno %s: %s\n", c.Name, c.Why)
			}
		}
	}
}

// writeLaunchers prints which launchers may have started this process.
func (d *Diagnosis) writeLaunchers(t io.Writer) {
	fmt.Fprintln(t, "\nLaunchers, in the order they are looked for")
	for _, l := range d.Launchers {
		state := "no"
		switch {
		case l.Chosen:
			state = "chosen"
		case l.Started:
			state = "yes"
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", l.Name, state, terminal.OneLine(l.Why))
		for _, v := range l.Variables {
			fmt.Fprintf(t, "  \t\t%s\n", terminal.OneLine(v))
		}
	}
}

// writeLimits prints the limits of the system: those that may be too low, or all.
func (d *Diagnosis) writeLimits(t io.Writer, verbose bool) {
	begun := false
	for _, l := range d.Limits {
		if l.Advice == "" && !verbose {
			continue
		}
		if !begun {
			begun = true
			fmt.Fprintln(t, "\nLimits")
		}
		sign := terminal.MarkGood
		if l.Advice != "" {
			sign = terminal.MarkWarning
		}
		fmt.Fprintf(t, "%s %s\t%s\t%s\n", sign, l.Name, l.Value, l.Meaning)
		if l.Advice != "" {
			fmt.Fprintf(t, "  \t\tto do: %s\n", l.Advice)
		}
	}
}

// writeSettings prints the settings that differ from the defaults, or all, or why there are none.
func (d *Diagnosis) writeSettings(t io.Writer, verbose bool) {
	if d.Config.Error != "" {
		fmt.Fprintf(t, "\nSettings\n%s not valid\t%s\n", terminal.MarkBad, strings.ReplaceAll(d.Config.Error, "\n", "\n  \t"))
		return
	}
	begun := false
	for _, s := range d.Config.Settings {
		if !verbose && s.Source == sourceDefault {
			continue
		}
		if !begun {
			begun = true
			fmt.Fprintln(t, "\nSettings")
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", s.Key, terminal.OneLine(s.Value), s.Source)
	}
}

// sourceDefault is the name of the source of a setting that nobody has set.
var sourceDefault = config.Source{}.String()

// writeLibraries prints what was found out about each native library, once for all backends that need it.
func (d *Diagnosis) writeLibraries(t io.Writer, verbose bool) {
	var shown []backend.Library
	var advised []string // what was said to be done already
	for _, b := range d.Backends {
		advised = append(advised, b.Fix)
	}
	for _, b := range d.Backends {
		for _, l := range b.Libraries {
			if slices.ContainsFunc(shown, func(s backend.Library) bool { return reflect.DeepEqual(s, l) }) {
				continue
			}
			if len(shown) == 0 {
				fmt.Fprintln(t, "\nNative libraries")
			}
			shown = append(shown, l)
			what := strings.TrimSpace(l.Version + "  " + l.Path)
			if l.State == "missing" {
				what = "not found"
			}
			if l.Reason != "" {
				what += ": " + l.Reason
			}
			fmt.Fprintf(t, "%s %s\t%s\n", terminal.Mark(l.State == "usable"), l.Name, terminal.OneLine(what))
			if l.Fix != "" && l.State != "usable" && (verbose || !slices.Contains(advised, l.Fix)) {
				fmt.Fprintf(t, "  \tto do: %s\n", terminal.OneLine(l.Fix))
			}
			if !verbose {
				continue
			}
			for _, place := range l.Tried {
				fmt.Fprintf(t, "  \ttried %s\n", terminal.OneLine(place))
			}
			for _, x := range l.Details {
				fmt.Fprintf(t, "  \t%s: %s\n", terminal.OneLine(x.Name), terminal.OneLine(x.Value))
			}
		}
	}
}
