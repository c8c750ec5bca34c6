package main

import (
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
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what works on this machine, and what to do about what does not",
		Long: `Doctor probes every backend, each in a process of its own, looks for the native libraries that they stand on, and shows
what launchers and settings this process would see and which limits the system sets. Its exit status is 1 if no backend can be used or the configuration is not valid.`,
		Args: noArgs,
	}
	cmd.RunE = failing(func(cmd *cobra.Command, _ []string) error {
		d := a.diagnose(cmd)
		var err error
		if asJSON {
			err = writeJSON(a.out, d)
		} else {
			err = d.write(a.out)
		}
		if err != nil {
			return err
		}
		if !d.healthy() {
			return &exitError{status: exitFailure}
		}
		return nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	config.AddFlags(cmd.Flags())
	return cmd
}

// diagnose looks at everything. A configuration that is not valid is a finding too.
func (a *app) diagnose(cmd *cobra.Command) diagnosis {
	d := diagnosis{Version: readBuild(), Machine: readMachine(), Limits: readLimits()}
	ctx := cmd.Context()
	names := backend.Names()
	d.Backends = make([]backendFinding, len(names))
	var probes sync.WaitGroup
	for i, name := range names {
		probes.Go(func() {
			b := a.probeApart(ctx, name)
			b.Libraries = a.librariesApart(ctx, name)
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
	cfg, err := a.load(cmd)
	if err != nil {
		d.Config.Error = err.Error()
		return d
	}
	for _, key := range config.Keys() {
		d.Config.Settings = append(d.Config.Settings, settingFinding{
			Key: key.Name, Value: settingText(cfg.Value(key.Name)), Source: cfg.Source(key.Name).String(),
		})
	}
	return d
}

// healthy reports whether a program could begin here.
func (d *diagnosis) healthy() bool {
	for _, b := range d.Backends {
		if b.Available {
			return d.Config.Error == ""
		}
	}
	return false
}

// write prints the diagnosis for people.
func (d *diagnosis) write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, d.Version)
	m := d.Machine
	fmt.Fprintf(t, "machine: %s, %d cores, %s of memory, %s %s\n", orUnknown(m.CPU), m.Cores, byteText(m.Memory), m.OS, m.Kernel)
	fmt.Fprintln(t, "\nBackends, the best first")
	for _, b := range d.Backends {
		if b.Available {
			fmt.Fprintf(t, "  %s\tavailable\t%s\n", b.Name, b.Capabilities)
			for _, c := range b.Capabilities.List() {
				if c.Why != "" {
					fmt.Fprintf(t, "  \t\tno %s: %s\n", c.Name, c.Why)
				}
			}
			continue
		}
		fmt.Fprintf(t, "  %s\tnot available\t%s\n", b.Name, oneLine(b.Reason))
		if b.Fix != "" {
			fmt.Fprintf(t, "  \tto do\t%s\n", oneLine(b.Fix))
		}
	}
	d.writeLibraries(t)
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
	if len(d.Limits) > 0 {
		fmt.Fprintln(t, "\nLimits")
	}
	for _, l := range d.Limits {
		fmt.Fprintf(t, "  %s\t%s\t%s\n", l.Name, l.Value, l.Meaning)
		if l.Advice != "" {
			fmt.Fprintf(t, "  \tto do\t%s\n", l.Advice)
		}
	}
	fmt.Fprintln(t, "\nSettings")
	if d.Config.Error != "" {
		fmt.Fprintf(t, "  not valid\t%s\n", strings.ReplaceAll(d.Config.Error, "\n", "\n  \t"))
	}
	for _, s := range d.Config.Settings {
		fmt.Fprintf(t, "  %s\t%s\t%s\n", s.Key, oneLine(s.Value), s.Source)
	}
	return t.Flush()
}

// writeLibraries prints what was found of each native library, once for all backends that stand on it.
func (d *diagnosis) writeLibraries(t io.Writer) {
	var shown []backend.Library
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
				if len(l.Tried) > 0 {
					what += "; what was tried:"
				}
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\n", l.Name, l.State, oneLine(what))
			if l.State == backend.LibraryMissing {
				for _, place := range l.Tried {
					fmt.Fprintf(t, "  \t\t%s\n", oneLine(place))
				}
			}
			if l.Reason != "" {
				fmt.Fprintf(t, "  \twhy\t%s\n", oneLine(l.Reason))
			}
			if l.Fix != "" && l.State != backend.LibraryUsable {
				fmt.Fprintf(t, "  \tto do\t%s\n", oneLine(l.Fix))
			}
			for _, x := range l.Details {
				fmt.Fprintf(t, "  \t\t%s: %s\n", oneLine(x.Name), oneLine(x.Value))
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

// probeEnv is what a backend is probed with outside of a job.
func (a *app) probeEnv() *backend.Env {
	d := config.Default()
	return &backend.Env{Multicast: d.Multicast, KernelTimeout: d.KernelTimeout, Getenv: a.getenv, Logger: discard}
}

// fixer is an error that knows what to do about itself.
type fixer interface{ Fix() string }

// fixes says what each backend needs, for errors that do not say it themselves.
var fixes = map[string]string{
	"host":    "run on Linux 3.17 or newer",
	"native":  "install the NVIDIA driver, and make the devices visible (nvidia-smi lists them; containers need --gpus all)",
	"nccl":    "install NCCL (libnccl2, or pip install nvidia-nccl-cu13), or name it in SYMMEM_NCCL_LIBRARY",
	"nvshmem": "install NVSHMEM (libnvshmem_host.so.3; the Python package nvidia-nvshmem-cu13), or name it in SYMMEM_NVSHMEM_LIBRARY",
	"nixl":    "install NIXL (pip install nixl-cu13, or nixl-cu12 for a driver of CUDA 12), or name it in SYMMEM_NIXL_LIBRARY",
}

// fixProbe is for a probe that failed otherwise than by finding that something is missing.
const fixProbe = "the probe itself failed: see whether the installed library is the right one and whole, and report this text"

// findBackend turns a probe into a finding.
func findBackend(name string, probe func() (backend.Capabilities, error)) backendFinding {
	c, err := probe()
	if err == nil {
		return backendFinding{Name: name, Available: true, Capabilities: c}
	}
	b := backendFinding{Name: name, Reason: err.Error(), Fix: fixes[name]}
	if f, ok := errors.AsType[interface {
		error
		fixer
	}](err); ok {
		b.Fix = f.Fix()
	}
	if !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnsupported) {
		b.Fix = fixProbe
	}
	return b
}
