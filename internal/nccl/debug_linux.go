package nccl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// debugLog is a file in memory that NCCL writes its log to. It is read back after calls: a pipe would need a reader for as long
// as the process lives, or the library would hang in a write.
type debugLog struct {
	mu   sync.Mutex
	file *os.File
	read int64  // bytes read back
	rest []byte // the beginning of a line
	log  *slog.Logger
}

// theLog is the one of the process: NCCL reads its variables once.
var theLog struct {
	sync.Mutex
	log *debugLog
}

// openDebugLog makes NCCL write its log where it can be read back, for a logger that wants warnings. If NCCL's own variables are set, they decide,
// and nothing is passed to the logger. Without a file in memory, NCCL logs as it does by default.
func openDebugLog(log *slog.Logger) *debugLog {
	theLog.Lock()
	defer theLog.Unlock()
	ctx := context.Background()
	if theLog.log != nil {
		theLog.log.mu.Lock()
		defer theLog.log.mu.Unlock()
		if !theLog.log.log.Enabled(ctx, slog.LevelWarn) {
			theLog.log.log = log
		}
		return theLog.log
	}
	if os.Getenv(debugEnv) != "" || os.Getenv(debugFileEnv) != "" || !log.Enabled(ctx, slog.LevelWarn) {
		return nil
	}
	fd, err := unix.MemfdCreate("nccl-log", unix.MFD_CLOEXEC)
	if err != nil {
		log.Debug("NCCL's own log cannot be read back", "error", err)
		return nil
	}
	level := "WARN"
	if log.Enabled(ctx, slog.LevelDebug) {
		level = "INFO"
	}
	// The path has the number of this process and not "self", so that a child that inherits the variable finds this file too, or none.
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
	file := os.NewFile(uintptr(fd), path)
	if err := errors.Join(os.Setenv(debugEnv, level), os.Setenv(debugFileEnv, path)); err != nil {
		log.Debug("NCCL's own log cannot be read back", "error", errors.Join(err, file.Close()))
		return nil
	}
	theLog.log = &debugLog{file: file, log: log}
	return theLog.log
}

// drain reads back what is new.
func (d *debugLog) drain() {
	d.mu.Lock()
	defer d.mu.Unlock()
	began := d.read
	for {
		chunk := make([]byte, 16<<10)
		n, err := d.file.ReadAt(chunk, d.read)
		d.read += int64(n)
		d.rest = append(d.rest, chunk[:n]...)
		for {
			line, rest, whole := bytes.Cut(d.rest, []byte("\n"))
			if !whole {
				break
			}
			d.rest = rest
			tell(d.log, string(line))
		}
		if n == 0 || err != nil && err != io.EOF {
			break
		}
	}
	if d.read > began {
		// The memory of what was read is freed; the file keeps its length, so that NCCL's offset in it stays right.
		_ = unix.Fallocate(int(d.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, d.read)
	}
}
