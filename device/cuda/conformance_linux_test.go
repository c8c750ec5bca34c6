package cuda_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/device/devicetest"
	"github.com/symmem/symmem/internal/simcuda"
)

// TestConformanceOnSimulatedGPUs: the conformance suite makes no call that a real driver would not survive.
func TestConformanceOnSimulatedGPUs(t *testing.T) {
	open := func(t testing.TB, o devicetest.Options) *cuda.Device {
		m, err := simcuda.New(simcuda.Config{Seed: 1})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, m.Err()) }) // when the device is closed
		d, err := cuda.Open(&cuda.Options{Driver: m.Driver(), WaitTimeout: o.WaitTimeout, Err: o.Err})
		require.NoError(t, err)
		closeInTheEnd(t, d)
		return d
	}
	for name, begin := range map[string]func(t testing.TB, d *cuda.Device) *cuda.Device{
		"plain":                func(_ testing.TB, d *cuda.Device) *cuda.Device { return d },
		"with work of the CPU": served,
	} {
		t.Run(name, func(t *testing.T) {
			devicetest.Run(t, devicetest.Harness{
				Open:  func(t testing.TB, o devicetest.Options) device.Device { return begin(t, open(t, o)) },
				Other: func(t testing.TB) device.Device { return openFake(t, newFake(1), nil) },
				Held: func(d device.Device) devicetest.Held {
					s := d.(*cuda.Device).Stats()
					return devicetest.Held{
						Streams: s.Streams, Events: s.Events, Graphs: s.Graphs, Allocations: s.Allocations, Bytes: s.Bytes,
						Other: s.Modules + s.FaultWords + s.StopWords + s.HostFuncs,
					}
				},
				NilStream: (*cuda.Stream)(nil), NilEvent: (*cuda.Event)(nil),
				Slack: time.Millisecond, Resolution: time.Millisecond,
				Allocates: []string{"all"}, // the simulator itself does
			})
		})
	}
}
