package backend

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a backend that can be probed, by rank of the group given to Choose.
type fake struct{ refuse error }

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
	Register("host", fake{})
	Register("other", fake{})
	Register("native", fake{})
	require.Equal(t, []string{"native", "other", "host"}, Names())
	require.Panics(t, func() { Register("host", fake{}) })
	require.Panics(t, func() { Register("", fake{}) })
	require.Panics(t, func() { Register(Auto, fake{}) })
	require.Panics(t, func() { Register("x", nil) })
	_, err := Lookup("nvlink")
	require.ErrorIs(t, err, errs.ErrInvalid)
	for _, part := range []string{"nvlink", "native, other, host, auto", "backend/all"} {
		require.ErrorContains(t, err, part)
	}
}

// networked is a backend that opens ports.
type networked struct{ fake }

func (networked) Unprotected() string { return "its library listens without authentication" }

// TestUnprotectedRefused: a backend that opens what its library does not protect is passed over where that is refused.
func TestUnprotectedRefused(t *testing.T) {
	withRegistry(t, map[string]Factory{"nccl": networked{}, "host": fake{}})
	for setting, want := range map[string]string{"": "nccl host", "warn": "nccl host", "allow": "nccl host", "refuse": "host"} {
		var usable []string
		for _, r := range Probe(t.Context(), &Env{UnprotectedNetwork: setting}) {
			if r.Usable() {
				usable = append(usable, r.Name)
				continue
			}
			require.ErrorIs(t, r.Err, errs.ErrUnsupported)
			require.ErrorContains(t, r.Err, "its library listens without authentication")
			require.ErrorContains(t, r.Err, "SYMMEM_UNPROTECTED_NETWORK")
		}
		require.Equal(t, want, strings.Join(usable, " "), setting)
	}
}

func TestExpand(t *testing.T) {
	withRegistry(t, map[string]Factory{"host": fake{}, "native": fake{}, "nccl": fake{}})
	for list, want := range map[string]string{
		"": "native nccl host", "auto": "native nccl host", "host": "host", "nccl,auto": "nccl native host", "nccl,nccl": "nccl",
	} {
		var preferences []string
		if list != "" {
			preferences = strings.Split(list, ",")
		}
		got, err := Expand(preferences)
		require.NoError(t, err)
		require.Equal(t, want, strings.Join(got, " "), list)
	}
	_, err := Expand([]string{"nccl", "gpu"})
	require.ErrorIs(t, err, errs.ErrInvalid)
	withRegistry(t, map[string]Factory{})
	_, err = Expand(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
}

// choose runs Choose on every rank with that rank's list, and gives each rank's answer.
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
	withRegistry(t, map[string]Factory{"host": fake{}, "native": fake{missing}, "nccl": fake{fmt.Errorf("odd: %w", errs.ErrUnsupported)}})

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
	withRegistry(t, map[string]Factory{"nixl": onCPU{}, "host": fake{}})
	for _, c := range []struct {
		preferences []string
		want        string
	}{{nil, "host"}, {[]string{"auto"}, "host"}, {[]string{"nixl"}, "nixl"}, {[]string{"nixl", "auto"}, "nixl"}, {[]string{"nixl", "host"}, "nixl"}} {
		names, failures := choose(t, c.preferences, c.preferences)
		require.NoError(t, failures[0])
		require.Equal(t, c.want, names[0], "%v", c.preferences)
	}
	withRegistry(t, map[string]Factory{"nixl": onCPU{}, "host": fake{fmt.Errorf("two hosts: %w", errs.ErrUnsupported)}})
	names, failures := choose(t, nil, nil)
	require.NoError(t, failures[0])
	require.Equal(t, "nixl", names[0])

	withRegistry(t, map[string]Factory{"nixl": fake{}, "host": untried{t: t}})
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
	withRegistry(t, map[string]Factory{"native": alone{}, "host": fake{}})
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
	withRegistry(t, map[string]Factory{"host": fake{}, "native": fake{errs.ErrUnavailable}, "odd": fake{errors.New("crashed")}})
	reports := Probe(t.Context(), &Env{})
	require.Len(t, reports, 3)
	require.False(t, reports[0].Usable())
	require.ErrorContains(t, reports[1].Err, "probing backend odd: crashed")
	require.True(t, reports[2].Usable())
}
