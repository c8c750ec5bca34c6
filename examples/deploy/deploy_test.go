// Package deploy holds the examples of this folder to what they are for.
package deploy

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// missing skips the test, because what name stands for is missing; why says what that is. It fails the test if SYMMEM_TEST_REQUIRE lists the name.
func missing(t *testing.T, name, why string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ","), name) {
		t.Fatalf("SYMMEM_TEST_REQUIRE names %s, which is missing: %s", name, why)
	}
	t.Skip(name + " is missing: " + why)
}

// manifest reads kubernetes.yaml; a field that Kubernetes does not have is an error.
func manifest(t *testing.T) (corev1.Service, batchv1.Job) {
	t.Helper()
	text, err := os.ReadFile("kubernetes.yaml")
	require.NoError(t, err)
	parts := strings.Split(string(text), "\n---\n")
	require.Len(t, parts, 2)
	var service corev1.Service
	var job batchv1.Job
	require.NoError(t, yaml.UnmarshalStrict([]byte(parts[0]), &service))
	require.NoError(t, yaml.UnmarshalStrict([]byte(parts[1]), &job))
	return service, job
}

// variables are those of the container that have their value in the manifest.
func variables(job batchv1.Job) map[string]string {
	vars := map[string]string{}
	for _, v := range job.Spec.Template.Spec.Containers[0].Env {
		vars[v.Name] = v.Value
	}
	return vars
}

// TestManifest: the Job's numbers are one number, and every rank finds rank 0 by the service.
func TestManifest(t *testing.T) {
	service, job := manifest(t)
	assert.Equal(t, []string{"v1", "Service", "batch/v1", "Job"}, []string{service.APIVersion, service.Kind, job.APIVersion, job.Kind})
	spec, pod := job.Spec, job.Spec.Template.Spec
	assert.Equal(t, batchv1.IndexedCompletion, *spec.CompletionMode)
	assert.Equal(t, *spec.Completions, *spec.Parallelism, "all ranks run at once")
	assert.Zero(t, *spec.BackoffLimit)
	require.Len(t, pod.Containers, 1)
	assert.Equal(t, corev1.RestartPolicyNever, pod.RestartPolicy)
	vars := variables(job)
	assert.Equal(t, fmt.Sprint(*spec.Completions), vars["SYMMEM_WORLD_SIZE"])

	assert.Equal(t, corev1.ClusterIPNone, service.Spec.ClusterIP)
	assert.True(t, service.Spec.PublishNotReadyAddresses)
	assert.Equal(t, map[string]string{"batch.kubernetes.io/job-name": job.Name}, service.Spec.Selector, "the label that the Job gives its pods")
	assert.Equal(t, service.Name, pod.Subdomain)
	require.Len(t, service.Spec.Ports, 1)
	assert.Equal(t, fmt.Sprintf("%s-0.%s:%d", job.Name, service.Name, service.Spec.Ports[0].Port), vars["SYMMEM_RENDEZVOUS_ADDR"])

	token := slices.IndexFunc(pod.Containers[0].Env, func(v corev1.EnvVar) bool { return v.Name == "SYMMEM_TOKEN" })
	require.GreaterOrEqual(t, token, 0)
	require.NotNil(t, pod.Containers[0].Env[token].ValueFrom.SecretKeyRef, "a token is not in a manifest")
	assert.Empty(t, pod.Containers[0].Env[token].Value)
	assert.True(t, *pod.SecurityContext.RunAsNonRoot)
	assert.False(t, *pod.EnableServiceLinks, "a service called symmem would make SYMMEM_ variables that nothing reads")
}

// TestImage: the image has what the program needs and no more, and two processes in its root, with the manifest's variables, are the ranks of the
// Job. Without nixl they use the memory of this host.
func TestImage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dir := t.TempDir()
	command := func(name string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s %v: %s", name, args, out)
	}
	symmem, file := filepath.Join(dir, "symmem"), filepath.Join(dir, "symmem.tar")
	build := exec.CommandContext(ctx, "go", "build", "-o", symmem, "./cmd/symmem")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	data := filepath.Join(dir, "data")
	require.NoError(t, os.Mkdir(data, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(data, "hello"), []byte("hello"), 0o600))
	args := []string{"run", "./image", "-program", symmem, "-output", file, "-tree", data + "=/data"}
	nixl := os.Getenv("SYMMEM_NIXL_LIBRARY")
	if nixl != "" {
		args = append(args, "-tree", nixl+"=/opt/nixl")
	}
	command("go", args...)
	if nixl == "" { // which is large
		again := filepath.Join(dir, "again.tar")
		args[slices.Index(args, file)] = again
		command("go", args...)
		one, err := os.ReadFile(file)
		require.NoError(t, err)
		two, err := os.ReadFile(again)
		require.NoError(t, err)
		require.True(t, bytes.Equal(one, two), "the same files give the same image")
	}

	image, err := tarball.ImageFromPath(file, nil)
	require.NoError(t, err)
	config, err := image.ConfigFile()
	require.NoError(t, err)
	assert.Equal(t, []string{"/symmem"}, config.Config.Entrypoint)
	assert.Equal(t, "65532:65532", config.Config.User)
	root := filepath.Join(dir, "root")
	names := extract(t, mutate.Extract(image), root)
	assert.Contains(t, names, "data/hello")
	if nixl == "" {
		for _, name := range names {
			assert.True(t, name == "symmem" || name == "data/hello" || strings.Contains(name, ".so"), "%s is in the image", name)
		}
		assert.Less(t, len(names), 10)
	}
	if os.Geteuid() != 0 {
		missing(t, "deploy", "only root can run what is in the image")
	}

	_, job := manifest(t)
	vars := variables(job)
	vars["SYMMEM_RENDEZVOUS_ADDR"], vars["SYMMEM_TOKEN"] = fmt.Sprint("127.0.0.1:", freePorts(t, 1)[0]), "0123456789abcdef"
	vars["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
	if nixl == "" {
		vars["SYMMEM_BACKEND"] = "host"
		delete(vars, "SYMMEM_NIXL_LIBRARY")
	}
	for _, folder := range []string{"proc", "sys", "dev"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, folder), 0o755))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(root, "tmp"), 0o777)) // as the manifest has it
	require.NoError(t, os.Chmod(filepath.Join(root, "tmp"), 0o777))
	require.NoError(t, os.Chmod(dir, 0o755))
	ranks, err := strconv.Atoi(vars["SYMMEM_WORLD_SIZE"])
	require.NoError(t, err)
	outs, errs := make([]string, ranks), make([]error, ranks)
	var wait sync.WaitGroup
	for rank := range ranks {
		// What a container runtime does: a root of its own with /proc, /sys and /dev, and the image's user.
		const shell = `mount -t proc proc "$0/proc" && mount -t sysfs sysfs "$0/sys" && mount --rbind /dev "$0/dev" && exec chroot --userspec=65532:65532 "$0" /symmem "$@"`
		arguments := append(slices.Clone(job.Spec.Template.Spec.Containers[0].Args), "--short", "--filter", "^(agreement|put)")
		cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "sh", "-c", shell, root}, arguments...)...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), fmt.Sprint("JOB_COMPLETION_INDEX=", rank), fmt.Sprintf("HOSTNAME=%s-%d", job.Name, rank)}
		for name, value := range vars {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 5 * time.Second
		wait.Go(func() {
			out, err := cmd.CombinedOutput()
			outs[rank], errs[rank] = string(out), err
		})
	}
	wait.Wait()
	for rank := range ranks {
		require.NoError(t, errs[rank], "rank %d: %s", rank, outs[rank])
	}
	assert.Regexp(t, `(?m)^[1-9][0-9]* passed, 0 failed`, outs[0])
	assert.Empty(t, outs[1], "only rank 0 prints")
}

// extract writes the files of an archive below root, and returns their names.
func extract(t *testing.T, archive io.ReadCloser, root string) []string {
	t.Helper()
	defer archive.Close()
	var names []string
	for r := tar.NewReader(archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		require.NoError(t, err)
		require.True(t, filepath.IsLocal(h.Name), h.Name)
		file := filepath.Join(root, h.Name)
		require.Zero(t, h.Uid)
		if h.Typeflag == tar.TypeDir {
			require.NoError(t, os.MkdirAll(file, 0o755))
			continue
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, content, 0o755))
		names = append(names, h.Name)
	}
}

// srun stands in for Slurm's: it starts two tasks on this host with the variables of a step.
const srun = `#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
step=$(cat "$STEPS"); echo $((step + 1)) >"$STEPS"
export SLURM_STEP_ID=$step SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; status=$?
wait $other || status=$?
exit $status
`

// TestSlurm: the batch script runs verify and bench as the ranks of a step each, with a token that all of them have, and ends with the first failure.
func TestSlurm(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dir := t.TempDir()
	symmem, script := filepath.Join(dir, "symmem"), ""
	build := exec.CommandContext(ctx, "go", "build", "-o", symmem, "./cmd/symmem")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "srun"), []byte(srun), 0o755))
	script, err = filepath.Abs("slurm.sh")
	require.NoError(t, err)
	run := func(id, backend string) (string, error) {
		t.Helper()
		steps := filepath.Join(dir, "steps-"+id)
		require.NoError(t, os.WriteFile(steps, []byte("0"), 0o600))
		cmd := exec.CommandContext(ctx, "bash", script, "--sizes", "1K", "--reps", "1", "--peer", "none")
		cmd.Dir = dir
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "SYMMEM=" + symmem, "SYMMEM_BACKEND=" + backend, "STEPS=" + steps,
			// What sbatch sets for the script, which is no step.
			"SLURM_JOB_ID=" + id, "SLURM_NTASKS=2", "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_JOB_NODELIST=localhost"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 5 * time.Second
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	id := strconv.Itoa(os.Getpid())
	text, err := run(id, "host")
	require.NoError(t, err, text)
	assert.Regexp(t, `(?m)^[1-9][0-9]* passed, 0 failed`, text)
	assert.Contains(t, text, "all_reduce on host, 2 ranks")
	assert.FileExists(t, filepath.Join(dir, "symmem-"+id+".json"))

	text, err = run(id+"1", "nixl,nccl")
	require.Error(t, err, text)
	assert.NotContains(t, text, "all_reduce on", "bench is not run after verify has failed")
}

// cluster starts Slurm's daemons for two nodes on this host, in namespaces that end with it, and then the program in its arguments.
const cluster = `set -eu
mount --bind hosts /etc/hosts
munged --foreground --force --socket="$PWD/munge.sock" --key-file="$PWD/munge.key" --pid-file="$PWD/munge.pid" --log-file="$PWD/munge.log" --seed-file="$PWD/munge.seed" >munged.out 2>&1 &
until [ -S munge.sock ]; do sleep 0.1; done
slurmctld -D >slurmctld.out 2>&1 &
slurmd -D -N one >slurmd-one.out 2>&1 &
slurmd -D -N two >slurmd-two.out 2>&1 &
until [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ]; do sleep 0.1; done
"$@"
`

// TestSlurmItself: what srun starts on two nodes is a job that finds the host of rank 0 by itself, and sbatch takes the script.
func TestSlurmItself(t *testing.T) {
	if os.Getuid() != 0 || exec.Command("unshare", "--mount", "--pid", "--fork", "--mount-proc", "true").Run() != nil {
		missing(t, "slurm", "Slurm's daemons need root, and namespaces")
	}
	for _, program := range []string{"munged", "slurmctld", "slurmd", "srun"} {
		if _, err := exec.LookPath(program); err != nil {
			missing(t, "slurm", err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "slurm") // a short name, for a socket
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	symmem := filepath.Join(dir, "symmem")
	build := exec.CommandContext(ctx, "go", "build", "-o", symmem, "./cmd/symmem")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	script, err := filepath.Abs("slurm.sh")
	require.NoError(t, err)
	host, err := os.Hostname()
	require.NoError(t, err)
	host, _, _ = strings.Cut(host, ".")

	cluster := func(program ...string) (string, error) {
		t.Helper()
		here, err := os.MkdirTemp(dir, "")
		require.NoError(t, err)
		require.NoError(t, os.Chmod(here, 0o755))
		ports := freePorts(t, 3)
		for name, text := range map[string]string{
			"run.sh": cluster, "hosts": "127.0.0.1 localhost one two\n", "munge.key": strings.Repeat("0123456789abcdef", 8), "gpu0": "", "gpu1": "", "gpu2": "", "gpu3": "",
			"gres.conf": "NodeName=one,two Name=gpu File=" + here + "/gpu[0-3]\n",
			"slurm.conf": fmt.Sprintf(`ClusterName=test
SlurmctldHost=%[1]s(127.0.0.1)
AuthInfo=socket=%[2]s/munge.sock
SlurmUser=root
SlurmctldPort=%[3]d
StateSaveLocation=%[2]s
SlurmdSpoolDir=%[2]s/spool-%%n
SlurmctldPidFile=%[2]s/slurmctld.pid
SlurmdPidFile=%[2]s/slurmd-%%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=one NodeHostname=%[1]s NodeAddr=127.0.0.1 Port=%[4]d CPUs=8 Gres=gpu:4
NodeName=two NodeHostname=%[1]s NodeAddr=127.0.0.1 Port=%[5]d CPUs=8 Gres=gpu:4
PartitionName=all Nodes=one,two Default=YES
`, host, here, ports[0], ports[1], ports[2]),
		} {
			require.NoError(t, os.WriteFile(filepath.Join(here, name), []byte(text), 0o400))
		}
		cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "run.sh"}, program...)...)
		cmd.Dir = here
		cmd.Env = append(os.Environ(), "SLURM_CONF="+filepath.Join(here, "slurm.conf"), "SYMMEM="+symmem, "SYMMEM_BACKEND=host")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 5 * time.Second
		text, err := cmd.CombinedOutput()
		said := string(text)
		outputs, globErr := filepath.Glob(filepath.Join(here, "*.out"))
		require.NoError(t, globErr)
		for _, name := range outputs { // of the daemons, and of the batch script
			text, readErr := os.ReadFile(name)
			require.NoError(t, readErr)
			if err != nil || strings.HasPrefix(filepath.Base(name), "slurm-") {
				said += "\n" + filepath.Base(name) + ":\n" + string(text)
			}
		}
		return said, err
	}
	text, err := cluster("srun", "--nodes", "2", "--ntasks", "3", symmem, "verify", "--short", "--filter", "^agreement/")
	require.NoError(t, err, text)
	assert.Regexp(t, `(?m)^[1-9][0-9]* passed, 0 failed`, text)

	text, err = cluster("sbatch", "--wait", "--ntasks-per-node", "1", script, "--sizes", "1K", "--reps", "1", "--peer", "none")
	require.NoError(t, err, text)
	assert.Regexp(t, `(?m)^[1-9][0-9]* passed, 0 failed`, text)
	assert.Contains(t, text, "all_reduce on host, 2 ranks")

	text, err = cluster("srun", "--nodes", "2", "--ntasks", "2", symmem, "verify", "--backend", "nccl")
	require.Error(t, err, text)
	assert.Contains(t, text, "a required backend cannot be used")
}

// freePorts are ports that nobody listens on, none of them one that systems give to who asks for any: somebody else could be given it before it is listened on.
func freePorts(t *testing.T, n int) (ports []int) {
	t.Helper()
	const first, after, most = 10240, 20480, 100
	var last error
	for range n * most {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", first+rand.IntN(after-first)))
		if err != nil {
			last = err
			continue
		}
		defer l.Close() // only now, so that they differ
		if ports = append(ports, l.Addr().(*net.TCPAddr).Port); len(ports) == n {
			return ports
		}
	}
	require.NoError(t, last)
	return nil
}
