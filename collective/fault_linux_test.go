package collective

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// faultWord is one in which a kernel has written.
type faultWord struct {
	device.FaultWord
	word uint64
}

func (f faultWord) Load() uint64 { return f.word }

// counted counts launches.
type counted struct {
	device.PreparedLaunch
	n int
}

func (c *counted) Launch(device.Stream) error { c.n++; return nil }

// TestNothingIsRecordedAfterFault: a kernel that has given up is not recorded any more, as it is not launched; a recorded run is asked for
// by its stream, and does not count.
func TestNothingIsRecordedAfterFault(t *testing.T) {
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	b, err := host.New(groups[0], nil)
	require.NoError(t, err)
	p := &Plan{name: "fault", memory: memory.New(b, groups[0], nil), size: 1, spec: Spec{CUDA: &Kernel{}}}
	launch := &counted{}
	w := &kernelWork{plan: p, blocks: 1, launch: launch}
	p.held.fault = faultWord{}
	require.NoError(t, w.enqueue(nil, false))
	require.NoError(t, w.enqueue(nil, true))
	require.Equal(t, 2, launch.n)
	require.Equal(t, uint32(1), w.enqueued.Load())
	require.True(t, w.captured.Load())

	p.held.fault = faultWord{word: ptx.FaultTimeout << 56}
	for _, recorded := range []bool{false, true} {
		err := w.enqueue(nil, recorded)
		_, ok := errors.AsType[*device.WaitError](err)
		require.True(t, ok, "%v", err)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	require.Equal(t, 2, launch.n)
	require.ErrorIs(t, p.Err(), os.ErrDeadlineExceeded)
	require.NoError(t, p.memory.Close(t.Context()))
	require.NoError(t, groups[0].Close(t.Context()))
}

// TestClosedWorkFailsWithoutItsWord: what a stream has cut off is polled to its end, and may fail when the plan has been closed. The word that kernels looked at is memory of somebody
// else's then.
func TestClosedWorkFailsWithoutItsWord(t *testing.T) {
	var word uint32
	w := &programWork{plan: &Plan{name: "cut off"}, failed: &word}
	require.NoError(t, w.close())
	require.ErrorIs(t, w.fail(os.ErrDeadlineExceeded), os.ErrDeadlineExceeded)
	require.Zero(t, word)
}
