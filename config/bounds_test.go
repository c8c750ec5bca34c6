package config_test

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
)

// TestWholeNumbersAreDecimal: a number is the same number wherever it is written. YAML and package flag have octal, hexadecimal and binary numbers, and
// numbers with underscores; what means ten in a variable must not mean eight in a file.
func TestWholeNumbersAreDecimal(t *testing.T) {
	for text, want := range map[string]int{"010": 10, "08": 8, "+3": 3, "0": 0, "12": 12} {
		fromFile, err := loadText(t, "rank: "+text)
		require.NoError(t, err, text)
		assert.Equal(t, want, fromFile.Rank, "rank: %s in a file", text)
		alias, err := loadText(t, "local-rank: &n "+text+"\nrank: *n")
		require.NoError(t, err, text)
		assert.Equal(t, want, alias.Rank, "rank: %s by an alias", text)
		fromVariable, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_RANK=" + text)})
		require.NoError(t, err, text)
		assert.Equal(t, want, fromVariable.Rank, "SYMMEM_RANK=%s", text)
		flags := parsed(t, "--rank="+text)
		fromFlag, err := config.Load(&config.LoadOptions{Flags: flags, Environ: environ()})
		require.NoError(t, err, text)
		assert.Equal(t, want, fromFlag.Rank, "--rank=%s", text)
		got, err := flags.GetInt("rank")
		require.NoError(t, err, text)
		assert.Equal(t, want, got)
	}
	for _, text := range []string{"0x10", "0b11", "0o17", "1_000", "99999999999999999999", "1e1", "8.0", ".inf"} {
		_, err := loadText(t, "world-size: "+text)
		assert.Contains(t, refusals(t, err), "world-size", "%s in a file", text)
		_, err = config.Load(&config.LoadOptions{Environ: environ("SYMMEM_WORLD_SIZE=" + text)})
		assert.Contains(t, refusals(t, err), "world-size", "%s in a variable", text)
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		config.AddFlags(flags)
		require.ErrorContains(t, flags.Parse([]string{"--world-size=" + text}), "a whole decimal number")
	}
	c, err := loadText(t, "device: 010")
	require.NoError(t, err)
	assert.Equal(t, "010", c.Device, "as it was written, which is ten and not eight")
	_, err = loadText(t, "job: 0123")
	assert.Contains(t, refusals(t, err), "job", "a text that YAML takes for a number needs quotes")
}

// TestBlankVariables: blanks around a value are dropped, and what is empty then is unset. A blank variable hides no value of the file, least of all a token.
func TestBlankVariables(t *testing.T) {
	var blank []string
	for _, k := range config.Keys() {
		blank = append(blank, k.Env+"= \t")
	}
	path := writeFile(t, "token: 'of the file'\nchannels: 3\nnet-devices: [eth0]\n")
	c, err := config.Load(&config.LoadOptions{File: path, Environ: environ(append(blank, "SYMMEM_CONFIG= ", "SYMMEM_NO_KEY= ")...)})
	require.NoError(t, err)
	assert.Equal(t, "of the file", c.Token.Reveal())
	assert.Equal(t, config.Source{File: path}, c.Source("token"))
	assert.Equal(t, 3, c.Channels)
	assert.Equal(t, []string{"eth0"}, c.NetDevices)
	assert.Equal(t, config.Source{}, c.Source("backend"))

	c, err = config.Load(&config.LoadOptions{Environ: environ("SYMMEM_CONFIG= " + path + " ")})
	require.NoError(t, err)
	assert.Equal(t, 3, c.Channels)
}

// TestResolveRefusesAll: of the variables that belong to the place to meet, each that is wrong is named.
func TestResolveRefusesAll(t *testing.T) {
	_, err := config.Default().Resolve(environ("SYMMEM_RENDEZVOUS_SERVED=perhaps", "SYMMEM_RENDEZVOUS_FD=0x3", "SYMMEM_TOKEN=[redacted]"))
	for _, key := range []string{"rendezvous-served", "rendezvous-fd", "token"} {
		assert.Contains(t, refusals(t, err), key)
	}
}

// TestStoreOfAPrintedConfiguration: what a printed configuration shows in place of the store's URL is not the URL, as with the token.
func TestStoreOfAPrintedConfiguration(t *testing.T) {
	for _, text := range []string{"[redacted]", "etcd://user:hunter2@host/\\a"} {
		_, err := loadText(t, "rendezvous-store: \""+text+"\"")
		assert.Contains(t, refusals(t, err), "rendezvous-store", text)
		assert.NotContains(t, err.Error(), "hunter2")
	}
}
