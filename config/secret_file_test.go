package config_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
)

// loadText loads a configuration file with this content.
func loadText(t *testing.T, content string) (config.Config, error) {
	t.Helper()
	return config.Load(&config.LoadOptions{File: writeFile(t, content), Environ: environ()})
}

// TestSecretInAFile writes a secret in ways that YAML takes for something else. It is never printed, and never lost silently.
func TestSecretInAFile(t *testing.T) {
	const secret = "hunter2"
	for _, content := range []string{
		"token: *hunter2", "token: !hunter2", "token: !!int hunter2", "token: !!binary hunter2", "token: &hunter2", "token: &hunter2 x",
		"token: &x hunter2", "token: #hunter2", "token: # hunter2", "token: x #hunter2", "token:\n  #hunter2\n", "token: ~",
		"token: [hunter2]", "token: {hunter2: x}", "token: {x: hunter2}", "token: |\n  *hunter2\n  !", "token: 'hunter2", "token: \"hunter2",
		"token: \"hunter2\\q\"", "token: @hunter2", "token: `hunter2`", "token: %hunter2", "token: hunter2: x", "token: 'a'hunter2",
		"token:hunter2", "rank: 0\ntoken:hunter2", "{token:hunter2}", "{'token:hunter2': 1, x: 2}", "token: hunter2\ntoken: hunter2", "Token: *hunter2",
		"token: &t hunter2\njob: *t\nrank: *t", "token: !!str &t hunter2\nbackend: *t", "backend:\n  token: hunter2", "rank: [{token: hunter2}]",
		"rank: {token: hunter2}", "device: {token: hunter2}", "x: &x {token: hunter2}\n<<: *x", "<<: {token: hunter2}", "? token\n: *hunter2",
		"token: !!map hunter2", "token: !!timestamp hunter2", "token: !!float hunter2", "token: !!null hunter2", "token: !!bool hunter2",
		"rank: *hunter2", "token: a\n---\ntoken: hunter2", "- token: hunter2", "token: hunter2\n bad: x",
	} {
		c, err := loadText(t, content)
		if err == nil {
			assert.Failf(t, "it was taken", "%q gave %q", content, c.Token.Reveal())
			continue
		}
		assert.NotContains(t, err.Error(), secret, content)
	}
	// One more character anywhere, of any kind: it is the token as it was written, or an error that does not have it.
	for c := ' '; c <= '~'; c++ {
		for _, value := range []string{fmt.Sprintf("%chunter2", c), fmt.Sprintf("hun%cter2", c), fmt.Sprintf("hunter2%c", c),
			fmt.Sprintf("%c%chunter2", c, c), fmt.Sprintf("hunter2 %cx", c)} {
			loaded, err := loadText(t, "token: "+value+"\njob: x\n")
			if err != nil {
				assert.NotContains(t, err.Error(), "hun", value)
				assert.NotContains(t, err.Error(), "ter2", value)
				continue
			}
			assert.Equal(t, strings.TrimSpace(value), loaded.Token.Reveal())
		}
	}
	for content, want := range map[string]string{
		"token: hunter2": secret, "token: 'hunter2' # mine": secret, `token: "*hun#ter2"`: "*hun#ter2", "token: '!&*'": "!&*",
		"# mine\ntoken: hunter2\n# mine\njob: x": secret, "token: >-\n  hunter2": secret, "token: ''": "",
	} {
		c, err := loadText(t, content)
		require.NoError(t, err, content)
		assert.Equal(t, want, c.Token.Reveal())
	}
}

// TestTextsThatAreNotUTF8 refuses names that no other rank could be told.
func TestTextsThatAreNotUTF8(t *testing.T) {
	for _, key := range []string{"job", "token"} {
		_, err := config.Load(&config.LoadOptions{Explicit: map[string]any{key: "a\xffb"}, Environ: environ(), File: writeFile(t, "")})
		assert.Contains(t, refusals(t, err), key)
	}
	_, err := config.Load(&config.LoadOptions{Explicit: map[string]any{"job": strings.Repeat("x", 1<<20)}, Environ: environ(), File: writeFile(t, "")})
	require.ErrorIs(t, err, config.ErrInvalid)
	require.Less(t, len(err.Error()), 500)
}
