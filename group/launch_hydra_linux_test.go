package group

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// placeVar makes TestHydraJob a process that Hydra has started: it prints its job and address.
const placeVar = "SYMMEM_TEST_PLACE"

// TestHydraJob: ranks of one host that Hydra's daemon has started, also below a shell, find a job and so a port of their own in the socket that the
// daemon has given them.
func TestHydraJob(t *testing.T) {
	if os.Getenv(placeVar) != "" {
		l, err := DetectLaunch(nil, nil)
		require.NoError(t, err)
		fmt.Printf("place=%s %s\n", l.Job, l.Addr)
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	place := func(program []string, vars ...string) (job, addr string) {
		t.Helper()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		ours, theirs := os.NewFile(uintptr(pair[0]), "daemon"), os.NewFile(uintptr(pair[1]), "rank")
		defer ours.Close()
		defer theirs.Close()
		cmd := exec.CommandContext(t.Context(), program[0], append(program[1:], "-test.run=^TestHydraJob$")...)
		cmd.ExtraFiles = []*os.File{theirs}
		cmd.Env = append(vars, placeVar+"=1", "PATH="+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		_, rest, found := strings.Cut(string(out), "place=")
		require.True(t, found, string(out))
		line, _, _ := strings.Cut(rest, "\n")
		job, addr, _ = strings.Cut(line, " ")
		return job, addr
	}
	two := []string{"PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2"}
	job, addr := place([]string{self}, append(two, "PMI_FD=3")...)
	began := hydraBegan(t, os.Getpid())
	assert.Equal(t, fmt.Sprintf("hydra-%d-%s", os.Getpid(), began), job)
	assert.Equal(t, fmt.Sprintf("127.0.0.1:%d", launchPort("hydra", job)), addr)

	again, same := place([]string{"sh", "-c", `"$0" "$@"; exit $?`, self}, append(two, "PMI_FD=3")...)
	assert.Equal(t, job, again)
	assert.Equal(t, addr, same)

	none := fmt.Sprintf("127.0.0.1:%d", launchPort("hydra", ""))
	for name, fd := range map[string]string{"not set": "", "no number": "x", "not open": "77", "negative": "-1", "no socket": "0", "huge": strconv.Itoa(1 << 62)} {
		job, addr := place([]string{self}, append(two, "PMI_FD="+fd)...)
		assert.Empty(t, job, name)
		assert.Equal(t, none, addr, name)
	}

	// On several hosts there are several daemons, and nothing that all ranks know.
	job, _ = place([]string{self}, "PMI_RANK=1", "PMI_SIZE=4", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2", "PMI_FD=3", "MASTER_ADDR=node1")
	assert.Empty(t, job)
	assert.Empty(t, hydraDaemon("3"), "a socket of this process itself says nothing")
}

// hydraBegan reads when a process began.
func hydraBegan(t *testing.T, pid int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	return strings.Fields(string(text[strings.LastIndex(string(text), ") ")+2:]))[19]
}
