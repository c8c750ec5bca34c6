package futex_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/futex"
)

// stride keeps the words of the tests in cache lines of their own.
const stride = 128

// sharedFile returns a file without a name, and its memory.
func sharedFile(t testing.TB, size int) (*os.File, []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("futex-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "futex-test")
	t.Cleanup(func() { assert.NoError(t, f.Close()) })
	require.NoError(t, f.Truncate(int64(size)))
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Munmap(mem)) })
	return f, mem
}

// startChild starts this binary in a role, with the shared file as its descriptor 3.
func startChild(t testing.TB, f *os.File, role string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childRole+"="+role)
	cmd.ExtraFiles = []*os.File{f}
	out := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	return cmd, out
}

// runChild plays one side of a test: "pong n", "ring i members laps" or "sleep".
func runChild(role string) error {
	const size = 1 << 16
	mem, err := unix.Mmap(3, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the shared file: %w", err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	fields := strings.Fields(role)
	numbers := make([]int, 0, 3)
	for _, f := range fields[1:] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return err
		}
		numbers = append(numbers, n)
	}
	switch fields[0] {
	case "pong":
		return pong(mem, numbers[0])
	case "ring":
		return ring(mem, numbers[0], numbers[1], numbers[2])
	case "sleep":
		w, err := futex.At(mem)
		if err != nil {
			return err
		}
		return w.WaitAtLeast(1, within())
	}
	return errors.New("unknown role " + role)
}

// pong answers n turns in the word at 0 through the word at stride, and checks the plain data that each turn publishes.
func pong(mem []byte, n int) error {
	ping, err := futex.At(mem)
	if err != nil {
		return err
	}
	answer, err := futex.At(mem[stride:])
	if err != nil {
		return err
	}
	bound := within()
	for turn := uint32(1); turn <= uint32(n); turn++ {
		if err := ping.WaitAtLeast(turn, bound); err != nil {
			return err
		}
		if got := binary.LittleEndian.Uint32(mem[2*stride:]); got != ^turn {
			return fmt.Errorf("turn %d: data is %#x", turn, got)
		}
		answer.Store(turn)
	}
	return nil
}

// ring takes part in a ring of processes that hand a token round.
func ring(mem []byte, i, members, laps int) error {
	mine, err := futex.At(mem[i*stride:])
	if err != nil {
		return err
	}
	next, err := futex.At(mem[(i+1)%members*stride:])
	if err != nil {
		return err
	}
	bound := within()
	for lap := 1; lap <= laps; lap++ {
		if err := mine.WaitAtLeast(uint32(lap), bound); err != nil {
			return err
		}
		token := binary.LittleEndian.Uint64(mem[1<<15:])
		binary.LittleEndian.PutUint64(mem[1<<15:], token+1)
		if i == members-1 {
			next.Store(uint32(lap + 1))
		} else {
			next.Store(uint32(lap))
		}
	}
	return nil
}

// pingPong plays n turns against a child and returns the time of one way.
func pingPong(t testing.TB, n int) time.Duration {
	f, mem := sharedFile(t, 1<<16)
	cmd, out := startChild(t, f, fmt.Sprintf("pong %d", n))
	ping, err := futex.At(mem)
	require.NoError(t, err)
	answer, err := futex.At(mem[stride:])
	require.NoError(t, err)
	var started time.Time
	var failed error
	for turn := uint32(1); turn <= uint32(n) && failed == nil; turn++ {
		binary.LittleEndian.PutUint32(mem[2*stride:], ^turn)
		ping.Store(turn)
		failed = answer.WaitAtLeast(turn, within())
		if turn == 1 {
			started = time.Now() // the child is up now
		}
	}
	took := time.Since(started)
	require.NoError(t, cmd.Wait(), "%s", out)
	require.NoError(t, failed)
	return took / time.Duration(2*max(n-1, 1))
}

func TestTwoProcesses(t *testing.T) {
	t.Logf("one way between two processes: %v", pingPong(t, 50000))
}

func TestMoreProcessesThanCores(t *testing.T) {
	members, laps := 2*runtime.NumCPU()+1, 100
	if members*stride > 1<<15 {
		members = 1 << 15 / stride
	}
	f, mem := sharedFile(t, 1<<16)
	children := make([]*exec.Cmd, members)
	outs := make([]*bytes.Buffer, members)
	for i := range children {
		children[i], outs[i] = startChild(t, f, fmt.Sprintf("ring %d %d %d", i, members, laps))
	}
	first, err := futex.At(mem)
	require.NoError(t, err)
	first.Store(1)
	for i, c := range children {
		assert.NoError(t, c.Wait(), "%s", outs[i])
	}
	assert.EqualValues(t, members*laps, binary.LittleEndian.Uint64(mem[1<<15:]))
}

func TestAWaiterThatDiesLeavesTheWordUsable(t *testing.T) {
	f, mem := sharedFile(t, 1<<16)
	cmd, _ := startChild(t, f, "sleep")
	sleepers := (*atomic.Uint32)(unsafe.Pointer(&mem[4]))
	require.Eventually(t, func() bool { return sleepers.Load() == 1 }, time.Minute, time.Millisecond)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())

	w, err := futex.At(mem)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- w.WaitAtLeast(5, within()) }()
	require.Eventually(t, func() bool { return sleepers.Load() == 2 }, time.Minute, time.Millisecond)
	w.Store(5)
	require.NoError(t, <-done)
}

func TestRefusedFutexIsAnError(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, unix.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	addr := (*uint32)(unsafe.Pointer(unsafe.SliceData(mem)))
	require.ErrorIs(t, futex.Wait(addr, 0, time.Second), unix.EFAULT)
}

func BenchmarkOneWayBetweenProcesses(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(float64(pingPong(b, 200000).Nanoseconds()), "ns/way")
	}
}
