package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/testneed"
)

// skipped counts the tests that had no GPU.
var skipped atomic.Int32

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(helper(role))
	}
	code := m.Run()
	if n := skipped.Load(); n > 0 {
		fmt.Printf("device/cuda: %d tests had no GPU and ran on the fake driver alone, or not at all\n", n)
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "goroutines are left:", err)
		code = 1
	}
	os.Exit(code)
}

// patience is a bound that no test reaches unless something is broken.
const patience = time.Minute

// open opens a GPU, or skips the test on a machine without. The test closes it in the end, and checks that it then holds
// nothing.
func open(t testing.TB, opts *cuda.Options) *cuda.Device {
	t.Helper()
	d, err := cuda.Open(opts)
	if errors.Is(err, device.ErrUnavailable) {
		skipped.Add(1)
		testneed.Missing(t, "cuda", err)
	}
	require.NoError(t, err)
	closeInTheEnd(t, d)
	return d
}

// openFake opens a device of a fake driver.
func openFake(t testing.TB, f *fake, opts *cuda.Options) *cuda.Device {
	t.Helper()
	var o cuda.Options
	if opts != nil {
		o = *opts
	}
	o.Driver = f.driver()
	d, err := cuda.Open(&o)
	require.NoError(t, err)
	closeInTheEnd(t, d)
	return d
}

func closeInTheEnd(t testing.TB, d *cuda.Device) {
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			assert.ErrorIs(t, err, device.ErrClosed)
		}
		assert.Equal(t, cuda.Stats{}, d.Stats())
	})
}

// onEach runs a test on the fake driver and on a GPU.
func onEach(t *testing.T, opts *cuda.Options, test func(t *testing.T, d *cuda.Device)) {
	t.Run("fake", func(t *testing.T) {
		f := newFake(1)
		d := openFake(t, f, opts)
		test(t, d)
		if err := d.Close(); err != nil {
			require.ErrorIs(t, err, device.ErrClosed)
		}
		f.assertEmpty(t)
	})
	t.Run("gpu", func(t *testing.T) { test(t, open(t, opts)) })
}

func newStream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.NewStream()
	require.NoError(t, err)
	return s.(*cuda.Stream)
}

func newEvent(t testing.TB, d *cuda.Device) *cuda.Event {
	t.Helper()
	e, err := d.NewEvent()
	require.NoError(t, err)
	return e.(*cuda.Event)
}

func alloc(t testing.TB, d *cuda.Device, bytes int64) device.Ptr {
	t.Helper()
	p, err := d.Alloc(bytes)
	require.NoError(t, err)
	return p
}

// bounded returns a context that ends when the test has lost patience.
func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func synchronize(t testing.TB, s *cuda.Stream) {
	t.Helper()
	require.NoError(t, s.Synchronize(bounded(t)))
}

// read returns n bytes of the device's memory.
func read(t testing.TB, d *cuda.Device, p device.Ptr, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, d.CopyToHost(b, p))
	return b
}

// counter counts calls of a host function.
type counter struct{ runs atomic.Int64 }

func (c *counter) run() { c.runs.Add(1) }
