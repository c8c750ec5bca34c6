package symmem_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/testneed"
)

type variables = map[string]string

// launched is what a launcher sets for the ranks of a job on one host; id names the job, and port is free.
type launched struct {
	name  string // as group.Launch.Source has it
	ranks int
	vars  func(rank, id string, port int) variables
}

var launches = []launched{
	{"none", 1, func(string, string, int) variables { return variables{} }},
	{"explicit", 2, func(rank, id string, port int) variables {
		return variables{"SYMMEM_RANK": rank, "SYMMEM_WORLD_SIZE": "2", "SYMMEM_LOCAL_RANK": rank, "SYMMEM_LOCAL_WORLD_SIZE": "2",
			"SYMMEM_RENDEZVOUS_ADDR": net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), "SYMMEM_JOB": id}
	}},
	{"torchrun", 2, func(rank, id string, port int) variables {
		return variables{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
			"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": strconv.Itoa(port), "TORCHELASTIC_RUN_ID": id, "TORCHELASTIC_RESTART_COUNT": "0"}
	}},
	{"openmpi", 2, func(rank, id string, _ int) variables {
		return variables{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
			"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": rank, "PMIX_NAMESPACE": id}
	}},
	{"hydra", 2, func(rank, _ string, port int) variables {
		return variables{"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2", "PMI_FD": "9",
			"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": strconv.Itoa(port)} // it gives no id of the job, from which a port could be made
	}},
	{"explicit+pmix", 2, func(rank, id string, port int) variables {
		return variables{"PMIX_RANK": rank, "PMIX_NAMESPACE": id, "SYMMEM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": strconv.Itoa(port)}
	}},
	{"slurm", 2, func(rank, id string, _ int) variables {
		return variables{"SLURM_JOB_ID": id, "SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0",
			"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
	}},
	{"explicit+kubernetes", 2, func(rank, id string, port int) variables {
		return variables{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": rank, "HOSTNAME": "train" + id + "-" + rank,
			"SYMMEM_SERVICE_HOST": "10.0.0.2", // of the headless service, called symmem
			"SYMMEM_WORLD_SIZE":   "2", "SYMMEM_RENDEZVOUS_ADDR": net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	}},
}

// TestExampleUnderEveryLauncher: the program of the package comment, as it is there, runs as processes in what each launcher sets, with
// and without a token, a chosen backend and a file of settings.
func TestExampleUnderEveryLauncher(t *testing.T) {
	const token = "a token of this test alone"
	for _, l := range launches {
		for _, tt := range []struct {
			name string
			more variables
			file string
			says []string
		}{
			{"as it is", nil, "", nil},
			{"with settings", variables{"SYMMEM_TOKEN": token, "SYMMEM_BACKEND": "host"}, "channels: 5\nbackend: nvlink\n", []string{"backend=host"}},
		} {
			t.Run(l.name+" "+tt.name, func(t *testing.T) {
				dir := t.TempDir()
				if tt.file != "" {
					require.NoError(t, os.WriteFile(dir+"/symmem.yaml", []byte(tt.file), 0o600))
				}
				envs := environments(t, l.ranks, l.vars)
				for rank, end := range runExample(t, dir, envs, func(int) variables { return tt.more }) {
					require.NoErrorf(t, end.err, "rank %d: %s", rank, end.out)
					require.Contains(t, end.out, "--- PASS: ExampleOpen")
					require.Regexp(t, fmt.Sprintf(`msg=launched by=%s rank=%d "world size"=%d `, strings.ReplaceAll(l.name, "+", `\+`), rank, l.ranks), end.out)
					for _, part := range tt.says {
						require.Contains(t, end.out, part)
					}
				}
			})
		}
	}
}

// TestJobsOfOnePort: two jobs on one host at the same time, from whose ids the same port is made.
func TestJobsOfOnePort(t *testing.T) {
	l := launches[slices.IndexFunc(launches, func(l launched) bool { return l.name == "openmpi" })]
	base, ids := strconv.Itoa(os.Getpid())+".", map[string]string{}
	var jobs [][]variables
	for n := 0; jobs == nil; n++ { // two of some hundred ids have one port
		require.Less(t, n, 1<<14)
		id := base + strconv.Itoa(n)
		envs := make([]variables, l.ranks)
		for rank := range envs {
			envs[rank] = l.vars(strconv.Itoa(rank), id, 0)
		}
		launch, err := group.DetectLaunch(func(name string) string { return envs[0][name] }, nil)
		require.NoError(t, err)
		if other, ok := ids[launch.Addr]; ok {
			others := make([]variables, l.ranks)
			for rank := range others {
				others[rank] = l.vars(strconv.Itoa(rank), other, 0)
			}
			jobs = [][]variables{envs, others}
		}
		ids[launch.Addr] = id
	}
	var all []variables
	for rank := range l.ranks { // rank 0 of both at once
		for _, envs := range jobs {
			all = append(all, envs[rank])
		}
	}
	for i, end := range runExample(t, t.TempDir(), all, nil) {
		require.NoErrorf(t, end.err, "rank %d of job %d: %s", i/len(jobs), i%len(jobs), end.out)
	}
}

// TestExampleRefuses: what a user has set and cannot be had is an error that says so, and not a world of one or another backend.
func TestExampleRefuses(t *testing.T) {
	l := launches[slices.IndexFunc(launches, func(l launched) bool { return l.name == "torchrun" })]
	const token = "a token of this test alone"
	for name, tt := range map[string]struct {
		more func(rank int) variables
		file string
		says []string
	}{
		"a backend that is not there": {func(int) variables { return variables{"SYMMEM_BACKEND": "nccl"} }, "", []string{`name is "nccl"`, "host, witness, auto"}},
		"a wrong token on one rank": {func(rank int) variables {
			return variables{"SYMMEM_TOKEN": token + strconv.Itoa(rank), "SYMMEM_TIMEOUT": "2s"}
		}, "", []string{"opening symmetric memory: joining the group"}},
		"no token on one rank": {func(rank int) variables {
			return variables{"SYMMEM_TOKEN": []string{token, ""}[rank], "SYMMEM_TIMEOUT": "2s"}
		}, "", []string{"opening symmetric memory: joining the group"}},
		"a bad value":    {func(int) variables { return variables{"SYMMEM_CHANNELS": "many"} }, "", []string{"variable SYMMEM_CHANNELS", "many"}},
		"an unknown key": {nil, "chanels: 5", []string{"symmem.yaml", "chanels", "channels"}},
		"no file":        {func(int) variables { return variables{"SYMMEM_CONFIG": "other.yaml"} }, "", []string{"other.yaml", "no such file"}},
		"a bad place":    {func(int) variables { return variables{"WORLD_SIZE": "two"} }, "", []string{"WORLD_SIZE", "two"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.file != "" {
				require.NoError(t, os.WriteFile(dir+"/symmem.yaml", []byte(tt.file), 0o600))
			}
			for rank, end := range runExample(t, dir, environments(t, l.ranks, l.vars), tt.more) {
				assert.Errorf(t, end.err, "rank %d: %s", rank, end.out)
				for _, part := range tt.says {
					assert.Contains(t, end.out, part, "rank %d", rank)
				}
			}
		})
	}
}

// TestPackageCommentIsTheExample: the package comment begins as the example does that these tests run.
func TestPackageCommentIsTheExample(t *testing.T) {
	for _, name := range []string{"doc.go", "example_test.go"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, line := range []string{"symmem.Open(ctx, config.Config{}, nil)", "t.Rendezvous(ctx)", "kernels.NewAllReduce(ctx, t, kernels.Sum, nil)", "plan.Run(stream)"} {
			require.Contains(t, string(text), line, name)
		}
	}
}

// environments returns the ranks' environments for a job whose address nobody uses.
func environments(t *testing.T, n int, vars func(rank, id string, port int) variables) []variables {
	t.Helper()
	for attempt := range 20 {
		l := testneed.Listen(t)
		port := l.Addr().(*net.TCPAddr).Port
		require.NoError(t, l.Close())
		envs := make([]variables, n)
		for rank := range envs {
			envs[rank] = vars(strconv.Itoa(rank), strconv.Itoa(os.Getpid())+strconv.Itoa(port)+strconv.Itoa(attempt), port)
		}
		launch, err := group.DetectLaunch(func(name string) string { return envs[0][name] }, nil)
		require.NoError(t, err)
		if launch.Addr == "" {
			return envs
		}
		if l, err := net.Listen("tcp", launch.Addr); err == nil {
			require.NoError(t, l.Close())
			return envs
		}
	}
	t.Fatal("no free port")
	return nil
}

type exampleEnd struct {
	out string
	err error
}

// runExample runs ExampleOpen in a process a rank, and returns what they printed and how they ended.
func runExample(t *testing.T, dir string, envs []variables, more func(rank int) variables) []exampleEnd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmds, outs := make([]*exec.Cmd, len(envs)), make([]bytes.Buffer, len(envs))
	self, err := os.Executable()
	require.NoError(t, err)
	for rank, env := range envs {
		cmd := exec.CommandContext(ctx, self, "-test.run=^ExampleOpen$", "-test.v", "-test.timeout=100s")
		cmd.Dir = dir
		all := variables{"PATH": os.Getenv("PATH"), "HOME": dir, "SYMMEM_LOG_LEVEL": "info", "SYMMEM_MULTICAST": "off", exampleVariable: "1"}
		maps.Copy(all, env)
		if more != nil {
			maps.Copy(all, more(rank))
		}
		for name, value := range all {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		cmd.Stdout, cmd.Stderr = &outs[rank], &outs[rank]
		cmd.WaitDelay = 5 * time.Second
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	ends := make([]exampleEnd, len(envs))
	for rank, cmd := range cmds {
		err := cmd.Wait()
		ends[rank] = exampleEnd{outs[rank].String(), err}
	}
	return ends
}
