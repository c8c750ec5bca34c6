package host_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/internal/errs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is a bound that no test reaches unless something is broken.
const patience = time.Minute

// open opens a device that the test closes in the end, and checks that it then holds nothing.
func open(t testing.TB, opts *host.Options) *host.Device {
	t.Helper()
	d, err := host.New(opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			assert.ErrorIs(t, err, device.ErrClosed)
		}
		assert.Equal(t, host.Stats{}, d.Stats())
	})
	return d
}

func newStream(t testing.TB, d *host.Device) *host.Stream {
	t.Helper()
	s, err := d.NewStream()
	require.NoError(t, err)
	return s.(*host.Stream)
}

func newEvent(t testing.TB, d *host.Device) *host.Event {
	t.Helper()
	e, err := d.NewEvent()
	require.NoError(t, err)
	return e.(*host.Event)
}

func alloc(t testing.TB, d *host.Device, bytes int64) device.Ptr {
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

func synchronize(t testing.TB, s *host.Stream) {
	t.Helper()
	require.NoError(t, s.Synchronize(bounded(t)))
}

// kernel runs a function as a kernel.
type kernel func() error

func (k kernel) RunKernel() error { return k() }

// counter is a kernel that counts its runs.
type counter struct{ runs atomic.Int64 }

func (c *counter) RunKernel() error { c.runs.Add(1); return nil }

// gate is a kernel that holds its stream up until it is opened, or fails when nobody opens it.
type gate struct {
	entered chan struct{}
	opened  chan struct{}
}

func newGate() *gate { return &gate{entered: make(chan struct{}, 16), opened: make(chan struct{})} }

func (g *gate) RunKernel() error {
	g.entered <- struct{}{}
	select {
	case <-g.opened:
		return nil
	case <-time.After(patience):
		return errors.New("nobody opened the gate")
	}
}

func (g *gate) open() { close(g.opened) }

// await waits for the gate to hold a stream up.
func (g *gate) await(t testing.TB) {
	t.Helper()
	select {
	case <-g.entered:
	case <-time.After(patience):
		require.FailNow(t, "the gate was not reached")
	}
}

func TestIdentity(t *testing.T) {
	d := open(t, nil)
	assert.Equal(t, device.Host, d.Kind())
	assert.Equal(t, 0, d.Index())
	assert.NotEmpty(t, d.Name())
	assert.Regexp(t, `^host-.+`, d.UUID())
	again := open(t, nil)
	assert.Equal(t, d.UUID(), again.UUID(), "all processes of a host must agree")
	third := open(t, &host.Options{Index: 3})
	assert.Equal(t, 3, third.Index())
	assert.NotEqual(t, d.UUID(), third.UUID())
}

func TestNewRefusesBadOptions(t *testing.T) {
	for _, o := range []host.Options{{Index: -1}, {WaitTimeout: -time.Second}} {
		_, err := host.New(&o)
		var arg *errs.ArgumentError
		require.ErrorAs(t, err, &arg)
		assert.ErrorIs(t, err, device.ErrInvalid)
	}
}
