package nccl

import (
	"context"
	"log/slog"
	"regexp"
	"strings"
)

// The variables by which NCCL's own log is set.
const (
	debugEnv     = "NCCL_DEBUG"
	debugFileEnv = "NCCL_DEBUG_FILE"
)

// logLine matches a line of NCCL's log: "[2026-11-20 10:00:00] host:123:456 [0] init.cc:99 NCCL WARN text".
var logLine = regexp.MustCompile(`^(?:\[[^\]]*\] )?(\S+?):(\d+):(\d+) \[(-?\d+)\] (?:(\S+) )?NCCL (WARN|INFO|ABORT|TRACE|VERSION) ?(.*)$`)

// tell passes a line of NCCL's to the logger: warnings as warnings, everything else for debugging.
func tell(log *slog.Logger, line string) {
	line = strings.TrimSpace(line)
	if line == "" {
		return
	}
	level := slog.LevelDebug
	args := []any{"library", libraryName}
	if m := logLine.FindStringSubmatch(line); m != nil {
		if m[6] == "WARN" || m[6] == "ABORT" {
			level = slog.LevelWarn
		}
		args = append(args, "gpu", m[4])
		if m[5] != "" {
			args = append(args, "at", m[5])
		}
		line = m[7]
	}
	log.Log(context.Background(), level, line, args...)
}

// Log passes the lines that NCCL has logged since the last call to the logger of Load.
func (l *Library) Log() {
	if l.log != nil {
		l.log.drain()
	}
}
