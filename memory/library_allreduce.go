package memory

import (
	"cmp"
	"context"
	"errors"
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
	return m.PrepareCollective(ctx, in, out, bytes, bytes, backend.AllReduce{Name: name, Count: count, DType: dtype, Op: op})
}

// LibraryCollective is what is asked of the backend's library.
type LibraryCollective = backend.AllReduce

// LibraryCall is one call of what is asked for in parts.
type LibraryCall = backend.Call

// PrepareCollective is PrepareAllReduce for any collective of a library: c says which, without its operands, of which the input is inBytes at in, and
// the output outBytes at out. A "barrier" has none, and nor have collectives in parts, whose calls bring their own.
func (m *Memory) PrepareCollective(ctx context.Context, in, out Place, inBytes, outBytes int64, c LibraryCollective) (backend.PreparedAllReduce, error) {
	call := "PrepareAllReduce"
	what := "all-reduce"
	if c.Collective != "" {
		call, what = "PrepareCollective", c.Collective
	}
	if err := errs.Given(call, "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	library, ok := m.backend.(backend.AllReducer)
	if !ok {
		return nil, fmt.Errorf("backend %s has no %s called %s: %w", m.backend.Name(), what, c.Name, errs.ErrUnsupported)
	}
	operands := []Place{in, out}
	if c.Collective == "barrier" || c.Parts != nil {
		operands = nil
	}
	for i, p := range operands {
		bytes := []int64{inBytes, outBytes}[i]
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
	if operands != nil {
		c.In, c.InOffset, c.Out, c.OutOffset = in.Window.alloc, in.Offset, out.Window.alloc, out.Offset
	}
	return inTurn(ctx, &m.collective, "preparing "+what, func(ctx context.Context, gaveUp error) (backend.PreparedAllReduce, error) {
		// An earlier call, which this one has waited for, may have closed the memory or freed some of it.
		err := m.Closed()
		for _, p := range operands {
			err = cmp.Or(err, p.Window.Err())
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", call, err)
		}
		p, err := library.PrepareAllReduce(ctx, &c)
		if gaveUp != nil && err == nil {
			return nil, errors.Join(gaveUp, p.Close()) // the caller tells the others, as of every failure here
		}
		return p, err
	})
}
