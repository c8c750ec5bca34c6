package nixl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// UCX neither authenticates nor encrypts: whoever can connect to its ports can write the memory of the rank behind them. So the ranks of one host use
// none, where UCX can do without: they reach each other by memory of the host, the kernel's copies between processes, and the links of GPUs, for all
// of which the kernel or the driver checks permissions. Otherwise a rank opens only what leads to the others.

// The values of Options.UnprotectedNetwork.
const (
	unprotectedWarn   = "warn"   // a warning in the log says who can reach the memory
	unprotectedAllow  = "allow"  // only a note in the log does
	unprotectedRefuse = "refuse" // opening the backend is ErrUnsupported
)

// allDevices stands in Options.NetDevices for every device.
const allDevices = "all"

// loopback is the interface that ends at this host.
const loopback = "lo"

// userNetwork are the variables by which users choose UCX's transports and network devices. They take precedence.
var userNetwork = []string{"UCX_TLS", "UCX_NET_DEVICES"}

// reach says how far the network extends that data may go over.
type reach int

const (
	reachNothing  reach = iota // there is none
	reachLoopback              // this host
	reachHosts                 // other hosts
	reachUser                  // whatever the user's variables of UCX say
)

// location is where a rank is, for finding the way to the others.
type location struct {
	Alone      bool   // the library works without a network
	Maps       bool   // it can map memory of the ranks on its island
	Kind       string // of its device
	Page       int64  // of memory of the CPU, in bytes
	Namespaces string // in which processes find each other's memory, and the user; "" if not known
	Network    string // the namespace of the network; "" if not known
	Addr       string // from which the rendezvous service is reached; "" if there is none
}

// route is what a rank may use to reach the others.
type route struct {
	reach   reach
	devices string        // UCX's list; "" is none
	addrs   string        // of the devices, for people
	silence time.Duration // after which TCP gives up a connection over which data is not acknowledged; 0 leaves that to the system
}

const (
	// defaultLiveness is the LivenessTimeout unless the options say otherwise: that of groups.
	defaultLiveness = 10 * time.Second
	// laterSilence is how much longer than a peer TCP may be silent: that a rank is lost is the better error, and should come first.
	laterSilence = time.Second
	// mostSilence is the most time for which TCP may be silent, as the system takes it.
	mostSilence = math.MaxInt32 * time.Millisecond
	// leastSilence is the least time for which TCP may be silent: a segment that is lost is sent again after 0.2, 0.6 and 1.4 s.
	leastSilence = 2 * time.Second
)

// settings returns UCX's settings for an agent on the route. Without a network, active messages and connecting agents need the transport posix, which
// notices that a peer has died only if that is switched on. The transport sysv would make memory that the user's group can write. By itself TCP sends to a
// host that has been cut off for a quarter of an hour, in which the transfers to it do not end, and memory is kept.
func (n route) settings() map[string]string {
	s := map[string]string{"POSIX_ERROR_HANDLING": "y"}
	if n.silence > 0 {
		s["TCP_USER_TIMEOUT"] = fmt.Sprintf("%dms", n.silence.Milliseconds())
	}
	if n.reach != reachUser {
		s["NET_DEVICES"], s["TLS"] = n.devices, "^sysv"
	}
	return s
}

// firstNetworks returns the networks to try for an agent that talks to nobody, the best first.
func firstNetworks() []route {
	if chosenByUser() != "" {
		return []route{{reach: reachUser}}
	}
	return []route{{}, {reach: reachLoopback, devices: loopback}}
}

// chosenByUser returns the names of the variables of userNetwork that are set; "" if none is.
func chosenByUser() string {
	var set []string
	for _, name := range userNetwork {
		if value, ok := nixl.UserVariable(name); ok {
			set = append(set, name+"="+value)
		}
	}
	return strings.Join(set, " ")
}

// localTransports are the transports of UCX that stay on the host, with the names of their groups. Those of other vendors' GPUs are left out, since
// this module does not support them.
var localTransports = []string{"self", "loopback", "mm", "sm", "shm", "posix", "sysv", "xpmem", "cma", "knem", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"}

// staysOnHost reports whether a value of UCX_TLS allows no transport that uses a network.
func staysOnHost(transports string) bool {
	return transports != "" && !slices.ContainsFunc(strings.Split(transports, ","), func(name string) bool {
		name, _, _ = strings.Cut(strings.TrimLeft(strings.TrimSpace(name), `\`), ":")
		return !slices.Contains(localTransports, name)
	})
}

// locate finds out where all ranks are. A rank that cannot take part makes it fail on every rank. Collective.
func (b *Backend) locate(ctx context.Context, o *Options, failure error) ([]location, error) {
	var mine location
	if failure == nil {
		mine = location{Alone: b.alone, Maps: b.mayMap(o), Kind: b.device.Kind().String()}
		if b.device.Kind() == device.Host {
			mine.Page = int64(os.Getpagesize())
		}
		if o.Parent == nil { // which has the network
			mine.Namespaces, mine.Network, mine.Addr = namespaces("pid", "ipc", "user"), namespaces("net"), sourceAddr(ctx, o.Rendezvous)
		}
	}
	return backend.Tell(ctx, b.group, "opening backend nixl: where the ranks are", mine, failure)
}

// namespaces identifies namespaces of this process, and its user; "" if the system does not say.
func namespaces(kinds ...string) string {
	ids := []string{strconv.Itoa(os.Geteuid())}
	for _, kind := range kinds {
		id, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			return ""
		}
		ids = append(ids, id)
	}
	return strings.Join(ids, " ")
}

// sourceTimeout bounds looking up the name of a host.
const sourceTimeout = 5 * time.Second

// sourceAddr returns the address that packets to addr, a host:port, come from; "" if that is not known. It sends nothing.
func sourceAddr(ctx context.Context, addr string) string {
	if addr == "" {
		return ""
	}
	conn, err := (&net.Dialer{Timeout: sourceTimeout}).DialContext(ctx, "udp", addr)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close() }() // nothing was sent
	from, ok := conn.LocalAddr().(*net.UDPAddr)
	if !ok {
		return ""
	}
	return from.IP.String()
}

// isLocal reports whether addr does not lead to other hosts.
func isLocal(addr string) bool {
	ip := net.ParseIP(addr)
	return ip == nil || ip.IsLoopback() || ip.IsUnspecified()
}

// oneHost reports whether all run under one kernel, as far as is known.
func oneHost(members []group.Member) bool {
	return !slices.ContainsFunc(members, func(m group.Member) bool {
		return m.BootID != members[0].BootID || m.BootID == "" && m.Process != members[0].Process
	})
}

// agreed reports whether a part of the location is the same for all ranks, as it is in one process.
func agreed(members []group.Member, all []location, of func(location) string) bool {
	if !slices.ContainsFunc(members, func(m group.Member) bool { return m.Process != members[0].Process }) {
		return true
	}
	return of(all[0]) != "" && !slices.ContainsFunc(all, func(l location) bool { return of(l) != of(all[0]) })
}

// choose decides what this rank of g may use, from the locations of all.
func choose(ctx context.Context, o *Options, g *group.Group, all []location) (route, error) {
	n, err := chooseDevices(ctx, o, g, all)
	if n.reach >= reachHosts {
		n.silence = max(min(cmp.Or(o.LivenessTimeout, defaultLiveness), mostSilence-laterSilence)+laterSilence, leastSilence)
	}
	return n, err
}

// chooseDevices is choose without the settings of what is chosen.
func chooseDevices(ctx context.Context, o *Options, g *group.Group, all []location) (route, error) {
	members := g.Members()
	lacking := slices.ContainsFunc(all, func(l location) bool { return !l.Alone })
	switch {
	case chosenByUser() != "":
		return route{reach: reachUser}, nil
	case !lacking && oneHost(members) && agreed(members, all, func(l location) string { return l.Namespaces }):
		return route{}, nil
	case oneHost(members) && agreed(members, all, func(l location) string { return l.Network }):
		return route{reach: reachLoopback, devices: loopback, addrs: "127.0.0.1"}, nil
	case len(o.NetDevices) > 0:
		return named(o.NetDevices)
	}
	return leading(ctx, g.Rank(), members, all)
}

// leading returns the devices of rank me that lead to the ranks on other hosts.
func leading(ctx context.Context, me int, members []group.Member, all []location) (route, error) {
	addr := all[me].Addr
	reached := 0
	// The rank with the service may know itself by a local address: then the others' addresses show the way.
	for r, l := range all {
		if isLocal(l.Addr) {
			continue
		}
		reached++
		if isLocal(addr) && members[r].BootID != members[me].BootID {
			addr = sourceAddr(ctx, net.JoinHostPort(l.Addr, "9"))
		}
	}
	const call, setting = "opening backend nixl", "net-devices"
	if reached == 0 && !slices.ContainsFunc(all, func(l location) bool { return l.Addr == "" }) {
		// All ranks reach the service by loopback, so all are on its host.
		return route{reach: reachLoopback, devices: loopback, addrs: "127.0.0.1"}, nil
	}
	if isLocal(addr) {
		return route{}, errs.Invalid(call, setting, `""`, "the network interface that leads to the other hosts, since there is no address to tell it by "+
			"(set net-devices, SYMMEM_NET_DEVICES)")
	}
	name, err := interfaceOf(net.ParseIP(addr))
	if err != nil {
		return route{}, err
	}
	if name == "" {
		return route{}, errs.Invalid(call, setting, `""`, fmt.Sprintf("the network interface that leads to the other hosts: none of this host has "+
			"the address %s that packets to them come from (set net-devices, SYMMEM_NET_DEVICES)", addr))
	}
	return route{reach: reachHosts, devices: strings.Join(append([]string{name}, adapters("/sys/class/net", name)...), ","), addrs: addr}, nil
}

// interfaceOf names the interface that has the address; "" if none has.
func interfaceOf(ip net.IP) (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("listing network interfaces: %w", err)
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue // it has gone
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.Equal(ip) {
				return i.Name, nil
			}
		}
	}
	return "", nil
}

// adapters returns the ports of the RDMA adapter behind a network interface, as UCX names them: they use the same wire.
func adapters(sysfs, name string) []string {
	entries, err := os.ReadDir(filepath.Join(sysfs, name, "device", "infiniband"))
	if err != nil {
		return nil // there is none
	}
	port := 0
	if text, err := os.ReadFile(filepath.Join(sysfs, name, "dev_port")); err == nil {
		port, _ = strconv.Atoi(strings.TrimSpace(string(text))) // the first, if the kernel should say something else
	}
	var names []string
	for _, e := range entries {
		names = append(names, fmt.Sprintf("%s:%d", e.Name(), port+1))
	}
	return names
}

// named returns the devices that the user has named, if they are there.
func named(names []string) (route, error) {
	n := route{reach: reachHosts, devices: strings.Join(names, ","), addrs: "any address of theirs"}
	if slices.Equal(names, []string{allDevices}) {
		n.addrs = "any address of this host"
		return n, nil
	}
	var have []string
	for _, class := range []string{"/sys/class/net", "/sys/class/infiniband"} {
		if entries, err := os.ReadDir(class); err == nil {
			for _, e := range entries {
				have = append(have, e.Name())
			}
		}
	}
	if len(have) == 0 {
		return n, nil // the system does not tell
	}
	for _, name := range names {
		base, _, _ := strings.Cut(name, ":")
		if !slices.Contains(have, name) && !slices.Contains(have, base) {
			return route{}, errs.Invalid("opening backend nixl", "net-devices", name, fmt.Sprintf("devices of this host: %s", strings.Join(have, ", ")))
		}
	}
	return n, nil
}

// judge warns of a network that others can reach, or refuses it, as the user has chosen.
func (b *Backend) judge(o *Options, n route) error {
	var who string
	switch n.reach {
	case reachNothing:
		return nil
	case reachLoopback:
		who = "every user of this host"
	case reachHosts:
		who = fmt.Sprintf("whoever can send to %s (%s)", n.addrs, n.devices)
	case reachUser:
		if transports, _ := nixl.UserVariable("UCX_TLS"); staysOnHost(transports) {
			return nil
		}
		who = fmt.Sprintf("whoever can send to the devices that %s leaves", chosenByUser())
		if devices, _ := nixl.UserVariable("UCX_NET_DEVICES"); devices == loopback {
			who = "every user of this host"
		}
	}
	const text = "data goes over a network that UCX neither authenticates nor encrypts"
	switch o.UnprotectedNetwork {
	case unprotectedRefuse:
		return fmt.Errorf("%s: %s could read and write the memory of rank %d, and unprotected-network is refuse; run all ranks in one place of one "+
			"host, or protect the network by other means (WireGuard, IPsec, a network of its own) and set unprotected-network to allow "+
			"(SYMMEM_UNPROTECTED_NETWORK): %w", text, who, b.group.Rank(), errs.ErrUnsupported)
	case unprotectedAllow:
		b.log.Info(text, "who can reach the memory", who, "devices", n.devices)
	default:
		b.log.Warn(text+"; set unprotected-network to allow if others cannot reach it, or to refuse", "who can reach the memory", who, "devices", n.devices)
	}
	return nil
}

// firstAgent makes an agent that talks to nobody, with as little network as the library accepts.
func firstAgent(try func(n route) (*nixl.Agent, error)) (a *nixl.Agent, n route, err error) {
	for _, n = range firstNetworks() {
		var failed error
		if a, failed = try(n); failed == nil {
			return a, n, nil
		}
		if _, full := errors.AsType[*group.FileLimitError](failed); full {
			return nil, route{}, failed // of every network
		}
		err = errors.Join(err, failed)
	}
	return nil, route{}, err
}
