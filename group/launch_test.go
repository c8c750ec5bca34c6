package group

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/symmem/symmem/internal/errs"
)

// launchFile returns a recorded environment, with more variables laid over it.
func launchFile(t *testing.T, name string, more ...string) func(string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "env", name+".env"))
	require.NoError(t, err)
	return launchVarsOf(append(strings.Split(string(data), "\n"), more...)...)
}

// launchVarsOf returns an environment of lines NAME=value.
func launchVarsOf(lines ...string) func(string) string {
	vars := map[string]string{}
	for _, line := range lines {
		if name, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			vars[name] = value
		}
	}
	return func(name string) string { return vars[name] }
}

func TestDetectLaunch(t *testing.T) {
	for _, test := range []struct {
		name string // the recorded environment
		more []string
		want Launch
	}{
		{"desktop", nil, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "none"}},
		{"torchrun", nil, Launch{5, 8, 1, 4, 1, "gpu-node-01:25404", 0, "run7", 0, "torchrun"}},
		{"torchrun", []string{"MASTER_ADDR=fe80::1", "MASTER_PORT=29501"},
			Launch{5, 8, 1, 4, 1, "[fe80::1]:25405", 0, "run7", 0, "torchrun"}},
		{"torchrun", []string{"LOCAL_WORLD_SIZE="}, Launch{5, 8, 1, 0, 1, "gpu-node-01:25404", 0, "run7", 0, "torchrun"}},
		{"torchrun", []string{"RANK=1", "WORLD_SIZE=4", "GROUP_RANK=0", "GROUP_WORLD_SIZE=1"}, Launch{1, 4, 1, 4, 0, "gpu-node-01:25404", 0, "run7", 1, "torchrun"}},
		{"torchrun", []string{"RANK=1", "WORLD_SIZE=4", "GROUP_RANK=0", "GROUP_WORLD_SIZE="}, Launch{1, 4, 1, 4, 0, "gpu-node-01:25404", 0, "run7", 1, "torchrun"}},
		{"torchrun", []string{"GROUP_WORLD_SIZE="}, Launch{5, 8, 1, 4, 1, "gpu-node-01:25404", 0, "run7", 0, "torchrun"}},
		{"torchrun-in-srun", nil, Launch{11, 16, 3, 8, 1, "n017:25404", 0, "101", 0, "torchrun"}},
		{"torchrun-in-mpirun", nil, Launch{2, 4, 0, 2, 1, "10.0.0.5:28671", 0, "none", 0, "torchrun"}},
		{"openmpi4-one-host", nil, Launch{2, 4, 2, 4, 0, "127.0.0.1:25967", 8, "1837498369", 0, "openmpi"}},
		{"openmpi5-two-hosts", nil, Launch{3, 4, 1, 2, -1, "a:25404", 0, "prterun-a-31415@1", 0, "openmpi"}},
		{"openmpi-in-sbatch", nil, Launch{5, 8, 1, 4, -1, "n017:21826", 8, "prterun-n017-2718@1", 0, "openmpi"}},
		{"openmpi-in-batch-shell", nil, Launch{0, 8, 0, 4, -1, "n017:21826", 8, "prterun-n017-2718@1", 0, "openmpi"}},
		{"hydra", nil, Launch{1, 4, 1, 4, 0, "127.0.0.1:25635", 0, "", 0, "hydra"}},
		{"hydra-wrong-local-size", nil, Launch{6, 8, 3, 0, -1, "bb87:25404", 0, "", 0, "hydra"}},
		{"hydra-in-srun", nil, Launch{6, 8, 2, 4, -1, "n017:28587", 0, "", 0, "hydra"}},
		{"two-mpis", []string{"SYMMEM_LAUNCHER=openmpi"}, Launch{0, 2, 0, 2, 0, "127.0.0.1:27743", 0, "", 0, "openmpi"}},
		{"pmix", []string{"SYMMEM_WORLD_SIZE=4", "SYMMEM_LOCAL_WORLD_SIZE=4"},
			Launch{2, 4, 2, 4, 0, "127.0.0.1:20613", 8, "prterun-a-99@1", 0, "explicit+pmix"}},
		{"srun", nil, Launch{9, 10, 1, 2, 2, "gpu001:24328", 8, "123456.3", 2, "slurm"}},
		{"srun", []string{"SLURM_STEP_TASKS_PER_NODE=", "SLURM_NTASKS_PER_NODE=4"},
			Launch{9, 10, 1, 4, 2, "gpu001:24328", 8, "123456.3", 2, "slurm"}},
		{"srun", []string{"SLURM_STEP_TASKS_PER_NODE="}, Launch{9, 10, 1, 0, 2, "gpu001:24328", 8, "123456.3", 2, "slurm"}},
		{"srun", []string{"MASTER_ADDR=10.0.0.9", "WORLD_SIZE=10"}, Launch{9, 10, 1, 2, 2, "10.0.0.9:25404", 0, "123456.3", 2, "slurm"}},
		{"srun", []string{"SYMMEM_JOB=train"}, Launch{9, 10, 1, 2, 2, "gpu001:24328", 0, "train", 2, "explicit+slurm"}}, // as others may be called
		{"openmpi4-one-host", []string{"SYMMEM_JOB=train"}, Launch{2, 4, 2, 4, 0, "127.0.0.1:21387", 0, "train", 0, "explicit+openmpi"}},
		{"srun-pmi2", nil, Launch{1, 2, 1, 2, 0, "host2:22174", 8, "123457.0", 0, "slurm"}},
		{"sbatch-shell-one-task", nil, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "none"}},
		{"sbatch-shell", []string{"SYMMEM_LAUNCHER=none"}, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "none"}},
		{"sbatch-shell", []string{"SYMMEM_WORLD_SIZE=1"}, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "explicit"}},
		{"srun-pty-bash", nil, Launch{0, 1, 0, 1, 0, "", 0, "123461.0", 0, "slurm"}},
		{"srun-in-interactive", nil, Launch{3, 4, 3, 4, 0, "gpu001:22364", 8, "123462.2", 0, "slurm"}},
		{"kubernetes", []string{"SYMMEM_WORLD_SIZE=4", "SYMMEM_RENDEZVOUS_ADDR=train-0.train:29400"},
			Launch{2, 4, 0, 1, -1, "train-0.train:29400", 0, "train", 0, "explicit+kubernetes"}},
		{"kubeflow-trainer", []string{"SYMMEM_WORLD_SIZE=2", "SYMMEM_RENDEZVOUS_ADDR=train-node-0-0.train:29400"},
			Launch{1, 2, 0, 1, -1, "train-node-0-0.train:29400", 0, "train-node-0", 0, "explicit+kubernetes"}},
		{"kubernetes", []string{"SYMMEM_LAUNCHER=none"}, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "none"}},
		{"node-level-ranks", []string{"SYMMEM_LAUNCHER=torchrun"}, Launch{2, 4, -1, 0, -1, "train-master-0:27552", 0, "", 0, "torchrun"}},
		{"node-level-ranks", []string{"RANK=0", "WORLD_SIZE=1"}, Launch{0, 1, 0, 1, 0, "", 0, "", 0, "none"}},
		{"kubeflow-trainer", []string{"SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=1", "JOB_COMPLETION_INDEX="},
			Launch{0, 1, 0, 1, 0, "", 0, "", 0, "explicit"}},
	} {
		t.Run(test.name+" "+strings.Join(test.more, " "), func(t *testing.T) {
			got, err := DetectLaunch(launchFile(t, test.name, test.more...), nil)
			require.NoError(t, err)
			assert.Equal(t, test.want, got)
		})
	}
}

func TestDetectLaunchRefuses(t *testing.T) {
	for _, test := range []struct {
		name string
		more []string
		says []string
	}{
		{"node-level-ranks", nil, []string{"without LOCAL_RANK", "torchrun --no-python", "SYMMEM_LAUNCHER=torchrun"}},
		{"kubeflow-trainer", []string{"JOB_COMPLETION_INDEX="}, []string{"PET_NNODES", "torchrun --no-python"}},
		{"kubeflow-trainer", nil, []string{"PET_NNODES", "torchrun --no-python"}},
		{"sbatch-shell", nil, []string{"4 tasks", "srun ./program"}},
		{"sbatch-shell", []string{"SLURM_STEP_ID=4294967291"}, []string{"4 tasks", "srun ./program"}},
		{"sbatch-shell", []string{"SYMMEM_LAUNCHER=slurm"}, []string{"srun has not started the process"}},
		{"salloc-shell", nil, []string{"8 tasks", "srun ./program"}},
		{"kubernetes", nil, []string{"SYMMEM_WORLD_SIZE", "completions", "SYMMEM_LAUNCHER=none"}},
		{"kubernetes", []string{"SYMMEM_WORLD_SIZE=4"}, []string{"rendezvous address", "train-0.<headless service>"}},
		{"kubernetes", []string{"SYMMEM_WORLD_SIZE=2"}, []string{"rank is 2", "0 to 1"}},
		{"pmix", nil, []string{"world size is not known", "PMIx does not put it into the environment"}},
		{"pmix", []string{"SYMMEM_WORLD_SIZE=4"}, []string{"rendezvous address", "MASTER_ADDR"}},
		{"two-mpis", nil, []string{"openmpi (rank 0 of 2)", "hydra (rank 1 of 4)", "SYMMEM_LAUNCHER"}},
		{"openmpi5-two-hosts", []string{"MASTER_ADDR="}, []string{"openmpi gives none", "mpirun -x MASTER_ADDR"}},
		{"openmpi4-one-host", []string{"OMPI_COMM_WORLD_SIZE=four"}, []string{"OMPI_COMM_WORLD_SIZE", `"four"`}},
		{"openmpi4-one-host", []string{"OMPI_COMM_WORLD_RANK=4"}, []string{"rank is 4", "0 to 3"}},
		{"torchrun", []string{"MASTER_PORT=http"}, []string{"MASTER_PORT", "SYMMEM_RENDEZVOUS_ADDR"}},
		{"torchrun", []string{"MASTER_ADDR="}, []string{"rendezvous address", "MASTER_ADDR as torchrun sets it"}},
		{"torchrun", []string{"RANK=-1"}, []string{"RANK", `"-1"`}},
		{"torchrun", []string{"WORLD_SIZE=99999999999999999999"}, []string{"WORLD_SIZE", "1048576"}},
		{"torchrun", []string{"WORLD_SIZE="}, []string{`rank "5" of ""`}},
		{"torchrun", []string{"SYMMEM_WORLD_SIZE=4", "SYMMEM_RANK=1"}, []string{"rendezvous address", "another one for each group"}},
		{"srun", []string{"SLURM_STEP_NODELIST=gpu[001"}, []string{"closing bracket", "SYMMEM_RENDEZVOUS_ADDR"}},
		{"desktop", []string{"SYMMEM_LAUNCHER=lsf"}, []string{`"lsf"`, "torchrun, openmpi, hydra, pmix, slurm, kubernetes, none"}},
		{"desktop", []string{"SYMMEM_LAUNCHER=slurm"}, []string{"launcher is slurm", "SLURM_PROCID is not set"}},
		{"desktop", []string{"SYMMEM_RANK=0"}, []string{"world size is not known", "SYMMEM_WORLD_SIZE"}},
		{"desktop", []string{"SYMMEM_WORLD_SIZE=4"}, []string{"rank is not known", "SYMMEM_RANK"}},
		{"desktop", []string{"SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=2"}, []string{"rendezvous address", "SYMMEM_RENDEZVOUS_ADDR"}},
		{"desktop", []string{"SYMMEM_RANK=x", "SYMMEM_WORLD_SIZE=-2"}, []string{"SYMMEM_RANK", "SYMMEM_WORLD_SIZE"}},
		{"desktop", []string{"SYMMEM_RENDEZVOUS_ADDR=node1"}, []string{"host:port"}},
		{"desktop", []string{"SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=1", "SYMMEM_LOCAL_RANK=1"}, []string{"local rank is 1"}},
		{"desktop", []string{"SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=1", "SYMMEM_LOCAL_WORLD_SIZE=2"}, []string{"local world size is 2"}},
	} {
		t.Run(test.name+" "+strings.Join(test.more, " "), func(t *testing.T) {
			got, err := DetectLaunch(launchFile(t, test.name, test.more...), nil)
			require.ErrorIs(t, err, ErrInvalid)
			assert.Zero(t, got)
			for _, words := range test.says {
				assert.ErrorContains(t, err, words)
			}
			argument, ok := errors.AsType[*errs.ArgumentError](err)
			require.True(t, ok)
			assert.NotEmpty(t, argument.Allowed)
		})
	}
}

func TestDetectLaunchExplicit(t *testing.T) {
	// Each field wins on its own, the options over the variables, and the launcher fills the rest.
	full := Launch{Rank: 1, WorldSize: 2, LocalRank: 0, LocalWorldSize: 1, NodeRank: 1, Addr: "x:1", Job: "j", Restart: 4, Source: "ignored"}
	for _, name := range []string{"desktop", "torchrun", "srun", "two-mpis", "sbatch-shell", "node-level-ranks", "kubernetes"} {
		got, err := DetectLaunch(launchFile(t, name, "SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=9", "SYMMEM_RENDEZVOUS_ADDR=y:2"),
			&LaunchOptions{Explicit: &full})
		require.NoError(t, err, name)
		got.Source = full.Source
		assert.Equal(t, full, got, name)
	}

	one := func(change func(*Launch)) *LaunchOptions {
		l := NoLaunch()
		change(&l)
		return &LaunchOptions{Explicit: &l}
	}
	base, err := DetectLaunch(launchFile(t, "torchrun"), nil)
	require.NoError(t, err)
	base.Source = "explicit+torchrun"
	for _, change := range []func(*Launch){
		func(l *Launch) { l.Rank = 6 },
		func(l *Launch) { l.LocalRank = 3 },
		func(l *Launch) { l.LocalWorldSize = 8 },
		func(l *Launch) { l.NodeRank = 7 },
		func(l *Launch) { l.Addr = "elsewhere:77" },
		func(l *Launch) { l.Job = "other" },
		func(l *Launch) { l.Restart = 9 },
	} {
		want := base
		change(&want)
		if want.LocalWorldSize == want.WorldSize {
			want.NodeRank = base.NodeRank
		}
		got, err := DetectLaunch(launchFile(t, "torchrun"), one(change))
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}

	t.Run("variables", func(t *testing.T) {
		got, err := DetectLaunch(launchFile(t, "desktop", "SYMMEM_RANK=3", "SYMMEM_WORLD_SIZE=4", "SYMMEM_LOCAL_RANK=1",
			"SYMMEM_LOCAL_WORLD_SIZE=2", "SYMMEM_RENDEZVOUS_ADDR=node1:29400", "SYMMEM_JOB=j", "SYMMEM_RESTART=2"), nil)
		require.NoError(t, err)
		assert.Equal(t, Launch{3, 4, 1, 2, -1, "node1:29400", 0, "j", 2, "explicit"}, got)
	})
	t.Run("not given, written out", func(t *testing.T) {
		got, err := DetectLaunch(launchFile(t, "srun", "SYMMEM_RANK=-1", "SYMMEM_WORLD_SIZE=0", "SYMMEM_LOCAL_RANK=-1",
			"SYMMEM_LOCAL_WORLD_SIZE=0", "SYMMEM_RESTART=0"), &LaunchOptions{Explicit: new(NoLaunch())})
		require.NoError(t, err)
		assert.Equal(t, Launch{9, 10, 1, 2, 2, "gpu001:24328", 8, "123456.3", 2, "slurm"}, got)
	})
	t.Run("malformed but overridden", func(t *testing.T) {
		got, err := DetectLaunch(launchFile(t, "torchrun", "RANK=what", "SYMMEM_RANK=7"), nil)
		require.NoError(t, err)
		assert.Equal(t, 7, got.Rank)
	})
	t.Run("another world size drops the launcher's places", func(t *testing.T) {
		got, err := DetectLaunch(launchFile(t, "torchrun", "SYMMEM_RANK=1", "SYMMEM_WORLD_SIZE=4", "SYMMEM_RENDEZVOUS_ADDR=a:1"), nil)
		require.NoError(t, err)
		assert.Equal(t, Launch{1, 4, -1, 0, -1, "a:1", 0, "run7", 0, "explicit+torchrun"}, got)
	})
	t.Run("launcher by option", func(t *testing.T) {
		got, err := DetectLaunch(launchFile(t, "torchrun-in-srun", "SYMMEM_LAUNCHER=torchrun"), &LaunchOptions{Launcher: "Slurm"})
		require.NoError(t, err)
		assert.Equal(t, 1, got.Rank)
		assert.Equal(t, 2, got.WorldSize)
		assert.Equal(t, "slurm", got.Source)
	})
	t.Run("bad options", func(t *testing.T) {
		for _, change := range []func(*Launch){
			func(l *Launch) { l.Rank = -2 },
			func(l *Launch) { l.WorldSize = -1 },
			func(l *Launch) { l.WorldSize = 1 << 30 },
			func(l *Launch) { l.LocalRank = -2 },
			func(l *Launch) { l.LocalWorldSize = -1 },
			func(l *Launch) { l.NodeRank = -2 },
			func(l *Launch) { l.Restart = -1 },
			func(l *Launch) { l.Addr = "a:0" },
			func(l *Launch) { l.Addr = ":80" },
		} {
			_, err := DetectLaunch(launchFile(t, "torchrun"), one(change))
			assert.ErrorIs(t, err, ErrInvalid)
		}
	})
}

// TestLaunchAddressIsTheSameOnAllRanks holds that each rank comes to the address of all others by itself.
func TestLaunchAddressIsTheSameOnAllRanks(t *testing.T) {
	for _, test := range []struct {
		name string
		rank []string // what rank 0 has otherwise
	}{
		{"srun", []string{"SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_NODEID=0", "PMIX_RANK=0"}},
		{"openmpi4-one-host", []string{"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=0"}},
		{"torchrun", []string{"RANK=0", "LOCAL_RANK=0", "GROUP_RANK=0"}},
	} {
		one, err := DetectLaunch(launchFile(t, test.name), nil)
		require.NoError(t, err)
		zero, err := DetectLaunch(launchFile(t, test.name, test.rank...), nil)
		require.NoError(t, err)
		assert.Equal(t, 0, zero.Rank)
		assert.NotEqual(t, 0, one.Rank)
		assert.Equal(t, zero.Addr, one.Addr)
		assert.Equal(t, zero.Job, one.Job)
	}
}

// TestTorchrunStartsAgain: where a process of one node has failed only that node's agent counts a restart, and the ranks of both nodes meet again.
func TestTorchrunStartsAgain(t *testing.T) {
	l := listenLoopback(t)
	groups, failures := joinAll(t, 2, func(rank int) *Options {
		node := strconv.Itoa(rank)
		found, err := DetectLaunch(launchFile(t, "torchrun", "RANK="+node, "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "GROUP_RANK="+node, "TORCHELASTIC_RESTART_COUNT="+node), nil)
		require.NoError(t, err)
		o := &Options{Rank: found.Rank, WorldSize: found.WorldSize, Addr: l.Addr().String(), Job: found.Job, Restart: found.Restart, Timeout: 20 * time.Second}
		if rank == 0 {
			o.Listener = l
		}
		return o
	})
	requireNone(t, failures)
	leaveAll(t, groups)
}

func TestLaunchPortIsNeverMasterPort(t *testing.T) {
	seen := map[string]bool{}
	for port := 1; port <= 65535; port++ {
		e := newLaunchEnv(launchVarsOf("MASTER_ADDR=h", "MASTER_PORT="+strconv.Itoa(port)))
		addr, _, err := e.address(Launch{WorldSize: 2}, launchReading{}, false)
		require.NoError(t, err)
		if addr == "h:"+strconv.Itoa(port) {
			t.Fatalf("MASTER_PORT %d is taken for the own port", port)
		}
		seen[addr] = true
	}
	assert.Len(t, seen, launchPorts, "neighbouring MASTER_PORTs of two jobs give two ports")
}

func TestLaunchers(t *testing.T) {
	byName := func(reports []LaunchReport) map[string]LaunchReport {
		m := map[string]LaunchReport{}
		for _, r := range reports {
			m[r.Launcher] = r
			assert.NotEmpty(t, r.Why, r.Launcher)
		}
		return m
	}
	reports := Launchers(launchFile(t, "torchrun-in-srun", "SYMMEM_JOB=mine", "SYMMEM_TOKEN=hunter2"), nil)
	var names []string
	for _, r := range reports {
		names = append(names, r.Launcher)
		assert.NotContains(t, strings.Join(r.Found, " "), "hunter2")
	}
	assert.Equal(t, append([]string{"explicit"}, launcherNames()...), names)
	found := byName(reports)
	assert.True(t, found["torchrun"].Chosen)
	assert.Contains(t, found["torchrun"].Found, "RANK=11")
	assert.True(t, found["slurm"].Started)
	assert.False(t, found["slurm"].Chosen)
	assert.Contains(t, found["slurm"].Why, "torchrun comes first")
	assert.True(t, found["explicit"].Chosen)
	assert.Equal(t, []string{"SYMMEM_JOB=mine"}, found["explicit"].Found)
	assert.False(t, found["none"].Chosen)
	assert.Empty(t, found["openmpi"].Found)

	found = byName(Launchers(launchFile(t, "torchrun-in-srun", "SYMMEM_LAUNCHER=slurm"), nil))
	assert.True(t, found["slurm"].Chosen)
	assert.Contains(t, found["slurm"].Why, "SYMMEM_LAUNCHER")
	assert.False(t, found["torchrun"].Chosen)
	assert.Contains(t, found["torchrun"].Why, "SYMMEM_LAUNCHER asks for slurm")

	// What a file or a flag asks for is an option here.
	found = byName(Launchers(launchFile(t, "torchrun-in-srun"), &LaunchOptions{Launcher: "Slurm"}))
	assert.True(t, found["slurm"].Chosen)
	assert.Contains(t, found["slurm"].Why, "it was asked for")
	assert.Contains(t, found["torchrun"].Why, "but slurm was asked for")
	assert.False(t, found["explicit"].Chosen)
	place := NoLaunch()
	place.Rank, place.WorldSize = 1, 2
	found = byName(Launchers(launchFile(t, "desktop"), &LaunchOptions{Explicit: &place}))
	assert.True(t, found["explicit"].Chosen)
	assert.True(t, found["explicit"].Started)

	found = byName(Launchers(launchFile(t, "srun-pmi2"), nil))
	assert.True(t, found["slurm"].Chosen)
	assert.False(t, found["hydra"].Started)
	assert.Contains(t, found["hydra"].Why, "srun has set them")

	found = byName(Launchers(launchFile(t, "desktop"), nil))
	assert.True(t, found["none"].Chosen)
	found = byName(Launchers(launchFile(t, "sbatch-shell"), nil))
	assert.False(t, found["none"].Chosen)
	assert.Contains(t, found["slurm"].Why, "srun ./program")
	found = byName(Launchers(launchFile(t, "two-mpis"), nil))
	assert.False(t, found["openmpi"].Chosen)
	assert.Contains(t, found["none"].Why, "hydra (rank 1 of 4)")
	found = byName(Launchers(launchVarsOf("SYMMEM_RANK=x", "SYMMEM_LAUNCHER=lsf"), nil))
	assert.Contains(t, found["explicit"].Why, "SYMMEM_RANK")
	assert.Contains(t, found["none"].Why, "lsf")
	found = byName(Launchers(launchVarsOf("SYMMEM_RANK=0", "SYMMEM_WORLD_SIZE=1"), nil))
	assert.True(t, found["explicit"].Started)
}

func TestDetectLaunchReadsTheProcessEnvironment(t *testing.T) {
	t.Setenv("SYMMEM_LAUNCHER", "none")
	t.Setenv("SYMMEM_RANK", "0")
	t.Setenv("SYMMEM_WORLD_SIZE", "1")
	t.Setenv("SYMMEM_JOB", "from the process")
	got, err := DetectLaunch(nil, nil)
	require.NoError(t, err)
	assert.Equal(t, "from the process", got.Job)
	assert.Contains(t, Launchers(nil, nil)[0].Found, "SYMMEM_JOB=from the process")
}

func TestParseNodeList(t *testing.T) {
	for _, test := range []struct {
		list string
		want string
	}{
		{"host2", "host2"},
		{"node[001-004,007],host2", "node001 node002 node003 node004 node007 host2"},
		{"node[8-11]", "node8 node9 node10 node11"},
		{"node[08-11]", "node08 node09 node10 node11"},
		{"a,b.example.org,c_d", "a b.example.org c_d"},
		{"rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"},
		{"n[1,3]-ib", "n1-ib n3-ib"},
		{" gpu001 ", "gpu001"},
		{"10.0.0.[1-2]", "10.0.0.1 10.0.0.2"},
	} {
		got, err := parseNodeList(test.list, 100)
		require.NoError(t, err, test.list)
		assert.Equal(t, test.want, strings.Join(got, " "), test.list)
		first, err := parseNodeList(test.list, 1)
		require.NoError(t, err, test.list)
		assert.Equal(t, got[:1], first, test.list)
	}
	huge, err := parseNodeList("n[000000000000000-999999999999999]x[1-9],b", 3)
	require.Error(t, err, "%v", huge)
	huge, err = parseNodeList("n[000000000000-199999999999]x[1-9],b", 3)
	require.NoError(t, err, "a huge list takes no longer than its first hosts")
	assert.Equal(t, []string{"n000000000000x1", "n000000000000x2", "n000000000000x3"}, huge)

	for _, bad := range []string{"", ",", "(null)", "n[1", "n]1", "n[]", "n[2-1]", "n[1-]", "n[-1]", "n[a-b]", "n[1-2-3]", "n[+1]",
		"n[[1]]", "n 1", "n[1]]", "hé", strings.Repeat("x", 254), strings.Repeat("x", 300) + "[1-2]", "n[99999999999999999999]"} {
		hosts, err := parseNodeList(bad, 100)
		assert.ErrorIs(t, err, ErrInvalid, "%q gives %q", bad, hosts)
	}
}

func TestSlurmTasksOnNode(t *testing.T) {
	for _, test := range []struct {
		counts           string
		node, size, want int
	}{
		{"4(x2),2", 0, 10, 4}, {"4(x2),2", 1, 10, 4}, {"4(x2),2", 2, 10, 2}, {"4(x2),2", 3, 10, 0},
		{"1", 0, 1, 1}, {"4(x2),2", 0, 11, 0}, {"4(x2),2", 0, 9, 0},
		{"4(x", 0, 4, 0}, {"x", 0, 4, 0}, {"4(x0)", 0, 4, 0}, {"-4", 0, 4, 0}, {"4(x999999999999)", 0, 4, 0}, {"", 0, 4, 0},
	} {
		assert.Equal(t, test.want, slurmTasksOnNode(test.counts, test.node, test.size), "%+v", test)
	}
}

func FuzzNodeList(f *testing.F) {
	for _, seed := range []string{"node[001-004,007],host2", "a[1-2]b[3-4]", "n[", "]", "n[1-99999999999999]", ",,", "[0][0][0]"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := parseNodeList(list, 20)
		if err != nil {
			assert.ErrorIs(t, err, ErrInvalid)
			return
		}
		require.NotEmpty(t, hosts)
		require.LessOrEqual(t, len(hosts), 20)
		for _, host := range hosts {
			assert.True(t, isNodeName(host), "%q", host)
		}
		// Plain names come back as they are.
		again, err := parseNodeList(strings.Join(hosts, ","), 20)
		require.NoError(t, err)
		assert.Equal(t, hosts, again)
	})
}

func FuzzDetectLaunch(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "env", "*.env"))
	require.NoError(f, err)
	require.NotEmpty(f, files)
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(string(data))
	}
	f.Fuzz(func(t *testing.T, env string) {
		getenv := launchVarsOf(strings.Split(env, "\n")...)
		require.Len(t, Launchers(getenv, nil), len(launchers)+2)
		l, err := DetectLaunch(getenv, nil)
		if err != nil {
			assert.ErrorIs(t, err, ErrInvalid)
			return
		}
		assert.True(t, 0 <= l.Rank && l.Rank < l.WorldSize, "%+v", l)
		assert.True(t, -1 <= l.LocalRank && l.LocalRank < l.WorldSize, "%+v", l)
		assert.True(t, 0 <= l.LocalWorldSize && l.LocalWorldSize <= l.WorldSize, "%+v", l)
		assert.True(t, l.LocalWorldSize == 0 || l.LocalRank < l.LocalWorldSize, "%+v", l)
		assert.True(t, l.WorldSize == 1 || l.Addr != "", "%+v", l)
	})
}

// TestKubernetesOnTheHostsNetwork: the pods of a Job that have the names of their hosts are of one job, whatever those names end in.
func TestKubernetesOnTheHostsNetwork(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts")
	was := podHosts
	podHosts = hosts
	t.Cleanup(func() { podHosts = was })
	job := func(file, hostname, index string) string {
		t.Helper()
		require.NoError(t, os.WriteFile(hosts, []byte(file), 0o600))
		vars := map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": index, "HOSTNAME": hostname,
			"SYMMEM_WORLD_SIZE": "2", "SYMMEM_RENDEZVOUS_ADDR": "gpu-1:29400"}
		l, err := DetectLaunch(func(name string) string { return vars[name] }, nil)
		require.NoError(t, err)
		return l.Job
	}
	const shared, own = "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n", "# Kubernetes-managed hosts file.\n127.0.0.1 localhost\n"
	assert.Empty(t, job(shared, "gpu-1", "0"))
	assert.Empty(t, job(shared, "gpu-1", "1"))
	for _, file := range []string{own, "", "127.0.0.1 localhost\n"} {
		assert.Equal(t, "train", job(file, "train-0", "0"))
		assert.Equal(t, "train", job(file, "train-1", "1"))
	}
	require.NoError(t, os.Remove(hosts))
	assert.False(t, onHostNetwork(), "there is no such file")
}
