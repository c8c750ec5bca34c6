package memory

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
)

// linked is a device that has atomics with those devices only.
type linked struct {
	device.Device
	with map[string]bool
}

func (l linked) PeerAtomics(uuid string) bool { return l.with[uuid] }

// TestPeerAtomics: signals are atomic operations only if the links to all peers are known to have them.
func TestPeerAtomics(t *testing.T) {
	d := linked{with: map[string]bool{"a": true, "b": true}}
	assert.True(t, peerAtomics(d, []string{"a", "b", "a"}))
	assert.False(t, peerAtomics(d, []string{"a", "b", "c"}))
	assert.False(t, peerAtomics(d, nil), "the devices are not known")
	assert.False(t, peerAtomics(struct{ device.Device }{}, []string{"a"}), "a device that does not know its links")
}
