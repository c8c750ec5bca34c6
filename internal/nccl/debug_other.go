//go:build !linux

package nccl

import "log/slog"

// debugLog does not exist where no library can be loaded.
type debugLog struct{}

func openDebugLog(*slog.Logger) *debugLog { return nil }

func (*debugLog) drain() {}
