package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Open:       func(_ context.Context, g *group.Group) (backend.Backend, error) { return host.New(g, nil) },
		WorldSizes: []int{1, 2, 3, 5},
	})
}

// TestFar: the stand-in for backends without peer pointers keeps the same promises.
func TestFar(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Open: func(_ context.Context, g *group.Group) (backend.Backend, error) {
			b, err := host.New(g, nil)
			if err != nil {
				return nil, err
			}
			return backendtest.Far(b, g, nil), nil
		},
		WorldSizes: []int{1, 3}, Unreachable: true,
	})
}

// onMemories runs f on the symmetric memory of each of size ranks of this process.
func onMemories(t *testing.T, size int, opts *group.LocalOptions, f func(ctx context.Context, m *memory.Memory) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, opts, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return f(ctx, m) })
	}))
}

// TestDeviceThatCannotBeOpened: it is an error of the backend, and not a backend without a value.
func TestDeviceThatCannotBeOpened(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		m, err := memory.Open(ctx, host.Name, &backend.Env{Group: g, KernelTimeout: -1}, nil)
		if !errors.Is(err, errs.ErrInvalid) || m != nil {
			return fmt.Errorf("opened %v: %w", m, err)
		}
		return nil
	}))
}

// TestTwoHosts: ranks on two hosts get an error that says so, on every rank.
func TestTwoHosts(t *testing.T) {
	hosts := &group.LocalOptions{BootIDs: []string{"", "", "another host"}}
	onMemories(t, 3, hosts, func(ctx context.Context, m *memory.Memory) error {
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		if !errors.Is(err, errs.ErrNotReachable) {
			return fmt.Errorf("a rendezvous between two hosts: %w", err)
		}
		return m.Free(ctx, a)
	})
}

// TestTwoHostsAfterAnAllocationOfNoUse: a rank that brings no allocation of the backend stops where the others do, and the group goes on.
func TestTwoHostsAfterAnAllocationOfNoUse(t *testing.T) {
	hosts := &group.LocalOptions{BootIDs: []string{"", "another host"}, Timeout: 10 * time.Second}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, hosts, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		a, err := b.Allocate(ctx, 100)
		if err != nil {
			return err
		}
		mine := a
		if g.Rank() == 1 {
			mine = nil
		}
		if _, err = b.Rendezvous(ctx, mine); !errors.Is(err, errs.ErrNotReachable) {
			return fmt.Errorf("a rendezvous between two hosts: %w", err)
		}
		return errors.Join(g.Barrier(ctx, "after it"), a.Release(ctx), b.Close(ctx))
	}))
}

// TestSealed: a peer can neither shrink nor grow the memory.
func TestSealed(t *testing.T) {
	onMemories(t, 1, nil, func(ctx context.Context, m *memory.Memory) error {
		a, err := m.Allocate(ctx, 10000, "")
		if err != nil {
			return err
		}
		links, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return err
		}
		found := 0
		for _, l := range links {
			path := "/proc/self/fd/" + l.Name()
			if to, err := os.Readlink(path); err != nil || to != "/memfd:symmem (deleted)" {
				continue
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			found++
			shrink, grow := unix.Ftruncate(int(f.Fd()), 100), unix.Ftruncate(int(f.Fd()), 1<<20)
			if err := f.Close(); err != nil {
				return err
			}
			if !errors.Is(shrink, unix.EPERM) || !errors.Is(grow, unix.EPERM) {
				return fmt.Errorf("shrinking: %v, growing: %v", shrink, grow)
			}
		}
		if found == 0 {
			return errors.New("no memfd was found")
		}
		return m.Free(ctx, a)
	})
}

// TestNoDescriptorsLeft: the limit of open files is an error that says what to do, and afterwards everything works.
func TestNoDescriptorsLeft(t *testing.T) {
	onMemories(t, 1, nil, func(ctx context.Context, m *memory.Memory) error {
		var held []*os.File
		defer func() {
			for _, f := range held {
				_ = f.Close()
			}
		}()
		var old unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			return err
		}
		low := old
		low.Cur = 64
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			return err
		}
		for {
			f, err := os.Open("/dev/null")
			if err != nil {
				break
			}
			held = append(held, f)
		}
		_, err := m.Allocate(ctx, 64, "")
		if restore := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); restore != nil {
			return restore
		}
		if !errors.Is(err, unix.EMFILE) {
			return fmt.Errorf("allocating without a descriptor left: %w", err)
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		return m.Free(ctx, a)
	})
}

// TestGivenOptions: what a program gives in the backend's own type comes to it.
func TestGivenOptions(t *testing.T) {
	d, err := devhost.New(nil)
	require.NoError(t, err)
	f, err := backend.Lookup(host.Name)
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := f.Open(ctx, &backend.Env{Group: g, Given: &host.Options{Device: d}})
		if err != nil {
			return err
		}
		if b.Device() != device.Device(d) {
			return errors.New("another device was opened")
		}
		return b.Close(ctx)
	}))
	require.NoError(t, d.Close(), "it stays open")
}
