// Package probe finds out whether backends can be used here. It does so in processes of their own, because a native library may crash,
// exit or hang.
package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// timeout bounds the probe of one backend. A native library may take seconds to load, and a broken one may never return.
const timeout = 30 * time.Second

// Finding is the result of probing one backend: that it works, or why it does not and what to do about that.
type Finding struct {
	Name         string               `json:"name"`
	Available    bool                 `json:"available"`
	Reason       string               `json:"reason"` // why it is not available
	Fix          string               `json:"fix"`    // what to do about it
	Capabilities backend.Capabilities `json:"capabilities"`
	Libraries    []backend.Library    `json:"libraries"` // that it stands on
}

// Command is the hidden sub-command of the processes in which backends are probed. It prints the result of Here as a line of JSON, or
// that of LibrariesHere if it has LibrariesFlag.
const (
	Command       = "probe"
	LibrariesFlag = "libraries"
)

// Apart probes a backend in a process of its own, with the environment of p. It blocks for at most half a minute. If the probe crashes or
// hangs, that is the finding.
func Apart(ctx context.Context, p *process.Process, name string) Finding {
	var b Finding
	if err := apart(ctx, p, &b, Command, name); err != nil {
		return Finding{Name: name, Reason: fmt.Sprintf("probing it %v", err), Fix: fixProbe}
	}
	return b
}

// LibrariesApart asks a backend for its native libraries in a process of its own. It is not the process of the probe, so that the
// finding stands whatever a library does when it is looked at. It blocks for at most half a minute.
func LibrariesApart(ctx context.Context, p *process.Process, name string) []backend.Library {
	libraries := []backend.Library{}
	if f, err := backend.Lookup(name); err != nil {
		return libraries
	} else if _, ok := f.(backend.Libraries); !ok {
		return libraries
	}
	if err := apart(ctx, p, &libraries, Command, "--"+LibrariesFlag, name); err != nil {
		return []backend.Library{{
			Name: "libraries of backend " + name, State: "unusable", Reason: fmt.Sprintf("looking at them %v", err), Fix: fixProbe,
		}}
	}
	return libraries
}

// apart runs this program with args in a process of its own, so that a native library that crashes, exits or hangs is a finding and not
// the end of this process. The last line of its output is decoded into found; an error says how it ended otherwise.
func apart(ctx context.Context, p *process.Process, found any, args ...string) error {
	path, err := process.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = p.Environ
	cmd.WaitDelay = time.Second // for what the probe may have started
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := launch.Output(cmd)
	if ctx.Err() != nil {
		return fmt.Errorf("did not end: %w", context.Cause(ctx))
	}
	// A library may print to the standard output too.
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err == nil {
		err = json.Unmarshal([]byte(lines[len(lines)-1]), found)
	}
	if err != nil {
		said := terminal.OneLine(errOut.String())
		const most = 500
		if len(said) > most {
			said = "..." + strings.ToValidUTF8(said[len(said)-most:], "")
		}
		return fmt.Errorf("ended with %w %s", err, said)
	}
	return nil
}

// Here probes a backend in this process, with the settings in the environment of p. An error means that there is no such backend.
func Here(ctx context.Context, p *process.Process, name string) (Finding, error) {
	f, err := backend.Lookup(name)
	if err != nil {
		return Finding{}, err
	}
	return find(name, func() (backend.Capabilities, error) {
		c, err := backend.Probe(ctx, name, environment(p))
		if pre, ok := f.(backend.Preflighter); ok && err == nil {
			err = pre.Preflight(ctx, environment(p))
		}
		return c, err
	}), nil
}

// LibrariesHere asks a backend for its libraries in this process. An error means that there is no such backend.
func LibrariesHere(ctx context.Context, p *process.Process, name string) ([]backend.Library, error) {
	f, err := backend.Lookup(name)
	if err != nil {
		return nil, err
	}
	found := []backend.Library{}
	if l, ok := f.(backend.Libraries); ok {
		found = append(found, l.Libraries(ctx, environment(p))...)
	}
	return found, nil
}

// With returns p with the settings of cfg in its environment, which probes have them from: cfg may have some from flags. All are there, for settings that are
// not valid without the flags would be none for a probe. file is the configuration file that flags name; a probe does not look for another one.
func With(p *process.Process, file string, cfg config.Config) *process.Process {
	with := *p
	with.Environ = slices.Clone(p.Environ)
	if file != "" {
		with.Environ = append(with.Environ, "SYMMEM_CONFIG="+file)
	}
	for _, key := range config.Keys() {
		value := cfg.Value(key.Name)
		if _, secret := value.(config.Secret); !secret { // which no probe needs
			with.Environ = append(with.Environ, key.Env+"="+settings.Text(value))
		}
	}
	return &with
}

// Failed reports whether a backend was refused because its probe failed, and not because something is missing. It probes the refused
// backends again.
func Failed(ctx context.Context, p *process.Process, refused *backend.RefusedError) bool {
	return slices.ContainsFunc(refused.Tried, func(name string) bool {
		f, err := backend.Lookup(name)
		if err != nil {
			return true
		}
		_, err = f.Probe(ctx, environment(p))
		return err != nil && !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrUnsupported)
	})
}

// environment returns what a backend is probed with outside of a job: the settings, or the defaults if the settings are not valid.
func environment(p *process.Process) *backend.Env {
	cfg, err := config.Load(&config.LoadOptions{Environ: func() []string { return p.Environ }})
	if err != nil {
		cfg = config.Default()
	}
	return &backend.Env{
		Device: cfg.Device, ShareDevice: cfg.ShareDevice, Multicast: cfg.Multicast, NetDevices: cfg.NetDevices, UnprotectedNetwork: cfg.UnprotectedNetwork,
		KernelTimeout: cfg.KernelTimeout,
		Options:       cfg.BackendOptions, Getenv: p.Getenv, Logger: slog.New(slog.DiscardHandler),
	}
}

// fixProbe is the advice for a probe that failed, other than by finding that something is missing.
const fixProbe = "the probe itself failed: see whether the installed library is the right one and whole, and report this text"

// find turns a probe into a finding. If the error says separately what to do, that is the fix. Otherwise its text says it, or it is not known.
func find(name string, probe func() (backend.Capabilities, error)) Finding {
	c, err := probe()
	if err == nil {
		return Finding{Name: name, Available: true, Capabilities: c}
	}
	b := Finding{Name: name}
	b.Reason, b.Fix = dl.Advice(err)
	if wrong, ok := errors.AsType[*errs.ArgumentError](err); ok {
		b.Fix = fmt.Sprintf("correct %s; allowed: %s", wrong.Arg, wrong.Allowed)
		if wrong.Advice != "" {
			b.Fix += "; " + wrong.Advice
		}
	} else if !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrUnsupported) && b.Fix == "" {
		b.Fix = fixProbe
	}
	return b
}
