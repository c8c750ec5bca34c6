package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

func diagnosed(t *testing.T, status int, env []string, args ...string) diagnosis {
	t.Helper()
	r := call(t, "", env, append([]string{"doctor", "--json"}, args...)...)
	require.Equal(t, status, r.status, r.err)
	d := json.NewDecoder(strings.NewReader(r.out))
	d.DisallowUnknownFields()
	var found diagnosis
	require.NoError(t, d.Decode(&found))
	return found
}

func (d diagnosis) backend(name string) *backendFinding {
	i := slices.IndexFunc(d.Backends, func(b backendFinding) bool { return b.Name == name })
	if i < 0 {
		return nil
	}
	return &d.Backends[i]
}

// healthyHere is doctor's status: the host backend is what works without devices.
func healthyHere() int {
	if runtime.GOOS == "linux" {
		return exitOK
	}
	return exitFailure
}

func TestDoctorJSON(t *testing.T) {
	env := environ("SYMMEM_TIMEOUT=75s", "SYMMEM_TOKEN=hunter2", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1")
	d := diagnosed(t, healthyHere(), env, "--channels", "9")
	require.Len(t, d.Backends, len(backend.Names()), "every backend that is registered")
	host := d.backend("host")
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
	absent := d.backend("absent")
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
	settings := map[string]settingFinding{}
	for _, s := range d.Config.Settings {
		settings[s.Key] = s
	}
	assert.Equal(t, settingFinding{"timeout", "1m15s", "variable SYMMEM_TIMEOUT"}, settings["timeout"])
	assert.Equal(t, settingFinding{"channels", "9", "flag --channels"}, settings["channels"])
	assert.Equal(t, settingFinding{"token", "[redacted]", "variable SYMMEM_TOKEN"}, settings["token"])
	assert.Equal(t, settingFinding{"multicast", "auto", "default"}, settings["multicast"])
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
		for _, part := range []string{"host", "✗ absent", "libabsent.so", "token", "[redacted]", runtime.Version()} {
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
		const missing = "without the host backend no backend can be used here"
		require.NotContains(t, strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ","), "host", missing)
		t.Skip(missing)
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
		"a bad setting":          {[]string{"SYMMEM_TIMEOUT=soon"}, nil, false, "", []string{"configuration is not valid", "SYMMEM_TIMEOUT"}},
		"a crash":                {[]string{brokenVar + "=1"}, []string{"--backend", "crashes"}, false, "", []string{"backend crashes cannot be used", "last words"}},
	} {
		t.Run(name, func(t *testing.T) {
			status := map[bool]int{true: exitOK, false: exitFailure}[tt.ok]
			r := call(t, "", environ(tt.env...), append([]string{"doctor"}, tt.args...)...)
			assert.Equal(t, status, r.status, r.err)
			lines := strings.Split(strings.TrimSpace(r.out), "\n")
			last := lines[len(lines)-1]
			assert.True(t, strings.HasPrefix(last, mark(tt.ok)+" "), last)
			for _, part := range tt.says {
				assert.Contains(t, last, part)
			}
			d := diagnosed(t, status, environ(tt.env...), tt.args...)
			assert.Equal(t, verdict{OK: tt.ok, Backend: tt.backend, Text: strings.TrimPrefix(last, mark(tt.ok)+" ")}, d.Verdict)
		})
	}
}

// TestDoctorJudgesLikeChoose holds doctor's verdict to what a program takes, the exception for the CPU's memory included.
func TestDoctorJudgesLikeChoose(t *testing.T) {
	at := func(onHost bool) backend.Capabilities { return backend.Capabilities{OnHost: onHost} }
	for name, tt := range map[string]struct {
		wanted []string
		has    []backendFinding
		want   string
	}{
		"a GPU before the CPU":         {[]string{"auto"}, []backendFinding{{Name: "nixl", Available: true, Capabilities: at(false)}, {Name: "host", Available: true, Capabilities: at(true)}}, "nixl"},
		"the CPU's own for its memory": {[]string{"auto"}, []backendFinding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host", Available: true, Capabilities: at(true)}}, "host"},
		"unless it was named":          {[]string{"nixl", "auto"}, []backendFinding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host", Available: true, Capabilities: at(true)}}, "nixl"},
		"or there is no other":         {[]string{"auto"}, []backendFinding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host"}}, "nixl"},
		"none":                         {[]string{"nixl"}, []backendFinding{{Name: "nixl"}, {Name: "host", Available: true, Capabilities: at(true)}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Backend = tt.wanted
			d := diagnosis{Backends: tt.has}
			d.judge(cfg)
			assert.Equal(t, tt.want, d.Verdict.Backend)
			assert.Equal(t, tt.want != "", d.Verdict.OK)
		})
	}
}

// TestFindBackendFixes: the fix is for what is wrong, and the reason does not say it again.
func TestFindBackendFixes(t *testing.T) {
	for name, tt := range map[string]struct {
		err         error
		reason, fix string
	}{
		"a library of another backend": {fmt.Errorf("opening the CUDA device: %w", &dl.LoadError{Library: "the CUDA driver", Hint: "install the driver"}),
			"opening the CUDA device: loading the CUDA driver: there is nowhere to look for it", "install the driver"},
		"a setting": {errs.Invalid("New", "device", "7", "0 to 3"), "New: device is 7; allowed: 0 to 3", "correct device; allowed: 0 to 3"},
		"says it itself": {fmt.Errorf("the fabric is off; switch it on: %w", backend.ErrUnsupported),
			"the fabric is off; switch it on: unsupported", ""},
		"nobody knows": {errors.New("strange"), "strange", fixProbe},
	} {
		t.Run(name, func(t *testing.T) {
			b := findBackend("nvshmem", func() (backend.Capabilities, error) { return backend.Capabilities{}, tt.err })
			assert.Equal(t, backendFinding{Name: "nvshmem", Reason: tt.reason, Fix: tt.fix}, b)
		})
	}
}

// TestDoctorProbesWithTheSettings: what decides whether a backend can be used reaches the process that probes it.
func TestDoctorProbesWithTheSettings(t *testing.T) {
	d := diagnosed(t, exitFailure, environ(brokenVar+"=1"), "--backend", "picky", "--device", "7")
	assert.Contains(t, d.find("picky").Reason, "device 7 is not there")
	d = diagnosed(t, exitOK, environ(brokenVar+"=1"), "--backend", "picky", "--device", "3")
	assert.Equal(t, "picky", d.Verdict.Backend)
}

func TestDoctorOfABadConfiguration(t *testing.T) {
	d := diagnosed(t, exitFailure, environ("SYMMEM_TIMEOUT=soon", "SYMMEM_RANKS=3"))
	assert.Contains(t, d.Config.Error, "SYMMEM_TIMEOUT")
	assert.Contains(t, d.Config.Error, "SYMMEM_RANKS")
	assert.Empty(t, d.Config.Settings)
	assert.NotEmpty(t, d.Backends, "the rest is shown all the same")

	r := call(t, "", environ("SYMMEM_TIMEOUT=soon"), "doctor")
	assert.Equal(t, exitFailure, r.status)
	assert.Contains(t, r.out, "not valid")
}

// TestDoctorSurvivesACrash has a library that ends the process when it is loaded.
func TestDoctorSurvivesACrash(t *testing.T) {
	d := diagnosed(t, healthyHere(), environ(brokenVar+"=1"))
	b := d.backend("crashes")
	require.NotNil(t, b)
	assert.False(t, b.Available)
	assert.Contains(t, b.Reason, "exit status 9")
	assert.Contains(t, b.Reason, "last words")
	assert.NotEmpty(t, b.Fix)

	b = d.backend("exits")
	require.NotNil(t, b)
	assert.False(t, b.Available, "it can be probed, but not started")
	assert.Contains(t, b.Reason, "exit status 255")
	assert.Contains(t, b.Reason, "aborting due to error")
}

// TestDoctorLibraries: found and right, found but not usable and why, and not found with what was tried, each once.
func TestDoctorLibraries(t *testing.T) {
	d := diagnosed(t, healthyHere(), environ())
	for _, name := range []string{"host", "absent"} {
		assert.Empty(t, d.backend(name).Libraries, name)
	}
	shelf := d.backend("shelved").Libraries
	require.Len(t, shelf, 3)
	assert.Equal(t, backend.Library{Name: "Good", State: backend.LibraryUsable, Path: "/lib/libgood.so.1", Version: "1.2",
		Details: []backend.Detail{{Name: "plugins", Value: "three"}}}, shelf[0])
	assert.Equal(t, backend.LibraryUnusable, shelf[1].State)
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
		told = append(told, oneLine(l))
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
	found := d.backend("shelfcrash").Libraries
	require.Len(t, found, 1)
	assert.Equal(t, backend.LibraryUnusable, found[0].State)
	assert.Contains(t, found[0].Name, "shelfcrash")
	assert.Contains(t, found[0].Reason, "exit status 9")
	assert.Contains(t, found[0].Reason, "dropped from the shelf")
	assert.NotEmpty(t, found[0].Fix)
	assert.Len(t, d.backend("shelved").Libraries, 3)
}
