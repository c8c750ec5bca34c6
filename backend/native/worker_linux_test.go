package native

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

// workerReport is what one rank's process prints at its end.
type workerReport struct {
	Rank   int
	Open   time.Duration
	Times  map[string][]time.Duration // of rendezvous, by size, the first one first
	Allocs map[string][]time.Duration
	Free   int64 // bytes of the GPU's memory that are less free at the end than at the beginning
	Failed string
}

// runWorker returns the main function of a rank's process.
func runWorker(role string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := work(ctx, role); err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		return 1
	}
	return 0
}

func work(ctx context.Context, role string) error {
	rank, err := strconv.Atoi(os.Getenv("SYMMEM_TEST_RANK"))
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(os.Getenv("SYMMEM_TEST_SIZE"))
	if err != nil {
		return err
	}
	o := &group.Options{
		Rank: rank, WorldSize: size, LocalRank: rank, Addr: os.Getenv("SYMMEM_TEST_ADDR"), Token: "token", Timeout: time.Minute,
	}
	if rank == 0 {
		f := os.NewFile(3, "listener")
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		o.Listener = l
	}
	g, err := group.Join(ctx, o)
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	report := &workerReport{Rank: rank, Times: map[string][]time.Duration{}, Allocs: map[string][]time.Duration{}}
	began := time.Now()
	b, err := New(ctx, g, &Options{Device: os.Getenv("SYMMEM_TEST_DEVICE"), ShareDevice: true, Multicast: "off", Logger: logger})
	if err != nil {
		return errors.Join(err, g.Close(ctx))
	}
	report.Open = time.Since(began)
	free, _, err := b.device.MemInfo()
	if err != nil {
		return err
	}
	m := memory.New(b, g, &memory.Options{Channels: 2, Logger: logger})
	switch role {
	case "times":
		err = report.measure(ctx, m)
	case "adopt":
		for _, kind := range []string{"virtual", "legacy"} {
			err = errors.Join(err, adoptAll(ctx, b, m, kind))
		}
	case "killed":
		err = loseOne(ctx, m, size-1)
	default:
		err = fmt.Errorf("no role %q", role)
	}
	if err != nil {
		report.Failed = err.Error()
	}
	if role == "killed" {
		if report.Free, err = lessFree(ctx, b, free); err != nil {
			return err
		}
	}
	if err := m.Close(ctx); err != nil && role != "killed" {
		return err
	}
	if err := g.Close(ctx); err != nil && role != "killed" {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(report)
}

// lessFree waits until about as much memory is free as before, since the system takes a killed process apart in its own time, and
// gives by how many bytes it is less.
func lessFree(ctx context.Context, b *Backend, before int64) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		now, _, err := b.device.MemInfo()
		if err != nil || before-now <= stillHeld {
			return before - now, err
		}
		select {
		case <-ctx.Done():
			return before - now, nil
		case <-time.After(pause):
		}
	}
}

// stillHeld is more than what a backend has of the GPU's memory without any allocation: the workspace, until Close.
const stillHeld = 32 << 20

// measure times allocations and rendezvous of some sizes.
func (r *workerReport) measure(ctx context.Context, m *memory.Memory) error {
	for _, bytes := range []int64{1 << 20, 64 << 20, 1 << 30} {
		key := fmt.Sprintf("%d MiB", bytes>>20)
		for range 10 {
			began := time.Now()
			a, err := m.Allocate(ctx, bytes, "")
			if err != nil {
				return err
			}
			r.Allocs[key] = append(r.Allocs[key], time.Since(began))
			if err := m.Group().Barrier(ctx, "allocated"); err != nil {
				return err
			}
			began = time.Now()
			w, err := m.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			r.Times[key] = append(r.Times[key], time.Since(began))
			if err := errors.Join(backendtest.ExchangeBytes(ctx, m, w), m.Free(ctx, a)); err != nil {
				return err
			}
		}
	}
	return nil
}

// adoptAll adopts memory of one kind in pieces of several sizes, at different and at equal offsets.
func adoptAll(ctx context.Context, b *Backend, m *memory.Memory, kind string) error {
	for _, bytes := range []int64{64 << 10, 1 << 20, 32 << 20} {
		for _, step := range []int64{0, 1024, 3 << 20} {
			size := bytes + 64<<10 + int64(b.group.Size())*step
			if kind == "virtual" {
				size = roundUp(size, b.granularity)
			}
			p, free, err := foreignMemory(b, kind, size)
			if err != nil {
				return err
			}
			offset := 4096 + int64(b.group.Rank())*step
			err = adoptAndUse(ctx, m, p.Add(offset), bytes, kind == "virtual" && step == 0)
			if err = errors.Join(err, free()); err != nil {
				return fmt.Errorf("%s memory, %d bytes at offset %d: %w", kind, bytes, offset, err)
			}
		}
	}
	return nil
}

// loseOne maps memory, loses a rank, and unwinds.
func loseOne(ctx context.Context, m *memory.Memory, victim int) error {
	var all []backend.Allocation
	for range 3 {
		a, err := m.Allocate(ctx, 64<<20, "")
		if err != nil {
			return err
		}
		all = append(all, a)
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
	}
	if m.Group().Rank() == victim {
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	select {
	case <-m.Group().Lost():
	case <-ctx.Done():
		return ctx.Err()
	}
	for _, a := range all {
		if err := m.Free(ctx, a); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("freeing after the loss: %w", err)
		}
	}
	return nil
}

// runWorkers runs a process a rank and returns their reports; lost ranks have none.
func runWorkers(t *testing.T, role string, size int, env func(rank int) []string, lost ...int) []*workerReport {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	defer f.Close()
	reports := make([]*workerReport, size)
	logs := make([]string, size)
	var wg sync.WaitGroup
	for rank := range size {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), "SYMMEM_TEST_NATIVE_WORKER="+role, "SYMMEM_TEST_RANK="+strconv.Itoa(rank),
			"SYMMEM_TEST_SIZE="+strconv.Itoa(size), "SYMMEM_TEST_ADDR="+l.Addr().String())
		cmd.Env = append(cmd.Env, env(rank)...)
		if rank == 0 {
			cmd.ExtraFiles = []*os.File{f}
		}
		wg.Go(func() {
			var log strings.Builder
			cmd.Stderr = &log
			out, err := cmd.Output()
			logs[rank] = log.String()
			if err == nil {
				reports[rank] = &workerReport{}
				err = json.Unmarshal(out, reports[rank])
			}
			if err != nil && !slices.Contains(lost, rank) {
				reports[rank] = &workerReport{Rank: rank, Failed: fmt.Sprintf("%v: %s", err, log.String())}
			}
		})
	}
	wg.Wait()
	if os.Getenv("SYMMEM_TEST_LOGS") != "" {
		t.Log(strings.Join(logs, "\n"))
	}
	for rank, r := range reports {
		if !slices.Contains(lost, rank) {
			require.NotNil(t, r)
			require.Empty(t, r.Failed, "rank %d", rank)
		}
	}
	return reports
}

// gpus counts the GPUs of the machine. Without any, the test is skipped, unless they are required.
func gpus(t *testing.T) int {
	t.Helper()
	drv, err := cu.Load(nil)
	if err == nil {
		var d *cuda.Device
		if d, err = cuda.Open(&cuda.Options{Driver: drv}); err == nil {
			require.NoError(t, d.Close())
		}
	}
	if errors.Is(err, errs.ErrUnavailable) {
		testneed.Missing(t, Name, err)
	}
	require.NoError(t, err)
	var count int32
	require.Equal(t, cu.Success, drv.DeviceGetCount(&count))
	return int(count)
}

// worlds returns the sizes to run processes at: one rank a GPU, and two ranks on one if there is no more.
func worlds(count int) []int {
	if count == 1 {
		return []int{2}
	}
	if count >= 4 {
		return []int{2, 4}
	}
	return []int{count}
}

// ownDevice gives each rank its GPU, in turn.
func ownDevice(count int) func(rank int) []string {
	return func(rank int) []string { return []string{"SYMMEM_TEST_DEVICE=" + strconv.Itoa(rank%count)} }
}

func TestRendezvousOfProcesses(t *testing.T) {
	count := gpus(t)
	for _, size := range worlds(count) {
		reports := runWorkers(t, "times", size, ownDevice(count))
		t.Logf("%d processes: opening took %v", size, reports[0].Open.Round(time.Millisecond))
		for _, key := range []string{"1 MiB", "64 MiB", "1024 MiB"} {
			// The slowest rank of each round counts.
			slowest := func(of func(r *workerReport) map[string][]time.Duration) []time.Duration {
				all := make([]time.Duration, 10)
				for _, r := range reports {
					for i, d := range of(r)[key] {
						all[i] = max(all[i], d.Round(10*time.Microsecond))
					}
				}
				return all
			}
			times := slowest(func(r *workerReport) map[string][]time.Duration { return r.Times })
			allocs := slowest(func(r *workerReport) map[string][]time.Duration { return r.Allocs })
			later := slices.SortedFunc(slices.Values(times[1:]), cmp.Compare)
			laterAllocs := slices.SortedFunc(slices.Values(allocs[1:]), cmp.Compare)
			t.Logf("%d processes, %s: rendezvous first %v, later median %v, worst %v; allocation first %v, later median %v",
				size, key, times[0], later[len(later)/2], later[len(later)-1], allocs[0], laterAllocs[len(laterAllocs)/2])
		}
	}
}

func TestAdoptionBetweenProcesses(t *testing.T) {
	count := gpus(t)
	for _, size := range worlds(count) {
		runWorkers(t, "adopt", size, ownDevice(count))
	}
}

// TestIsolatedProcesses: every process sees its own GPU alone, as some launchers set it up.
func TestIsolatedProcesses(t *testing.T) {
	count := gpus(t)
	if count < 2 {
		testneed.MissingGPUs(t, 2, "one GPU cannot be hidden from the other")
	}
	isolated := func(rank int) []string { return []string{"CUDA_VISIBLE_DEVICES=" + strconv.Itoa(rank)} }
	runWorkers(t, "times", 2, isolated)
	runWorkers(t, "adopt", 2, isolated)
}

// TestKilledProcess: when a process is killed, the others unmap and release all, and their GPUs get all of it back.
func TestKilledProcess(t *testing.T) {
	count := gpus(t)
	for _, size := range worlds(count) {
		for rank, r := range runWorkers(t, "killed", size, ownDevice(count), size-1) {
			if r != nil && count >= size {
				assert.LessOrEqual(t, r.Free, int64(stillHeld), "rank %d", rank)
			}
		}
	}
}
