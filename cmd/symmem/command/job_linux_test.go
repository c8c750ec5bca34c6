package command

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/bench"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/internal/testneed"
)

// jobs are the launchers' variables for one rank of a job on this host. id names the job, and port is free.
var jobs = map[string]func(rank, size int, id string, port int) []string{
	"torchrun": func(rank, size int, id string, port int) []string {
		return []string{fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", size), fmt.Sprint("LOCAL_RANK=", rank), fmt.Sprint("LOCAL_WORLD_SIZE=", size),
			"GROUP_RANK=0", "MASTER_ADDR=127.0.0.1", fmt.Sprint("MASTER_PORT=", port), "TORCHELASTIC_RUN_ID=" + id, "TORCHELASTIC_RESTART_COUNT=0"}
	},
	"openmpi": func(rank, size int, id string, _ int) []string {
		return []string{fmt.Sprint("OMPI_COMM_WORLD_RANK=", rank), fmt.Sprint("OMPI_COMM_WORLD_SIZE=", size), fmt.Sprint("OMPI_COMM_WORLD_LOCAL_RANK=", rank),
			fmt.Sprint("OMPI_COMM_WORLD_LOCAL_SIZE=", size), fmt.Sprint("PMIX_RANK=", rank), "PMIX_NAMESPACE=" + id}
	},
	"hydra": func(rank, size int, _ string, port int) []string {
		return []string{fmt.Sprint("PMI_RANK=", rank), fmt.Sprint("PMI_SIZE=", size), fmt.Sprint("MPI_LOCALRANKID=", rank), fmt.Sprint("MPI_LOCALNRANKS=", size),
			"MASTER_ADDR=127.0.0.1", fmt.Sprint("MASTER_PORT=", port)}
	},
	"slurm": func(rank, size int, id string, _ int) []string {
		return []string{"SLURM_JOB_ID=" + id, "SLURM_STEP_ID=0", fmt.Sprint("SLURM_PROCID=", rank), fmt.Sprint("SLURM_LOCALID=", rank), "SLURM_NODEID=0",
			fmt.Sprint("SLURM_STEP_NUM_TASKS=", size), fmt.Sprint("SLURM_STEP_TASKS_PER_NODE=", size), "SLURM_STEP_NODELIST=localhost"}
	},
	"explicit+kubernetes": func(rank, size int, id string, port int) []string {
		return []string{"KUBERNETES_SERVICE_HOST=10.0.0.1", fmt.Sprint("JOB_COMPLETION_INDEX=", rank), fmt.Sprintf("HOSTNAME=job%s-%d", id, rank),
			fmt.Sprint("SYMMEM_WORLD_SIZE=", size), fmt.Sprint("SYMMEM_RENDEZVOUS_ADDR=127.0.0.1:", port)}
	},
}

// ranksOf starts the command once a rank, each with its variables, and returns how each ended.
func ranksOf(t *testing.T, size int, vars func(rank int) []string, args func(rank int) []string) []result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	self, err := os.Executable()
	require.NoError(t, err)
	results := make([]result, size)
	var wait sync.WaitGroup
	for rank := range results {
		cmd := exec.CommandContext(ctx, self, args(rank)...)
		cmd.Env = environ(vars(rank)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 5 * time.Second
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		require.NoError(t, cmd.Start())
		wait.Go(func() {
			_ = cmd.Wait() // the status says it
			results[rank] = result{status: cmd.ProcessState.ExitCode(), out: out.String(), err: errOut.String()}
		})
	}
	wait.Wait()
	require.NoError(t, ctx.Err(), "the ranks took too long: %v", results)
	return results
}

// newJob returns an id and a port that no other job of this machine has.
func newJob(t *testing.T) (id string, port int) {
	t.Helper()
	_, text, err := net.SplitHostPort(testneed.FreeAddress(t))
	require.NoError(t, err)
	port, err = strconv.Atoi(text)
	require.NoError(t, err)
	return strconv.Itoa(os.Getpid()) + text, port
}

func same(args ...string) func(int) []string { return func(int) []string { return args } }

// TestJobs: verify and bench are one rank of the job in what each launcher sets. Rank 0 prints, the others say nothing, and all end with status 0.
func TestJobs(t *testing.T) {
	for name, vars := range jobs {
		t.Run(name, func(t *testing.T) {
			const size = 2
			id, port := newJob(t)
			ranks := ranksOf(t, size, func(rank int) []string { return vars(rank, size, id, port) },
				same("verify", "--short", "--backend", "host", "--filter", "^agreement/", "--json"))
			for rank, r := range ranks {
				require.Equal(t, exit.OK, r.status, "rank %d: %s", rank, r.err)
				assert.Empty(t, r.err)
			}
			var v verify.Verification
			require.NoError(t, json.Unmarshal([]byte(ranks[0].out), &v))
			assert.Equal(t, size, v.Ranks)
			assert.Positive(t, v.Summary.Passed)
			assert.Zero(t, v.Summary.Failed)
			assert.Empty(t, ranks[1].out)

			id, port = newJob(t)
			dir := t.TempDir()
			ranks = ranksOf(t, size, func(rank int) []string { return vars(rank, size, id, port) }, func(rank int) []string {
				return []string{"bench", "--ranks", "2", "--sizes", "1K", "--kind", "all_reduce", "--reps", "2", "--output", filepath.Join(dir, strconv.Itoa(rank)), "--peer", "none"}
			})
			for rank, r := range ranks {
				require.Equal(t, exit.OK, r.status, "rank %d: %s", rank, r.err)
				assert.Empty(t, r.err)
			}
			assert.Contains(t, ranks[0].out, "all_reduce on host, 2 ranks")
			assert.Empty(t, ranks[1].out)
			text, err := os.ReadFile(filepath.Join(dir, "0"))
			require.NoError(t, err)
			var report bench.Report
			require.NoError(t, json.Unmarshal(text, &report))
			assert.Equal(t, name, report.Launcher)
			require.Len(t, report.Rows, 1)
			assert.Equal(t, size, report.Rows[0].Ranks)
			assert.NoFileExists(t, filepath.Join(dir, "1"), "only rank 0 writes files")
		})
	}
}

// TestJobSeveralBackends: the ranks of a job go from one backend to the next together, also past one that is not there, and report alike.
func TestJobSeveralBackends(t *testing.T) {
	id, port := newJob(t)
	ranks := ranksOf(t, 3, func(rank int) []string { return jobs["torchrun"](rank, 3, id, port) },
		same("verify", "--short", "--backend", "all", "--filter", "^agreement/size$", "--json"))
	for rank, r := range ranks {
		require.Equal(t, exit.OK, r.status, "rank %d: %s", rank, r.err)
	}
	var v verify.Verification
	require.NoError(t, json.Unmarshal([]byte(ranks[0].out), &v))
	status := map[string]string{}
	for _, b := range v.Backends {
		status[b.Name] = string(b.Status)
	}
	assert.Equal(t, "passed", status["host"])
	assert.Equal(t, "skipped", status["absent"])
	assert.Equal(t, verify.Summary{Passed: 1, Skipped: len(v.Backends) - 1}, v.Summary)
}

// TestJobFails: what fails ends every rank with status 1, and each says on its standard error what it knows, with its number.
func TestJobFails(t *testing.T) {
	for name, tt := range map[string]struct {
		args    []string
		more    []string
		says    []string // on ranks other than 0
		on0     string
		printed bool // rank 0's is in its report
	}{
		"verify needs a backend that is not there": {
			[]string{"verify", "--backend", "absent"}, nil, []string{"symmem: rank 1: a required backend cannot be used", "libabsent.so is not there"}, "a required backend cannot be used", true,
		},
		"bench needs a backend that is not there": {
			[]string{"bench", "--backend", "absent"}, nil, []string{"symmem: rank 1: ", "libabsent.so is not there"}, "symmem: rank 0: ", false,
		},
		"bench cannot measure": {
			[]string{"bench", "--backend", "host", "--sizes", "1K", "--kind", "all_reduce_rms_norm", "--dtype", "i8", "--reps", "1"}, nil,
			[]string{"symmem: rank 1: measuring backend host"}, "there is no RMSNorm of i8", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			id, port := newJob(t)
			ranks := ranksOf(t, 2, func(rank int) []string { return append(jobs["slurm"](rank, 2, id, port), tt.more...) }, same(tt.args...))
			for rank, r := range ranks {
				assert.Equal(t, exit.Failure, r.status, "rank %d: %s", rank, r.err)
			}
			for _, text := range tt.says {
				assert.Contains(t, ranks[1].err, text)
			}
			assert.Empty(t, ranks[1].out)
			if tt.printed {
				assert.Contains(t, ranks[0].out, tt.on0)
			} else {
				assert.Contains(t, ranks[0].err, tt.on0)
			}
		})
	}
}

// TestJobRankDies: a rank whose process ends in the middle makes the others fail, with its number; nobody waits for ever.
func TestJobRankDies(t *testing.T) {
	id, port := newJob(t)
	ranks := ranksOf(t, 3, func(rank int) []string { return append(jobs["openmpi"](rank, 3, id, port), brokenVar+"=1") },
		same("verify", "--backend", "dies"))
	assert.Equal(t, 9, ranks[1].status, "it is this one that dies")
	for _, rank := range []int{0, 2} {
		assert.Equal(t, exit.Failure, ranks[rank].status, ranks[rank].err)
		assert.Contains(t, ranks[rank].out+ranks[rank].err, "rank 1")
	}
	assert.Empty(t, ranks[2].out)
	assert.Contains(t, ranks[2].err, "symmem: rank 2: ")
}

// TestJobCannotWrite: a file that rank 0 cannot write is refused on every rank, with the same words, before anything is measured.
func TestJobCannotWrite(t *testing.T) {
	for _, flag := range []string{"--output", "--plot"} {
		id, port := newJob(t)
		missing := filepath.Join(t.TempDir(), "missing", "results.png")
		ranks := ranksOf(t, 2, func(rank int) []string { return jobs["torchrun"](rank, 2, id, port) },
			same("bench", "--backend", "host", "--sizes", "1K", "--kind", "all_reduce", "--reps", "1", "--peer", "none", "--timeout", "5s", flag, missing))
		for rank, r := range ranks {
			assert.Equal(t, exit.Usage, r.status, "rank %d: %s", rank, r.err)
			assert.Contains(t, r.err, "failed: rank 0: "+flag+": ")
			assert.Contains(t, r.err, filepath.Dir(missing))
			assert.Empty(t, r.out)
		}
	}
}

// TestJobHangs: a rank that hangs in a library ends by itself, with its stacks.
func TestJobHangs(t *testing.T) {
	t.Parallel() // it waits for the most part
	id, port := newJob(t)
	ranks := ranksOf(t, 2, func(rank int) []string {
		return append(jobs["torchrun"](rank, 2, id, port), brokenVar+"=1", "SYMMEM_TIMEOUT=1s")
	}, same("verify", "--backend", "hangs"))
	assert.Equal(t, exit.Failure, ranks[0].status, ranks[0].err)
	assert.Equal(t, exit.Failure, ranks[1].status)
	assert.Contains(t, ranks[1].err, "symmem: rank 1: nothing was heard")
	assert.Contains(t, ranks[1].err, "broken.Open", "the stacks are there")
}

// TestWithoutEnd: whoever wants no bound gives the longest timeout that there is. Nothing is made of it that is over at once.
func TestWithoutEnd(t *testing.T) {
	longest := time.Duration(math.MaxInt64).String()
	id, port := newJob(t)
	args := []string{"verify", "--short", "--backend", "host", "--filter", "^agreement/size$", "--timeout", longest, "--liveness-timeout", longest}
	for rank, r := range ranksOf(t, 2, func(rank int) []string { return jobs["torchrun"](rank, 2, id, port) }, same(args...)) {
		assert.Equal(t, exit.OK, r.status, "rank %d: %s", rank, r.err+r.out)
	}
	r := call(t, "", environ(), append(args, "-n", "2")...)
	assert.Equal(t, exit.OK, r.status, r.err+r.out)
}

// TestJobRefuses: what contradicts the job is a mistake of the command line, said by the rank that was started so.
func TestJobRefuses(t *testing.T) {
	slurm := jobs["slurm"](1, 4, "77", 0)
	for name, tt := range map[string]struct {
		vars []string
		args []string
		says []string
	}{
		"more ranks":  {slurm, []string{"verify", "-n", "8"}, []string{"--ranks is 8", "allowed: 4", "rank 1 of", "slurm"}},
		"fewer ranks": {slurm, []string{"bench", "--ranks", "2"}, []string{"--ranks is 2", "allowed: 4", "leave --ranks out"}},
		"simulated":   {slurm, []string{"verify", "--simulate"}, []string{"--simulate is true", "rank 1 of 4"}},
		"no world size": {[]string{"KUBERNETES_SERVICE_HOST=10.0.0.1", "JOB_COMPLETION_INDEX=1"}, []string{"bench", "-n", "2"},
			[]string{"world size", "SYMMEM_WORLD_SIZE"}},
		"a batch script":  {[]string{"SLURM_JOB_ID=7", "SLURM_NTASKS=8", "SLURM_PROCID=0"}, []string{"verify"}, []string{"srun", "--ranks"}},
		"half a launcher": {[]string{"RANK=0", "WORLD_SIZE=2"}, []string{"verify"}, []string{"LOCAL_RANK", "--ranks"}},
		"a served job": {append([]string{"SYMMEM_RENDEZVOUS_SERVED=true", "SYMMEM_RENDEZVOUS_ADDR=127.0.0.1:1"}, slurm...),
			[]string{"verify", "--backend", "host,absent"}, []string{"the number of backends is 2", "once for each backend"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, "", environ(tt.vars...), tt.args...)
			assert.Equal(t, exit.Usage, r.status, r.err)
			assert.Empty(t, r.out)
			for _, text := range tt.says {
				assert.Contains(t, r.err, text)
			}
		})
	}
}

// TestJobOfOne: a process that is all of its job is one rank, or starts as many as it is asked for; so does one that only looks as if something
// should have started it.
func TestJobOfOne(t *testing.T) {
	args := []string{"verify", "--short", "--backend", "host", "--filter", "^agreement/size$", "--json"}
	for name, tt := range map[string]struct {
		vars  []string
		more  []string
		ranks int
	}{
		"alone":          {jobs["slurm"](0, 1, "78", 0), nil, 1},
		"alone, asked":   {jobs["slurm"](0, 1, "78", 0), []string{"-n", "2"}, 2},
		"a batch script": {[]string{"SLURM_JOB_ID=7", "SLURM_NTASKS=8", "SLURM_PROCID=0"}, []string{"-n", "2"}, 2},
		"no launcher":    {[]string{"SYMMEM_LAUNCHER=none", "SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=8"}, []string{"-n", "2"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, "", environ(tt.vars...), append(args, tt.more...)...)
			require.Equal(t, exit.OK, r.status, r.err)
			var v verify.Verification
			require.NoError(t, json.Unmarshal([]byte(r.out), &v))
			assert.Equal(t, tt.ranks, v.Ranks)
		})
	}
}

// TestInterruptedJob: what rank 0 of a job has measured when a signal asks it to end is printed and written, as it is where bench has started the ranks.
func TestInterruptedJob(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	self, err := os.Executable()
	require.NoError(t, err)
	id, port := newJob(t)
	output := filepath.Join(t.TempDir(), "results.json")
	const size, large = 2, 256 << 20
	var out bytes.Buffer
	var said syncBuffer
	var ranks []*exec.Cmd
	for rank := range size {
		cmd := exec.CommandContext(ctx, self, "bench", "--backend", "host", "--kind", "rendezvous,all_reduce", "--sizes", strconv.Itoa(large), "--reps", "1000", "--json", "--output", output)
		cmd.Env = environ(append(jobs["torchrun"](rank, size, id, port), "SYMMEM_LOG_LEVEL=info")...)
		cmd.WaitDelay = 5 * time.Second
		if rank == 0 {
			cmd.Stdout, cmd.Stderr = &out, &said
		}
		require.NoError(t, cmd.Start())
		ranks = append(ranks, cmd)
	}
	defer func() { _, _ = ranks[1].Process.Kill(), ranks[1].Wait() }()
	// The memory of the last measurement, which takes long, comes when the first is over.
	require.Eventually(t, func() bool { return strings.Contains(said.String(), fmt.Sprint("bytes=", large)) }, patience, 10*time.Millisecond)
	require.NoError(t, ranks[0].Process.Signal(syscall.SIGTERM))
	_ = ranks[0].Wait() // the status says it
	require.NoError(t, ctx.Err())
	assert.Equal(t, launch.SignalStatus(syscall.SIGTERM), ranks[0].ProcessState.ExitCode(), said.String())
	text, err := os.ReadFile(output)
	require.NoError(t, err)
	assert.Equal(t, string(text), out.String())
	var report bench.Report
	require.NoError(t, json.Unmarshal(text, &report))
	assert.Equal(t, "interrupted", report.Incomplete)
	require.NotEmpty(t, report.Rows)
	assert.Equal(t, measure.Rendezvous, report.Rows[0].Kind)
}

// mpiexecs are the launchers of MPI that may be installed, with how each is told to start n ranks of a program.
var mpiexecs = map[string]struct {
	program string
	args    func(n int) []string
}{
	"mpich":   {"mpiexec.hydra", func(n int) []string { return []string{"-n", strconv.Itoa(n)} }},
	"openmpi": {"mpiexec.openmpi", func(n int) []string { return []string{"--allow-run-as-root", "--oversubscribe", "-n", strconv.Itoa(n)} }},
}

// TestMPI: what the real mpiexec starts, directly and below a shell, and two jobs at once on one host, which have a port each.
func TestMPI(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for name, mpi := range mpiexecs {
		t.Run(name, func(t *testing.T) {
			path, err := exec.LookPath(mpi.program)
			if err != nil {
				testneed.Missing(t, name, err)
			}
			dir := t.TempDir()
			mpiexec := func(n int, program ...string) result {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				cmd := exec.CommandContext(ctx, path, append(mpi.args(n), program...)...)
				// Open MPI keeps its sockets in a folder that wants a short name, and that each job of a user makes and removes: a job that begins as
				// another ends finds it there, then gone, and fails. Open MPI 5 reads the second name.
				own := t.TempDir()
				cmd.Env = append(environ(), "TMPDIR="+dir, "OMPI_MCA_orte_tmpdir_base="+own, "PRTE_MCA_prte_tmpdir_base="+own)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) } // it ends its ranks
				cmd.WaitDelay = 10 * time.Second
				var out, errOut bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &errOut
				_ = cmd.Run() // the status says it
				assert.NoError(t, ctx.Err(), "mpiexec took too long")
				return result{status: cmd.ProcessState.ExitCode(), out: out.String(), err: errOut.String()}
			}
			few := []string{"verify", "--short", "--backend", "host", "--filter", "^agreement/", "--json"}
			check := func(n int, r result) {
				require.Equal(t, exit.OK, r.status, r.err+r.out)
				var v verify.Verification
				require.NoError(t, json.Unmarshal([]byte(r.out), &v), r.out) // one document: only rank 0 prints
				require.Equal(t, n, v.Ranks)
				require.Zero(t, v.Summary.Failed)
			}
			check(2, mpiexec(2, append([]string{self}, few...)...))
			check(3, mpiexec(3, append([]string{"sh", "-c", `"$0" "$@"; exit $?`, self}, few...)...))

			// Jobs of several sizes at the same time: were they to meet, ranks would be refused.
			const jobs = 4
			ends := make([]result, jobs)
			var wait sync.WaitGroup
			for i := range ends {
				wait.Go(func() { ends[i] = mpiexec(2+i%2, append([]string{self}, few...)...) })
			}
			wait.Wait()
			for i, r := range ends {
				check(2+i%2, r)
			}

			r := mpiexec(2, self, "verify", "--backend", "absent")
			assert.Equal(t, exit.Failure, r.status, r.err)
			assert.Contains(t, r.out, "a required backend cannot be used")
			r = mpiexec(2, self, "bench", "-n", "4")
			assert.NotEqual(t, exit.OK, r.status)
			assert.Contains(t, r.err, "--ranks is 4")
			assert.NotContains(t, strings.ToLower(r.out), "all_reduce on")
		})
	}
}

// TestMPIMeasuresTheSameSizes: the program that measures Open MPI beside bench takes the same messages, also where they cannot be shared out evenly.
func TestMPIMeasuresTheSameSizes(t *testing.T) {
	for _, program := range []string{"mpicc.openmpi", "mpiexec.openmpi"} {
		if _, err := exec.LookPath(program); err != nil {
			testneed.Missing(t, "openmpi", err)
		}
	}
	const kinds, ranks = "all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all", 3
	dir := t.TempDir()
	peer := filepath.Join(dir, "peer")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, err := exec.CommandContext(ctx, "mpicc.openmpi", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", peer, "../../../bench/peers/mpi_collectives.c").CombinedOutput()
	require.NoError(t, err, string(text))
	cmd := exec.CommandContext(ctx, "mpiexec.openmpi", append(append(mpiexecs["openmpi"].args(ranks), "--bind-to", "none"), peer, kinds, "1", "1048580", "10000000")...)
	cmd.Env = append(environ(), "TMPDIR="+dir, "OMPI_MCA_orte_tmpdir_base="+dir, "PRTE_MCA_prte_tmpdir_base="+dir)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its ranks
	cmd.WaitDelay = 10 * time.Second
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	text, err = cmd.Output()
	require.NoError(t, err, errOut.String())
	var theirs []string
	for line := range strings.Lines(string(text)) {
		var row measure.Row
		require.NoError(t, json.Unmarshal([]byte(line), &row), line)
		theirs = append(theirs, fmt.Sprint(row.Kind, " ", row.Bytes, " ", row.Iterations))
	}

	r := call(t, "", environ(), "bench", "--backend", "host", "-n", strconv.Itoa(ranks), "--kind", kinds, "--reps", "1", "--sizes", "1048580,10000000", "--json")
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	var ours []string
	for _, row := range report.Rows {
		ours = append(ours, fmt.Sprint(row.Kind, " ", row.Bytes, " ", row.Iterations))
	}
	assert.Equal(t, ours, theirs)
}
