package symmem_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// exampleVariable is set in processes of this binary that tests start as ranks: the variables of a launcher are theirs.
const exampleVariable = "SYMMEM_TEST_EXAMPLE"

func TestMain(m *testing.M) {
	// A launcher may run the tests themselves, which are no rank of its job.
	if os.Getenv(exampleVariable) == "" {
		for _, l := range group.Launchers(os.Getenv, nil) {
			for _, v := range l.Found {
				name, _, _ := strings.Cut(v, "=")
				_ = os.Unsetenv(name) // it is set
			}
		}
	}
	// A machine with GPUs may name libraries for the tests of backends that are not in this program, which would be refused.
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		for _, backend := range []string{"NCCL", "NVSHMEM", "NIXL"} {
			if strings.HasPrefix(name, "SYMMEM_"+backend+"_") {
				_ = os.Unsetenv(name) // it is set
			}
		}
	}
	goleak.VerifyTestMain(m)
}

// nobody is the environment of a process that no launcher started.
var nobody = &symmem.Options{Environ: func() []string { return nil }}

func TestOpenAlone(t *testing.T) {
	r, err := symmem.Open(t.Context(), config.Default(), nobody)
	require.NoError(t, err)
	require.Equal(t, 0, r.Rank())
	require.Equal(t, 1, r.WorldSize())
	require.Equal(t, "host", r.Backend())
	require.NoError(t, r.Err())
	require.NoError(t, r.Barrier(t.Context()))
	require.NoError(t, r.Close(t.Context()))
	require.ErrorIs(t, r.Close(t.Context()), symmem.ErrClosed)
	require.ErrorIs(t, r.Err(), symmem.ErrClosed)
}

func TestOpenErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*config.Config)
		is     error
		parts  []string
	}{
		"unknown backend":           {func(c *config.Config) { c.Backend = []string{"nvlink"} }, symmem.ErrInvalid, []string{"nvlink", "host", "backend/all"}},
		"no channels":               {func(c *config.Config) { c.Channels = -1 }, symmem.ErrInvalid, []string{"channels", "-1"}},
		"rank outside of the world": {func(c *config.Config) { c.Rank, c.WorldSize, c.RendezvousAddr = 5, 2, "127.0.0.1:1" }, symmem.ErrInvalid, []string{"5"}},
		"not a socket": {func(c *config.Config) {
			c.Rank, c.WorldSize, c.RendezvousFD, c.RendezvousAddr = 0, 2, 9999, "127.0.0.1:1"
		}, symmem.ErrInvalid, []string{"rendezvous-fd", "9999"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			tt.change(&cfg)
			_, err := symmem.Open(t.Context(), cfg, nobody)
			require.ErrorIs(t, err, tt.is)
			for _, part := range tt.parts {
				require.ErrorContains(t, err, part)
			}
		})
	}
	_, err := symmem.OpenLocal(t.Context(), 0, config.Default(), nobody)
	require.ErrorIs(t, err, symmem.ErrInvalid)
}

// TestNobodyComes: a world size that nobody fills ends with the ranks that are missing.
func TestNobodyComes(t *testing.T) {
	addr := testneed.FreeAddress(t)
	cfg := config.Default()
	cfg.Rank, cfg.WorldSize, cfg.RendezvousAddr, cfg.Timeout = 0, 3, addr, 300*time.Millisecond
	_, err := symmem.Open(t.Context(), cfg, nobody)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	missing, ok := errors.AsType[*group.MissingRanksError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []int{1, 2}, missing.Missing)
}

// TestInheritedSocket: rank 0 serves on a socket that it was started with, and the ranks prove the token, whether the program or the
// launcher says so, and whichever Config the program begins with.
func TestInheritedSocket(t *testing.T) {
	for name, begin := range map[string]func() config.Config{
		"the program says it":              nil,
		"the launcher, the zero Config":    func() config.Config { return config.Config{} },
		"the launcher, a Config as it was": config.Default,
		"the launcher, a loaded Config": func() config.Config {
			cfg, err := config.Load(&config.LoadOptions{Environ: nobody.Environ})
			require.NoError(t, err)
			return cfg
		},
	} {
		t.Run(name, func(t *testing.T) { inheritedSocket(t, begin) })
	}
}

func inheritedSocket(t *testing.T, begin func() config.Config) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() {
			cfg := config.Default()
			cfg.Rank, cfg.WorldSize, cfg.LocalRank, cfg.RendezvousAddr, cfg.Token = rank, 2, rank, addr, config.NewSecret("secret")
			if rank == 0 {
				fd, err := dup(f)
				if err != nil {
					t.Error(err)
					return
				}
				cfg.RendezvousFD = fd
			}
			opts := *nobody
			if begin != nil {
				vars := []string{
					"SYMMEM_RANK=" + strconv.Itoa(rank), "SYMMEM_WORLD_SIZE=2", "SYMMEM_LOCAL_RANK=" + strconv.Itoa(rank),
					"SYMMEM_RENDEZVOUS_ADDR=" + addr, "SYMMEM_TOKEN=secret", "SYMMEM_RENDEZVOUS_FD=" + strconv.Itoa(cfg.RendezvousFD),
				}
				opts.Environ = func() []string { return vars }
				cfg = begin()
			}
			r, err := symmem.Open(t.Context(), cfg, &opts)
			if err == nil {
				err = r.Close(t.Context())
			}
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
	require.NoError(t, f.Close())
}

// TestInheritedSomethingElse: what is no socket that listens where the ranks look is refused at once, and stays the program's: an earlier Open may have taken the socket, and
// a file, or a server, of the program got its number.
func TestInheritedSomethingElse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	connection, err := conn.(*net.TCPConn).File()
	require.NoError(t, err)
	defer connection.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer file.Close()
	server, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	defer server.Close()
	local, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	require.NoError(t, err)
	defer local.Close()
	socket, err := local.(*net.UnixListener).File()
	require.NoError(t, err)
	defer socket.Close()
	for what, f := range map[string]*os.File{"a file": file, "a connection": connection, "a server": server, "a server of this host": socket} {
		fd, err := dup(f)
		require.NoError(t, err)
		cfg := config.Default()
		cfg.Rank, cfg.WorldSize, cfg.RendezvousAddr, cfg.RendezvousFD, cfg.Timeout = 0, 2, "127.0.0.1:1", fd, 200*time.Millisecond
		_, err = symmem.Open(t.Context(), cfg, nobody)
		require.ErrorIs(t, err, symmem.ErrInvalid, what)
		require.ErrorContains(t, err, "rendezvous-fd", what)
		require.True(t, alive(fd), "%s was closed", what)
	}
}

// TestTwoHosts: ranks on two hosts that no backend here spans are told so at once, all of them.
func TestTwoHosts(t *testing.T) {
	addr := testneed.FreeAddress(t)
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for rank := range errs {
		wg.Go(func() {
			cfg := config.Default()
			cfg.Backend = []string{"host"}
			cfg.Rank, cfg.WorldSize, cfg.LocalRank, cfg.RendezvousAddr = rank, 2, 0, addr
			_, errs[rank] = symmem.Open(t.Context(), cfg, &symmem.Options{Environ: nobody.Environ, BootID: []string{"one host", "another"}[rank]})
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.ErrorIs(t, err, symmem.ErrUnavailable)
		require.ErrorContains(t, err, "the ranks are on 2 hosts: shared memory ends at the host: use nixl")
	}
}

// TestMulticastOn: whoever insists on multicast where there is none is told so on every rank, and which values do without.
func TestMulticastOn(t *testing.T) {
	cfg := config.Default()
	cfg.Backend, cfg.Multicast = []string{"host"}, config.MulticastOn
	_, err := symmem.OpenLocal(t.Context(), 2, cfg, nobody)
	require.ErrorIs(t, err, symmem.ErrUnsupported)
	for _, part := range []string{"ranks 0, 1", "auto or off does without (SYMMEM_MULTICAST)", "a CPU has no store"} {
		require.ErrorContains(t, err, part)
	}
}

// TestFullTemporaryFolder: nothing needs a place to write files.
func TestFullTemporaryFolder(t *testing.T) {
	t.Setenv("TMPDIR", "/nowhere/at/all")
	require.NoError(t, onLocal(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := r.Zeros(ctx, tensor.Float32, 100)
		if err != nil {
			return err
		}
		return errors.Join(x.Rendezvous(ctx), x.Close(ctx))
	}))
}

// onLocal runs f on each of n ranks of this process.
func onLocal(t *testing.T, n int, f func(ctx context.Context, r *symmem.Rank) error) error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, n, config.Default(), nobody)
	if err != nil {
		return err
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { errs[i] = errors.Join(f(ctx, r), r.Close(ctx)) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// TestAllocationThatFails: one rank cannot allocate what all of them need, and closes. The others, who wait for it, hear why.
func TestAllocationThatFails(t *testing.T) {
	err := onLocal(t, 3, func(ctx context.Context, r *symmem.Rank) error {
		elements := int64(1000)
		if r.Rank() == 1 {
			elements = 1 << 58
		}
		x, err := r.Zeros(ctx, tensor.Int32, elements)
		if r.Rank() == 1 {
			if err == nil {
				return errors.New("it was allocated")
			}
			return nil
		}
		if err != nil {
			return err
		}
		err = x.Rendezvous(ctx)
		var vote *group.VoteError
		if !errors.As(err, &vote) || len(vote.Failures) != 1 || vote.Failures[0].Rank != 1 || errors.Is(err, symmem.ErrMismatch) {
			return fmt.Errorf("not what rank 1 failed with: %w", err)
		}
		t.Log(err)
		return nil
	})
	// What is left is that the ranks did not close together.
	for _, part := range []string{"it was allocated", "not what rank 1"} {
		require.NotContains(t, fmt.Sprint(err), part)
	}
}

// TestForgottenSubGroups: sub-groups that were not closed are closed with their parent, and sub-groups of theirs before them.
func TestForgottenSubGroups(t *testing.T) {
	forgotten := make([]*symmem.Rank, 3)
	require.NoError(t, onLocal(t, 3, func(ctx context.Context, r *symmem.Rank) error {
		all, err := r.Sub(ctx, []int{0, 1, 2})
		if err != nil {
			return err
		}
		forgotten[r.Rank()] = all
		if _, err := all.Sub(ctx, []int{r.Rank()}); err != nil {
			return err
		}
		if r.Rank() != 1 {
			if _, err := r.Sub(ctx, []int{0, 2}); err != nil {
				return err
			}
		}
		x, err := all.Zeros(ctx, tensor.Float32, 100)
		if err != nil {
			return err
		}
		return x.Rendezvous(ctx)
	}))
	for _, all := range forgotten {
		require.ErrorIs(t, all.Err(), symmem.ErrClosed)
		require.ErrorIs(t, all.Close(t.Context()), symmem.ErrClosed)
	}
}

// TestForgottenCircle: sub-groups that were made at the same time are closed in one order, though they were there first in another on each rank: the ranks do not wait for each other in a circle.
func TestForgottenCircle(t *testing.T) {
	began := time.Now()
	onRanks(t, 3, func(ctx context.Context, r *symmem.Rank) error {
		for _, pair := range [][]int{{0, 1}, {1, 2}, {0, 2}, {0, 2}} {
			if slices.Contains(pair, r.Rank()) {
				if _, err := r.Sub(ctx, pair); err != nil {
					return err
				}
			}
		}
		if r.Rank() > 0 {
			symmem.ReverseSubs(r)
		}
		return nil
	})
	require.Less(t, time.Since(began), 10*time.Second, "a rank has waited for its timeout")
}

// TestRunAllocatesNothing: neither enqueueing a plan nor running it allocates.
func TestRunAllocatesNothing(t *testing.T) {
	for _, alg := range kernels.Algorithms(device.Host) {
		t.Run(alg.String(), func(t *testing.T) {
			r, err := symmem.Open(t.Context(), config.Default(), nobody)
			require.NoError(t, err)
			x, err := r.Zeros(t.Context(), tensor.BFloat16, 1000)
			require.NoError(t, err)
			require.NoError(t, x.Rendezvous(t.Context()))
			p, err := kernels.NewAllReduce(t.Context(), x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
			require.NoError(t, err)
			s, err := r.NewStream()
			require.NoError(t, err)
			ctx := context.Background()
			run := func() {
				if err := p.Run(s); err != nil {
					t.Error(err)
				}
				if err := s.Synchronize(ctx); err != nil {
					t.Error(err)
				}
			}
			run()
			require.Zero(t, testing.AllocsPerRun(1000, run))
			require.NoError(t, errors.Join(p.Close(ctx), s.Close(), x.Close(ctx), r.Close(ctx)))
		})
	}
}

// TestTransfersAllocateNothing: nor does an all-reduce by transfers between two ranks, small or in laps.
func TestTransfersAllocateNothing(t *testing.T) {
	for _, n := range []int64{1000, 1 << 20} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ctx := context.Background()
			ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), nobody)
			require.NoError(t, err)
			plans, streams := make([]*kernels.Plan, 2), make([]device.Stream, 2)
			var g errgroup.Group
			each := func(f func(r *symmem.Rank) error) error {
				for _, r := range ranks {
					g.Go(func() error { return f(r) })
				}
				return g.Wait()
			}
			require.NoError(t, each(func(r *symmem.Rank) error {
				x, err := r.Zeros(ctx, tensor.Float32, n)
				if err != nil {
					return err
				}
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				if plans[r.Rank()], err = kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.Transfers}); err != nil {
					return err
				}
				streams[r.Rank()], err = r.NewStream()
				return err
			}))
			run := func() {
				for i := range plans {
					if err := plans[i].Run(streams[i]); err != nil {
						t.Error(err)
					}
				}
				for i := range streams {
					if err := streams[i].Synchronize(ctx); err != nil {
						t.Error(err)
					}
				}
			}
			for range 20 {
				run()
			}
			require.Zero(t, testing.AllocsPerRun(100, run))
			require.NoError(t, each(func(r *symmem.Rank) error {
				return errors.Join(plans[r.Rank()].Close(ctx), streams[r.Rank()].Close(), r.Close(ctx))
			}))
		})
	}
}

// TestBackendVariable: SYMMEM_BACKEND chooses through the configuration, and a backend that is not compiled in is named.
func TestBackendVariable(t *testing.T) {
	cfg, err := config.Load(&config.LoadOptions{Environ: func() []string { return []string{"SYMMEM_BACKEND=nccl"} }})
	require.NoError(t, err)
	_, err = symmem.Open(t.Context(), cfg, nobody)
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, "nccl")
	require.ErrorContains(t, err, "host")
}

// TestOpenLocalContextEnds: the error is the context's own, when it has ended before and whenever it ends meanwhile.
func TestOpenLocalContextEnds(t *testing.T) {
	cfg := config.Default()
	cfg.Backend = []string{"host"}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		_, err := symmem.OpenLocal(ended, 3, cfg, nil)
		require.ErrorIs(t, err, context.Canceled)
	}
	_, err := symmem.Open(ended, cfg, nobody)
	require.ErrorIs(t, err, context.Canceled, "a rank alone")
	for i := range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i*20)*time.Microsecond)
		ranks, err := symmem.OpenLocal(ctx, 3, cfg, nil)
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		cancel()
		var wg sync.WaitGroup
		for _, r := range ranks {
			wg.Go(func() { assert.NoError(t, r.Close(t.Context())) })
		}
		wg.Wait()
	}
}

// TestRefusalsAreLoggedOnce: a backend that many ranks pass over for one reason is one line of the log.
func TestRefusalsAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	var all []backend.Refusal
	for rank := range 8 {
		all = append(all, backend.Refusal{Name: "native", Rank: rank, Err: "no GPU"})
	}
	all = append(all, backend.Refusal{Name: "native", Rank: 8, Err: "another"}, backend.Refusal{Name: "nccl", Rank: 0, Err: "no GPU"})
	symmem.LogRefusals(slog.New(slog.NewTextHandler(&log, nil)), all)
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.Len(t, lines, 3)
	require.Contains(t, lines[0], `backend=native on="ranks 0-7" reason="no GPU"`)
	require.Contains(t, lines[1], `backend=native on="rank 8" reason=another`)
	require.Contains(t, lines[2], `backend=nccl on="rank 0" reason="no GPU"`)
}
