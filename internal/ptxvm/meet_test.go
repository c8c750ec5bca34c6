package ptxvm

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// meet is barriers on streams, before each of which every rank writes to every other, and behind which it reads what they wrote. The next
// round writes other words: what a rank reads behind one barrier, nobody writes before the next but one.
func meet(tb testing.TB, ranks int, hopper bool, c Config, replace func(*Module) *Module) error {
	const rounds = 4
	w := newCrew(tb, ranks, 1, 32, 0, 1<<32-2, c)
	w.replace = replace
	copies := parse(tb, "copy.ptx", copyKernels)
	boxes, seen := make([]uint64, ranks), make([][]byte, ranks)
	at := make([]uint64, ranks)
	for r := range ranks {
		boxes[r] = w.put(r, make([]byte, 2*4*ranks))
		seen[r] = aligned((4*rounds*ranks + 15) / 16 * 16)
		at[r] = w.mapped(r, seen[r])
	}
	word := func(owner, round, writer int) uint64 { return boxes[owner] + uint64(round%2*ranks+writer)*4 }
	for round := range rounds {
		for r, s := range w.streams {
			for q := range ranks {
				require.NoError(tb, s.Launch(Launch{Function: copies.Function("put"), Params: [][]byte{u64(word(q, round, r)), u32(uint32(100*round + r + 1))}}))
			}
			comm := w.comm(r)
			w.launch(r, ptx.Meet(hopper), comm.Bytes())
			for q := range ranks {
				require.NoError(tb, s.Launch(Launch{Function: copies.Function("get"), Params: [][]byte{u64(at[r] + uint64(round*ranks+q)*4), u64(word(r, round, q))}}))
			}
		}
	}
	if err := w.m.Run(); err != nil {
		return err
	}
	for r := range ranks {
		for i := range rounds * ranks {
			if got, want := binary.LittleEndian.Uint32(seen[r][4*i:]), uint32(100*(i/ranks)+i%ranks+1); got != want {
				return fmt.Errorf("rank %d: what rank %d wrote before barrier %d is %d, not %d", r, i%ranks, i/ranks, got, want)
			}
		}
	}
	return nil
}

// TestMeet: a barrier on streams holds up who is early, and what was written before it is seen behind it.
func TestMeet(t *testing.T) {
	for _, ranks := range []int{1, 2, 4, 9} {
		for _, hopper := range []bool{false, true} {
			for seed := range uint64(6) {
				c := Config{Seed: seed, Weak: seed%2 == 0, MaxSteps: 1 << 26}
				require.NoError(t, meet(t, ranks, hopper, c, nil), "%d ranks, hopper %v, seed %d", ranks, hopper, seed)
			}
		}
	}
}

// TestMeetBites: without the wait for the launch before it, what that wrote may come after the flags. The rest is for threads that give up, or said
// by the ends of launches as well.
func TestMeetBites(t *testing.T) {
	known := map[string]string{
		"meet: bar.red.and.pred (0)":          deadLater,
		"meet: ld.acquire.sys.global.u32 (0)": launchEnds,
		"meet: bar.red.and.pred (1)":          "it tells all threads that one has given up; the launch ends when all have what they waited for",
		"meet: bar.red.and.pred (2)":          barrierTwin,
	}
	var subjects []subject
	for _, hopper := range []bool{false, true} {
		attempts := []attempt{func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			return meet(tb, 3, hopper, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()}, replace)
		}}
		subjects = append(subjects, subject{ptx.Meet(hopper), "meet", attempts})
	}
	bite(t, subjects, 64, known)
}
