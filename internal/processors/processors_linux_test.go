package processors

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/testneed"
)

const childRole = "SYMMEM_TEST_PROCESSORS_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childRole) != "" {
		s := Here()
		if err := json.NewEncoder(os.Stdout).Encode(report{[]byte(s.Set), s.AtOnce, s.Quota, s.QuotaOf}); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// report is a Share as JSON, which has no strings of any bytes.
type report struct {
	Set     []byte
	AtOnce  int
	Quota   int64
	QuotaOf uint64
}

// child runs this binary, started by a thread that enter has changed until leave, and returns its share. Processes inherit what the thread has that
// starts them.
func child(t *testing.T, enter, leave func() error) Share {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, enter())
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childRole+"=1")
	out, err := cmd.Output()
	require.NoError(t, leave())
	require.NoError(t, err, "%s", out)
	var told report
	require.NoError(t, json.Unmarshal(out, &told))
	return Share{Set(told.Set), told.AtOnce, told.Quota, told.QuotaOf}
}

// TestBoundProcess: a process that is bound to one processor says which.
func TestBoundProcess(t *testing.T) {
	var before unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(os.Getpid(), &before))
	for p := range Here().Set.all {
		var only unix.CPUSet
		only.Set(p)
		s := child(t, func() error { return unix.SchedSetaffinity(0, &only) }, func() error { return unix.SchedSetaffinity(0, &before) })
		require.Equal(t, of(p), s.Set)
		require.Equal(t, 1, s.AtOnce)
		if p == 3 {
			break // of many, a few will do
		}
	}
	require.Equal(t, Here().Set, child(t, nothing, nothing).Set)
}

func nothing() error { return nil }

// TestQuotaOfProcess: a process in a control group with half a processor says so, and two in one group name the same group.
func TestQuotaOfProcess(t *testing.T) {
	_, top, version1 := controlGroup(os.DirFS("/"))
	if top == "" {
		testneed.Missing(t, "cgroup", "no hierarchy of control groups counts the processor time of this process")
	}
	if q := Here(); q.Quota != 0 {
		testneed.Missing(t, "cgroup", fmt.Sprintf("the tests themselves have a quota, %d thousandths of a processor", q.Quota))
	}
	group := func(name, within string) string {
		dir := filepath.Join(within, name+strconv.Itoa(os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			testneed.Missing(t, "cgroup", err)
		}
		t.Cleanup(func() { assert.NoError(t, os.Remove(dir)) })
		return dir
	}
	limit := func(dir string, time, period int) {
		files := map[string]string{"cpu.max": fmt.Sprint(time, " ", period)}
		if version1 {
			files = map[string]string{"cpu.cfs_period_us": strconv.Itoa(period), "cpu.cfs_quota_us": strconv.Itoa(time)}
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0); err != nil {
				testneed.Missing(t, "cgroup", err)
			}
		}
	}
	home, _, _ := controlGroup(os.DirFS("/"))
	in := func(dir string) Share {
		// In version 1 the thread alone moves; in version 2 it takes all others along.
		file, id := "tasks", unix.Gettid
		if !version1 {
			file, id = "cgroup.procs", os.Getpid
		}
		move := func(dir string) func() error {
			return func() error { return os.WriteFile(filepath.Join(dir, file), []byte(strconv.Itoa(id())), 0) }
		}
		return child(t, move(dir), move("/"+home))
	}
	half := group("symmem-half-", "/"+top)
	limit(half, 50000, 100000)
	inode := func(dir string) uint64 {
		var stat syscall.Stat_t
		require.NoError(t, syscall.Stat(dir, &stat))
		return stat.Ino
	}
	for range 2 {
		s := in(half)
		require.EqualValues(t, 500, s.Quota)
		require.Equal(t, inode(half), s.QuotaOf)
		require.Equal(t, Here().Set, s.Set)
		require.False(t, Enough([]Rank{{"a", s}}))
	}
	if !version1 {
		require.NoError(t, os.WriteFile(filepath.Join(half, "cgroup.subtree_control"), []byte("+cpu"), 0))
	}
	within := group("symmem-within-", half)
	s := in(within)
	require.EqualValues(t, 500, s.Quota, "what a group may not, those in it may not")
	require.Equal(t, inode(half), s.QuotaOf)
	limit(within, 20000, 100000)
	s = in(within)
	require.EqualValues(t, 200, s.Quota)
	require.Equal(t, inode(within), s.QuotaOf)
}

// TestQuotaFiles reads the files of control groups as systems have them.
func TestQuotaFiles(t *testing.T) {
	const (
		version2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		docker1  = "35 30 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
		both     = "31 23 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" +
			"32 23 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n33 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	)
	for _, tt := range []struct {
		name, cgroup, mounts string
		files                map[string]string
		quota                int64
		of                   string
	}{
		{"none at all", "", "", nil, 0, ""},
		{"no mount", "0::/\n", "", nil, 0, ""},
		{"the root, which has no quota", "0::/\n", version2, nil, 0, ""},
		{"no limit", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 0, ""},
		{"half", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 500, "sys/fs/cgroup/a"},
		{"in a namespace", "0::/\n", version2, map[string]string{"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2500, "sys/fs/cgroup"},
		{"the outer one is smaller", "0::/a/b\n", version2, map[string]string{
			"sys/fs/cgroup/a/cpu.max": "100000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 1000, "sys/fs/cgroup/a"},
		{"the inner one is smaller", "0::/a/b\n", version2, map[string]string{
			"sys/fs/cgroup/a/cpu.max": "400000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3000, "sys/fs/cgroup/a/b"},
		{"two alike: more ranks are in the outer one", "0::/a/b\n", version2, map[string]string{
			"sys/fs/cgroup/a/cpu.max": "400000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 4000, "sys/fs/cgroup/a"},
		{"hardly anything", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "1000 10000000\n"}, 1, "sys/fs/cgroup/a"},
		{"more than there can be", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "9223372036854775807 1\n"}, 0, ""},
		{"nonsense", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "many 0\n"}, 0, ""},
		{"too little", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "50000\n"}, 0, ""},
		{"a period of nothing", "0::/a\n", version2, map[string]string{"sys/fs/cgroup/a/cpu.max": "50000 0\n"}, 0, ""},
		{"outside of the namespace", "0::/../a\n", version2, map[string]string{"sys/fs/a/cpu.max": "50000 100000\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0, ""},
		{"version 1 in a container", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n", docker1, map[string]string{
			"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 1500, "sys/fs/cgroup/cpu,cpuacct"},
		{"version 1 of another container", "3:cpu,cpuacct:/docker/abcd\n", docker1, map[string]string{
			"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 0, ""},
		{"both versions", "9:name=systemd:/x\n3:cpuset:/y\n1:cpu:/a\n0::/z\n", both, map[string]string{
			"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
			"sys/fs/cgroup/unified/z/cpu.max": "10000 100000\n"}, 500, "sys/fs/cgroup/cpu/a"},
		{"version 1 without a limit", "1:cpu:/a\n", both, map[string]string{
			"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 0, ""},
		{"a folder with a space", "0::/a\n", strings.ReplaceAll(version2, "/sys/fs/cgroup", `/my\040groups`), map[string]string{
			"my groups/a/cpu.max": "50000 100000\n"}, 500, "my groups/a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(tt.cgroup)}, "proc/self/mountinfo": {Data: []byte(tt.mounts)}}
			inodes := map[string]uint64{}
			for file, text := range tt.files {
				root[file] = &fstest.MapFile{Data: []byte(text)}
				dir := filepath.Dir(file)
				if inodes[dir] == 0 {
					inodes[dir] = uint64(len(inodes) + 1)
					root[dir] = &fstest.MapFile{Mode: fs.ModeDir, Sys: &syscall.Stat_t{Ino: inodes[dir]}}
				}
			}
			quota, of := quotaIn(root)
			require.Equal(t, tt.quota, quota)
			require.Equal(t, inodes[tt.of], of)
		})
	}
}
