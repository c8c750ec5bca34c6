package tests

import (
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/multicast"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/tests/suite"
)

// byNature lists the capabilities that a backend has on no machine: cases that need one are skipped also where the backend is required.
// Any other capability that is missing is missing on this machine.
var byNature = map[string][]string{
	"host":    {"multicast", "register"},
	farName:   {"peer_pointers", "contiguous", "multicast", "register"},
	"nvshmem": {"contiguous", "ranks_in_one_process"},
	"nixl":    {"peer_pointers", "contiguous", "multicast", "ranks_in_one_process"}, // the last with memory of GPUs only
}

// multicastSetting is the setting under which the suite runs: SYMMEM_MULTICAST, as a program takes it.
func multicastSetting() string { return cmp.Or(os.Getenv("SYMMEM_MULTICAST"), config.MulticastAuto) }

// excused reports whether a case may be skipped on a backend that is required, because of what it lacks; policy says whether multicast
// may be used at all.
func excused(backend, missing string, world int, policy *multicast.Policy) bool {
	switch {
	case missing == suite.MoreRanks, missing == suite.SeveralIslands, slices.Contains(byNature[backend], missing):
		return true
	case missing == "multicast":
		return world == 1 || policy.Forbidden != "" // there is nobody to reach, or somebody has switched it off
	}
	return false
}

// requireCapability fails the test if the backend is required and lacks the capability on this machine, where others have it.
func requireCapability(t *testing.T, name string, world int, capability string) {
	t.Helper()
	policy, err := multicast.NewPolicy("tests", multicastSetting(), os.Getenv)
	require.NoError(t, err)
	if slices.Contains(required(), name) && !excused(name, capability, world, policy) {
		t.Errorf("SYMMEM_TEST_REQUIRE names backend %s, which has no %s on this machine", name, capability)
	}
}

// skipWithout skips the test and says why; under SYMMEM_TEST_REQUIRE with name among its names that is a failure.
func skipWithout(t *testing.T, name, format string, args ...any) {
	t.Helper()
	testneed.Missing(t, name, fmt.Sprintf(format, args...))
}

// check turns the result of a case into that of its sub-test. One that was skipped although the backend is required has failed.
func check(t *testing.T, backend string, world int, name string, res suite.Result) {
	t.Helper()
	assert.Equal(t, name, res.Case, "the case that was run")
	switch res.Status {
	case suite.Passed:
	case suite.Skipped:
		requireCapability(t, backend, world, res.Missing)
		t.Skip(res.Reason)
	default:
		t.Error(res.Reason)
	}
}

// TestExcused: a required backend may lack what it has nowhere, and what was switched off, and nothing else.
func TestExcused(t *testing.T) {
	free, off := &multicast.Policy{}, &multicast.Policy{Forbidden: "it is switched off"}
	for _, tt := range []struct {
		backend, missing string
		world            int
		policy           *multicast.Policy
		want             bool
	}{
		{"host", "register", 2, free, true},
		{"host", "multicast", 2, free, true},
		{"host", "graphs", 2, free, false},
		{"host", suite.MoreRanks, 1, free, true},
		{"nccl", suite.SeveralIslands, 2, free, true},
		{"far", "peer_pointers", 3, free, true},
		{"native", "register", 2, free, false},
		{"native", "peer_pointers", 2, off, false},
		{"native", "multicast", 2, free, false},
		{"native", "multicast", 2, off, true},
		{"native", "multicast", 1, free, true},
		{"nvshmem", "contiguous", 2, free, true},
		{"nvshmem", "register", 2, free, false},
		{"nixl", "peer_pointers", 2, free, true},
		{"nixl", "register", 2, free, false},
		{"a new one", "transfers", 2, free, false},
	} {
		assert.Equal(t, tt.want, excused(tt.backend, tt.missing, tt.world, tt.policy), "%+v", tt)
	}
	known := map[string]bool{}
	for _, c := range (backend.Capabilities{}).List() {
		known[c.Name] = true
	}
	for name, lacks := range byNature {
		_, err := backend.Lookup(name)
		require.NoError(t, err)
		for _, c := range lacks {
			assert.True(t, known[c], "%s lacks %q, which is no capability", name, c)
		}
	}
}

// TestSkipWithout: a test of what is not here says so and is skipped, and fails where it was required.
func TestSkipWithout(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for must, fails := range map[string]bool{"": false, "host,netns": false, "host,checkout": true} {
		c := exec.CommandContext(t.Context(), self, "-test.v", "-test.run", "^TestReadme(Program|Defaults)$")
		c.Dir = t.TempDir() // which is no checkout
		c.Env = append(os.Environ(), "SYMMEM_TEST_REQUIRE="+must)
		out, err := c.CombinedOutput()
		result := "SKIP"
		if fails {
			result = "FAIL"
		}
		assert.Equal(t, fails, err != nil, "SYMMEM_TEST_REQUIRE=%s: %s", must, out)
		for _, test := range []string{"TestReadmeProgram", "TestReadmeDefaults"} {
			assert.Contains(t, string(out), "--- "+result+": "+test, "SYMMEM_TEST_REQUIRE=%s", must)
		}
		assert.Contains(t, string(out), "not run in a checkout", "SYMMEM_TEST_REQUIRE=%s", must)
	}
}

// skipping lists the functions that may skip whatever is required, since nothing is missing where they do.
var skipping = map[string]string{
	"memory/workspace_test.go TestWorkspaceBlock":             "it draws again",
	"device/devicetest/memory.go hostMemory":                  "what the device under test is not",
	"device/devicetest/streams.go enqueueingAllocatesNothing": "what the device under test does not promise",
}

// TestSkipsCanBeForbidden: every function of the module that skips a test looks at SYMMEM_TEST_REQUIRE first.
func TestSkipsCanBeForbidden(t *testing.T) {
	const root = ".."
	if _, err := os.Stat(root + "/go.mod"); errors.Is(err, fs.ErrNotExist) {
		skipWithout(t, "checkout", "this is not run in a checkout: the tests are not here")
	}
	found, excused := 0, map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		within, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			skips, looks := skipsOf(decl)
			if skips == 0 {
				continue
			}
			found += skips
			f, ok := decl.(*ast.FuncDecl)
			if !ok {
				t.Errorf("%s skips tests outside of a function", within)
				continue
			}
			name := filepath.ToSlash(within) + " " + f.Name.Name
			if _, ok := skipping[name]; ok {
				excused[name] = true
			} else if !looks {
				t.Errorf("%s skips a test and does not look at SYMMEM_TEST_REQUIRE", name)
			}
		}
		return nil
	})
	require.NoError(t, err)
	assert.Greater(t, found, 20, "skips in the module")
	for name := range skipping {
		assert.True(t, excused[name], "%s skips nothing", name)
	}
}

// skipsOf counts the calls in decl that skip a test, and says whether something there looks at SYMMEM_TEST_REQUIRE.
func skipsOf(decl ast.Decl) (skips int, looks bool) {
	ast.Inspect(decl, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			looks = looks || n.Value == `"SYMMEM_TEST_REQUIRE"`
		case *ast.CallExpr:
			switch f := n.Fun.(type) {
			case *ast.Ident:
				looks = looks || f.Name == "required" || f.Name == "requireCapability"
			case *ast.SelectorExpr:
				if of, ok := f.X.(*ast.Ident); ok && of.Name == "testneed" {
					looks = true // it skips nothing that is required
					skips++
				} else if ok && slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, f.Sel.Name) {
					skips++
				}
			}
		}
		return true
	})
	return skips, looks
}
