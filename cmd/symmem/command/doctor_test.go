package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/doctor"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/machine"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/testneed"
)

func diagnosed(t *testing.T, status int, env []string, args ...string) doctor.Diagnosis {
	t.Helper()
	r := call(t, "", env, append([]string{"doctor", "--json"}, args...)...)
	require.Equal(t, status, r.status, r.err)
	d := json.NewDecoder(strings.NewReader(r.out))
	d.DisallowUnknownFields()
	var found doctor.Diagnosis
	require.NoError(t, d.Decode(&found))
	return found
}

// findingOf returns the finding of a backend, nil if there is none.
func findingOf(d doctor.Diagnosis, name string) *probe.Finding {
	i := slices.IndexFunc(d.Backends, func(b probe.Finding) bool { return b.Name == name })
	if i < 0 {
		return nil
	}
	return &d.Backends[i]
}

// healthyHere returns doctor's status: the host backend is what works without devices.
func healthyHere() int {
	if runtime.GOOS == "linux" {
		return exit.OK
	}
	return exit.Failure
}

func TestDoctorJSON(t *testing.T) {
	env := environ("SYMMEM_TIMEOUT=75s", "SYMMEM_TOKEN=hunter2", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1")
	d := diagnosed(t, healthyHere(), env, "--channels", "9")
	require.Len(t, d.Backends, len(backend.Names()), "every backend that is registered")
	host := findingOf(d, "host")
	require.NotNil(t, host)
	if runtime.GOOS == "linux" {
		assert.True(t, host.Available)
		assert.True(t, host.Capabilities.PeerPointers)
		assert.Empty(t, host.Reason)
		assert.NotEmpty(t, d.Machine.Kernel)
		assert.Positive(t, d.Machine.Memory)
		var names []string
		for _, l := range d.Limits {
			names = append(names, l.Name)
			assert.NotEmpty(t, l.Value, l.Name)
		}
		assert.Equal(t, []string{"memlock", "descriptors", "/dev/shm"}, names)
	}
	absent := findingOf(d, "absent")
	require.NotNil(t, absent)
	assert.False(t, absent.Available)
	assert.Contains(t, absent.Reason, "libabsent.so")

	assert.Equal(t, runtime.Version(), d.Version.Go)
	assert.Equal(t, runtime.NumCPU(), d.Machine.Cores)

	chosen := 0
	for _, l := range d.Launchers {
		if l.Chosen {
			chosen++
			assert.Equal(t, "openmpi", l.Name)
			assert.Contains(t, l.Variables, "OMPI_COMM_WORLD_SIZE=1")
		}
	}
	assert.Equal(t, 1, chosen)

	require.Len(t, d.Config.Settings, len(config.Keys()))
	settings := map[string]doctor.Setting{}
	for _, s := range d.Config.Settings {
		settings[s.Key] = s
	}
	assert.Equal(t, doctor.Setting{Key: "timeout", Value: "1m15s", Source: "variable SYMMEM_TIMEOUT"}, settings["timeout"])
	assert.Equal(t, doctor.Setting{Key: "channels", Value: "9", Source: "flag --channels"}, settings["channels"])
	assert.Equal(t, doctor.Setting{Key: "token", Value: "[redacted]", Source: "variable SYMMEM_TOKEN"}, settings["token"])
	assert.Equal(t, doctor.Setting{Key: "multicast", Value: "auto", Source: "default"}, settings["multicast"])
}

// TestDoctorJSONNames holds the names that programs read.
func TestDoctorJSONNames(t *testing.T) {
	r := call(t, "", environ(), "doctor", "--json")
	require.Equal(t, healthyHere(), r.status, r.err)
	var d map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.out), &d))
	backends, ok := d["backends"].([]any)
	require.True(t, ok)
	for _, b := range backends {
		fields, ok := b.(map[string]any)
		require.True(t, ok)
		for _, name := range []string{"name", "available", "reason", "fix", "capabilities", "libraries"} {
			assert.Contains(t, fields, name)
		}
		capabilities, ok := fields["capabilities"].(map[string]any)
		require.True(t, ok)
		assert.Contains(t, capabilities, "peer_pointers")
	}
}

func TestDoctorForPeople(t *testing.T) {
	brief := call(t, "", environ("SYMMEM_TOKEN=hunter2"), "doctor")
	assert.Equal(t, healthyHere(), brief.status, brief.err)
	whole := call(t, "", environ("SYMMEM_TOKEN=hunter2"), "doctor", "--verbose")
	assert.Equal(t, healthyHere(), whole.status, whole.err)
	for _, r := range []result{brief, whole} {
		for _, part := range []string{"host", "✗ absent", "libabsent.so", "token", "[redacted]", runtime.Version(), ", " + machine.Read().CoreCount() + ", "} {
			assert.Contains(t, r.out, part)
		}
		assert.NotContains(t, r.out, "hunter2")
		assert.NotContains(t, r.out, "\x1b", "colours are for terminals")
		lines := strings.Split(strings.TrimSpace(r.out), "\n")
		assert.Regexp(t, `^[✓✗] `, lines[len(lines)-1], "the last line is the verdict")
	}
	for _, detail := range []string{"torchrun", "kernel-timeout", "/lib/libgone.so", "plugins: three"} {
		assert.NotContains(t, brief.out, detail)
		assert.Contains(t, whole.out, detail)
	}
	assert.Contains(t, brief.out, "symmem doctor --verbose")
}

// TestDoctorVerdict: the exit status and the last line say whether the backends that were asked for can be used.
func TestDoctorVerdict(t *testing.T) {
	if runtime.GOOS != "linux" {
		testneed.Missing(t, "host", "without the host backend no backend can be used here")
	}
	for name, tt := range map[string]struct {
		env     []string
		args    []string
		ok      bool
		backend string
		says    []string
	}{
		"any":                    {nil, nil, true, "host", []string{"backend host can be used", "auto"}},
		"by a flag":              {nil, []string{"--backend", "host"}, true, "host", []string{"backend host can be used"}},
		"not there":              {nil, []string{"--backend", "absent"}, false, "", []string{"backend absent cannot be used", "libabsent.so"}},
		"not there, by variable": {[]string{"SYMMEM_BACKEND=absent"}, nil, false, "", []string{"backend absent cannot be used"}},
		"a list":                 {nil, []string{"--backend", "absent,host"}, true, "host", []string{"backend host can be used", "absent,host"}},
		"a list of none":         {nil, []string{"--backend", "absent,dies"}, false, "", []string{"none of the backends absent, dies"}},
		"a list that goes on":    {nil, []string{"--backend", "absent,auto"}, true, "host", []string{"backend host can be used"}},
		"unknown":                {nil, []string{"--backend", "hots"}, false, "", []string{"there is no backend hots (flag --backend)", "did you mean host?"}},
		"an unknown launcher":    {[]string{"SYMMEM_LAUNCHER=tochrun"}, nil, false, "", []string{"there is no launcher tochrun (variable SYMMEM_LAUNCHER)", "slurm", "did you mean torchrun?"}},
		"no launcher at all":     {nil, []string{"--launcher", "explicit"}, false, "", []string{"there is no launcher explicit (flag --launcher)"}},
		"a launcher":             {nil, []string{"--launcher", "Slurm"}, true, "host", []string{"backend host can be used"}},
		"a bad setting":          {[]string{"SYMMEM_TIMEOUT=soon"}, nil, false, "", []string{"configuration is not valid", "SYMMEM_TIMEOUT"}},
		"a crash":                {[]string{brokenVar + "=1"}, []string{"--backend", "crashes"}, false, "", []string{"backend crashes cannot be used", "last words"}},
	} {
		t.Run(name, func(t *testing.T) {
			status := map[bool]int{true: exit.OK, false: exit.Failure}[tt.ok]
			r := call(t, "", environ(tt.env...), append([]string{"doctor"}, tt.args...)...)
			assert.Equal(t, status, r.status, r.err)
			lines := strings.Split(strings.TrimSpace(r.out), "\n")
			last := lines[len(lines)-1]
			assert.True(t, strings.HasPrefix(last, terminal.Mark(tt.ok)+" "), last)
			for _, part := range tt.says {
				assert.Contains(t, last, part)
			}
			d := diagnosed(t, status, environ(tt.env...), tt.args...)
			assert.Equal(t, doctor.Verdict{OK: tt.ok, Backend: tt.backend, Text: strings.TrimPrefix(last, terminal.Mark(tt.ok)+" ")}, d.Verdict)
		})
	}
}

// TestDoctorProbesWithTheSettings: what decides whether a backend can be used reaches the process that probes it.
func TestDoctorProbesWithTheSettings(t *testing.T) {
	d := diagnosed(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "picky", "--device", "7")
	assert.Contains(t, findingOf(d, "picky").Reason, "device 7 is not there")
	d = diagnosed(t, exit.OK, environ(brokenVar+"=1"), "--backend", "picky", "--device", "3")
	assert.Equal(t, "picky", d.Verdict.Backend)
	d = diagnosed(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "picky", "--unprotected-network", "refuse")
	assert.Contains(t, findingOf(d, "picky").Reason, "picky opens a port to anybody, and unprotected-network is refuse")
}

// TestDoctorProbesWithTheSameSettings: what is not valid without the flags, or is in a file that they do not name, leaves no probe without settings.
func TestDoctorProbesWithTheSameSettings(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("good.yaml", []byte("device: 7\n"), 0o600))
	for _, tt := range []struct {
		file string
		flag []string
	}{
		{"bakend: host\n", []string{"--config", "good.yaml"}},
		{"device: 7\nchannels: 0\n", []string{"--channels", "9"}},
	} {
		require.NoError(t, os.WriteFile("symmem.yaml", []byte(tt.file), 0o600))
		d := diagnosed(t, exit.Failure, environ(brokenVar+"=1"), append(tt.flag, "--backend", "picky")...)
		assert.Empty(t, d.Config.Error)
		assert.Contains(t, findingOf(d, "picky").Reason, "device 7 is not there")
	}
}

// TestDoctorLaunchersWithTheSettings: a launcher that a file or a flag asks for is the one that is chosen, as it is when ranks are started.
func TestDoctorLaunchersWithTheSettings(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("symmem.yaml", []byte("launcher: none\n"), 0o600))
	env := environ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1")
	for _, tt := range []struct {
		args   []string
		chosen string
	}{{nil, "none"}, {[]string{"--launcher", "OpenMPI"}, "openmpi"}} {
		var chosen []string
		for _, l := range diagnosed(t, exit.OK, env, tt.args...).Launchers {
			if l.Chosen {
				chosen = append(chosen, l.Name)
			}
		}
		assert.Equal(t, []string{tt.chosen}, chosen, tt.args)
	}
}

// TestDoctorKnowsBackendsOptions: a backend's own option is a flag, is shown with its source, reaches the probe, and is judged.
func TestDoctorKnowsBackendsOptions(t *testing.T) {
	d := diagnosed(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "picky", "--device", "4")
	assert.Contains(t, d.Config.Settings, doctor.Setting{Key: "picky-last-device", Value: "3", Source: "default"})
	d = diagnosed(t, exit.OK, environ(brokenVar+"=1"), "--backend", "picky", "--device", "4", "--picky-last-device", "5")
	assert.Equal(t, "picky", d.Verdict.Backend)
	assert.Contains(t, d.Config.Settings, doctor.Setting{Key: "picky-last-device", Value: "5", Source: "flag --picky-last-device"})
	d = diagnosed(t, exit.OK, environ(brokenVar+"=1", "SYMMEM_PICKY_LAST_DEVICE=4"), "--backend", "picky", "--device", "4")
	assert.Equal(t, "picky", d.Verdict.Backend)

	// The file's reaches the probe too.
	file := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(file, []byte("picky-last-device: 4\n"), 0o600))
	r := call(t, "", environ(brokenVar+"=1"), "doctor", "--backend", "picky", "--device", "4", "--config", file)
	assert.Equal(t, exit.OK, r.status, r.out)
	assert.Regexp(t, `picky-last-device +4 +file `, r.out)
	t.Setenv(brokenVar, "1") // the probe is in this process
	r = call(t, "", environ(brokenVar+"=1", "SYMMEM_CONFIG="+file, "SYMMEM_DEVICE=4"), "probe", "picky")
	assert.Contains(t, r.out, `"available":true`)

	d = diagnosed(t, exit.Failure, environ("SYMMEM_PICKY_LAST_DEVICE=9", "SYMMEM_PICKY_FIRST_DEVICE=0", "SYMMEM_TOY_SIZE=1"))
	for _, part := range []string{`picky-last-device is "9"; allowed: 3, 4, 5`, "SYMMEM_PICKY_FIRST_DEVICE; allowed", "SYMMEM_PICKY_LAST_DEVICE is the nearest",
		"there is no backend toy in this program"} {
		assert.Contains(t, d.Config.Error, part)
	}
	r = call(t, "", environ(), "doctor", "--help")
	assert.Regexp(t, `--picky-last-device string +backend picky: last device that there is`, r.out)
}

func TestDoctorOfABadConfiguration(t *testing.T) {
	d := diagnosed(t, exit.Failure, environ("SYMMEM_TIMEOUT=soon", "SYMMEM_RANKS=3"))
	assert.Contains(t, d.Config.Error, "SYMMEM_TIMEOUT")
	assert.Contains(t, d.Config.Error, "SYMMEM_RANKS")
	assert.Empty(t, d.Config.Settings)
	assert.NotEmpty(t, d.Backends, "the rest is shown all the same")

	r := call(t, "", environ("SYMMEM_TIMEOUT=soon"), "doctor")
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.out, "not valid")
}

// TestDoctorSurvivesACrash has a library that ends the process when it is loaded.
func TestDoctorSurvivesACrash(t *testing.T) {
	d := diagnosed(t, healthyHere(), environ(brokenVar+"=1"))
	b := findingOf(d, "crashes")
	require.NotNil(t, b)
	assert.False(t, b.Available)
	assert.Contains(t, b.Reason, "exit status 9")
	assert.Contains(t, b.Reason, "last words")
	assert.NotEmpty(t, b.Fix)

	b = findingOf(d, "exits")
	require.NotNil(t, b)
	assert.False(t, b.Available, "it can be probed, but not started")
	assert.Contains(t, b.Reason, "exit status 255")
	assert.Contains(t, b.Reason, "aborting due to error")
}

// TestDoctorLibraries: found and right, found but not usable and why, and not found with what was tried, each once.
func TestDoctorLibraries(t *testing.T) {
	d := diagnosed(t, healthyHere(), environ())
	for _, name := range []string{"host", "absent"} {
		assert.Empty(t, findingOf(d, name).Libraries, name)
	}
	shelf := findingOf(d, "shelved").Libraries
	require.Len(t, shelf, 3)
	assert.Equal(t, backend.Library{Name: "Good", State: "usable", Path: "/lib/libgood.so.1", Version: "1.2",
		Details: []backend.Detail{{Name: "plugins", Value: "three"}}}, shelf[0])
	assert.Equal(t, "unusable", shelf[1].State)
	assert.Equal(t, []string{"/lib/libgone.so (no such file)", "libgone.so (not found)"}, shelf[2].Tried)

	r := call(t, "", environ(), "doctor", "--verbose")
	require.Equal(t, healthyHere(), r.status, r.err)
	lines := strings.Split(r.out, "\n")
	at := slices.Index(lines, "Native libraries")
	require.Positive(t, at, r.out)
	var told []string
	for _, l := range lines[at+1:] {
		if l == "" {
			break
		}
		told = append(told, terminal.OneLine(l))
	}
	text := strings.Join(told, "\n")
	for _, want := range []string{
		"✓ Good 1.2 /lib/libgood.so.1\nplugins: three",
		"✗ Old 0.1 /lib/libold.so.1: it is for CUDA 11\nto do: install a newer one",
		"✗ Gone not found\nto do: install gone\ntried /lib/libgone.so (no such file)\ntried libgone.so (not found)",
	} {
		assert.Equal(t, 1, strings.Count(text, want), "%s in\n%s", want, text)
	}
}

// TestDoctorSurvivesALibrary has one that ends the process when it is looked at.
func TestDoctorSurvivesALibrary(t *testing.T) {
	d := diagnosed(t, healthyHere(), environ(brokenVar+"=1"))
	found := findingOf(d, "shelfcrash").Libraries
	require.Len(t, found, 1)
	assert.Equal(t, "unusable", found[0].State)
	assert.Contains(t, found[0].Name, "shelfcrash")
	assert.Contains(t, found[0].Reason, "exit status 9")
	assert.Contains(t, found[0].Reason, "dropped from the shelf")
	assert.NotEmpty(t, found[0].Fix)
	assert.Len(t, findingOf(d, "shelved").Libraries, 3)
}
