package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/dl"
)

// probeTime bounds the probe of one backend: native libraries may take seconds to load, and a broken one for ever.
const probeTime = 30 * time.Second

// diagnosis is what doctor finds out.
type diagnosis struct {
	Version   buildInfo         `json:"version"`
	Machine   machine           `json:"machine"`
	Backends  []backendFinding  `json:"backends"`
	Launchers []launcherFinding `json:"launchers"`
	Limits    []limit           `json:"limits"`
	Config    configFinding     `json:"config"`
	Verdict   verdict           `json:"verdict"`
}

// verdict is whether a program could begin here with the configuration as it is.
type verdict struct {
	OK      bool   `json:"ok"`
	Backend string `json:"backend"` // that it would take; "" if there is none
	Text    string `json:"text"`
}

// backendFinding is one backend: it works, or why not and what to do.
type backendFinding struct {
	Name         string               `json:"name"`
	Available    bool                 `json:"available"`
	Reason       string               `json:"reason"` // why it is not available
	Fix          string               `json:"fix"`    // what to do about it
	Capabilities backend.Capabilities `json:"capabilities"`
	Libraries    []backend.Library    `json:"libraries"` // that it stands on
}

// launcherFinding is one launcher that may have started this process.
type launcherFinding struct {
	Name      string   `json:"name"`
	Variables []string `json:"variables"` // that are set, as NAME=value
	Started   bool     `json:"started"`
	Chosen    bool     `json:"chosen"`
	Why       string   `json:"why"`
}

// configFinding is every setting and where it came from, or why there is no configuration.
type configFinding struct {
	Error    string           `json:"error"`
	Settings []settingFinding `json:"settings"`
}

type settingFinding struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

func (a *app) doctorCommand() *cobra.Command {
	var asJSON, verbose bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what works on this machine, and what to do about what does not",
		Long: `Doctor probes every backend, each in a process of its own, looks for the native libraries that they stand on, and checks
the configuration. With --verbose it also shows what each backend can do, where libraries were looked for, what launchers this
process would see, which limits the system sets, and every setting with its source.

The last line is the verdict: whether a program could begin here. --backend, SYMMEM_BACKEND or the configuration file name the
backends that it may take; by default any will do. The exit status is 1 if none of them can be used or the configuration is not
valid.`,
		Example: "  symmem doctor --backend nccl\n  symmem doctor --verbose",
		Args:    noArgs,
	}
	cmd.RunE = failing(func(cmd *cobra.Command, _ []string) error {
		d := a.diagnose(cmd)
		var err error
		if asJSON {
			err = writeJSON(a.out, d)
		} else {
			err = d.write(a.out, verbose, a.painterFor(a.out))
		}
		if err != nil {
			return err
		}
		if !d.Verdict.OK {
			return &exitError{status: exitFailure}
		}
		return nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, jsonUsage)
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show everything that was found, also what is as it should be")
	config.AddFlags(cmd.Flags())
	return cmd
}

// diagnose looks at everything. A configuration that is not valid is a finding too.
func (a *app) diagnose(cmd *cobra.Command) diagnosis {
	d := diagnosis{Version: readBuild(), Machine: readMachine(), Limits: readLimits()}
	ctx := cmd.Context()
	cfg, cfgErr := a.load(cmd)
	probing := a
	if cfgErr == nil {
		probing = a.withProbeSettings(cfg)
	}
	names := backend.Names()
	d.Backends = make([]backendFinding, len(names))
	var probes sync.WaitGroup
	for i, name := range names {
		probes.Go(func() {
			b := probing.probeApart(ctx, name)
			b.Libraries = probing.librariesApart(ctx, name)
			d.Backends[i] = b
		})
	}
	probes.Wait()
	for _, r := range group.Launchers(a.getenv) {
		d.Launchers = append(d.Launchers, launcherFinding{
			Name: r.Launcher, Variables: append([]string{}, r.Found...), Started: r.Started, Chosen: r.Chosen, Why: r.Why,
		})
	}
	d.Config.Settings = []settingFinding{}
	if cfgErr != nil {
		d.Config.Error = cfgErr.Error()
	} else {
		for _, key := range config.Keys() {
			d.Config.Settings = append(d.Config.Settings, settingFinding{
				Key: key.Name, Value: settingText(cfg.Value(key.Name)), Source: cfg.Source(key.Name).String(),
			})
		}
	}
	d.judge(cfg)
	return d
}

// probeKeys are the settings that decide whether a backend can be used.
var probeKeys = []string{"device", "share-device", "multicast", "kernel-timeout"}

// withProbeSettings is a with those of cfg's settings in its environment that probes read there.
func (a *app) withProbeSettings(cfg config.Config) *app {
	with := *a
	with.environ = slices.Clone(a.environ)
	for _, key := range config.Keys() {
		if slices.Contains(probeKeys, key.Name) {
			with.environ = append(with.environ, key.Env+"="+settingText(cfg.Value(key.Name)))
		}
	}
	return &with
}

// judge finds the backend that a program would take here, by the rules of backend.Choose.
func (d *diagnosis) judge(cfg config.Config) {
	if d.Config.Error != "" {
		d.Verdict.Text = "the configuration is not valid: " + oneLine(strings.ReplaceAll(d.Config.Error, "\n", "; "))
		return
	}
	wanted, err := backend.Expand(cfg.Backend)
	if err != nil {
		d.Verdict.Text = oneLine(err.Error())
		if name := unknownBackend(cfg.Backend); name != "" {
			known := append(backend.Names(), config.BackendAuto)
			d.Verdict.Text = fmt.Sprintf("there is no backend %s (%s); there are %s%s", name, cfg.Source("backend"),
				strings.Join(known, ", "), didYouMean(name, known))
		}
		return
	}
	spare := ""
	for _, name := range wanted {
		b := d.find(name)
		switch {
		case !b.Available:
		case b.Capabilities.OnHost && name != "host" && slices.Contains(wanted, "host") && !slices.Contains(cfg.Backend, name):
			spare = cmp.Or(spare, name) // the CPU's memory is better reached by the CPU's own backend
		case d.Verdict.Backend == "":
			d.Verdict.Backend = name
		}
	}
	d.Verdict.Backend = cmp.Or(d.Verdict.Backend, spare)
	d.Verdict.OK = d.Verdict.Backend != ""
	asked := strings.Join(cfg.Backend, ",")
	switch {
	case d.Verdict.OK && asked == d.Verdict.Backend:
		d.Verdict.Text = fmt.Sprintf("backend %s can be used", asked)
	case d.Verdict.OK:
		d.Verdict.Text = fmt.Sprintf("backend %s can be used, which %s takes here", d.Verdict.Backend, asked)
	case len(wanted) == 1:
		b := d.find(wanted[0])
		d.Verdict.Text = fmt.Sprintf("backend %s cannot be used: %s", b.Name, oneLine(b.Reason))
		if b.Fix != "" {
			d.Verdict.Text += "; " + oneLine(b.Fix)
		}
	default:
		d.Verdict.Text = fmt.Sprintf("none of the backends %s can be used", strings.Join(wanted, ", "))
	}
}

// find gives the finding of a registered backend.
func (d *diagnosis) find(name string) *backendFinding {
	for i := range d.Backends {
		if d.Backends[i].Name == name {
			return &d.Backends[i]
		}
	}
	return &backendFinding{Name: name, Reason: "it was not probed"}
}

// unknownBackend gives the first of names that is no backend.
func unknownBackend(names []string) string {
	for _, name := range names {
		if _, err := backend.Lookup(name); err != nil && name != config.BackendAuto {
			return name
		}
	}
	return ""
}

// write prints the diagnosis for people: what works and what does not, then the details if they are wanted, then the verdict.
func (d *diagnosis) write(w io.Writer, verbose bool, paint painter) error {
	var text bytes.Buffer
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	m := d.Machine
	fmt.Fprintln(t, d.Version)
	fmt.Fprintf(t, "machine: %s, %d cores, %s of memory, %s %s\n", orUnknown(m.CPU), m.Cores, byteText(m.Memory), m.OS, m.Kernel)
	fmt.Fprintln(t, "\nBackends, the best first")
	d.writeBackends(t, verbose)
	d.writeLibraries(t, verbose)
	d.writeLimits(t, verbose)
	if verbose {
		d.writeLaunchers(t)
	}
	d.writeSettings(t, verbose)
	if !verbose {
		fmt.Fprintln(t, "\nsymmem doctor --verbose shows capabilities, where libraries were looked for, launchers, limits and all settings")
	}
	fmt.Fprintf(t, "\n%s %s\n", mark(d.Verdict.OK), d.Verdict.Text)
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, paint.marks(text.String()))
	return err
}

// writeBackends prints whether each backend can be used, or why not and what to do about that.
func (d *diagnosis) writeBackends(t io.Writer, verbose bool) {
	for _, b := range d.Backends {
		what := oneLine(b.Reason)
		if b.Available {
			what = strings.ReplaceAll(b.Capabilities.String(), ",", ", ")
		}
		fmt.Fprintf(t, "%s %s\t%s\n", mark(b.Available), b.Name, what)
		if !b.Available && b.Fix != "" {
			fmt.Fprintf(t, "  \tto do: %s\n", oneLine(b.Fix))
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
func (d *diagnosis) writeLaunchers(t io.Writer) {
	fmt.Fprintln(t, "\nLaunchers, in the order they are looked for")
	for _, l := range d.Launchers {
		state := "no"
		switch {
		case l.Chosen:
			state = "chosen"
		case l.Started:
			state = "yes"
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", l.Name, state, oneLine(l.Why))
		for _, v := range l.Variables {
			fmt.Fprintf(t, "  \t\t%s\n", oneLine(v))
		}
	}
}

// writeLimits prints the limits of the system: those that may be too low, or all.
func (d *diagnosis) writeLimits(t io.Writer, verbose bool) {
	begun := false
	for _, l := range d.Limits {
		if l.Advice == "" && !verbose {
			continue
		}
		if !begun {
			begun = true
			fmt.Fprintln(t, "\nLimits")
		}
		sign := markGood
		if l.Advice != "" {
			sign = markWarning
		}
		fmt.Fprintf(t, "%s %s\t%s\t%s\n", sign, l.Name, l.Value, l.Meaning)
		if l.Advice != "" {
			fmt.Fprintf(t, "  \t\tto do: %s\n", l.Advice)
		}
	}
}

// writeSettings prints the settings that somebody has made, or all, or why there are none.
func (d *diagnosis) writeSettings(t io.Writer, verbose bool) {
	if d.Config.Error != "" {
		fmt.Fprintf(t, "\nSettings\n%s not valid\t%s\n", markBad, strings.ReplaceAll(d.Config.Error, "\n", "\n  \t"))
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
		fmt.Fprintf(t, "  %s\t%s\t%s\n", s.Key, oneLine(s.Value), s.Source)
	}
}

// sourceDefault is how the configuration names the source of what nobody has set.
var sourceDefault = config.Source{Kind: config.SourceDefault}.String()

// writeLibraries prints what was found of each native library, once for all backends that stand on it.
func (d *diagnosis) writeLibraries(t io.Writer, verbose bool) {
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
			if l.State == backend.LibraryMissing {
				what = "not found"
			}
			if l.Reason != "" {
				what += ": " + l.Reason
			}
			fmt.Fprintf(t, "%s %s\t%s\n", mark(l.State == backend.LibraryUsable), l.Name, oneLine(what))
			if l.Fix != "" && l.State != backend.LibraryUsable && (verbose || !slices.Contains(advised, l.Fix)) {
				fmt.Fprintf(t, "  \tto do: %s\n", oneLine(l.Fix))
			}
			if !verbose {
				continue
			}
			for _, place := range l.Tried {
				fmt.Fprintf(t, "  \ttried %s\n", oneLine(place))
			}
			for _, x := range l.Details {
				fmt.Fprintf(t, "  \t%s: %s\n", oneLine(x.Name), oneLine(x.Value))
			}
		}
	}
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown processor"
	}
	return s
}

// oneLine keeps a text from breaking a table.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// probeApart probes a backend in a process of its own.
func (a *app) probeApart(ctx context.Context, name string) backendFinding {
	var b backendFinding
	if err := a.apart(ctx, &b, "probe", name); err != nil {
		return backendFinding{Name: name, Reason: fmt.Sprintf("probing it %v", err), Fix: fixProbe}
	}
	return b
}

// librariesApart asks a backend for its libraries in a process of its own: one more than that of the probe, whose answer stands
// whatever a library does when it is looked at.
func (a *app) librariesApart(ctx context.Context, name string) []backend.Library {
	libraries := []backend.Library{}
	if f, err := backend.Lookup(name); err != nil {
		return libraries
	} else if _, ok := f.(backend.Libraries); !ok {
		return libraries
	}
	if err := a.apart(ctx, &libraries, "probe", "--libraries", name); err != nil {
		return []backend.Library{{
			Name: "libraries of backend " + name, State: backend.LibraryUnusable, Reason: fmt.Sprintf("looking at them %v", err), Fix: fixProbe,
		}}
	}
	return libraries
}

// apart runs this program with args in a process of its own, so that a native library that crashes, exits or hangs is a finding and
// not the end of doctor. found is what it prints as a line of JSON; an error says how it ended otherwise.
func (a *app) apart(ctx context.Context, found any, args ...string) error {
	path, err := self()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = a.environ
	cmd.WaitDelay = time.Second // for what the probe may have started
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return fmt.Errorf("did not end: %w", context.Cause(ctx))
	}
	// A library may print to the standard output as well; the finding is the last line.
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err == nil {
		err = json.Unmarshal([]byte(lines[len(lines)-1]), found)
	}
	if err != nil {
		said := oneLine(errOut.String())
		const most = 500
		if len(said) > most {
			said = "..." + strings.ToValidUTF8(said[len(said)-most:], "")
		}
		return fmt.Errorf("ended with %w %s", err, said)
	}
	return nil
}

// probeCommand is the other side of probeApart and librariesApart.
func (a *app) probeCommand() *cobra.Command {
	var libraries bool
	cmd := &cobra.Command{
		Use:    "probe BACKEND",
		Short:  "Probe one backend and print the finding as a line of JSON",
		Hidden: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("the backend to probe is missing")
			}
			return nil
		},
		RunE: failing(func(cmd *cobra.Command, args []string) error {
			f, err := backend.Lookup(args[0])
			if err != nil {
				return usageError(err)
			}
			if libraries {
				found := []backend.Library{}
				if l, ok := f.(backend.Libraries); ok {
					found = append(found, l.Libraries(cmd.Context(), a.probeEnv())...)
				}
				return json.NewEncoder(a.out).Encode(found)
			}
			return json.NewEncoder(a.out).Encode(findBackend(args[0], func() (backend.Capabilities, error) {
				c, err := f.Probe(cmd.Context(), a.probeEnv())
				if p, ok := f.(backend.Preflighter); ok && err == nil {
					err = p.Preflight(cmd.Context(), a.probeEnv())
				}
				return c, err
			}))
		}),
	}
	cmd.Flags().BoolVar(&libraries, "libraries", false, "what was found of the native libraries that it stands on")
	return cmd
}

// probeEnv is what a backend is probed with outside of a job: the settings as they are, if they are valid.
func (a *app) probeEnv() *backend.Env {
	cfg, err := config.Load(&config.LoadOptions{Environ: func() []string { return a.environ }})
	if err != nil {
		cfg = config.Default()
	}
	return &backend.Env{
		Device: cfg.Device, ShareDevice: cfg.ShareDevice, Multicast: cfg.Multicast, KernelTimeout: cfg.KernelTimeout,
		Getenv: a.getenv, Logger: discard,
	}
}

// fixProbe is for a probe that failed otherwise than by finding that something is missing.
const fixProbe = "the probe itself failed: see whether the installed library is the right one and whole, and report this text"

// findBackend turns a probe into a finding. Where the error keeps apart what to do, that is the fix; else its text says it, or nobody
// knows.
func findBackend(name string, probe func() (backend.Capabilities, error)) backendFinding {
	c, err := probe()
	if err == nil {
		return backendFinding{Name: name, Available: true, Capabilities: c}
	}
	b := backendFinding{Name: name}
	b.Reason, b.Fix = dl.Advice(err)
	if wrong, ok := errors.AsType[*backend.ArgumentError](err); ok {
		b.Fix = fmt.Sprintf("correct %s; allowed: %s", wrong.Arg, wrong.Allowed)
		if wrong.Advice != "" {
			b.Fix += "; " + wrong.Advice
		}
	} else if !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnsupported) && b.Fix == "" {
		b.Fix = fixProbe
	}
	return b
}
