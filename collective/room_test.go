package collective

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
)

// TestMostBlocks: whatever a kernel needs, two plans of every rank on a device fit it, and something is left.
func TestMostBlocks(t *testing.T) {
	for _, processors := range []int{1, 2, 16, 108, 132, 148} {
		for _, perProcessor := range []int{1, 2, 3, 4, 8, 16} {
			for ranks := 1; ranks <= 8; ranks++ {
				for _, early := range []bool{false, true} {
					resident := processors * perProcessor
					n := mostBlocks(resident, processors, ranks, early)
					require.Positive(t, n)
					there := n * ranks * plansAtOnce
					if early {
						there *= 2
					}
					if n > 1 {
						assert.Less(t, there, resident, "%d multiprocessors, %d blocks on each, %d ranks", processors, perProcessor, ranks)
					}
				}
			}
		}
	}
	assert.Equal(t, 128, mostBlocks(264, 132, 1, false))
	assert.Equal(t, 64, mostBlocks(264, 132, 1, true))
	assert.Equal(t, 32, mostBlocks(264, 132, 4, false))
}

// namedStream is a stream that is only a name.
type namedStream struct {
	device.Stream
	closed bool
}

func (s *namedStream) Capturing() bool { return false }

func (s *namedStream) Query() (bool, error) {
	if s.closed {
		return false, errs.ErrClosed
	}
	return true, nil
}

// TestTenants: plans count on the stream they are on, the largest of each; on streams that are closed they do not count.
func TestTenants(t *testing.T) {
	s := []*namedStream{{}, {}, {}}
	over := false
	plan := func(takes float64) *tenant {
		return &tenant{device: t.Name(), takes: takes, most: 0.9, over: func() bool { return over }}
	}
	a, b, c, small := plan(0.45), plan(0.45), plan(0.45), plan(0.1)
	elsewhere := &tenant{device: "another " + t.Name(), takes: 0.9, most: 0.9}
	var nothing *tenant
	require.NoError(t, nothing.move(s[0]))
	nothing.leave()

	require.NoError(t, elsewhere.move(s[2]))
	defer elsewhere.leave()
	require.NoError(t, a.move(s[0]))
	require.NoError(t, b.move(s[1]))
	require.NoError(t, c.move(s[1]), "behind another plan of its stream")
	require.NoError(t, a.move(s[0]), "again")
	err := small.move(s[2])
	require.ErrorIs(t, err, errs.ErrNoRoom)
	assert.Equal(t, &RoomError{Takes: 0.1, Taken: 0.9, Most: 0.9, Streams: 2}, err)
	assert.Contains(t, err.Error(), "MaxBlocks")

	require.NoError(t, b.move(s[0]))
	require.ErrorIs(t, small.move(s[2]), errs.ErrNoRoom, "the other plan of the stream is still there")
	c.leave()
	require.NoError(t, small.move(s[2]))

	require.NoError(t, b.move(s[0]))
	require.ErrorIs(t, c.move(s[1]), errs.ErrNoRoom)
	s[2].closed = true
	require.NoError(t, c.move(s[1]), "what was on the closed stream has ended")
	over = true
	require.NoError(t, plan(0.9).move(&namedStream{}), "what was in memory that is closed has ended")
	over = false
	for p := range tenants.of[t.Name()] {
		p.leave()
	}
	assert.NotContains(t, tenants.of, t.Name(), "nothing is left behind")
	huge := plan(2)
	require.NoError(t, huge.move(s[0]), "alone, a plan always runs")
	huge.leave()
}

// TestAgree: the launch is the same whoever works it out, and fits the least of the devices, however ranks share them.
func TestAgree(t *testing.T) {
	large := cudaOffer{Processors: 132, Resident: [...]int{1056, 528}}
	small := cudaOffer{Processors: 16, Resident: [...]int{128, 64}}
	offers := func(devices string, of map[rune]cudaOffer) []memory.WorkspaceOffer {
		var all []memory.WorkspaceOffer
		for _, d := range devices {
			blob, err := json.Marshal(of[d])
			require.NoError(t, err)
			all = append(all, memory.WorkspaceOffer{Device: string(d), Offer: blob})
		}
		return all
	}
	of := map[rune]cudaOffer{'a': large, 'b': large, 's': small, 'n': {Processors: 132}, 't': {Processors: 1, Resident: [...]int{2, 1}}}
	for _, c := range []struct {
		devices      string
		bytes        int64
		alg          Algorithm
		most, blocks int
		early        bool
	}{
		{"ab", 64 << 20, TwoShotFlow, 0, 256, false},
		{"ab", 64 << 20, TwoShotFlow, 7, 7, true},
		{"ab", 1 << 20, OneShotPush, 0, 256, false},
		{"ab", 512 << 10, OneShotPush, 0, 128, true},
		{"ab", 64 << 10, OneShotPush, 0, 32, true},
		{"aabb", 64 << 20, TwoShotFlow, 0, 128, false},
		{"aaaaaaaa", 64 << 20, TwoShotFlow, 0, 32, false},
		{"as", 64 << 20, TwoShotFlow, 0, 30, false},
	} {
		all := offers(c.devices, of)
		g, early, err := agreeLaunch(c.alg, c.bytes, c.most, all)
		require.NoError(t, err, "%+v", c)
		assert.Equal(t, c.blocks, g.blocks, "%+v", c)
		assert.Equal(t, c.early, early, "%+v", c)
	}
	_, _, err := agreeLaunch(TwoShotFlow, 64<<20, 0, offers("an", of))
	require.ErrorIs(t, err, ErrInvalid)
	assert.Contains(t, err.Error(), "rank 1")
	_, _, err = agreeLaunch(TwoShotFlow, 64<<20, 0, offers("att", of))
	require.ErrorIs(t, err, ErrInvalid, "one block of each of two ranks where one runs at a time")
	assert.Contains(t, err.Error(), "which 2 ranks share")
	_, _, err = agreeLaunch(TwoShotFlow, 64<<20, 0, []memory.WorkspaceOffer{{Device: "a", Offer: []byte("{")}, {}})
	require.ErrorContains(t, err, "rank 0")
}
