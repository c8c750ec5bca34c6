package memory

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
)

// Place is where something begins: a window, and how many bytes into it.
type Place struct {
	Window *Window
	Offset int64
}

// PrepareAllReduce prepares the all-reduce called name of the backend's library, of count elements (> 0) at in, with the result at
// out; bytes is their size. Both are in windows of this memory. Collective: it blocks until all ranks have come. ErrUnsupported if the backend
// has no such form; ErrNoRendezvous for no window, ErrNotSymmetric for another memory's, ErrClosed for one that was freed, ErrInvalid for a
// range that is not in its window.
func (m *Memory) PrepareAllReduce(ctx context.Context, name string, in, out Place, count, bytes int64, dtype, op string) (backend.PreparedAllReduce, error) {
	const call = "PrepareAllReduce"
	library, ok := m.backend.(backend.AllReducer)
	if !ok {
		return nil, fmt.Errorf("backend %s has no all-reduce called %s: %w", m.backend.Name(), name, errs.ErrUnsupported)
	}
	for _, p := range []Place{in, out} {
		switch w := p.Window; {
		case w == nil:
			return nil, fmt.Errorf("%s: memory without a window: %w", call, errs.ErrNoRendezvous)
		case w.memory != m:
			return nil, fmt.Errorf("%s: the window is of another memory: %w", call, errs.ErrNotSymmetric)
		case w.Err() != nil:
			return nil, fmt.Errorf("%s: %w", call, w.Err())
		case bytes < 0 || p.Offset < 0 || bytes > w.Bytes()-p.Offset:
			return nil, errs.Invalid(call, "range", fmt.Sprintf("%d bytes at offset %d", bytes, p.Offset), fmt.Sprintf("inside the window of %d bytes", w.Bytes()))
		}
	}
	m.collective.Lock()
	defer m.collective.Unlock()
	return library.PrepareAllReduce(ctx, &backend.AllReduce{Name: name, In: in.Window.alloc, InOffset: in.Offset, Out: out.Window.alloc, OutOffset: out.Offset,
		Count: count, DType: dtype, Op: op})
}
