package main

import (
	"encoding/json"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
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
	r := call(t, "", environ("SYMMEM_TOKEN=hunter2"), "doctor")
	assert.Equal(t, healthyHere(), r.status, r.err)
	for _, part := range []string{"host", "absent", "not available", "libabsent.so", "torchrun", "kernel-timeout", runtime.Version()} {
		assert.Contains(t, r.out, part)
	}
	assert.NotContains(t, r.out, "hunter2")
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

	r := call(t, "", environ(), "doctor")
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
		"Good usable 1.2 /lib/libgood.so.1\nplugins: three",
		"Old unusable 0.1 /lib/libold.so.1\nwhy it is for CUDA 11\nto do install a newer one",
		"Gone missing not found; what was tried:\n/lib/libgone.so (no such file)\nlibgone.so (not found)\nto do install gone",
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
