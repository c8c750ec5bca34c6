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
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, _ *tensor.Tensor) error {
		const runs = 5 * hostSlots
		spec := collective.Spec{Name: "message", Tensors: []tensor.SymmetricTensor{x}, FirstEpoch: math.MaxUint32 - runs/2}
		slots := hostSlotsOf(&spec, x.Bytes())
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
					time.Sleep(2 * time.Millisecond)
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

// TestSlotsAreForSmallMessages: what is larger than a slot has none.
func TestSlotsAreForSmallMessages(t *testing.T) {
	var s collective.Spec
	assert.Nil(t, hostSlotsOf(&s, hostSlotBytes+1))
	assert.Zero(t, s.Workspace)
	assert.NotNil(t, hostSlotsOf(&s, hostSlotBytes))
	assert.Equal(t, int64(hostSlots*hostSlotBytes), s.Workspace)
}
