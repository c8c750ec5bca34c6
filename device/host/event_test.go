package host_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The devices of several ranks in one process may wait for each other's events.
func TestEventAcrossDevices(t *testing.T) {
	d, other := open(t, nil), open(t, nil)
	a, b := newStream(t, d), newStream(t, other)
	e := newEvent(t, d)
	g := newGate()
	var seen, c counter
	require.NoError(t, a.Launch(g))
	require.NoError(t, a.Launch(&seen))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	require.NoError(t, b.Launch(kernel(func() error { c.runs.Store(10 + seen.runs.Load()); return nil })))
	g.open()
	synchronize(t, b)
	assert.EqualValues(t, 11, c.runs.Load())
}
