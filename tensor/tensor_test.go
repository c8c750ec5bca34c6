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

// TestLasting: what outlives its slice has all that the slice had, its own rendezvous too, and ends with the memory; of the memory itself, and of no tensor,
// there is no other. What has no elements outlives its tensor and its heap too.
func TestLasting(t *testing.T) {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Default(), &symmem.Options{Environ: func() []string { return nil }})
	require.NoError(t, err)
	heap, err := r.NewHeap(ctx, 1<<16)
	require.NoError(t, err)
	one, err := r.Zeros(ctx, tensor.Float32, 4, 6)
	require.NoError(t, err)
	piece, err := heap.Zeros(ctx, tensor.Float32, 4, 6)
	require.NoError(t, err)
	for _, x := range []*tensor.Tensor{one, piece} {
		same, err := tensor.Lasting(x)
		require.NoError(t, err)
		require.Same(t, x, same)
		rows, err := x.Slice(1, 4)
		require.NoError(t, err)
		part, err := rows.Sub(2, 5)
		require.NoError(t, err)
		before, err := tensor.Lasting(part)
		require.NoError(t, err)
		_, _, err = before.Window()
		if x == one {
			require.ErrorIs(t, err, symmem.ErrNoRendezvous)
		}
		require.NoError(t, rows.Rendezvous(ctx)) // not x's
		require.NoError(t, rows.Close(ctx))
		require.ErrorIs(t, part.Err(), symmem.ErrClosed)
		lasting, err := tensor.Lasting(part)
		require.NoError(t, err)
		require.Equal(t, x.Offset()+(6+2)*4, lasting.Offset())
		require.Equal(t, x.Ptr().Add((6+2)*4), lasting.Ptr())
		require.Equal(t, tensor.Shape{5}, lasting.Shape())
		window, offset, err := lasting.Window()
		require.NoError(t, err)
		require.Equal(t, lasting.Offset(), offset)
		require.NoError(t, window.Err())
		require.NoError(t, tensor.Write(lasting.Local(), []float32{1, 2, 3, 4, 5}, 0))
		require.NoError(t, x.Close(ctx))
		require.ErrorIs(t, lasting.Err(), symmem.ErrClosed)
		for _, closed := range []tensor.SymmetricTensor{x, part, lasting} {
			_, err = tensor.Lasting(closed)
			require.ErrorIs(t, err, symmem.ErrClosed)
		}
	}
	for _, none := range []tensor.SymmetricTensor{nil, (*tensor.Tensor)(nil), &tensor.Tensor{}} {
		_, err := tensor.Lasting(none)
		require.ErrorIs(t, err, symmem.ErrInvalid)
	}
	// Without elements there is no memory to end with.
	empty, err := heap.Zeros(ctx, tensor.Int8, 0, 3)
	require.NoError(t, err)
	before, err := tensor.Lasting(empty)
	require.NoError(t, err)
	require.NoError(t, empty.Close(ctx))
	require.NoError(t, heap.Close(ctx))
	lasting, err := tensor.Lasting(empty)
	require.NoError(t, err)
	for _, same := range []tensor.SymmetricTensor{before, lasting} {
		require.NoError(t, same.Err())
		require.Equal(t, empty.Shape(), same.Shape())
		require.Equal(t, empty.DType(), same.DType())
		require.Same(t, empty.Memory(), same.Memory())
	}
	require.NoError(t, r.Close(ctx))
	require.ErrorIs(t, lasting.Err(), symmem.ErrClosed)
	_, err = tensor.Lasting(lasting)
	require.ErrorIs(t, err, symmem.ErrClosed)
}
