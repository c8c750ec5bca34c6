package group

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Launch is what is known of this process's place in its job before it has spoken to any other process.
type Launch struct {
	Rank           int    // number of this process in the job, from 0
	WorldSize      int    // number of processes in the job
	LocalRank      int    // number of this process among those of its host, from 0; -1 if nothing says it
	LocalWorldSize int    // number of the job's processes on this host; 0 if nothing says it
	NodeRank       int    // number of this host in the job, from 0; -1 if nothing says it
	Addr           string // host:port for the rendezvous service of rank 0; "" in a world of one that was not given any
	Ports          int    // at how many ports from Addr's on the service may be, as [Options].Ports says; 0 is 1
	Job            string // id of the job; "" if nothing says it
	Restart        int    // how often the job was restarted
	Source         string // who said so: "torchrun", "explicit", "explicit+slurm", "none"
}

// NoLaunch returns a Launch that says nothing: start from it to fill [LaunchOptions].Explicit.
func NoLaunch() Launch { return Launch{Rank: -1, LocalRank: -1, NodeRank: -1} }

// LaunchOptions changes what [DetectLaunch] finds.
type LaunchOptions struct {
	// Launcher is the name of the launcher to believe, as [Launchers] lists them; "" asks SYMMEM_LAUNCHER, and then tries
	// them in their order.
	Launcher string
	// Explicit overrides what is found, field by field; -1, 0 and "" (see NoLaunch) leave a field to what is found. nil
	// overrides nothing. Source is not read, and Ports only with an Addr.
	Explicit *Launch
}

// maxLaunchSize is the largest number of processes that is believed.
const maxLaunchSize = 1 << 20

// launchOp is the operation that refused values name.
const launchOp = "finding this process's place in the job"

// DetectLaunch finds this process's place in its job from the environment, and the names of some launchers' jobs from what the system says: it waits for nothing. getenv returns the value of
// a variable, "" if it is not set; nil is os.Getenv. Nil options are the zero LaunchOptions.
//
// # Who is believed
//
// The options come first, then SYMMEM_RANK, SYMMEM_WORLD_SIZE, SYMMEM_LOCAL_RANK, SYMMEM_LOCAL_WORLD_SIZE, SYMMEM_RENDEZVOUS_ADDR, SYMMEM_JOB and
// SYMMEM_RESTART, each on its own. What is then missing comes from one launcher: the first of torchrun, Open MPI, Hydra (MPICH, Intel MPI), PMIx,
// Slurm and a Kubernetes indexed job that has started this process. The order is that of nesting, the innermost first: torchrun inside mpirun or
// srun, and mpirun inside a Slurm step or a pod, leave the variables of both, which may differ. Open MPI and Hydra do not nest; if both have set
// their variables and disagree, that is an error with both. A launcher whose world size is not the one that was given explicitly speaks of another
// set of processes: its local ranks and the address made from it are not used.
//
// When nothing has started this process, it is a world of one. If it looks as if something should have (a Slurm allocation for
// several tasks without srun, node ranks without local ranks), that is an error that says how to start it.
//
// # The address
//
// An explicit address is taken as it is. Otherwise, in this order: MASTER_ADDR, as it is set by torchrun and by hand, with port
// 20480 + MASTER_PORT mod 8192 (29500 gives 25404; MASTER_PORT itself belongs to torchrun's own store); under srun the first
// host of SLURM_STEP_NODELIST, where rank 0 runs unless the tasks were distributed arbitrarily; under mpirun on one host
// 127.0.0.1; under mpirun in a Slurm job the first host of SLURM_JOB_NODELIST. Where there is no MASTER_PORT, the port is made
// from the id of the job, between 20480 and 28671, and Ports is 8, so that jobs that run on one host at the same time have ports of their own, also where two ids
// give the same. Hydra gives no id: on one host its daemon's process stands for it, to which the socket PMI_FD leads (on Linux). Where there is neither, or the
// job has a name that was given explicitly, which other jobs may have too, Ports is 0. Where nothing gives an address it is an error. Every rank comes to the same address by itself; nothing here makes sure that a port is free on rank 0's
// host.
//
// # The job
//
// Without an explicit name it is what the launcher calls it. Kubernetes calls a pod JOB-INDEX, but for one with hostNetwork, which has the name of its host: its Job is "".
//
// # The attempt
//
// Restart comes from SYMMEM_RESTART, from SLURM_RESTART_COUNT, or from TORCHELASTIC_RESTART_COUNT where torchrun has all ranks on one node. On several nodes the counts
// differ, since each node's agent counts the failures of its own processes only: Restart is 0 there in every attempt. No rank of an earlier one is left then, because
// the agents end all of their processes before they start others.
//
// Every error is ErrInvalid or lists errors that are.
func DetectLaunch(getenv func(string) string, opts *LaunchOptions) (Launch, error) {
	if opts == nil {
		opts = &LaunchOptions{}
	}
	e := newLaunchEnv(getenv)
	given, err := e.explicit(opts.Explicit)
	if err != nil {
		return Launch{}, err
	}
	chosen, _, err := e.choose(opts.Launcher, given)
	if err != nil {
		return Launch{}, err
	}
	return e.complete(given, chosen)
}

// explicit returns what the caller and then the SYMMEM_ variables say.
func (e *launchEnv) explicit(given *Launch) (Launch, error) {
	l := NoLaunch()
	if given != nil {
		l = *given
		l.Source = ""
	}
	var all []error
	take := func(value *int, missing int, name string, lowest int) {
		if *value != missing {
			if *value < lowest || *value > maxLaunchSize {
				all = append(all, errs.Invalid(launchOp, name, *value, launchRange(lowest)))
			}
			return
		}
		// The number that means "not given" may also be written out.
		n, err := e.number("SYMMEM_"+strings.ToUpper(strings.ReplaceAll(name, " ", "_")), min(lowest, missing))
		if err != nil {
			all = append(all, err)
		} else if n != -1 {
			*value = n
		}
	}
	take(&l.Rank, -1, "rank", 0)
	take(&l.WorldSize, 0, "world size", 1)
	take(&l.LocalRank, -1, "local rank", 0)
	take(&l.LocalWorldSize, 0, "local world size", 1)
	take(&l.Restart, 0, "restart", 0)
	if l.NodeRank < -1 || l.NodeRank > maxLaunchSize {
		all = append(all, errs.Invalid(launchOp, "node rank", l.NodeRank, launchRange(0)))
	}
	if l.Addr == "" {
		l.Addr = e.get("SYMMEM_RENDEZVOUS_ADDR")
	}
	if l.Job == "" {
		l.Job = e.get("SYMMEM_JOB")
	}
	if l.Addr != "" {
		host, port, err := net.SplitHostPort(l.Addr)
		if _, ok := parseLaunchPort(port); err != nil || host == "" || !ok {
			all = append(all, errs.Invalid(launchOp, "rendezvous address", strconv.Quote(l.Addr),
				"host:port with a port from 1 to 65535, like node1:29400 or [::1]:29400"))
		}
	}
	if len(all) > 0 {
		return Launch{}, errors.Join(all...)
	}
	if l.WorldSize == 1 && l.Rank == -1 {
		l.Rank = 0 // there is no other
	}
	return l, nil
}

// Why a launcher is chosen that was asked for.
const (
	whyVariable = "SYMMEM_LAUNCHER asks for it"
	whyAsked    = "it was asked for"
)

// choose picks the launcher to fill the gaps of given from, and says in a few words why. A reading of nothing is chosen when
// nothing has started this process.
func (e *launchEnv) choose(forced string, given Launch) (chosen launchReading, why string, err error) {
	variable := e.get("SYMMEM_LAUNCHER")
	switch forced = cmp.Or(forced, variable); {
	case forced == "":
		why = "the first in the order that has started this process"
	case strings.EqualFold(forced, variable):
		return e.force(forced, whyVariable)
	default:
		return e.force(forced, whyAsked)
	}

	readings := e.readAll()
	if err := launchConflict(readings); err != nil && (given.Rank == -1 || given.WorldSize == 0) {
		return launchReading{}, "", err
	}
	first := slices.IndexFunc(readings, func(r launchReading) bool { return r.started })
	if first >= 0 && (given.WorldSize != 0 || readings[first].launch.WorldSize != 0 || readings[first].bad != nil) {
		return readings[first], why, nil
	}
	if given.Rank == -1 || given.WorldSize == 0 {
		// If one launcher half started this process, saying so helps more than naming what another one, such as a pod, lacks.
		for _, r := range readings {
			if r.suspect != nil {
				return launchReading{}, "", r.suspect
			}
		}
	}
	if first >= 0 {
		return readings[first], why, nil
	}
	return launchReading{name: launchNone, launch: NoLaunch(), started: true}, "nothing has started this process: a world of one", nil
}

// force reads the launcher that was asked for, which must at least say a rank.
func (e *launchEnv) force(name, why string) (launchReading, string, error) {
	if strings.EqualFold(name, launchNone) {
		return launchReading{name: launchNone, launch: NoLaunch(), started: true}, why, nil
	}
	for _, l := range launchers {
		if !strings.EqualFold(name, l.name) {
			continue
		}
		r := l.read(e, true)
		r.name = l.name
		if !r.started {
			return launchReading{}, "", errs.Advised(launchOp, "launcher", l.name,
				"a launcher that has started this process, or "+launchNone+" for a world of one", r.why)
		}
		return r, why, nil
	}
	return launchReading{}, "", errs.Invalid(launchOp, "launcher", strconv.Quote(name), strings.Join(launcherNames(), ", "))
}

// complete fills the gaps of given from the chosen launcher, checks the whole and finds the address.
func (e *launchEnv) complete(given Launch, chosen launchReading) (Launch, error) {
	l := given
	other := given.WorldSize != 0 && chosen.launch.WorldSize != 0 && given.WorldSize != chosen.launch.WorldSize
	var all []error
	fill := func(value *int, missing, found int, field string) {
		if *value != missing {
			return
		}
		if err := chosen.bad[field]; err != nil {
			all = append(all, err)
		}
		*value = found
	}
	fill(&l.Rank, -1, chosen.launch.Rank, "rank")
	fill(&l.WorldSize, 0, chosen.launch.WorldSize, "world size")
	if !other {
		fill(&l.LocalRank, -1, chosen.launch.LocalRank, "local rank")
		fill(&l.LocalWorldSize, 0, chosen.launch.LocalWorldSize, "local world size")
		fill(&l.NodeRank, -1, chosen.launch.NodeRank, "node rank")
	}
	fill(&l.Restart, 0, chosen.launch.Restart, "restart")
	if l.Job == "" {
		l.Job = chosen.launch.Job
	}
	if len(all) > 0 {
		return Launch{}, fmt.Errorf("reading the variables of %s: %w", chosen.name, errors.Join(all...))
	}

	if chosen.name == launchNone && l.Rank == -1 && l.WorldSize == 0 {
		l.Rank, l.WorldSize = 0, 1
	}
	if err := l.check(given, chosen); err != nil {
		return Launch{}, err
	}
	l.Source = launchSource(given, chosen.name)
	if l.Addr == "" && l.WorldSize > 1 {
		addr, made, err := e.address(l, chosen, other)
		if err != nil {
			return Launch{}, err
		}
		l.Addr, l.Ports = addr, 0
		if made && l.Job != "" && given.Job == "" { // a name that somebody gives may be that of another job too, whose service would take the ranks for its own
			l.Ports = launchProbes
		}
	}
	return l, nil
}

// check looks for missing numbers and for numbers that contradict each other. Where a launcher and an explicit value disagree, the launcher's number
// is dropped: some launchers are known to set wrong local sizes.
func (l *Launch) check(given Launch, chosen launchReading) error {
	if l.WorldSize == 0 {
		hint := "set SYMMEM_WORLD_SIZE to the number of ranks"
		if chosen.sizeHint != "" {
			hint = chosen.sizeHint
		}
		return errs.Advised(launchOp, "world size", fmt.Sprintf("not known, though the rank is (%d)", l.Rank), launchRange(1), hint)
	}
	if l.Rank == -1 {
		return errs.Advised(launchOp, "rank", fmt.Sprintf("not known, though the world size is (%d)", l.WorldSize),
			fmt.Sprintf("0 to %d", l.WorldSize-1), "set SYMMEM_RANK for each process, or start them with symmem run")
	}
	if l.Rank >= l.WorldSize {
		return errs.Invalid(launchOp, "rank", l.Rank, fmt.Sprintf("0 to %d, since the world size is %d (%s)",
			l.WorldSize-1, l.WorldSize, launchSource(given, chosen.name)))
	}

	if l.LocalWorldSize > l.WorldSize {
		if given.LocalWorldSize != 0 {
			return errs.Invalid(launchOp, "local world size", l.LocalWorldSize, fmt.Sprintf("1 to %d, the world size", l.WorldSize))
		}
		l.LocalWorldSize = 0
	}
	if l.WorldSize == 1 && l.LocalWorldSize == 0 {
		l.LocalWorldSize = 1
	}
	limit, what := l.WorldSize, "the world size"
	if l.LocalWorldSize != 0 {
		limit, what = l.LocalWorldSize, "the local world size"
	}
	if l.LocalRank >= limit {
		switch {
		case given.LocalRank == -1 && l.LocalRank >= l.WorldSize:
			l.LocalRank = -1
		case given.LocalWorldSize == 0 && l.WorldSize > l.LocalRank:
			l.LocalWorldSize = 0
		case given.LocalRank == -1:
			l.LocalRank = -1
		default:
			return errs.Invalid(launchOp, "local rank", l.LocalRank, fmt.Sprintf("0 to %d, since %s is %d", limit-1, what, limit))
		}
	}
	if l.LocalWorldSize == l.WorldSize {
		// All ranks are on this host, even if nothing else is known of it.
		if l.LocalRank == -1 {
			l.LocalRank = l.Rank
		}
		if l.NodeRank == -1 {
			l.NodeRank = 0
		}
	}
	return nil
}

// launchSource says who a Launch came from.
func launchSource(given Launch, launcher string) string {
	said := given != NoLaunch()
	switch {
	case said && launcher == launchNone:
		return "explicit"
	case said:
		return "explicit+" + launcher
	}
	return launcher
}

// The ports that are made from other numbers lie between those that services usually take and those that systems give to
// outgoing connections.
const (
	launchFirstPort  = 20480
	launchPorts      = 8192
	launchMasterPort = 29500 // what MASTER_PORT is where nobody sets it
)

// launchProbes is at how many ports a service may be whose port is made from the id of its job, since two ids may give the same.
const launchProbes = 8

// address makes the address of the rendezvous service, as DetectLaunch documents it, and says whether its port was made from the id of the job.
func (e *launchEnv) address(l Launch, chosen launchReading, other bool) (addr string, made bool, err error) {
	if other {
		return "", false, errs.Advised(launchOp, "rendezvous address",
			fmt.Sprintf("not given, while the world size (%d) is not that of %s (%d)", l.WorldSize, chosen.name, chosen.launch.WorldSize),
			"host:port", "set SYMMEM_RENDEZVOUS_ADDR to rank 0's, another one for each group of ranks")
	}
	if master := strings.Trim(e.get("MASTER_ADDR"), "[]"); master != "" {
		port := launchMasterPort
		if text := e.get("MASTER_PORT"); text != "" {
			var ok bool
			if port, ok = parseLaunchPort(text); !ok {
				return "", false, errs.Advised(launchOp, "MASTER_PORT", strconv.Quote(text),
					"a port from 1 to 65535", "correct it, or set SYMMEM_RENDEZVOUS_ADDR to an address for symmem alone")
			}
		}
		return net.JoinHostPort(master, strconv.Itoa(launchFirstPort+port%launchPorts)), false, nil
	}
	hosts := ""
	switch {
	case chosen.hosts != "":
		hosts = chosen.hosts
	case chosen.local && l.LocalWorldSize == l.WorldSize:
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(launchPort(chosen.name, l.Job))), true, nil
	case chosen.local:
		hosts = e.first("SLURM_JOB_NODELIST", "SLURM_NODELIST")
	}
	if hosts == "" {
		hint := "set SYMMEM_RENDEZVOUS_ADDR to host:port of rank 0, or MASTER_ADDR to its host, the same for all ranks; or start them with symmem run"
		if chosen.addrHint != "" {
			hint = chosen.addrHint
		}
		return "", false, errs.Advised(launchOp, "rendezvous address", "not known ("+chosen.name+" gives none)", "host:port", hint)
	}
	names, err := parseNodeList(hosts, 1)
	if err != nil {
		return "", false, fmt.Errorf("finding rank 0's host, which SYMMEM_RENDEZVOUS_ADDR can name as host:port: %w", err)
	}
	return net.JoinHostPort(names[0], strconv.Itoa(launchPort("slurm", e.slurmPortKey(chosen)))), true, nil
}

// launchPort makes a port from words that all ranks share.
func launchPort(words ...string) int {
	h := fnv.New32a()
	for _, word := range words {
		_, _ = h.Write([]byte(word)) // a hash never fails
		_, _ = h.Write([]byte{0})
	}
	return launchFirstPort + int(h.Sum32()%launchPorts)
}

// parseLaunchPort reads the number of a port that others can connect to.
func parseLaunchPort(text string) (port int, ok bool) {
	n, err := strconv.ParseUint(text, 10, 16)
	return int(n), err == nil && n > 0
}

// launchRange says what a number may be.
func launchRange(lowest int) string {
	return fmt.Sprintf("a whole number from %d to %d", lowest, maxLaunchSize)
}

// launchEnv is an environment, with the forms that launchers write.
type launchEnv struct{ getenv func(string) string }

func newLaunchEnv(getenv func(string) string) *launchEnv {
	if getenv == nil {
		getenv = os.Getenv
	}
	return &launchEnv{getenv: getenv}
}

// get returns a variable without blanks around it, "" if it is not set.
func (e *launchEnv) get(name string) string { return strings.TrimSpace(e.getenv(name)) }

// first returns the first of the variables that is set.
func (e *launchEnv) first(names ...string) string {
	for _, name := range names {
		if value := e.get(name); value != "" {
			return value
		}
	}
	return ""
}

// number returns a variable's number, -1 if it is not set, or an error if it is none or out of range.
func (e *launchEnv) number(name string, lowest int) (int, error) {
	text := e.get(name)
	if text == "" {
		return -1, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < lowest || n > maxLaunchSize {
		return -1, errs.Invalid(launchOp, name, strconv.Quote(text), launchRange(lowest))
	}
	return n, nil
}

// firstNumber returns the number of the first of the variables that is set.
func (e *launchEnv) firstNumber(lowest int, names ...string) (int, error) {
	for _, name := range names {
		if e.get(name) != "" {
			return e.number(name, lowest)
		}
	}
	return -1, nil
}

// shown returns the variables among names that are set, as NAME=value.
func (e *launchEnv) shown(names []string) []string {
	var found []string
	for _, name := range names {
		if value := e.get(name); value != "" {
			found = append(found, name+"="+value)
		}
	}
	return slices.Clip(found)
}
