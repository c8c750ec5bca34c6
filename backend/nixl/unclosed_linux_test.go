package nixl

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestTransfersThatAreNotClosed: the library ends an agent only when all its requests were released. So the memory that is closed releases those of
// transfers that nobody has closed, whose Close is harmless after it.
func TestTransfersThatAreNotClosed(t *testing.T) {
	fakes := &network{}
	transfers := make([]*memory.Transfer, 4)
	onFakes(t, fakes, 2, Options{}, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		a, err := m.Allocate(ctx, 256, "")
		if err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		for i, op := range []backend.TransferOp{backend.Write, backend.Read} {
			x, err := m.PrepareTransfer(op, 1-me, []memory.TransferBlock{{Local: a.Ptr(), Window: w, Offset: 128, Bytes: 64}})
			if err != nil {
				return err
			}
			transfers[2*me+i] = x
		}
		return errors.Join(transfers[2*me].Post(s), transfers[2*me].Wait(ctx), s.Close(), m.Free(ctx, a)) // the other is never posted
	})
	for name, e := range fakes.engines {
		assert.True(t, e.closed && e.requests == 0, fmt.Sprintf("%s: closed %t with %d requests", name, e.closed, e.requests))
	}
	for _, x := range transfers {
		if err := x.Close(); err != nil { // of the device
			assert.ErrorIs(t, err, errs.ErrClosed)
		}
	}
}
