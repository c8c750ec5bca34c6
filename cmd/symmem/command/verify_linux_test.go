package command

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tests/suite"
)

// fewCases match some quick cases of two groups.
const fewCases = "^(agreement/(size|dtype)$|all_reduce/one_shot/f16/)"

func verified(t *testing.T, status int, env []string, args ...string) verify.Verification {
	t.Helper()
	r := call(t, "", env, append([]string{"verify", "--json", "--short", "--filter", fewCases, "--ranks", "2"}, args...)...)
	require.Equal(t, status, r.status, "%s\n%s", r.out, r.err)
	var v verify.Verification
	require.NoError(t, json.Unmarshal([]byte(r.out), &v))
	return v
}

func TestVerify(t *testing.T) {
	v := verified(t, exit.OK, environ())
	require.Len(t, v.Backends, 1, "the best that works")
	b := v.Backends[0]
	assert.Equal(t, "host", b.Name)
	assert.Equal(t, suite.Passed, b.Status)
	cases := suite.Cases(&suite.Options{Backend: "host", Device: device.Host, World: 2, Short: true, Filter: regexp.MustCompile(fewCases)})
	require.Len(t, b.Results, len(cases))
	for i, r := range b.Results {
		assert.Equal(t, cases[i].Name, r.Case)
		assert.NotEqual(t, suite.Failed, r.Status, r.Reason)
	}
	assert.Equal(t, len(cases), v.Summary.Passed+v.Summary.Skipped)
	assert.Positive(t, v.Summary.Passed)
	assert.Equal(t, 2, v.Ranks)
}

func TestVerifyForPeople(t *testing.T) {
	r := call(t, "", environ(), "verify", "--short", "--filter", fewCases, "--ranks", "3", "--backend", "host", "--timeout", "45s")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	lines := strings.Split(strings.TrimSuffix(r.out, "\n"), "\n")
	assert.Regexp(t, `^\d+ passed, 0 failed, \d+ skipped$`, lines[len(lines)-1])
	assert.Regexp(t, `(?m)^host +agreement +2 +0 +0 `, r.out)
	assert.Regexp(t, `(?m)^host +all_reduce `, r.out)
	assert.Empty(t, r.err, "progress is for terminals")
}

func TestVerifyAllBackends(t *testing.T) {
	v := verified(t, exit.OK, environ(), "--backend", "all")
	require.Len(t, v.Backends, len(backend.Names()))
	skipped := 0
	for _, b := range v.Backends {
		switch b.Name {
		case "absent", "dies", "hangs", "crashes", "shelved", "shelfcrash", "picky": // those of this test, none of which can be used as it is called
			assert.Equal(t, suite.Skipped, b.Status, b.Name)
			assert.Contains(t, b.Reason, "libabsent.so", b.Name)
		case "host":
			assert.Equal(t, suite.Passed, b.Status, b.Reason)
		}
		if b.Status == suite.Skipped {
			skipped++
			assert.NotEmpty(t, b.Reason, b.Name)
			assert.Empty(t, b.Results, b.Name)
		}
	}
	assert.GreaterOrEqual(t, v.Summary.Skipped, skipped)
	assert.Zero(t, v.Summary.Failed)

	r := call(t, "", environ(), "verify", "--short", "--filter", fewCases, "--ranks", "2", "--backend", "all")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	assert.Regexp(t, `(?m)^absent +none +0 +0 +1 .*libabsent.so`, r.out)
}

func TestVerifyRequiredBackend(t *testing.T) {
	for name, args := range map[string][]string{
		"with all":       {"--backend", "all", "--require", "absent,host"},
		"beside auto":    {"--require", "absent"},
		"beside another": {"--backend", "host", "--require", "absent"},
		"by its name":    {"--backend", "absent"},
	} {
		t.Run(name, func(t *testing.T) {
			v := verified(t, exit.Failure, environ(), args...)
			assert.Equal(t, 1, v.Summary.Failed)
			last := ""
			for _, b := range v.Backends {
				if b.Status == suite.Failed {
					last = b.Name
					assert.Contains(t, b.Reason, "libabsent.so")
				}
			}
			assert.Equal(t, "absent", last)
		})
	}
	t.Run("that is there", func(t *testing.T) {
		v := verified(t, exit.OK, environ(), "--require", "host")
		assert.Len(t, v.Backends, 1, "it is not run twice")
	})
}

func TestVerifyARankDies(t *testing.T) {
	v := verified(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "dies")
	require.Len(t, v.Backends, 1)
	assert.Contains(t, v.Backends[0].Reason, "rank 1 (process")
	assert.Contains(t, v.Backends[0].Reason, "exited with status 9")
	assert.Equal(t, 1, v.Summary.Failed)
}

// TestVerifyTriesTheStartFirst: no rank is started over a library that ends the process.
func TestVerifyTriesTheStartFirst(t *testing.T) {
	v := verified(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "exits")
	require.Len(t, v.Backends, 1)
	assert.Equal(t, "exits", v.Backends[0].Name)
	assert.Contains(t, v.Backends[0].Reason, "exit status 255")
	assert.NotContains(t, v.Backends[0].Reason, "rank 1")
}

// TestVerifyTriesTheStartWithItsFlags: what is tried first has the settings that the ranks have, also those that were given as flags.
func TestVerifyTriesTheStartWithItsFlags(t *testing.T) {
	v := verified(t, exit.Failure, environ(brokenVar+"=1", "SYMMEM_DEVICE=4"), "--backend", "picky", "--share-device")
	require.Len(t, v.Backends, 1)
	assert.Contains(t, v.Backends[0].Reason, "device 4 is not there")
	v = verified(t, exit.Failure, environ(brokenVar+"=1", "SYMMEM_DEVICE=4"), "--backend", "picky", "--share-device", "--picky-last-device", "4")
	require.Len(t, v.Backends, 1)
	assert.Contains(t, v.Backends[0].Reason, "rank 1 (process", "the ranks were started")
}

// TestNothingOutlivesAProbe: a library that never returns does not outlive the command that has looked at it, however that ends, and keeps nobody from
// interrupting it.
func TestNothingOutlivesAProbe(t *testing.T) {
	for name, tt := range map[string]struct {
		args   []string
		end    os.Signal
		status int
	}{
		"doctor is killed":       {[]string{"doctor"}, os.Kill, -1},
		"doctor is interrupted":  {[]string{"doctor"}, os.Interrupt, -1},
		"verify is killed":       {[]string{"verify", "--backend", "stalls"}, os.Kill, -1},
		"verify is interrupted":  {[]string{"verify", "--backend", "stalls"}, os.Interrupt, 130},
		"verify of all that are": {[]string{"verify", "--backend", "host,stalls", "--filter", "agreement/size", "-n", "2"}, syscall.SIGTERM, 143},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mark := marker()
			c := startCommand(t, environ(mark, stallVar+"=1"), tt.args...)
			probing := func() bool {
				for _, pid := range marked(t, mark) {
					line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
					if err == nil && strings.Contains(string(line), "\x00probe\x00stalls") {
						return true
					}
				}
				return false
			}
			require.Eventually(t, probing, patience, 10*time.Millisecond)
			require.NoError(t, c.cmd.Process.Signal(tt.end))
			if tt.status >= 0 {
				assert.Equal(t, tt.status, c.status(t), c.err)
			} else {
				<-c.ended
			}
			assertGone(t, mark)
		})
	}
}

func TestVerifyARankHangs(t *testing.T) {
	v := verified(t, exit.Failure, environ(brokenVar+"=1"), "--backend", "hangs", "--timeout", "3s")
	require.Len(t, v.Backends, 1)
	assert.Regexp(t, `waiting for rank 1 of 2`, v.Backends[0].Reason)
	assert.Equal(t, 1, v.Summary.Failed)
}

func TestVerifyInterrupted(t *testing.T) {
	c := interrupted(t, "verify", "--ranks", "2", "--backend", "host")
	assert.Contains(t, c.out.String(), "interrupted")
}
