package collective

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/ptxvm"
	"github.com/symmem/symmem/kernels/ptx"
	_ "github.com/symmem/symmem/kernels/ptx/images"
)

// simulated is ranks with a simulated GPU each, of so many multiprocessors that hold so many blocks, and plans on them: each plan is launches of a kernel of three
// barriers across the ranks.
type simulated struct {
	t       *testing.T
	machine *ptxvm.Machine
	kernel  *ptxvm.Function
	memory  *ptxvm.Memory
	ranks   int
	plans   int
	records [][][]byte // of each plan and rank
}

func aligned16(n int) []byte {
	words := make([][2]uint64, (n+15)/16)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*16)
}

func newSimulated(t *testing.T, ranks, processors, each int, seed uint64) *simulated {
	text, err := ptx.Image(ptx.Pull(false).File)
	require.NoError(t, err)
	module, err := ptxvm.Parse(ptx.Pull(false).File, text)
	require.NoError(t, err)
	s := &simulated{t: t, memory: ptxvm.NewMemory(), kernel: module.Function(ptx.Pull(false).Name), ranks: ranks}
	s.machine = ptxvm.New(s.memory, ptxvm.Config{Seed: seed, Hangs: true, Turn: 50, MaxSteps: 1 << 26})
	for r := range ranks {
		s.machine.Limit(r, ptxvm.Limits{Multiprocessors: processors, Blocks: each})
	}
	return s
}

// plan is one more, of so many blocks. It gives what launches it on a rank's stream.
func (s *simulated) plan(blocks int) func(stream *ptxvm.Stream, rank int) {
	s.plans++
	comm := ptx.Comm{Version: ptx.CommVersion, World: uint32(s.ranks), Timeout: math.MaxUint64 / 2}
	base := func(rank int) uint64 { return uint64(s.plans)<<40 + uint64(rank+1)<<32 }
	var records [][]byte
	for r := range s.ranks {
		b := aligned16(int(ptx.ControlBytes(blocks, s.ranks)) + 64)
		require.NoError(s.t, s.memory.Map(base(r), b))
		comm.Workspace[r] = base(r)
		records = append(records, b)
	}
	s.records = append(s.records, records)
	words := uint64(ptx.ControlBytes(blocks, s.ranks))
	none := make([]byte, unsafe.Sizeof(ptx.Pieces{}))
	binary.LittleEndian.PutUint32(none[16:], 2) // phases
	return func(stream *ptxvm.Stream, rank int) {
		c := comm
		c.Rank, c.Dead, c.Fault = uint32(rank), comm.Workspace[rank]+words, comm.Workspace[rank]+words+16
		require.NoError(s.t, stream.Launch(ptxvm.Launch{
			Function: s.kernel, Grid: [3]uint32{uint32(blocks)}, Block: [3]uint32{2}, Params: [][]byte{c.Bytes(), none},
		}))
	}
}

// run launches each plan so often on a stream of its own, the ranks in different orders, and says what came of it.
func (s *simulated) run(launches int, plans ...func(*ptxvm.Stream, int)) error {
	for r := range s.ranks {
		streams := make([]*ptxvm.Stream, len(plans))
		for k := range plans {
			streams[k] = s.machine.NewStream(r)
			// On every rank another plan is far ahead of the others.
			streams[k].Pause(uint64((k+r*len(plans)/s.ranks)%len(plans)) * 20_000)
		}
		for range launches {
			for k, p := range plans {
				p(streams[k], r)
			}
		}
	}
	if err := s.machine.Run(); err != nil {
		return err
	}
	for k, records := range s.records {
		for r, b := range records {
			if epoch := binary.LittleEndian.Uint32(b); epoch != uint32(launches) {
				return fmt.Errorf("plan %d, rank %d: %d launches have ended", k, r, epoch)
			}
		}
	}
	return nil
}

// TestRoomIsEnough: plans of as many blocks as they may have never hang, on devices that hold no more than they do, whichever of two comes first on which rank; plans
// that a RoomError would be of, and one that a device does not hold, do: which is why they are refused. The kernel is the module's own, in a machine that runs PTX.
func TestRoomIsEnough(t *testing.T) {
	for _, c := range []struct{ processors, each int }{{4, 4}, {8, 2}, {3, 1}} {
		resident := c.processors * c.each
		blocks := mostBlocks(resident, c.processors, 1, plansAtOnce)
		require.LessOrEqual(t, float64(plansAtOnce*blocks)/float64(resident), capacity(c.processors))
		for seed := range uint64(6) {
			s := newSimulated(t, 2, c.processors, c.each, seed)
			require.NoError(t, s.run(2, s.plan(blocks), s.plan(blocks)), "%+v, seed %d", c, seed)
			// A third plan of a part of the size, while the sum is what all may take.
			if left := int(capacity(c.processors)*float64(resident)) - blocks; left > 1 {
				s = newSimulated(t, 2, c.processors, c.each, seed)
				require.NoError(t, s.run(2, s.plan(blocks), s.plan(left/2), s.plan(left-left/2)), "%+v, seed %d", c, seed)
			}
		}
	}

	// An exclusive plan, and of what it leaves what all may take together, in the hands of two others.
	for _, c := range []struct{ processors, each int }{{4, 4}, {8, 2}, {64, 2}} {
		resident := c.processors * c.each
		blocks := mostBlocks(resident, c.processors, 1, 1)
		require.LessOrEqual(t, float64(blocks)/float64(resident), capacity(c.processors))
		left := int(capacity(c.processors)*float64(resident)) - blocks
		require.Positive(t, left)
		for seed := range uint64(3) {
			s := newSimulated(t, 2, c.processors, c.each, seed)
			plans := []func(*ptxvm.Stream, int){s.plan(blocks), s.plan((left + 1) / 2)}
			if left > 1 {
				plans = append(plans, s.plan(left/2))
			}
			require.NoError(t, s.run(2, plans...), "%+v, seed %d", c, seed)
		}
	}

	// Eight of half a device each: what RoomError is for.
	const processors, each = 4, 4
	blocks := mostBlocks(processors*each, processors, 1, plansAtOnce)
	takes := float64(blocks) / float64(processors*each)
	require.Greater(t, 3*takes, capacity(processors))
	hung := 0
	for seed := range uint64(6) {
		s := newSimulated(t, 3, processors, each, seed)
		var plans []func(*ptxvm.Stream, int)
		for range 8 {
			plans = append(plans, s.plan(blocks))
		}
		if err := s.run(2, plans...); err != nil {
			hung++
			require.ErrorIs(t, err, ptxvm.ErrDeadlock)
			require.ErrorContains(t, err, "wait for room on the device")
		}
	}
	require.Positive(t, hung, "eight plans of half a device each")

	// Two that take all of it each.
	hung = 0
	for seed := range uint64(6) {
		s := newSimulated(t, 2, processors, each, seed)
		if err := s.run(1, s.plan(processors*each), s.plan(processors*each)); err != nil {
			hung++
			require.ErrorIs(t, err, ptxvm.ErrDeadlock)
		}
	}
	require.Positive(t, hung, "two plans of a whole device each")
}
