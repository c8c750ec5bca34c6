package backend

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a backend that can be probed, by rank of the group given to Choose.
type fake struct {
	refuse error
	place  *place // nil says nothing about it
}

// place is how much a fake is preferred.
type place struct{ gpu, cpu int }

var (
	asHost   = &place{0, 0}
	asNative = &place{500, 500}
	asNCCL   = &place{400, 400}
	asNIXL   = &place{200, -100}
)

func (f fake) Preference(onHost bool) int {
	switch {
	case f.place == nil:
		return preference(nil, onHost)
	case onHost:
		return f.place.cpu
	}
	return f.place.gpu
}

func (f fake) Probe(context.Context, *Env) (Capabilities, error) {
	return Capabilities{RanksInOneProcess: true}, f.refuse
}
func (f fake) Open(context.Context, *Env) (Backend, error) {
	return nil, errors.New("opening fails")
}

// withRegistry runs f with these backends registered and no others.
func withRegistry(t *testing.T, backends map[string]Factory) {
	registry.Lock()
	old := registry.factories
	registry.factories = backends
	registry.Unlock()
	t.Cleanup(func() {
		registry.Lock()
		registry.factories = old
		registry.Unlock()
	})
}

func TestRegister(t *testing.T) {
	withRegistry(t, map[string]Factory{})
	Register("host", fake{place: asHost})
	Register("other", fake{})
	Register("another", fake{})
	Register("native", fake{place: asNative})
	require.Equal(t, []string{"native", "another", "other", "host"}, Names())
	_, err := Lookup("nvlink")
	require.ErrorIs(t, err, errs.ErrInvalid)
	for _, part := range []string{"nvlink", "native, another, other, host, auto", "backend/all"} {
		require.ErrorContains(t, err, part)
	}
}

// TestUnknownName: the error says which backend may be meant, and what to import only where that can help.
func TestUnknownName(t *testing.T) {
	some := map[string]Factory{"host": fake{}, "toy": fake{}}
	every := map[string]Factory{"toy": fake{}}
	for _, name := range ofModule {
		every[name] = fake{}
	}
	for _, tt := range []struct {
		there map[string]Factory
		name  string
		want  string
	}{
		{some, "hots", `host is the nearest that is known; to have all backends of this module, import _ "github.com/symmem/symmem/backend/all"`},
		{some, "native", `to have all backends of this module, import _ "github.com/symmem/symmem/backend/all"`},
		{every, "hots", "host is the nearest that is known"},
		{every, "toyy", "toy is the nearest that is known"},
		{every, "something", "if it is meant for another backend, import its package"},
	} {
		withRegistry(t, tt.there)
		_, err := Lookup(tt.name)
		var wrong *errs.ArgumentError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, tt.want, wrong.Advice, "%s of %v", tt.name, Names())
	}
}

// around is a backend that is made of others, and asks the registry for them in all that the registry asks it.
type around struct{ fake }

func (around) Preference(bool) int {
	_, _ = Lookup("none")
	return 1
}

func (around) Options() []Option { return []Option{{Name: "of", Values: Names(), Default: Names()[0]}} }
func (around) Takes(any) bool    { return false }

// TestRegisterAsksWithoutItsLock: a backend may use the registry in what the registry asks of it, also while another registers itself.
func TestRegisterAsksWithoutItsLock(t *testing.T) {
	withRegistry(t, map[string]Factory{"inner": fake{}})
	t.Cleanup(func() { options.Forget("around") })
	ended := make(chan []string, 1)
	go func() {
		Register("around", around{})
		ended <- options.Lookup("around-of").Values
	}()
	select {
	case values := <-ended:
		require.Equal(t, []string{"inner"}, values)
	case <-time.After(10 * time.Second):
		fmt.Fprintln(os.Stderr, "Register waits for itself, and so would the end of the test")
		os.Exit(1)
	}
}

// networked is a backend that opens ports.
type networked struct{ fake }

func (networked) Unprotected() string { return "its library listens without authentication" }

// TestUnprotectedRefused: a backend that opens what its library does not protect is passed over where that is refused.
func TestUnprotectedRefused(t *testing.T) {
	withRegistry(t, map[string]Factory{"nccl": networked{fake{place: asNCCL}}, "host": fake{place: asHost}})
	for setting, want := range map[string]string{"": "nccl host", "warn": "nccl host", "allow": "nccl host", "refuse": "host"} {
		var usable []string
		for _, name := range Names() {
			_, err := Probe(t.Context(), name, &Env{UnprotectedNetwork: setting})
			if err == nil {
				usable = append(usable, name)
				continue
			}
			require.ErrorIs(t, err, errs.ErrUnsupported)
			require.ErrorContains(t, err, "its library listens without authentication")
			require.ErrorContains(t, err, "SYMMEM_UNPROTECTED_NETWORK")
		}
		require.Equal(t, want, strings.Join(usable, " "), setting)
	}
}

func TestExpand(t *testing.T) {
	withRegistry(t, map[string]Factory{"host": fake{place: asHost}, "native": fake{place: asNative}, "nccl": fake{place: asNCCL}})
	for list, want := range map[string]string{
		"": "native nccl host", "auto": "native nccl host", "host": "host", "nccl,auto": "nccl native host", "nccl,nccl": "nccl",
	} {
		var preferences []string
		if list != "" {
			preferences = strings.Split(list, ",")
		}
		got, err := expand(preferences)
		require.NoError(t, err)
		require.Equal(t, want, strings.Join(got, " "), list)
	}
	_, err := expand([]string{"nccl", "gpu"})
	require.ErrorIs(t, err, errs.ErrInvalid)
	withRegistry(t, map[string]Factory{})
	_, err = expand(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
}

// choose runs Choose on every rank with that rank's list, and returns each rank's answer.
func choose(t *testing.T, lists ...[]string) (names []string, failures []error) {
	groups, err := group.Local(len(lists), nil)
	require.NoError(t, err)
	names, failures = make([]string, len(lists)), make([]error, len(lists))
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			names[r], _, failures[r] = Choose(t.Context(), g, lists[r], &Env{})
			if err := g.Close(t.Context()); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
	return names, failures
}

func TestChoose(t *testing.T) {
	missing := fmt.Errorf("no driver; install one: %w", errs.ErrUnavailable)
	withRegistry(t, map[string]Factory{"host": fake{place: asHost}, "native": fake{missing, asNative}, "nccl": fake{fmt.Errorf("odd: %w", errs.ErrUnsupported), asNCCL}})

	names, failures := choose(t, nil, nil, nil)
	for r := range names {
		require.NoError(t, failures[r])
		require.Equal(t, "host", names[r], "auto takes the first that works")
	}
	// One name alone never falls back, and says why and what to do.
	_, failures = choose(t, []string{"native"}, []string{"native"})
	for _, err := range failures {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		require.ErrorContains(t, err, "install one")
		require.EqualError(t, err, "backend native cannot be used: ranks 0, 1: no driver; install one: unavailable")
	}
	// A list is tried in order, and every refusal is told.
	_, failures = choose(t, []string{"native", "nccl"}, []string{"native", "nccl"})
	for _, err := range failures {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		require.ErrorContains(t, err, "no driver")
		require.ErrorContains(t, err, "odd")
	}
	names, failures = choose(t, []string{"nccl", "host"})
	require.NoError(t, failures[0])
	require.Equal(t, "host", names[0])

	// Ranks that ask for different backends are told what each asked for.
	_, failures = choose(t, []string{"host"}, []string{"native"})
	for _, err := range failures {
		require.ErrorIs(t, err, errs.ErrMismatch)
		require.ErrorContains(t, err, "host")
		require.ErrorContains(t, err, "native")
	}
	// An unknown name on one rank is an error on all.
	_, failures = choose(t, []string{"host"}, []string{"gpu"})
	for _, err := range failures {
		require.ErrorIs(t, err, errs.ErrInvalid)
		require.NotErrorIs(t, err, errs.ErrMismatch)
		require.ErrorContains(t, err, `rank 1: backend: name is "gpu"`)
	}
}

// alone is a backend for one rank a process and one host.
type alone struct{ fake }

func (alone) Probe(context.Context, *Env) (Capabilities, error) {
	return Capabilities{Why: map[string]string{"ranks_in_one_process": "its library keeps one rank's state"}}, nil
}

// onCPU is a backend that moves the CPU's memory.
type onCPU struct{ fake }

func (m onCPU) Probe(context.Context, *Env) (Capabilities, error) {
	return Capabilities{RanksInOneProcess: true, OnHost: true}, m.refuse
}

// TestChooseOnTheCPU: of two backends for the CPU's memory, auto takes the one that maps it, and another only by its name or in need.
// What stands behind the chosen one is not tried.
func TestChooseOnTheCPU(t *testing.T) {
	withRegistry(t, map[string]Factory{"nixl": onCPU{fake{place: asNIXL}}, "host": fake{place: asHost}})
	for _, c := range []struct {
		preferences []string
		want        string
	}{{nil, "host"}, {[]string{"auto"}, "host"}, {[]string{"nixl"}, "nixl"}, {[]string{"nixl", "auto"}, "nixl"}, {[]string{"nixl", "host"}, "nixl"}} {
		names, failures := choose(t, c.preferences, c.preferences)
		require.NoError(t, failures[0])
		require.Equal(t, c.want, names[0], "%v", c.preferences)
	}
	// What auto stands for on one rank another has written out, which asks for something else.
	names, failures := choose(t, nil, []string{"nixl", "host"})
	for r, err := range failures {
		require.ErrorIsf(t, err, errs.ErrMismatch, "rank %d has chosen %q", r, names[r])
		require.ErrorContains(t, err, "list of backends")
		require.ErrorContains(t, err, "rank 0: nixl (auto), host (auto)")
		require.ErrorContains(t, err, "rank 1: nixl, host")
	}
	withRegistry(t, map[string]Factory{"nixl": onCPU{fake{place: asNIXL}}, "host": fake{fmt.Errorf("two hosts: %w", errs.ErrUnsupported), asHost}})
	names, failures = choose(t, nil, nil)
	require.NoError(t, failures[0])
	require.Equal(t, "nixl", names[0])

	withRegistry(t, map[string]Factory{"nixl": fake{place: asNIXL}, "host": untried{fake{place: asHost}, t}})
	names, failures = choose(t, nil, nil)
	require.NoError(t, failures[0])
	require.Equal(t, "nixl", names[0])
}

// untried is a backend that must not be probed.
type untried struct {
	fake
	t *testing.T
}

func (u untried) Probe(context.Context, *Env) (Capabilities, error) {
	u.t.Error("a backend behind the chosen one was tried")
	return Capabilities{}, nil
}

// TestChooseByPlace: a backend that cannot serve ranks where they are is passed over, and says why when it is named.
func TestChooseByPlace(t *testing.T) {
	withRegistry(t, map[string]Factory{"native": alone{fake{place: asNative}}, "host": fake{place: asHost}})
	names, failures := choose(t, nil, nil)
	require.NoError(t, failures[0])
	require.Equal(t, "host", names[0])
	_, failures = choose(t, []string{"native"}, []string{"native"})
	require.ErrorIs(t, failures[0], errs.ErrUnavailable)
	require.ErrorContains(t, failures[0], "2 ranks are in 1 processes: its library keeps one rank's state")
	names, failures = choose(t, []string{"native"})
	require.NoError(t, failures[0], "a rank alone is served")
	require.Equal(t, "native", names[0])

	groups, err := group.Local(2, &group.LocalOptions{BootIDs: []string{"one", "other"}})
	require.NoError(t, err)
	for _, g := range groups {
		err := fits(Capabilities{RanksInOneProcess: true}, g.Members())
		require.ErrorIs(t, err, errs.ErrUnsupported)
		require.ErrorContains(t, err, "2 hosts")
		require.NoError(t, fits(Capabilities{RanksInOneProcess: true, SeveralHosts: true}, g.Members()))
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestProbe(t *testing.T) {
	withRegistry(t, map[string]Factory{"host": fake{}, "native": fake{refuse: errs.ErrUnavailable}, "odd": fake{refuse: errors.New("crashed")}})
	_, err := Probe(t.Context(), "native", &Env{})
	require.Equal(t, errs.ErrUnavailable, err)
	_, err = Probe(t.Context(), "odd", &Env{})
	require.ErrorContains(t, err, "probing backend odd: crashed")
	_, err = Probe(t.Context(), "host", &Env{})
	require.NoError(t, err)
}

// refusal returns what f panics with, which is an ErrInvalid.
func refusal(t *testing.T, f func()) (refused *errs.ArgumentError) {
	t.Helper()
	defer func() {
		t.Helper()
		err, ok := recover().(error)
		require.True(t, ok, "no panic with an error")
		require.ErrorIs(t, err, errs.ErrInvalid)
		require.ErrorAs(t, err, &refused)
	}()
	f()
	return nil
}

// settable is a backend with options.
type settable struct {
	fake
	list []Option
}

func (s settable) Options() []Option { return s.list }
func (settable) Takes(v any) bool    { _, ok := v.(*settable); return ok }

// TestRegisterRefuses: each mistake has its own error, with the value and what is allowed, and leaves nothing behind.
func TestRegisterRefuses(t *testing.T) {
	withRegistry(t, map[string]Factory{})
	t.Cleanup(func() { options.Forget("settable"); options.Forget("settable-too") })
	Register("settable", settable{list: []Option{{Name: "too-many", Values: []string{"no", "yes"}, Default: "no"}}})
	with := func(o ...Option) Factory { return settable{list: o} }
	for what, tt := range map[string]struct {
		name  string
		f     Factory
		value string
		says  string
	}{
		"no name":                     {"", fake{}, `""`, "small letter"},
		"auto":                        {Auto, fake{}, `"auto"`, "stand for something else"},
		"all":                         {"all", fake{}, `"all"`, "stand for something else"},
		"test":                        {"test", fake{}, `"test"`, "stand for something else"},
		"capitals":                    {"Toy", fake{}, `"Toy"`, "small letter"},
		"a comma":                     {"a,b", fake{}, `"a,b"`, "small letter"},
		"an underscore":               {"my_toy", fake{}, `"my_toy"`, "hyphens"},
		"a hyphen last":               {"toy-", fake{}, `"toy-"`, "hyphen"},
		"a long name":                 {strings.Repeat("a", 33), fake{}, strings.Repeat("a", 33), "at most 31"},
		"no factory":                  {"toy", nil, "nil", "a Factory"},
		"a nil factory":               {"toy", (*settable)(nil), "nil", "a Factory"},
		"twice":                       {"settable", fake{}, `"settable"`, "any but settable"},
		"an option without a name":    {"toy", with(Option{}), `""`, "small letter"},
		"an option with a bad name":   {"toy", with(Option{Name: "a_b"}), `"a_b"`, "hyphens"},
		"an option twice":             {"toy", with(Option{Name: "size"}, Option{Name: "size"}), `"size"`, "SYMMEM_TOY_SIZE"},
		"a setting of symmem":         {"net", with(Option{Name: "devices"}), `"devices"`, "net-devices, which is a setting of symmem"},
		"the driver's library":        {"cuda", with(Option{Name: "library"}), `"library"`, "cuda-library"},
		"another's key":               {"settable-too", with(Option{Name: "many"}), `"many"`, "SYMMEM_SETTABLE_TOO_MANY, which is that of option \"too-many\" of backend settable"},
		"a default that is no value":  {"toy", with(Option{Name: "mode", Values: []string{"slow", "fast"}, Default: "quick"}), `"quick"`, "slow, fast"},
		"a default that is not right": {"toy", with(Option{Name: "size", Form: "a number", Check: func(v string) bool { return v == "1" }, Default: "x"}), `"x"`, "a number"},
	} {
		t.Run(what, func(t *testing.T) {
			err := refusal(t, func() { Register(tt.name, tt.f) })
			require.Equal(t, "backend.Register", err.Op)
			require.Contains(t, fmt.Sprint(err.Value), tt.value)
			require.Contains(t, err.Allowed, tt.says)
			require.Equal(t, []string{"settable"}, Names())
			require.Len(t, options.All(), 1)
		})
	}
}

// TestOption: a value is that of Env.Options, else of the variable, else the default; each is judged.
func TestOption(t *testing.T) {
	withRegistry(t, map[string]Factory{})
	t.Cleanup(func() { options.Forget("settable") })
	Register("settable", settable{list: []Option{
		{Name: "mode", Values: []string{"slow", "fast"}, Default: "slow"},
		{Name: "size", Form: "a number of one digit", Check: func(v string) bool { return len(v) == 1 }},
	}})
	env := &Env{Getenv: func(name string) string {
		return map[string]string{"SYMMEM_SETTABLE_MODE": " fast ", "SYMMEM_SETTABLE_SIZE": "77"}[name]
	}}
	for _, tt := range []struct {
		env        *Env
		name, want string
		problem    string
	}{
		{&Env{Getenv: func(string) string { return "" }}, "mode", "slow", ""},
		{&Env{Getenv: func(string) string { return "" }}, "size", "", ""},
		{env, "mode", "fast", ""},
		{env, "size", "", `environment variable SYMMEM_SETTABLE_SIZE is "77"; allowed: a number of one digit`},
		{&Env{Options: map[string]string{"settable-size": "7"}, Getenv: env.Getenv}, "size", "7", ""},
		{&Env{Options: map[string]string{"settable-mode": "Fast"}, Getenv: env.Getenv}, "mode", "", `settable-mode is "Fast"; allowed: slow, fast`},
		{env, "colour", "", `option of backend settable is "colour"; allowed: what it has declared: mode, size`},
	} {
		got, err := tt.env.Option("settable", tt.name)
		if tt.problem != "" {
			require.ErrorIs(t, err, errs.ErrInvalid)
			require.ErrorContains(t, err, tt.problem)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, tt.want, got, tt.name)
	}
}

// TestGiven: options that a program gives are for the backend that takes their type, and no other is chosen; on all ranks alike.
func TestGiven(t *testing.T) {
	withRegistry(t, map[string]Factory{"native": fake{place: asNative}, "settable": settable{}, "host": fake{place: asHost}})
	groups, err := group.Local(2, nil)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			name, refusals, err := Choose(t.Context(), g, nil, &Env{Given: &settable{}})
			assert.NoError(t, err)
			assert.Equal(t, "settable", name)
			if assert.Len(t, refusals, 2) {
				assert.Contains(t, refusals[0].Err, "options that are for backend settable (*backend.settable)")
			}
			_, _, err = Choose(t.Context(), g, []string{"host"}, &Env{Given: &settable{}})
			assert.ErrorIs(t, err, errs.ErrUnavailable)
			assert.ErrorIs(t, err, errs.ErrUnsupported)
			_, _, err = Choose(t.Context(), g, nil, &Env{Given: map[int]any{1: t}[r]})
			assert.ErrorIs(t, err, errs.ErrInvalid)
			assert.ErrorContains(t, err, "of type *testing.T; allowed: those that a registered backend takes")
			assert.NoError(t, g.Close(t.Context()))
		})
	}
	wg.Wait()
}

// silent is a backend that says nothing of where it stands.
type silent struct{}

func (silent) Probe(context.Context, *Env) (Capabilities, error) { return Capabilities{}, nil }
func (silent) Open(context.Context, *Env) (Backend, error)       { return nil, errors.New("opening fails") }

// TestPick: of backends for the CPU's memory the one that is preferred for that is taken, wherever it stands, unless another was named.
func TestPick(t *testing.T) {
	first, second := &place{9, 2}, &place{8, 3}
	withRegistry(t, map[string]Factory{"first": fake{place: first}, "second": fake{place: second}, "third": fake{place: &place{7, 1}}})
	for _, tt := range []struct {
		preferences, usable, onHost, want string
		tried                             int
	}{
		{"auto", "first second third", "", "first", 1},
		{"auto", "first second third", "first second third", "second", 2},
		{"auto", "first third", "first third", "first", 3}, // nothing is better for it
		{"auto", "first third", "first", "third", 3},       // the third has a GPU
		{"first,auto", "first second", "first second", "first", 1},
		{"third,auto", "first second third", "first second third", "third", 1},
		{"auto", "", "", "", 3},
	} {
		tried := 0
		name, candidates, err := Pick(strings.Split(tt.preferences, ","), func(name string) (usable, onHost bool, err error) {
			tried++
			return strings.Contains(tt.usable, name), strings.Contains(tt.onHost, name), nil
		})
		require.NoError(t, err)
		require.Equal(t, tt.want, name, tt)
		require.Equal(t, tt.tried, tried, tt)
		require.Len(t, candidates, 3)
	}
	// One that says nothing gives way to host for the CPU's memory, and goes before it with a GPU.
	withRegistry(t, map[string]Factory{"silent": silent{}, "host": fake{place: asHost}})
	for onHost, want := range map[bool]string{true: "host", false: "silent"} {
		name, _, err := Pick(nil, func(name string) (usable, onCPU bool, err error) { return true, onHost, nil })
		require.NoError(t, err)
		require.Equal(t, want, name)
	}
	failed := errors.New("lost")
	_, _, err := Pick(nil, func(string) (bool, bool, error) { return false, false, failed })
	require.Equal(t, failed, err)
	_, _, err = Pick([]string{"fourth"}, nil)
	require.ErrorIs(t, err, errs.ErrInvalid)
}

// spread is a backend that serves ranks that share no memory.
type spread struct{ fake }

func (s spread) Probe(context.Context, *Env) (Capabilities, error) {
	return Capabilities{RanksInOneProcess: true, SeveralHosts: true, OnHost: true}, s.refuse
}

// onRequest is a backend that serves several hosts only where a program asks for it.
type onRequest struct{ fake }

func (o onRequest) Probe(context.Context, *Env) (Capabilities, error) {
	return Capabilities{RanksInOneProcess: true, SeveralHosts: true, OnRequest: true}, o.refuse
}

// TestChooseOnRequest: what a backend cannot do between hosts is no surprise to a program that has not asked for it.
func TestChooseOnRequest(t *testing.T) {
	withRegistry(t, map[string]Factory{"native": onRequest{fake{place: asNative}}, "nixl": spread{fake{place: asNIXL}}})
	for name, c := range map[string]struct {
		hosts, islands []string
		list, want     string
		texts          []string
	}{
		"one host":             {[]string{"a", "a"}, nil, "auto", "native", nil},
		"two hosts":            {[]string{"a", "b"}, nil, "auto", "nixl", []string{"2 hosts", "by name (SYMMEM_BACKEND)"}},
		"by name":              {[]string{"a", "b"}, nil, "native", "native", nil},
		"first by name":        {[]string{"a", "b"}, nil, "native,auto", "native", nil},
		"two containers":       {nil, []string{"a", "b"}, "auto", "nixl", []string{"not all ranks can share memory"}},
		"by name in two of it": {nil, []string{"a", "b"}, "native", "native", nil},
	} {
		t.Run(name, func(t *testing.T) {
			groups, err := group.Local(2, &group.LocalOptions{BootIDs: c.hosts, Islands: c.islands})
			require.NoError(t, err)
			var wg sync.WaitGroup
			for _, g := range groups {
				wg.Go(func() {
					got, refusals, err := Choose(t.Context(), g, strings.Split(c.list, ","), &Env{})
					assert.NoError(t, err)
					assert.Equal(t, c.want, got)
					assert.Equal(t, len(c.texts) > 0, len(refusals) > 0)
					for _, r := range refusals {
						for _, text := range c.texts {
							assert.Contains(t, r.Err, text)
						}
					}
					assert.NoError(t, g.Close(t.Context()))
				})
			}
			wg.Wait()
		})
	}
}

// TestChooseByIslands: where not all ranks of a host share memory, a backend that needs that is passed over on every rank, with the reason.
func TestChooseByIslands(t *testing.T) {
	withRegistry(t, map[string]Factory{"native": fake{place: asNative}, "nixl": spread{fake{place: asNIXL}}, "host": fake{place: asHost}})
	for name, c := range map[string]struct {
		islands []string
		list    string
		want    string
		refused int
	}{
		"one island":            {[]string{"a", "a", "a"}, "auto", "native", 0},
		"two":                   {[]string{"a", "b", "a"}, "auto", "nixl", 2},
		"none of several":       {[]string{"a", "b", "c"}, "host", "", 1},
		"not the first":         {[]string{"a", "b", "c"}, "host,nixl", "nixl", 1},
		"what needs no sharing": {[]string{"a", "b", "c"}, "nixl", "nixl", 0},
	} {
		t.Run(name, func(t *testing.T) {
			groups, err := group.Local(3, &group.LocalOptions{Islands: c.islands})
			require.NoError(t, err)
			var wg sync.WaitGroup
			for _, g := range groups {
				wg.Go(func() {
					got, refusals, err := Choose(t.Context(), g, strings.Split(c.list, ","), &Env{})
					assert.Equal(t, c.want, got)
					assert.Len(t, refusals, 3*c.refused)
					for i, r := range refusals {
						assert.Equal(t, i%3, r.Rank)
						assert.Contains(t, r.Err, "not all ranks can share memory: rank 0 cannot pass memory to rank 1: a test pretends")
						assert.Contains(t, r.Conditions, errs.ErrUnsupported)
					}
					if c.want == "" {
						assert.ErrorIs(t, err, errs.ErrUnsupported)
						assert.ErrorIs(t, err, errs.ErrUnavailable)
						assert.NotContains(t, err.Error(), "\n", "one line")
						assert.Equal(t, 1, strings.Count(err.Error(), "a test pretends that it is elsewhere; rank 0"), err)
					} else {
						assert.NoError(t, err)
					}
					assert.NoError(t, g.Close(t.Context()))
				})
			}
			wg.Wait()
		})
	}
	_, err := group.Local(2, &group.LocalOptions{Islands: []string{"a"}})
	require.ErrorIs(t, err, errs.ErrInvalid)
}

// TestTellWhatHasNoForm: a value that JSON has no form for is the failure of its rank, which the others hear of and do not wait for.
func TestTellWhatHasNoForm(t *testing.T) {
	groups, err := group.Local(2, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var told sync.WaitGroup
	failures := make([]error, len(groups))
	for r, g := range groups {
		told.Go(func() { _, failures[r] = Tell(ctx, g, "weighing", []float64{1, math.NaN()}[r], nil) })
	}
	told.Wait()
	for r, err := range failures {
		vote, ok := errors.AsType[*group.VoteError](err)
		require.True(t, ok, "rank %d: %v", r, err)
		require.ErrorContains(t, err, "weighing")
		require.ErrorContains(t, err, "rank 1: json: unsupported value: NaN")
		require.Equal(t, r == 1, vote.Local != nil)
	}
	for _, g := range groups {
		require.NoError(t, g.Close(ctx))
	}
}
