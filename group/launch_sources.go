package group

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// launchNone is the name of no launcher at all: a world of one.
const launchNone = "none"

// launcher is a program that starts processes and tells them their places.
type launcher struct {
	name string
	vars []string // its variables, as a report shows them
	read func(e *launchEnv, forced bool) launchReading
}

// launchReading is what the variables of one launcher say.
type launchReading struct {
	name    string
	launch  Launch           // -1, 0 and "" for what they do not say
	bad     map[string]error // fields of launch whose variable has no sensible value
	started bool             // the launcher has started this process
	why     string           // how that was seen, or what is missing
	suspect error            // nothing was started, but somebody seems to have meant to; for when no other launcher has
	hosts   string           // a list of hosts, the first of which runs rank 0
	local   bool             // all ranks may be on this host; if not, a Slurm job around the launcher has the hosts

	sizeHint, addrHint string // what to do when the world size or the address is not known
}

// launchers holds every launcher, the innermost of a nesting first.
var launchers = []launcher{
	{"torchrun", []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
		"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PET_NNODES", "PET_NPROC_PER_NODE"}, readTorchrun},
	{"openmpi", []string{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
		"OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid"}, readOpenMPI},
	{"hydra", []string{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMI_FD"}, readHydra},
	{"pmix", []string{"PMIX_RANK", "PMIX_NAMESPACE"}, readPMIx},
	{"slurm", []string{"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID",
		"SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
		"SLURM_RESTART_COUNT"}, readSlurm},
	{"kubernetes", []string{"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "HOSTNAME"}, readKubernetes},
}

// launcherNames lists the names that a launcher can be asked for by.
func launcherNames() []string {
	names := make([]string, 0, len(launchers)+1)
	for _, l := range launchers {
		names = append(names, l.name)
	}
	return append(names, launchNone)
}

// readAll reads the variables of every launcher.
func (e *launchEnv) readAll() []launchReading {
	readings := make([]launchReading, len(launchers))
	for i, l := range launchers {
		readings[i] = l.read(e, false)
		readings[i].name = l.name
	}
	return readings
}

// launchConflict says that two launchers that do not nest both claim this process and disagree.
func launchConflict(readings []launchReading) error {
	var claims []launchReading
	for _, r := range readings {
		if r.started && (r.name == "torchrun" || r.name == "openmpi" || r.name == "hydra") {
			claims = append(claims, r)
		}
	}
	if len(claims) != 2 || claims[0].name == "torchrun" {
		return nil // one alone, or torchrun as the innermost of any
	}
	a, b := claims[0], claims[1]
	if a.launch.Rank == b.launch.Rank && a.launch.WorldSize == b.launch.WorldSize {
		return nil
	}
	return errs.Advised(launchOp, "launcher", fmt.Sprintf("%s (rank %d of %d) and also %s (rank %d of %d)",
		a.name, a.launch.Rank, a.launch.WorldSize, b.name, b.launch.Rank, b.launch.WorldSize),
		"one of them", fmt.Sprintf("set SYMMEM_LAUNCHER to %s or %s, or set SYMMEM_RANK and SYMMEM_WORLD_SIZE", a.name, b.name))
}

// number reads a field of the launch from the first of the variables that is set.
func (r *launchReading) number(e *launchEnv, value *int, field string, lowest int, names ...string) {
	n, err := e.firstNumber(lowest, names...)
	if err != nil {
		if r.bad == nil {
			r.bad = make(map[string]error)
		}
		r.bad[field] = err
		return
	}
	if n != -1 {
		*value = n
	}
}

// common reads the four numbers that most launchers give.
func (r *launchReading) common(e *launchEnv, rank, size string, localRank, localSize []string) {
	r.launch = NoLaunch()
	r.number(e, &r.launch.Rank, "rank", 0, rank)
	r.number(e, &r.launch.WorldSize, "world size", 1, size)
	r.number(e, &r.launch.LocalRank, "local rank", 0, localRank...)
	r.number(e, &r.launch.LocalWorldSize, "local world size", 1, localSize...)
}

// readTorchrun reads what torchrun, and programs that use its names, set. RANK and WORLD_SIZE are also set by systems that mean whole nodes by them
// and leave it to torchrun to start processes there; only together with LOCAL_RANK do they speak of processes.
func readTorchrun(e *launchEnv, forced bool) launchReading {
	var r launchReading
	r.common(e, "RANK", "WORLD_SIZE", []string{"LOCAL_RANK"}, []string{"LOCAL_WORLD_SIZE"})
	r.number(e, &r.launch.NodeRank, "node rank", 0, "GROUP_RANK")
	// Each node's agent counts only the failures of its own processes: where others restart because of them their counts stay, and differ from then on.
	if e.torchrunAlone(r.launch) {
		r.number(e, &r.launch.Restart, "restart", 0, "TORCHELASTIC_RESTART_COUNT")
	}
	r.launch.Job = e.get("TORCHELASTIC_RUN_ID")
	rank, size, local := e.get("RANK"), e.get("WORLD_SIZE"), e.get("LOCAL_RANK")
	if rank != "" && (forced || size != "" && local != "") {
		r.started, r.why = true, "RANK, WORLD_SIZE and LOCAL_RANK are set"
		r.addrHint = "set SYMMEM_RENDEZVOUS_ADDR to host:port of rank 0, or MASTER_ADDR as torchrun sets it"
		return r
	}

	const all = "RANK, WORLD_SIZE and LOCAL_RANK together"
	const hint = "without LOCAL_RANK they may count nodes instead of processes: " +
		"start the program with \"torchrun --no-python\", or, if they do count processes, set SYMMEM_LAUNCHER=torchrun"
	// A node count of one or a rank of 0 by itself only says that this is a world of one.
	several := size != "" && size != "1" || size == "" && rank != "" && rank != "0"
	nodes, each := e.get("PET_NNODES"), e.get("PET_NPROC_PER_NODE")
	switch {
	case several && local == "":
		r.why = "RANK or WORLD_SIZE is set, but LOCAL_RANK is not"
		r.suspect = errs.Advised(launchOp, "the place given by RANK and WORLD_SIZE",
			fmt.Sprintf("rank %q of %q without LOCAL_RANK", rank, size), all, hint)
	case several:
		r.why = "of RANK and WORLD_SIZE only one is set"
		r.suspect = errs.Invalid(launchOp, "the place given by RANK and WORLD_SIZE", fmt.Sprintf("rank %q of %q", rank, size),
			all)
	case nodes != "" && nodes != "1" && nodes != "1:1", each != "" && each != "1":
		r.why = "PET_NNODES or PET_NPROC_PER_NODE is set, which torchrun reads, but torchrun has not run"
		r.suspect = errs.Advised(launchOp, "PET_NNODES and PET_NPROC_PER_NODE", fmt.Sprintf("%q and %q without RANK", nodes, each), "1, or RANK with them",
			"these are for torchrun: start the program with \"torchrun --no-python\"; or set SYMMEM_LAUNCHER=none for a world of one")
	default:
		r.why = "RANK, WORLD_SIZE and LOCAL_RANK are not all set"
	}
	return r
}

// torchrunAlone reports whether torchrun has all ranks of the job on one node. What does not say how many nodes there are, as what only uses torchrun's names may not, says
// it by the ranks of this one.
func (e *launchEnv) torchrunAlone(l Launch) bool {
	if nodes := e.get("GROUP_WORLD_SIZE"); nodes != "" {
		return nodes == "1"
	}
	return l.WorldSize > 0 && l.LocalWorldSize == l.WorldSize
}

// readOpenMPI reads what mpirun of Open MPI sets. OMPI_COMM_WORLD_NODE_RANK is no number of a node.
func readOpenMPI(e *launchEnv, forced bool) launchReading {
	r := launchReading{local: true}
	r.common(e, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
		[]string{"OMPI_COMM_WORLD_LOCAL_RANK"}, []string{"OMPI_COMM_WORLD_LOCAL_SIZE"})
	r.launch.Job = e.first("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid")
	r.addrHint = mpiAddrHint
	r.started = e.get("OMPI_COMM_WORLD_RANK") != "" && (forced || e.get("OMPI_COMM_WORLD_SIZE") != "")
	r.why = launchWhy(r.started, "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE")
	return r
}

const mpiAddrHint = "set SYMMEM_RENDEZVOUS_ADDR to host:port of rank 0, or MASTER_ADDR to its host, for all ranks " +
	"(mpirun -x MASTER_ADDR=... with Open MPI, -genv MASTER_ADDR ... with Hydra)"

// readHydra reads what mpiexec of MPICH, Intel MPI and others sets. srun with PMI-2 sets two of these variables too: then they
// say the same as Slurm's own, or, in what mpirun started through srun, the place of mpirun's daemon, which Slurm's say too.
func readHydra(e *launchEnv, forced bool) launchReading {
	r := launchReading{local: true}
	r.common(e, "PMI_RANK", "PMI_SIZE",
		[]string{"MPI_LOCALRANKID", "PMI_LOCAL_RANK"}, []string{"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"})
	r.addrHint = mpiAddrHint
	rank, size := e.get("PMI_RANK"), e.get("PMI_SIZE")
	r.started = rank != "" && (forced || size != "")
	r.why = launchWhy(r.started, "PMI_RANK and PMI_SIZE")
	if r.started && !forced && e.inSlurmStep() && rank == e.get("SLURM_PROCID") &&
		size == e.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") {
		r.started, r.why = false, "PMI_RANK and PMI_SIZE are those of the Slurm step: srun has set them"
	}
	if r.started && r.launch.LocalWorldSize == r.launch.WorldSize { // on several hosts there are several daemons
		r.launch.Job = hydraDaemon(e.get("PMI_FD"))
	}
	return r
}

// readPMIx reads what a launcher that speaks only PMIx sets. The world size is not among it.
func readPMIx(e *launchEnv, _ bool) launchReading {
	r := launchReading{local: true, launch: NoLaunch(), addrHint: mpiAddrHint}
	r.number(e, &r.launch.Rank, "rank", 0, "PMIX_RANK")
	r.launch.Job = e.get("PMIX_NAMESPACE")
	r.sizeHint = "set SYMMEM_WORLD_SIZE to the number of ranks: PMIx does not put it into the environment"
	r.started = e.get("PMIX_RANK") != "" && r.launch.Job != ""
	r.why = launchWhy(r.started, "PMIX_RANK and PMIX_NAMESPACE")
	if r.started && strings.HasPrefix(r.launch.Job, "slurm.") {
		r.started, r.why = false, "PMIX_NAMESPACE is that of a Slurm step: srun has set it"
	}
	return r
}

// firstSpecialStep is the first of the step ids that stand for something else than what srun starts: 4294967291 is the batch
// script, 4294967290 the shell of salloc.
const firstSpecialStep = 0xfffffff0

// inSlurmStep reports whether srun has started this process or one above it. A batch script and a shell of salloc have a
// SLURM_PROCID too, but there is only one of them.
func (e *launchEnv) inSlurmStep() bool {
	step, err := strconv.ParseUint(e.first("SLURM_STEP_ID", "SLURM_STEPID"), 10, 32)
	return err == nil && step < firstSpecialStep
}

// readSlurm reads what srun sets.
func readSlurm(e *launchEnv, _ bool) launchReading {
	r := launchReading{launch: NoLaunch()}
	if e.get("SLURM_PROCID") == "" {
		r.why = "SLURM_PROCID is not set"
		if e.get("SLURM_JOB_ID") == "" {
			return r
		}
	}
	if !e.inSlurmStep() || e.get("SLURM_PROCID") == "" {
		r.why = "this is a job of Slurm, but srun has not started the process: SLURM_STEP_ID is not that of a step"
		if tasks := e.slurmTasks(); tasks > 1 {
			r.suspect = errs.Advised(launchOp, "the Slurm job",
				fmt.Sprintf("one for %d tasks, but this process runs alone in its shell", tasks), "a process that srun has started",
				"start the program with \"srun ./program\", or set SYMMEM_LAUNCHER=none for a world of one")
			r.why += fmt.Sprintf("; start the program with srun to have %d ranks", tasks)
		}
		return r
	}
	r.started, r.why = true, "SLURM_STEP_ID and SLURM_PROCID are set"
	r.number(e, &r.launch.Rank, "rank", 0, "SLURM_PROCID")
	// The step's own numbers come first: the job's stay as they were when a step takes fewer tasks.
	r.number(e, &r.launch.WorldSize, "world size", 1, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
	r.number(e, &r.launch.LocalRank, "local rank", 0, "SLURM_LOCALID")
	r.number(e, &r.launch.NodeRank, "node rank", 0, "SLURM_NODEID")
	r.number(e, &r.launch.Restart, "restart", 0, "SLURM_RESTART_COUNT")
	// --ntasks alone sets no SLURM_NTASKS_PER_NODE, and where it is set it is a wish; the step's list is exact.
	if counts := e.get("SLURM_STEP_TASKS_PER_NODE"); counts != "" && r.launch.NodeRank >= 0 {
		r.launch.LocalWorldSize = slurmTasksOnNode(counts, r.launch.NodeRank, r.launch.WorldSize)
	}
	if r.launch.LocalWorldSize == 0 {
		r.number(e, &r.launch.LocalWorldSize, "local world size", 1, "SLURM_NTASKS_PER_NODE")
	}
	r.launch.Job = e.first("SLURM_JOB_ID", "SLURM_JOBID") + "." + e.first("SLURM_STEP_ID", "SLURM_STEPID")
	r.hosts = e.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
	r.sizeHint = "set SYMMEM_WORLD_SIZE to the number of tasks, or SLURM_STEP_NUM_TASKS as srun sets it"
	return r
}

// slurmTasks returns how many tasks the job was asked for, 0 if it was not said.
func (e *launchEnv) slurmTasks() int {
	if n, err := e.firstNumber(1, "SLURM_NTASKS", "SLURM_NPROCS"); err == nil && n > 0 {
		return n
	}
	each, err := e.number("SLURM_NTASKS_PER_NODE", 1)
	if err != nil || each < 1 {
		return 0
	}
	if nodes, err := e.firstNumber(1, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"); err == nil && nodes > 0 {
		return min(each*nodes, maxLaunchSize)
	}
	return each
}

// slurmPortKey returns what all ranks know of their Slurm job: the job and the step, or, where mpirun has spread its daemons over
// a step and the batch script, the job alone.
func (e *launchEnv) slurmPortKey(chosen launchReading) string {
	if chosen.hosts != "" {
		return chosen.launch.Job
	}
	return e.first("SLURM_JOB_ID", "SLURM_JOBID")
}

// slurmTasksOnNode returns the number of tasks on a node from a list like "4(x2),3", which means 4, 4 and 3. It returns 0 if the list cannot be read
// or does not sum up to size.
func slurmTasksOnNode(counts string, node, size int) int {
	found, at, sum := 0, 0, 0
	for entry := range strings.SplitSeq(counts, ",") {
		text, repeat, repeated := strings.Cut(entry, "(x")
		times := 1
		if repeated {
			closed, ok := strings.CutSuffix(repeat, ")")
			n, err := strconv.Atoi(closed)
			if !ok || err != nil || n < 1 || n > maxLaunchSize {
				return 0
			}
			times = n
		}
		tasks, err := strconv.Atoi(text)
		if err != nil || tasks < 0 || tasks > maxLaunchSize {
			return 0
		}
		if node >= at && node < at+times {
			found = tasks
		}
		at += times
		if sum += tasks * times; sum > size {
			return 0
		}
	}
	if sum != size {
		return 0
	}
	return found
}

// podHosts is the file in which a pod is told whether its network is the host's.
var podHosts = "/etc/hosts"

// onHostNetwork reports whether this is a pod with hostNetwork, which has the host's name. Kubernetes says so in the first line of the file, and in no variable.
func onHostNetwork() bool {
	const says = "# Kubernetes-managed hosts file (host network).\n"
	f, err := os.Open(podHosts)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // it was only read
	first := make([]byte, len(says))
	_, err = io.ReadFull(f, first)
	return err == nil && string(first) == says
}

// readKubernetes reads what an indexed Job sets. Each pod has one process and only its own devices. Its host name is that of the Job with the index, unless it has that of the
// host: a number at the end of that is the index by chance, on some ranks and not on others.
func readKubernetes(e *launchEnv, forced bool) launchReading {
	r := launchReading{launch: NoLaunch()}
	index := e.get("JOB_COMPLETION_INDEX")
	r.started = index != "" && (forced || e.get("KUBERNETES_SERVICE_HOST") != "")
	r.why = launchWhy(r.started, "KUBERNETES_SERVICE_HOST and JOB_COMPLETION_INDEX")
	r.number(e, &r.launch.Rank, "rank", 0, "JOB_COMPLETION_INDEX")
	if !r.started {
		return r
	}
	r.launch.LocalRank, r.launch.LocalWorldSize = 0, 1
	if job, ok := strings.CutSuffix(e.get("HOSTNAME"), "-"+index); ok && !onHostNetwork() {
		r.launch.Job = job
	}
	r.sizeHint = "set SYMMEM_WORLD_SIZE to the Job's completions in its pod template: Kubernetes does not put them into the " +
		"environment; or SYMMEM_LAUNCHER=none if each pod works alone"
	host := "<job>-0"
	if r.launch.Job != "" {
		host = r.launch.Job + "-0"
	}
	r.addrHint = "set SYMMEM_RENDEZVOUS_ADDR to host:port of the pod with index 0, like " + host +
		".<headless service>:29400; the service needs publishNotReadyAddresses"
	return r
}

// launchWhy says by what it was recognized that a launcher did or did not start this process.
func launchWhy(started bool, vars string) string {
	if started {
		return vars + " are set"
	}
	return vars + " are not both set"
}
