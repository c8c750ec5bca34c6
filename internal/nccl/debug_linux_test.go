package nccl

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDebugLog: what NCCL writes to the file that it finds in its variable comes to the logger, line by line.
func TestDebugLog(t *testing.T) {
	t.Setenv(debugEnv, "")
	t.Setenv(debugFileEnv, "")
	defer func() { theLog.log = nil }()
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, nil))
	d := openDebugLog(log)
	require.NotNil(t, d)
	assert.Equal(t, "WARN", os.Getenv(debugEnv))
	file, err := os.OpenFile(os.Getenv(debugFileEnv), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	require.NoError(t, err)
	l := &Library{log: d}
	write := func(text string) { _, err := fmt.Fprint(file, text); require.NoError(t, err) }

	write("\nhost:12:34 [3] init.cc:99 NCCL WARN Bootstrap : no socket interface found\nhost:12:34 [3] NCCL INFO half")
	l.Log()
	text := said.String()
	assert.Contains(t, text, `level=WARN msg="Bootstrap : no socket interface found" library=NCCL gpu=3 at=init.cc:99`)
	assert.NotContains(t, text, "half")
	said.Reset()
	write(" a line\n[2026-11-20 10:00:00] host:12:34 [0] dev_runtime.cc:7 NCCL WARN with its time\nsomething else\n" + strings.Repeat("x", 40<<10) + "\n")
	l.Log()
	text = said.String()
	assert.NotContains(t, text, "half a line", "what is for debugging is not logged at this level")
	assert.Contains(t, text, `msg="with its time"`)
	said.Reset()
	l.Log()
	assert.Empty(t, said.String())
	assert.Same(t, d, openDebugLog(log), "the process has one")
	require.NoError(t, file.Close())
	require.NoError(t, d.file.Close())
}

func TestDebugLogLeavesPeoplesSettingsAlone(t *testing.T) {
	log := slog.New(slog.NewTextHandler(&bytes.Buffer{}, nil))
	for name, value := range map[string]string{debugEnv: "INFO", debugFileEnv: "/tmp/nccl.%p"} {
		t.Setenv(debugEnv, "")
		t.Setenv(debugFileEnv, "")
		t.Setenv(name, value)
		assert.Nil(t, openDebugLog(log))
		assert.Equal(t, value, os.Getenv(name))
	}
	t.Setenv(debugEnv, "")
	t.Setenv(debugFileEnv, "")
	assert.Nil(t, openDebugLog(slog.New(slog.DiscardHandler)), "nobody listens")
	(&Library{}).Log()
}
