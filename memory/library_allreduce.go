package memory

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// PrepareAllReduce prepares the all-reduce called name of the backend's library, of count elements (> 0) at in, with the result at
// out; bytes is their size. Both are inside windows of this memory. Collective. ErrUnsupported if the backend has no such form.
func (m *Memory) PrepareAllReduce(ctx context.Context, name string, in, out device.Ptr, count, bytes int64, dtype, op string) (backend.PreparedAllReduce, error) {
	library, ok := m.backend.(backend.AllReducer)
	if !ok {
		return nil, fmt.Errorf("backend %s has no all-reduce called %s: %w", m.backend.Name(), name, errs.ErrUnsupported)
	}
	r := &backend.AllReduce{Name: name, Count: count, DType: dtype, Op: op}
	for _, place := range []struct {
		p      device.Ptr
		alloc  *backend.Allocation
		offset *int64
	}{{in, &r.In, &r.InOffset}, {out, &r.Out, &r.OutOffset}} {
		a, w, offset, err := m.Find(place.p)
		if err != nil {
			return nil, err
		}
		if w == nil {
			return nil, fmt.Errorf("memory at %s: %w", place.p, errs.ErrNoRendezvous)
		}
		if bytes > a.Bytes()-offset {
			return nil, fmt.Errorf("%d bytes at %s do not fit into their allocation: %w", bytes, place.p, errs.ErrInvalid)
		}
		*place.alloc, *place.offset = a, offset
	}
	m.collective.Lock()
	defer m.collective.Unlock()
	return library.PrepareAllReduce(ctx, r)
}
