package nixl

import (
	"bytes"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// withoutUserNetwork unsets the variables by which users choose.
func withoutUserNetwork(t *testing.T) {
	for _, name := range userNetwork {
		t.Setenv(name, "")
		require.NoError(t, os.Unsetenv(name))
	}
}

// places returns groups of two ranks of this process that take themselves for such of two boots.
func places(t *testing.T, boots ...string) []*group.Group {
	groups, err := group.Local(len(boots), &group.LocalOptions{BootIDs: boots})
	require.NoError(t, err)
	t.Cleanup(func() {
		for i := len(groups) - 1; i >= 0; i-- {
			require.NoError(t, groups[i].Close(t.Context()))
		}
	})
	return groups
}

// TestChooseRoute: no network where the library can do without, loopback where it cannot or the ranks do not see each other's memory,
// and what leads to the others between hosts.
func TestChooseRoute(t *testing.T) {
	withoutUserNetwork(t)
	alone := location{Alone: true, Namespaces: "a", Network: "n", Addr: "127.0.0.1"}
	apart, elsewhere, needs := alone, alone, alone
	apart.Namespaces = "b"
	elsewhere.Network = "m"
	needs.Alone = false
	one, two := places(t, "x", "x"), places(t, "x", "y")

	got, err := choose(t.Context(), &Options{NetDevices: []string{"eth0"}}, one[0], []location{alone, alone})
	require.NoError(t, err)
	assert.Equal(t, route{}, got, "named devices are for what goes between hosts")
	assert.Equal(t, map[string]string{"POSIX_ERROR_HANDLING": "y", "NET_DEVICES": "", "TLS": "^sysv"}, got.settings())

	got, err = choose(t.Context(), &Options{}, one[1], []location{alone, needs})
	require.NoError(t, err)
	assert.Equal(t, reachLoopback, got.reach)
	assert.Equal(t, "lo", got.settings()["NET_DEVICES"])

	// The ranks of a group of one process share everything, whatever the namespaces are called.
	got, err = choose(t.Context(), &Options{}, one[1], []location{alone, apart})
	require.NoError(t, err)
	assert.Equal(t, reachNothing, got.reach)

	got, err = choose(t.Context(), &Options{}, two[0], []location{alone, elsewhere})
	require.NoError(t, err)
	assert.Equal(t, reachLoopback, got.reach, "all reach the service by loopback")

	got, err = choose(t.Context(), &Options{NetDevices: []string{"lo"}}, two[0], []location{alone, elsewhere})
	require.NoError(t, err)
	assert.Equal(t, reachHosts, got.reach)
	assert.Equal(t, "lo", got.devices)
	assert.Equal(t, "11000ms", got.settings()["TCP_USER_TIMEOUT"], "a second more than ranks have by default")
	for liveness, want := range map[time.Duration]string{20 * time.Second: "21000ms", time.Second / 4: "2000ms", math.MaxInt64: "2147483647ms"} {
		got, err = choose(t.Context(), &Options{NetDevices: []string{"lo"}, LivenessTimeout: liveness}, two[0], []location{alone, elsewhere})
		require.NoError(t, err)
		assert.Equal(t, want, got.settings()["TCP_USER_TIMEOUT"])
	}

	_, err = choose(t.Context(), &Options{NetDevices: []string{"no-such"}}, two[0], []location{alone, elsewhere})
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, "no-such")
	require.ErrorContains(t, err, "lo")

	elsewhere.Addr = ""
	_, err = choose(t.Context(), &Options{}, two[0], []location{alone, elsewhere})
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, "SYMMEM_NET_DEVICES")

	alone.Addr, elsewhere.Addr = "192.0.2.200", "198.51.100.77" // for documentation: no interface has them
	_, err = choose(t.Context(), &Options{}, two[0], []location{alone, elsewhere})
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, "192.0.2.200")

	t.Setenv("UCX_TLS", "tcp")
	got, err = choose(t.Context(), &Options{}, one[0], []location{alone, alone})
	require.NoError(t, err)
	assert.Equal(t, reachUser, got.reach)
	assert.Equal(t, map[string]string{"POSIX_ERROR_HANDLING": "y", "TCP_USER_TIMEOUT": "11000ms"}, got.settings(), "the user's choice of networks is left alone")
}

// TestChoiceBesideAnAgent: what a variable of UCX's holds only because the agent of another rank of this process is being made is no choice of the user's. It
// would let this rank's agent open every network.
func TestChoiceBesideAnAgent(t *testing.T) {
	withoutUserNetwork(t)
	RequireLibrary(t)
	lib, err := load("", 0, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	d, err := devhost.New(nil)
	require.NoError(t, err)
	defer func() { assert.NoError(t, d.Close()) }()
	apart := places(t, "x", "y")[0]
	made := make(chan error, 1)
	go func() {
		a, err := makeAgent(t.Context(), lib, d, "beside-"+nonce(), route{reach: reachHosts, devices: "lo,lo"}, false)
		if err == nil {
			err = a.Close()
		}
		made <- err
	}()
	for {
		assert.Empty(t, chosenByUser())
		got, err := choose(t.Context(), &Options{NetDevices: []string{"lo"}}, apart, []location{{}, {}})
		require.NoError(t, err)
		require.Equal(t, reachHosts, got.reach)
		select {
		case err := <-made:
			require.NoError(t, err)
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// TestProcessesApart: processes in containers of their own do not reach each other's memory.
func TestProcessesApart(t *testing.T) {
	members := []group.Member{{BootID: "x", Process: "p"}, {BootID: "x", Process: "q"}}
	assert.True(t, oneHost(members))
	a, b := location{Alone: true, Namespaces: "a", Network: "n"}, location{Alone: true, Namespaces: "b", Network: "n"}
	same := func(l location) string { return l.Namespaces }
	assert.False(t, agreed(members, []location{a, b}, same))
	assert.True(t, agreed(members, []location{a, a}, same))
	a.Namespaces = ""
	assert.False(t, agreed(members, []location{a, a}, same), "not known is not the same")
	members[1].Process = "p"
	assert.True(t, agreed(members, []location{a, b}, same), "one process")
	members[0].BootID, members[1].BootID = "", ""
	assert.True(t, oneHost(members))
	members[1].Process = "q"
	assert.False(t, oneHost(members), "boot ids that are not known")
}

// TestJudge: a network that others can reach is told of, or refused.
func TestJudge(t *testing.T) {
	withoutUserNetwork(t)
	judge := func(setting string, on route) (string, error) {
		var log bytes.Buffer
		b := &Backend{group: places(t, "x")[0], log: slog.New(slog.NewTextHandler(&log, nil))}
		err := b.judge(&Options{UnprotectedNetwork: setting}, on)
		return log.String(), err
	}
	for setting, want := range map[string]string{"": "level=WARN", "warn": "level=WARN", "allow": "level=INFO"} {
		log, err := judge(setting, route{reach: reachHosts, devices: "eth0", addrs: "10.0.0.1"})
		require.NoError(t, err)
		assert.Contains(t, log, want)
		assert.Contains(t, log, "whoever can send to 10.0.0.1 (eth0)")
	}
	for _, on := range []route{{reach: reachLoopback, devices: "lo"}, {reach: reachHosts, devices: "eth0"}, {reach: reachUser}} {
		_, err := judge(unprotectedRefuse, on)
		require.ErrorIs(t, err, errs.ErrUnsupported)
	}
	log, err := judge(unprotectedRefuse, route{})
	require.NoError(t, err)
	assert.Empty(t, log, "nothing is open")

	t.Setenv("UCX_TLS", "sm,cuda_copy,cuda_ipc")
	log, err = judge(unprotectedRefuse, route{reach: reachUser})
	require.NoError(t, err)
	assert.Empty(t, log)
	t.Setenv("UCX_TLS", "sm,tcp")
	log, err = judge("", route{reach: reachUser})
	require.NoError(t, err)
	assert.Contains(t, log, "UCX_TLS=sm,tcp")
}

func TestStaysOnHost(t *testing.T) {
	for _, on := range []string{"sm", "posix,cma,self", "shm, cuda", "cuda_ipc,cuda_copy,gdr_copy", `\\sm,self`} {
		assert.True(t, staysOnHost(on), on)
	}
	for _, off := range []string{"", "all", "tcp", "sm,tcp", "^tcp", "rc_x,sm", "ud:aux,sm", "ib", "sm,", "srd"} {
		assert.False(t, staysOnHost(off), off)
	}
}

// TestAdapters: the ports of the RDMA adapter behind an interface.
func TestAdapters(t *testing.T) {
	sysfs := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(sysfs, "ib0", "device", "infiniband", "mlx5_3"), 0o777))
	assert.Equal(t, []string{"mlx5_3:1"}, adapters(sysfs, "ib0"))
	require.NoError(t, os.WriteFile(filepath.Join(sysfs, "ib0", "dev_port"), []byte("1\n"), 0o666))
	assert.Equal(t, []string{"mlx5_3:2"}, adapters(sysfs, "ib0"))
	assert.Empty(t, adapters(sysfs, "eth0"))
}
