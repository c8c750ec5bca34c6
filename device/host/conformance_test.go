package host_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/devicetest"
	"github.com/symmem/symmem/device/host"
)

func TestConformance(t *testing.T) {
	devicetest.Run(t, devicetest.Harness{
		Open: func(t testing.TB, o devicetest.Options) device.Device {
			return open(t, &host.Options{WaitTimeout: o.WaitTimeout, Err: o.Err})
		},
		Held: func(d device.Device) devicetest.Held {
			s := d.(*host.Device).Stats()
			return devicetest.Held{
				Streams: s.Streams, Events: s.Events, Graphs: s.Graphs, Allocations: s.Allocations, Bytes: s.Bytes, Other: s.Mappings,
			}
		},
		NilStream: (*host.Stream)(nil),
		NilEvent:  (*host.Event)(nil),
		Fast:      true,
	})
}

func TestStatsCountEachKind(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	newEvent(t, d)
	alloc(t, d, 100)
	_, err := d.Map(make([]byte, 8))
	assert.NoError(t, err)
	capture(t, s, func() {})
	assert.Equal(t, host.Stats{Streams: 1, Events: 1, Graphs: 1, Allocations: 1, Mappings: 1, Bytes: 100}, d.Stats())
}
