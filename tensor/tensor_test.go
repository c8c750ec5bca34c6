package tensor_test

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// locked is a buffer that may be read while a logger writes to it.
type locked struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// TestDroppedTensorIsLogged: the collector frees nothing, but tells of the leak and its place.
func TestDroppedTensorIsLogged(t *testing.T) {
	ctx := context.Background()
	var log locked
	r, err := symmem.Open(ctx, config.Default(), &symmem.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), Environ: func() []string { return nil }})
	require.NoError(t, err)
	func() {
		_, err := r.Zeros(ctx, tensor.Float32, 123)
		require.NoError(t, err)
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "dropped without Close")
	}, 20*time.Second, 10*time.Millisecond)
	require.Contains(t, log.String(), "tensor_test.go")
	require.Equal(t, 1, r.Memory().Allocations(), "the memory must stay")
	require.NoError(t, r.Close(ctx))
	require.Contains(t, log.String(), "was not freed before close")
}

// TestEventsProveRegistration: each allocation and rendezvous is an event with rank, address, bytes and time.
func TestEventsProveRegistration(t *testing.T) {
	ctx := context.Background()
	var log locked
	r, err := symmem.Open(ctx, config.Default(), &symmem.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), Environ: func() []string { return nil }})
	require.NoError(t, err)
	x, err := tensor.ZerosNamed(ctx, r.Memory(), "weights", tensor.Float32, 256)
	require.NoError(t, err)
	require.NoError(t, x.Rendezvous(ctx))
	address := x.Ptr().String()
	require.NoError(t, x.Close(ctx))
	require.NoError(t, r.Close(ctx))
	for _, event := range []string{"msg=allocated", "msg=rendezvous", "msg=freed"} {
		found := false
		for line := range strings.Lines(log.String()) {
			found = found || strings.Contains(line, event) && strings.Contains(line, "name=weights") && strings.Contains(line, "address="+address) &&
				strings.Contains(line, "bytes=1024") && strings.Contains(line, "took=") && strings.Contains(line, "rank=0") && strings.Contains(line, "backend=host")
		}
		require.Truef(t, found, "no event %s with name, address, bytes and time in:\n%s", event, log.String())
	}
}

func TestStrings(t *testing.T) {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Default(), &symmem.Options{Environ: func() []string { return nil }})
	require.NoError(t, err)
	x, err := r.Zeros(ctx, tensor.BFloat16, 4, 5)
	require.NoError(t, err)
	require.Equal(t, "bf16[4 5] on rank 0 of 1", x.String())
	require.NoError(t, x.Close(ctx))
	require.NoError(t, r.Close(ctx))
}
