package tests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
)

// cables are what each host has two of. They lead to a switch for each. The rendezvous service is reached by the first; the second is for data where
// overTCP says so, so that what is counted there is data.
var cables = []string{"cable", "second"}

// network is some network namespaces, each with an end of each cable, and one more for the switches between them. Nothing names them: they are gone
// with the processes in them, the last of which end when this one does, however that is.
type network struct {
	hosts    []*namespace
	switches *namespace
}

// namespace is one network namespace, with what /sys shows of it. A process that waits for this one keeps it.
type namespace struct{ holder *exec.Cmd }

// joined are hosts on a network.
type joined struct {
	hosts
	network *network
	ranks   []int // how many each host has
}

// requireHostNIXL skips the test if backend nixl is not here, or works on GPUs: between hosts it is tried with memory of the CPU.
func requireHostNIXL(t *testing.T) {
	t.Helper()
	requireBackend(t, "nixl")
	if deviceKind(t, "nixl") != device.Host {
		skipWithout(t, "netns", "backend nixl works on GPUs here; between hosts it is tried with memory of the CPU")
	}
}

// containersOf makes network namespaces on this host, as containers of one host have, each with so many ranks.
func containersOf(t *testing.T, ranks ...int) *joined {
	t.Helper()
	on := &joined{network: newNetwork(t, len(ranks)), ranks: ranks}
	on.addr, on.env = address(0, 0)+":17717", func(int) []string { return nil }
	on.listen = func() (net.Listener, error) { return on.network.hosts[0].listen(on.addr) }
	on.command = func(rank int) []string { return on.network.hosts[on.host(rank)].entering() }
	return on
}

// hostsOf makes network namespaces that pretend to be hosts, each with so many ranks.
func hostsOf(t *testing.T, ranks ...int) *joined {
	t.Helper()
	on := containersOf(t, ranks...)
	on.env = func(rank int) []string { return onHost(ranks, rank) }
	return on
}

// dataDevice is the cable that data takes by the settings of overTCP.
const dataDevice = "second"

// overTCP are UCX's settings with which data goes by TCP and by one cable only: UCX sees that the hosts are one, and has more ways than between two.
var overTCP = []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=" + dataDevice}

// overTCP has all data between these hosts go by TCP.
func (on *joined) overTCP() *joined {
	env := on.env
	on.env = func(rank int) []string { return append(env(rank), overTCP...) }
	return on
}

// host is where a rank is.
func (on *joined) host(rank int) int {
	h, _ := placeOf(on.ranks, rank)
	return h
}

// placeOf is on which host a rank is, and its place there, where each host has so many ranks.
func placeOf(ranks []int, rank int) (host, local int) {
	for host < len(ranks)-1 && rank >= ranks[host] {
		rank -= ranks[host]
		host++
	}
	return host, rank
}

// onHost is the variables by which a rank takes its host for another one than those of the others are.
func onHost(ranks []int, rank int) []string {
	host, local := placeOf(ranks, rank)
	return []string{fmt.Sprintf("%s=host %d", bootVariable, host), fmt.Sprintf("SYMMEM_LOCAL_RANK=%d", local), fmt.Sprintf("SYMMEM_LOCAL_WORLD_SIZE=%d", ranks[host])}
}

// address is that of a host on a cable.
func address(host, cable int) string { return fmt.Sprintf("10.213.%d.%d", 77+cable, host+1) }

// newNetwork makes so many hosts. The end of t removes them, and so does the end of this process.
func newNetwork(t *testing.T, count int) *network {
	t.Helper()
	n := &network{switches: newNamespace(t)}
	for range count {
		n.hosts = append(n.hosts, newNamespace(t))
	}
	run := func(in *namespace, args ...string) {
		t.Helper()
		if out, err := in.run("ip", args...); err != nil {
			skipWithout(t, "netns", "network namespaces cannot be joined here, for which the program ip and veth and bridge devices must be there: %v: %s", err, out)
		}
	}
	for _, cable := range cables {
		run(n.switches, "link", "add", cable, "type", "bridge")
		run(n.switches, "link", "set", cable, "up")
	}
	for h, host := range n.hosts {
		run(host, "link", "set", "lo", "up")
		for c, cable := range cables {
			port := port(cable, h)
			run(n.switches, "link", "add", port, "type", "veth", "peer", "name", cable, "netns", strconv.Itoa(host.holder.Process.Pid))
			run(n.switches, "link", "set", port, "master", cable, "up")
			run(host, "addr", "add", address(h, c)+"/24", "dev", cable)
			run(host, "link", "set", cable, "up")
		}
	}
	for _, host := range n.hosts {
		for _, cable := range cables {
			// The kernel finds the other end a little later.
			require.Eventually(t, func() bool {
				out, err := host.run("ip", "link", "show", cable)
				return err == nil && strings.Contains(out, "state UP")
			}, 10*time.Second, 20*time.Millisecond)
		}
	}
	return n
}

// port is the name of a switch's port to which a host's cable leads.
func port(cable string, host int) string { return fmt.Sprintf("%s%d", cable, host) }

// newNamespace makes a network namespace.
func newNamespace(t *testing.T) *namespace {
	t.Helper()
	const why = "network namespaces cannot be made here, for which one must be root and have the programs unshare and nsenter: %v: %s"
	// The process ends when the other end of its standard input is closed.
	c := exec.Command("unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && echo made && exec cat")
	endWithParent(c)
	var noise bytes.Buffer
	c.Stderr = &noise
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	stdout, err := c.StdoutPipe()
	require.NoError(t, err)
	if err := c.Start(); err != nil {
		skipWithout(t, "netns", why, err, "")
	}
	t.Cleanup(func() { _ = errors.Join(stdin.Close(), c.Wait()) }) // a second time after a failure
	if _, err := io.ReadFull(stdout, make([]byte, len("made"))); err != nil {
		_ = c.Wait()
		skipWithout(t, "netns", why, c.ProcessState, strings.TrimSpace(noise.String()))
	}
	return &namespace{holder: c}
}

// entering is what runs a program in the namespace.
func (s *namespace) entering() []string {
	return []string{"nsenter", "--target", strconv.Itoa(s.holder.Process.Pid), "--net", "--mount", "--"}
}

// run runs a program in the namespace and gives what it writes.
func (s *namespace) run(name string, args ...string) (string, error) {
	return s.feed("", name, args...)
}

// feed is run with something to read.
func (s *namespace) feed(input, name string, args ...string) (string, error) {
	whole := append(append(s.entering(), name), args...)
	c := exec.Command(whole[0], whole[1:]...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), err
}

// listen gives this process a socket that listens in the namespace: a socket is where the thread was that made it. The thread goes back, since with it
// would end what it has started.
func (s *namespace) listen(addr string) (net.Listener, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer here.Close()
	there, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.holder.Process.Pid))
	if err != nil {
		return nil, err
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		return nil, errors.Join(err, back)
	}
	return l, err
}

// cut takes a host's cables out of the switches. The other hosts do not see that: packets are gone, and theirs still go everywhere else.
func (n *network) cut(t *testing.T, host int) {
	t.Helper()
	for _, cable := range cables {
		out, err := n.switches.run("ip", "link", "set", port(cable, host), "down")
		require.NoError(t, err, out)
	}
}

// sent says how many bytes a host has sent by a cable.
func (n *network) sent(t *testing.T, host int, cable string) int64 {
	t.Helper()
	out, err := n.hosts[host].run("ip", "-j", "-s", "link", "show", "dev", cable)
	require.NoError(t, err, out)
	var links []struct {
		Stats64 struct{ Tx struct{ Bytes int64 } }
	}
	require.NoError(t, json.Unmarshal([]byte(out), &links), out)
	require.Len(t, links, 1, out)
	return links[0].Stats64.Tx.Bytes
}

// sentAgain says how many segments of TCP a host has sent once more, because they were lost.
func (n *network) sentAgain(t *testing.T, host int) int {
	t.Helper()
	out, err := n.hosts[host].run("cat", "/proc/net/snmp")
	require.NoError(t, err, out)
	var names []string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if fields[0] != "Tcp:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		count, err := strconv.Atoi(fields[slices.Index(names, "RetransSegs")])
		require.NoError(t, err)
		return count
	}
	t.Fatalf("the kernel does not count segments of TCP: %s", out)
	return 0
}

// A narrow link, which loses packets now and then.
const (
	linkRate    = "100mbit"
	linkLoss    = 1 // of 100 packets
	linkBacklog = "20ms"
)

// worsen makes all links narrow, and has them lose packets in both directions, by what the kernel and its tools have: tc netem, or tbf together with a random
// choice of nftables or of iptables. It says which.
func (n *network) worsen(t *testing.T) string {
	t.Helper()
	for h := range n.hosts {
		for c, cable := range cables {
			// The way is short: what is lost need not be sent again so late as on the way around the world.
			out, err := n.hosts[h].run("ip", "route", "change", address(-1, c)+"/24", "dev", cable, "src", address(h, c), "rto_min", "20ms", "quickack", "1")
			require.NoError(t, err, out)
		}
	}
	for _, on := range append(slices.Clone(n.hosts), n.switches) {
		for _, device := range on.devices(t) {
			// So that it is packets that are lost, and not as many as TCP hands over at once.
			out, err := on.run("ip", "link", "set", "dev", device, "gso_max_segs", "1")
			require.NoError(t, err, out)
		}
	}
	var lacking []string
	each := func(way string, apply func(host int) (string, error)) bool {
		for h := range n.hosts {
			if out, err := apply(h); err != nil {
				lacking = append(lacking, fmt.Sprintf("%s (%v: %s)", way, err, out))
				return false
			}
		}
		return true
	}
	// onPorts adds a queueing discipline towards a host: what passes a switch passes one of them.
	onPorts := func(discipline ...string) func(host int) (string, error) {
		return func(host int) (out string, err error) {
			for _, cable := range cables {
				if out, err = n.switches.run("tc", append([]string{"qdisc", "replace", "dev", port(cable, host), "root"}, discipline...)...); err != nil {
					return out, err
				}
			}
			return "", nil
		}
	}
	if each("tc netem", onPorts("netem", "rate", linkRate, "loss", fmt.Sprintf("%d%%", linkLoss))) {
		return "tc netem"
	}
	if !each("tc tbf", onPorts("tbf", "rate", linkRate, "burst", "8kb", "latency", linkBacklog)) {
		skipWithout(t, "netem", "nothing here makes a link narrow: %s", strings.Join(lacking, ", "))
	}
	if each("nft numgen", func(host int) (string, error) {
		return n.hosts[host].feed(fmt.Sprintf("table ip lossy {\nchain arriving {\ntype filter hook input priority 0;\niifname { %s } numgen random mod 100 < %d drop\n}\n}\n",
			strings.Join(cables, ", "), linkLoss), "nft", "-f", "-")
	}) {
		return "tc tbf and nft numgen"
	}
	if each("iptables statistic", func(host int) (out string, err error) {
		for _, cable := range cables {
			if out, err = n.hosts[host].run("iptables", "-A", "INPUT", "-i", cable, "-m", "statistic", "--mode", "random",
				"--probability", fmt.Sprintf("%.2f", linkLoss/100.), "-j", "DROP"); err != nil {
				return out, err
			}
		}
		return "", nil
	}) {
		return "tc tbf and iptables statistic"
	}
	skipWithout(t, "netem", "nothing here loses packets: %s", strings.Join(lacking, ", "))
	return ""
}

// devices lists the ends of the cables in the namespace, and the switches.
func (s *namespace) devices(t *testing.T) []string {
	t.Helper()
	out, err := s.run("ls", "/sys/class/net")
	require.NoError(t, err, out)
	return slices.DeleteFunc(strings.Fields(out), func(name string) bool {
		return !slices.ContainsFunc(cables, func(cable string) bool { return strings.HasPrefix(name, cable) })
	})
}
