//go:build linux

package toy

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/tests/suite"
)

// rankVar makes this test binary one rank of the suite, which its launcher has told who it is.
const rankVar = "SYMMEM_TEST_TOY_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(rankVar) == "" {
		os.Exit(m.Run())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r, err := symmem.Open(ctx, config.Config{}, nil)
	if err == nil {
		err = runSuite(ctx, r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestConformance: the backend keeps what package backend promises of each.
func TestConformance(t *testing.T) {
	dir := t.TempDir()
	backendtest.Run(t, backendtest.Harness{Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
		env := &backend.Env{Group: g, Given: &Options{Directory: dir}, Logger: slog.New(slog.DiscardHandler)}
		return factory{}.Open(ctx, env)
	}})
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "the files have no names")
}

// runSuite runs symmem's own suite, without its largest sizes, on one rank, and closes it.
func runSuite(ctx context.Context, r *symmem.Rank) error {
	opts := &suite.Options{World: r.WorldSize(), Short: true}
	var failed error
	sum, err := suite.Run(ctx, r, slices.Values(suite.Cases(opts)), opts, func(res suite.Result) {
		if res.Status == suite.Failed && failed == nil {
			failed = fmt.Errorf("%s: %s", res.Case, res.Reason)
		}
	})
	switch {
	case err != nil || failed != nil:
	case r.Backend() != Name || sum.Passed < 100:
		failed = fmt.Errorf("%s over backend %s", sum, r.Backend())
	case r.Rank() == 0:
		fmt.Printf("%d ranks: %s\n", r.WorldSize(), sum)
	}
	for _, e := range []error{failed, r.Close(ctx)} {
		if err == nil {
			err = e
		}
	}
	return err
}

// TestSuiteOnGoroutines: all above a backend works over this one, by nothing but the settings.
func TestSuiteOnGoroutines(t *testing.T) {
	dir := t.TempDir()
	vars := []string{"SYMMEM_BACKEND=toy", "SYMMEM_TOY_DIRECTORY=" + dir}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, 3, config.Config{}, &symmem.Options{Environ: func() []string { return vars }})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for _, r := range ranks {
		wg.Go(func() { assert.NoError(t, runSuite(ctx, r)) })
	}
	wg.Wait()
}

// TestSuiteOnProcesses is the same between processes.
func TestSuiteOnProcesses(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	socket, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	require.NoError(t, l.Close())
	defer socket.Close()
	const ranks = 2
	dir := t.TempDir()
	var wg sync.WaitGroup
	for rank := range ranks {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), rankVar+"=1", "SYMMEM_BACKEND=toy", "SYMMEM_TOY_DIRECTORY="+dir, "SYMMEM_RENDEZVOUS_ADDR="+l.Addr().String(),
			fmt.Sprint("SYMMEM_RANK=", rank), fmt.Sprint("SYMMEM_LOCAL_RANK=", rank), fmt.Sprint("SYMMEM_WORLD_SIZE=", ranks), fmt.Sprint("SYMMEM_LOCAL_WORLD_SIZE=", ranks))
		if rank == 0 { // which serves the rendezvous at a port that nobody can take meanwhile
			cmd.ExtraFiles = []*os.File{socket}
			cmd.Env = append(cmd.Env, "SYMMEM_RENDEZVOUS_FD=3")
		}
		wg.Go(func() {
			out, err := cmd.CombinedOutput()
			assert.NoError(t, err, "rank %d: %s", rank, out)
			t.Logf("rank %d: %s", rank, out)
		})
	}
	wg.Wait()
}

// TestOption: the option comes from the user, and is judged when it is read and when it is tried.
func TestOption(t *testing.T) {
	open := func(opts *symmem.Options, vars ...string) error {
		opts.Environ = func() []string { return append(vars, "SYMMEM_BACKEND=toy") }
		ranks, err := symmem.OpenLocal(t.Context(), 1, config.Config{}, opts)
		for _, r := range ranks {
			err = r.Close(t.Context())
		}
		return err
	}
	missing := filepath.Join(t.TempDir(), "missing")
	require.NoError(t, open(&symmem.Options{}, "SYMMEM_TOY_DIRECTORY="+t.TempDir()))

	err := open(&symmem.Options{}, "SYMMEM_TOY_DIRECTORY=here")
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, `variable SYMMEM_TOY_DIRECTORY: configuration: toy-directory is "here"; allowed: an absolute path`)
	err = open(&symmem.Options{}, "SYMMEM_TOY_DIRECTROY=/tmp")
	require.ErrorContains(t, err, "SYMMEM_TOY_DIRECTORY is the nearest that is known")
	err = open(&symmem.Options{}, "SYMMEM_TOY_DIRECTORY="+missing)
	require.ErrorIs(t, err, symmem.ErrUnavailable)
	require.ErrorContains(t, err, missing)

	file := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(file, []byte("toy-directory: "+missing+"\n"), 0o600))
	err = open(&symmem.Options{}, "SYMMEM_CONFIG="+file)
	require.ErrorContains(t, err, missing)

	// What the program gives goes before what the user has set.
	require.NoError(t, open(&symmem.Options{Backend: &Options{Directory: t.TempDir()}}, "SYMMEM_TOY_DIRECTORY="+missing))
	err = open(&symmem.Options{Backend: &Options{Directory: missing}})
	require.ErrorIs(t, err, symmem.ErrUnavailable)
}

// TestAuto: a backend that says so does not come before those of symmem.
func TestAuto(t *testing.T) {
	require.Equal(t, []string{"host", Name}, backend.Names())
}
