package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestSlotsAreNotOverrun: a rank that gives messages and waits for none is ahead of a slow reader, and the reader has every message
// unchanged until it has released it, also where the count of runs begins again at 0.
func TestSlotsAreNotOverrun(t *testing.T) {
	for _, first := range []uint32{0, 1, 7} { // in and out of step with the runs at which readers tell
		t.Run(fmt.Sprintf("first=%d", first), func(t *testing.T) { slotsAreNotOverrun(t, first) })
	}
}

func slotsAreNotOverrun(t *testing.T, first uint32) {
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, _ *tensor.Tensor) error {
		spec := collective.Spec{Name: "message", Tensors: []tensor.SymmetricTensor{x}}
		slots := hostSlotsOf(&spec, x.Bytes())
		runs := 4 * slots.count
		spec.FirstEpoch = math.MaxUint32 - runs/2 + first
		var wrong error
		spec.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
			sources, readers := []int{}, []int{1}
			if at.Rank() == 1 {
				sources, readers = []int{0}, nil
			}
			slots.prepare(at, x.Bytes(), sources, readers)
			return func(r *collective.HostRun) error {
				for i := range slots.in {
					slots.in[i] = byte(r.Epoch())
				}
				slot, err := slots.exchange(r)
				if err != nil {
					return err
				}
				if r.Rank() == 1 {
					time.Sleep(time.Millisecond)
					for i, b := range slots.ranks[0][slot] {
						if b != byte(r.Epoch()) && wrong == nil {
							wrong = fmt.Errorf("run %d: byte %d is of run %d", byte(r.Epoch()), i, b)
						}
					}
				}
				slots.release(r)
				return nil
			}, nil
		}
		p, err := collective.New(ctx, m, spec)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		for range runs {
			if err := p.Run(s); err != nil {
				return err
			}
		}
		return errors.Join(s.Synchronize(ctx), wrong, s.Close(), p.Close(ctx))
	})
}

// TestSlotsAreForSmallMessages: what is larger than a slot has none, and the smaller a message is, the more slots there are.
func TestSlotsAreForSmallMessages(t *testing.T) {
	var s collective.Spec
	assert.Nil(t, hostSlotsOf(&s, hostSlotBytes+1))
	assert.Zero(t, s.Workspace)
	for bytes, count := range map[int64]uint32{0: 32, 1: 32, 128: 32, 1024: 32, 1025: 16, 3000: 8, 4096: 8, 4097: 4, hostSlotBytes: 4} {
		x := hostSlotsOf(&s, bytes)
		if assert.NotNil(t, x) {
			assert.Equal(t, count, x.count, "slots of %d bytes", bytes)
			assert.Equal(t, int64(count)*x.stride, s.Workspace, "slots of %d bytes", bytes)
			assert.LessOrEqual(t, s.Workspace, int64(hostSlotsRoom))
		}
	}
}
