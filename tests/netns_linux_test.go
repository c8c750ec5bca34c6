package tests

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

// TestTwoHosts runs the suite between two network namespaces that are joined by cables: as far as the library can tell, two
// hosts. They share no sockets, each rank has a boot id of its own, and UCX goes by TCP. It needs to be root; where that is
// not so it is skipped, which is a failure with "netns" in SYMMEM_TEST_REQUIRE.
func TestTwoHosts(t *testing.T) {
	const name = "nixl"
	requireBackend(t, name)
	if deviceKind(t, name) != device.Host {
		skipWithout(t, "netns", "backend nixl works on GPUs here; between hosts it is tried with memory of the CPU")
	}
	onProcessesAt(t, twoHosts(t), name, 2)
}

// cables join the two hosts. The rendezvous service is reached by the first.
var cables = []string{"cable", "second"}

// twoHosts makes two namespaces, each with one end of each cable.
func twoHosts(t *testing.T) *hosts {
	t.Helper()
	var names, addrs [2]string
	run := func(args ...string) {
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err == nil {
			return
		}
		skipWithout(t, "netns", "network namespaces cannot be made here, for which one must be root and have the program ip: ip %s: %v: %s",
			strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	for i := range names {
		names[i] = fmt.Sprintf("symmem-%d-%d", os.Getpid(), i)
		addrs[i] = fmt.Sprintf("10.213.77.%d", i+1)
		run("netns", "add", names[i])
		t.Cleanup(func() {
			if out, err := exec.Command("ip", "netns", "del", names[i]).CombinedOutput(); err != nil {
				t.Errorf("removing namespace %s: %v: %s", names[i], err, out)
			}
		})
		run("-n", names[i], "link", "set", "lo", "up")
	}
	for c, cable := range cables {
		run("-n", names[0], "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", names[1])
		for i := range names {
			run("-n", names[i], "addr", "add", fmt.Sprintf("10.213.%d.%d/24", 77+c, i+1), "dev", cable)
			run("-n", names[i], "link", "set", cable, "up")
		}
	}
	for i := range names {
		for _, cable := range cables {
			// The kernel finds the other end a little later.
			require.Eventually(t, func() bool {
				out, err := exec.Command("ip", "-n", names[i], "link", "show", cable).Output()
				return err == nil && strings.Contains(string(out), "state UP")
			}, 10*time.Second, 50*time.Millisecond)
		}
	}
	return &hosts{
		addr:    addrs[0] + ":17717",
		command: func(rank int) []string { return []string{"ip", "netns", "exec", names[rank]} },
		env: func(rank int) []string {
			return []string{
				bootVariable + "=" + fmt.Sprintf("host %d", rank), "SYMMEM_LOCAL_RANK=0", "SYMMEM_LOCAL_WORLD_SIZE=1",
			}
		},
	}
}
