package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// system makes files of a system that is not there.
func system(t *testing.T, files map[string]string) {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		at := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o777))
		require.NoError(t, os.WriteFile(at, []byte(text+"\n"), 0o666))
	}
	old := systemRoot
	systemRoot = root
	t.Cleanup(func() { systemRoot = old })
}

const (
	mountV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
	mountV1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
	noLimit = "9223372036854771712" // what version 1 writes for none
)

// TestLimits: what the host, the own control group, or one above it has left is the limit, and the error has the values.
func TestLimits(t *testing.T) {
	const mb = 1 << 20
	at := func(n int) string { return strconv.Itoa(n * mb) }
	for name, c := range map[string]struct {
		files map[string]string
		left  int64  // -1: nothing limits
		says  string // of the error
	}{
		"nothing can be read": {nil, -1, ""},
		"host":                {map[string]string{"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    2048 kB"}, 2 * mb, "the host"},
		"version 2": {map[string]string{
			"proc/self/cgroup": "0::/job/step", "proc/self/mountinfo": "22 1 0:1 / / rw - ext4 x rw\n" + mountV2,
			"sys/fs/cgroup/job/step/memory.max": at(100), "sys/fs/cgroup/job/step/memory.current": at(30),
			"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.current": at(3000),
		}, 70 * mb, "/sys/fs/cgroup/job/step has 73400320 left: its limit memory.max is 104857600, and 31457280"},
		"a group above": {map[string]string{
			"proc/self/cgroup": "0::/job/step", "proc/self/mountinfo": mountV2,
			"sys/fs/cgroup/job/step/memory.max": at(100), "sys/fs/cgroup/job/step/memory.current": at(30),
			"sys/fs/cgroup/job/memory.max": at(200), "sys/fs/cgroup/job/memory.current": at(190),
		}, 10 * mb, "/sys/fs/cgroup/job has"},
		"cached files can be taken back": {map[string]string{
			"proc/self/cgroup": "0::/", "proc/self/mountinfo": mountV2,
			"sys/fs/cgroup/memory.max": at(100), "sys/fs/cgroup/memory.current": at(95),
			"sys/fs/cgroup/memory.stat": "anon 7\ninactive_file " + at(10) + "\nactive_file " + at(5) + "\nshmem " + at(40) + "\nslab_reclaimable " + at(1),
		}, 21 * mb, "16777216 of which"},
		"over the limit": {map[string]string{
			"proc/self/cgroup": "0::/", "proc/self/mountinfo": mountV2,
			"sys/fs/cgroup/memory.max": at(10), "sys/fs/cgroup/memory.current": at(11),
		}, 0, "has 0 left"},
		"version 1, and version 2 without the controller": {map[string]string{
			"proc/self/cgroup":                               "9:name=systemd:/\n4:cpu,memory:/box\n0::/",
			"proc/self/mountinfo":                            mountV1 + "\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
			"sys/fs/cgroup/memory/box/memory.limit_in_bytes": at(64), "sys/fs/cgroup/memory/box/memory.usage_in_bytes": at(60),
			"sys/fs/cgroup/memory/box/memory.stat":       "inactive_file 1\ntotal_inactive_file " + at(1) + "\ntotal_active_file " + at(2),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": noLimit, "sys/fs/cgroup/memory/memory.usage_in_bytes": at(9000),
		}, 7 * mb, "memory.limit_in_bytes is 67108864"},
		"a container that sees its own group at the top": {map[string]string{
			"proc/self/cgroup": "4:memory:/docker/abc", "proc/self/mountinfo": strings.Replace(mountV1, " / ", " /docker/abc ", 1),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": at(64), "sys/fs/cgroup/memory/memory.usage_in_bytes": at(4),
		}, 60 * mb, "/sys/fs/cgroup/memory has"},
		"a group outside of what is mounted": {map[string]string{
			"proc/self/cgroup": "0::/../other", "proc/self/mountinfo": mountV2,
			"sys/fs/cgroup/memory.max": at(64), "sys/fs/cgroup/memory.current": at(4),
		}, 60 * mb, "/sys/fs/cgroup has"},
		"a container whose group has a name that mountinfo escapes": {map[string]string{
			"proc/self/cgroup": `0::/machine.slice/machine-a\x2db.scope/job`, "proc/self/mountinfo": strings.Replace(mountV2, " / ", ` /machine.slice/machine-a\134x2db.scope `, 1),
			"sys/fs/cgroup/job/memory.max": at(64), "sys/fs/cgroup/job/memory.current": at(4),
			"sys/fs/cgroup/memory.max": at(640), "sys/fs/cgroup/memory.current": at(4),
		}, 60 * mb, "/sys/fs/cgroup/job has"},
		"a host that promises no more than it has": {map[string]string{
			"proc/sys/vm/overcommit_memory": "2", "proc/meminfo": "MemAvailable: 9000 kB\nCommitLimit: 5120 kB\nCommitted_AS: 3072 kB",
		}, 2 * mb, "vm.overcommit_memory is 2, CommitLimit is 5242880, of which 0 are kept back"},
		"a host that promises no more than it has, and keeps some back": {map[string]string{
			"proc/sys/vm/overcommit_memory": "2", "proc/sys/vm/user_reserve_kbytes": "2048", "proc/sys/vm/admin_reserve_kbytes": "1024",
			"proc/meminfo": "MemAvailable: 9000 kB\nCommitLimit: 8192 kB\nCommitted_AS: 4096 kB",
		}, 1 * mb, "CommitLimit is 8388608, of which 3145728 are kept back (vm.user_reserve_kbytes, vm.admin_reserve_kbytes), and 4194304 are promised already"},
		"a host that has promised more than it has": {map[string]string{
			"proc/sys/vm/overcommit_memory": "2", "proc/meminfo": "MemAvailable: 9000 kB\nCommitLimit: 1024 kB\nCommitted_AS: 2048 kB",
		}, 0, "can promise 0 more"},
		"a host that promises more than it has": {map[string]string{
			"proc/sys/vm/overcommit_memory": "0", "proc/meminfo": "MemAvailable: 2048 kB\nCommitLimit: 1024 kB\nCommitted_AS: 3072 kB",
		}, 2 * mb, "the host has"},
		"no limit": {map[string]string{
			"proc/self/cgroup": "4:memory:/", "proc/self/mountinfo": mountV1,
			"sys/fs/cgroup/memory/memory.limit_in_bytes": noLimit, "sys/fs/cgroup/memory/memory.usage_in_bytes": at(4),
		}, -1, ""},
		"garbage": {map[string]string{
			"proc/self/cgroup": "\n::\n0", "proc/self/mountinfo": " - \n - cgroup2\nx - cgroup2 a b", "proc/meminfo": "MemAvailable: many kB",
		}, -1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			system(t, c.files)
			if c.left < 0 {
				require.NoError(t, enough(1<<50))
				return
			}
			require.NoError(t, enough(c.left))
			err := enough(c.left + 1)
			require.ErrorIs(t, err, errs.ErrNoMemory)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, strconv.FormatInt(c.left+1, 10)+" bytes are asked for")
		})
	}
}

// TestAllocateInControlGroup: memory that the control group does not have is refused before any is taken.
func TestAllocateInControlGroup(t *testing.T) {
	system(t, map[string]string{
		"proc/self/cgroup": "0::/", "proc/self/mountinfo": mountV2, "sys/fs/cgroup/memory.max": "1048576", "sys/fs/cgroup/memory.current": "0",
	})
	onOneRank(t, func(ctx context.Context, b *Backend) error {
		if _, err := b.Allocate(ctx, 1<<20+1); !errors.Is(err, errs.ErrNoMemory) {
			return fmt.Errorf("more than the limit: %w", err)
		}
		a, err := b.Allocate(ctx, 1<<20)
		if err != nil {
			return err
		}
		return a.Release(ctx)
	})
}

// onOneRank runs f on a backend of a group of one rank.
func onOneRank(t *testing.T, f func(ctx context.Context, b *Backend) error) {
	t.Helper()
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	b, err := New(groups[0], nil)
	require.NoError(t, err)
	require.NoError(t, f(t.Context(), b))
	require.NoError(t, errors.Join(b.Close(t.Context()), groups[0].Close(t.Context())))
}

// limitVariable makes the test binary a child of TestSystemLimits: it names the limit.
const limitVariable = "SYMMEM_TEST_HOST_LIMIT"

// TestSystemLimits: what the system refuses because of a limit of the process is ErrNoMemory, and the process lives on: limits of the
// address space, and of the size of files, for which a process that goes beyond is otherwise killed by SIGXFSZ.
func TestSystemLimits(t *testing.T) {
	limits := map[string]int{"ulimit -v": unix.RLIMIT_AS, "ulimit -f": unix.RLIMIT_FSIZE}
	if name := os.Getenv(limitVariable); name != "" {
		underLimit(t, name, limits[name])
		return
	}
	for name := range limits {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSystemLimits$", "-test.v")
			cmd.Env = append(os.Environ(), limitVariable+"="+name)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "refused: ")
		})
	}
}

// underLimit is the child: it lowers the limit to what it uses and 64 MiB, and asks for more.
func underLimit(t *testing.T, name string, resource int) {
	const spare, asked = 64 << 20, 256 << 20
	systemRoot = t.TempDir() // the machine's own memory is not what is tried here
	onOneRank(t, func(ctx context.Context, b *Backend) error {
		small, err := b.Allocate(ctx, 4096)
		if err != nil {
			return err
		}
		most := uint64(spare)
		if resource == unix.RLIMIT_AS {
			pages, err := os.ReadFile("/proc/self/statm")
			if err != nil {
				return err
			}
			used, err := strconv.ParseUint(strings.Fields(string(pages))[0], 10, 64)
			if err != nil {
				return err
			}
			most += used * uint64(os.Getpagesize())
		}
		var before unix.Rlimit
		if err := unix.Getrlimit(resource, &before); err != nil {
			return err
		}
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: most, Max: before.Max}); err != nil { // who is not root cannot raise the other one
			return err
		}
		defer func() { _ = unix.Setrlimit(resource, &before) }() // for what a test binary does in the end, as writing what it has counted
		_, err = b.Allocate(ctx, asked)
		if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), strconv.Itoa(asked)) ||
			!strings.Contains(err.Error(), name) {
			return fmt.Errorf("beyond %s: %w", name, err)
		}
		fmt.Println("refused:", err)
		again, err := b.Allocate(ctx, 4096)
		if err != nil {
			return fmt.Errorf("afterwards: %w", err)
		}
		return errors.Join(again.Release(ctx), small.Release(ctx))
	})
}

// TestMappings: memory that would leave the process too few mappings is ErrNoMemory on every rank, with the values, and what is freed can be had again.
func TestMappings(t *testing.T) {
	const ranks, windows = 3, 2
	before := mapped.Load()
	// Each rank maps its own memory, and in a window that of all; of one more window they can have what is their own and a part.
	enough := before + windows*ranks*(1+ranks) + ranks + ranks
	limit := (enough*16 + 14) / 15
	system(t, map[string]string{"proc/sys/vm/max_map_count": strconv.FormatInt(limit, 10)})
	backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			first, err := m.Allocate(ctx, 4096, "") // the other window is the workspace's
			if err != nil {
				return err
			}
			if _, err := m.Rendezvous(ctx, first, memory.Record{}); err != nil {
				return err
			}
			second, err := m.Allocate(ctx, 4096, "")
			if err != nil {
				return err
			}
			_, err = m.Rendezvous(ctx, second, memory.Record{})
			if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), fmt.Sprintf("is %d (vm.max_map_count)", limit)) {
				return fmt.Errorf("a window too many: %w", err)
			}
			if err := m.Free(ctx, first); err != nil {
				return err
			}
			if _, err := m.Rendezvous(ctx, second, memory.Record{}); err != nil {
				return fmt.Errorf("when another one was freed: %w", err)
			}
			return m.Free(ctx, second)
		})
	}))
	require.Equal(t, before, mapped.Load())
}

// TestRangeOfAllRanks: addresses for the memory of all ranks that the system does not have are ErrNoMemory.
func TestRangeOfAllRanks(t *testing.T) {
	onOneRank(t, func(_ context.Context, b *Backend) error {
		_, err := reserve(1<<62, 1)
		if !errors.Is(err, errs.ErrNoMemory) {
			return fmt.Errorf("2^62 bytes: %w", err)
		}
		return nil
	})
}
