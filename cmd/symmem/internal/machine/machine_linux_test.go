package machine

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// asksEnv makes this binary print what Read says of cores instead of running tests.
const asksEnv = "SYMMEM_MACHINE_TEST_ASKS"

func TestMain(m *testing.M) {
	if os.Getenv(asksEnv) != "" {
		_, _ = os.Stdout.WriteString(Read().CoreCount())
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestBoundToOneCore: a process that is bound to a core says that it has one, and of how many where the machine has more.
func TestBoundToOneCore(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), asksEnv+"=1")

	// What is started has the processors of the thread that starts it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &all))
	for n := range len(all) * strconv.IntSize {
		if all.IsSet(n) {
			one.Set(n)
			break
		}
	}
	require.NoError(t, unix.SchedSetaffinity(0, &one))
	said, err := cmd.Output()
	require.NoError(t, unix.SchedSetaffinity(0, &all))
	require.NoError(t, err)

	online := Read().Online
	require.GreaterOrEqual(t, online, all.Count())
	want := "1 core"
	if online > 1 {
		want = "1 of " + strconv.Itoa(online) + " cores"
	}
	require.Equal(t, want, string(said))
}

func TestCountList(t *testing.T) {
	for list, want := range map[string]int{
		"0": 1, "0-1": 2, "0-3,8": 5, "0-1,4-7,9": 7, "": 0, "x": 0, "3-1": 0, "-1": 0, "0-": 0, "0,,1": 0,
	} {
		require.Equal(t, want, countList(list), "%q", list)
	}
}
