package fromenv

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/internal/errs"
)

// own are a backend's options.
type own struct {
	Device             string
	LocalRank          int
	Opened             *host.Device
	Parent             *parent
	ShareDevice        bool
	Multicast          string
	NetDevices         []string
	UnprotectedNetwork string
	Rendezvous         string
	KernelTimeout      time.Duration
	Getenv             func(string) string
	Logger             *slog.Logger
	Mine               int
	kept               bool
}

type parent struct{ backend.Backend }

func (*parent) Close(context.Context) error { return nil }

type stranger struct{ backend.Backend }

// TestOptions: each field has what env says, what the program has set goes before it, and nothing of env is left out.
func TestOptions(t *testing.T) {
	d, err := host.New(nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	env := &backend.Env{
		LocalRank: 3, Device: "1", Opened: d, Parent: &parent{}, ShareDevice: true, Multicast: "off", NetDevices: []string{"eth0"},
		UnprotectedNetwork: "allow", Rendezvous: "a:1", KernelTimeout: time.Minute, Getenv: func(string) string { return "mine" }, Logger: slog.Default(),
	}
	o, err := Options[own]("toy", env)
	require.NoError(t, err)
	require.Equal(t, "mine", o.Getenv(""))
	o.Getenv = nil
	require.Equal(t, &own{
		LocalRank: 3, Device: "1", Opened: d, Parent: env.Parent.(*parent), ShareDevice: true, Multicast: "off", NetDevices: []string{"eth0"},
		UnprotectedNetwork: "allow", Rendezvous: "a:1", KernelTimeout: time.Minute, Logger: slog.Default(),
	}, o)

	given := &own{Device: "2", Multicast: "on", Mine: 7, kept: true, Parent: &parent{}}
	env.Given, env.Opened = given, nil
	o, err = Options[own]("toy", env)
	require.NoError(t, err)
	require.Equal(t, []any{"2", "on", 7, true, 3, time.Minute}, []any{o.Device, o.Multicast, o.Mine, o.kept, o.LocalRank, o.KernelTimeout})
	require.Same(t, env.Parent, o.Parent, "that of a sub-group is env's")
	require.Nil(t, o.Opened)
	require.Zero(t, given.LocalRank, "the program's stays as it is")

	env.Given = (*own)(nil)
	o, err = Options[own]("toy", env)
	require.NoError(t, err)
	require.Equal(t, "1", o.Device)

	o, err = Options[own]("toy", &backend.Env{})
	require.NoError(t, err)
	t.Setenv("SYMMEM_TEST_FROMENV", "x")
	require.Equal(t, "x", o.Getenv("SYMMEM_TEST_FROMENV"))

	var other struct{ device.Device }
	for arg, env := range map[string]*backend.Env{
		"Opened": {Opened: &other}, "Parent": {Parent: &stranger{}}, "options": {Given: 7},
	} {
		_, err := Options[own]("toy", env)
		require.ErrorIs(t, err, errs.ErrInvalid)
		require.ErrorContains(t, err, "toy.New: "+arg+" is of type")
		require.ErrorContains(t, err, "allowed: of type *")
	}
}
