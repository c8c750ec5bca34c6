package collective

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// TestMostBlocks: whatever a kernel needs, two plans of every rank on a device fit it, and something is left.
func TestMostBlocks(t *testing.T) {
	for _, processors := range []int{1, 2, 16, 108, 132, 148} {
		for _, perProcessor := range []int{1, 2, 3, 4, 8, 16} {
			for ranks := 1; ranks <= 8; ranks++ {
				resident := processors * perProcessor
				for plans := 1; plans <= plansAtOnce; plans++ {
					n := mostBlocks(resident, processors, ranks, plans)
					require.Positive(t, n)
					if n > 1 {
						assert.Less(t, n*ranks*plans, resident, "%d multiprocessors, %d blocks on each, %d ranks", processors, perProcessor, ranks)
					}
				}
			}
		}
	}
	assert.Equal(t, 128, mostBlocks(264, 132, 1, 2))
	assert.Equal(t, 32, mostBlocks(264, 132, 4, 2))
	assert.Equal(t, 256, mostBlocks(264, 132, 1, 1))
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

// TestTenantsOfRanks: where ranks of a process share a device, each counts its own plans alone, since what it counts for one is what all of them take. So none
// is refused because another was there first.
func TestTenantsOfRanks(t *testing.T) {
	plan := func(rank int, shared bool) *tenant {
		return &tenant{device: t.Name(), rank: rank, shared: shared, takes: 0.45, most: 0.9, over: func() bool { return false }}
	}
	var all []*tenant
	for round := range 3 {
		for rank := range 2 {
			p := plan(rank, true)
			err := p.move(&namedStream{})
			if round == 2 {
				require.Equal(t, &RoomError{Takes: 0.45, Taken: 0.9, Most: 0.9, Streams: 2}, err, "rank %d", rank)
			} else {
				require.NoError(t, err, "rank %d", rank)
				all = append(all, p)
			}
		}
	}
	require.ErrorIs(t, plan(2, false).move(&namedStream{}), errs.ErrNoRoom, "alone on the device as far as its group knows: whatever is there counts")
	for _, p := range all {
		p.leave()
	}
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
	large := plan(0.9)
	require.NoError(t, large.move(&namedStream{}), "what was in memory that is closed has ended")
	over = false
	require.ErrorIs(t, c.move(s[1]), errs.ErrNoRoom, "memory that is kept after all has plans that count")
	large.leave()
	require.NoError(t, c.move(s[1]))
	for p := range tenants.of[t.Name()] {
		p.leave()
	}
	assert.NotContains(t, tenants.of, t.Name(), "nothing is left behind")
	huge := plan(2)
	require.NoError(t, huge.move(s[0]), "alone, a plan always runs")
	huge.leave()
}
