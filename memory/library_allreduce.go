package memory

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Place is where something begins: a window, and how many bytes into it.
type Place struct {
	Window *Window
	Offset int64
	Err    error // why there is none: of a rank that comes to a collective call all the same, so that the others are told
}

// PrepareAllReduce prepares the all-reduce called name of the backend's library, of count elements (> 0) at in, with the result at
// out; bytes is their size. Both are in windows of this memory. Collective: it blocks until all ranks have come. ErrUnsupported if the backend
// has no such form; ErrNoRendezvous for no window, ErrNotSymmetric for another memory's, ErrClosed for one that was freed, ErrInvalid for a
// range that is not in its window, and for more elements than there are in it. What one rank fails for is every rank's error.
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
	if err := m.made("PrepareCollective"); err != nil {
		return nil, err
	}
	call := "PrepareAllReduce"
	what := "all-reduce"
	if c.Collective != "" {
		call, what = "PrepareCollective", c.Collective
	}
	ctx, failure := errs.WithContext(call, ctx, nil)
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
		var err error
		switch w := p.Window; {
		case p.Err != nil:
			err = fmt.Errorf("%s: %w", call, p.Err)
		case w == nil:
			err = fmt.Errorf("%s: memory without a window: %w", call, errs.ErrNoRendezvous)
		case w.memory != m:
			err = fmt.Errorf("%s: the window is of another memory: %w", call, errs.ErrNotSymmetric)
		case w.Err() != nil:
			err = fmt.Errorf("%s: %w", call, w.Err())
		case bytes < 0 || p.Offset < 0 || bytes > w.Bytes()-p.Offset:
			err = errs.Invalid(call, "range", fmt.Sprintf("%d bytes at offset %d", bytes, p.Offset), fmt.Sprintf("inside the window of %d bytes", w.Bytes()))
		default:
			most := bytes / shares(c.Collective, m.group.Size())[i] / max(elementBytes(c.DType), 1) // the library says that it has no such type
			if c.Count > most {
				err = errs.Invalid(call, "count", c.Count, fmt.Sprintf("%d at most, elements of %s in %d bytes", most, c.DType, bytes))
			}
		}
		failure = cmp.Or(failure, err)
	}
	return inTurn(ctx, &m.collective, "preparing "+what, func(ctx context.Context, gaveUp error) (backend.PreparedAllReduce, error) {
		// An earlier call, which this one has waited for, may have closed the memory or freed some of it.
		err := m.Closed()
		if failure == nil {
			for _, p := range operands {
				err = cmp.Or(err, p.Window.Err())
			}
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", call, err)
		}
		// The library's own steps are for ranks that come to all of them.
		ctx = group.Heard(ctx)
		if err := m.group.Vote(ctx, "preparing "+what, cmp.Or(gaveUp, failure, err)); err != nil {
			return nil, err
		}
		if operands != nil {
			c.In, c.InOffset, c.Out, c.OutOffset = in.Window.alloc, in.Offset, out.Window.alloc, out.Offset
		}
		return library.PrepareAllReduce(ctx, &c)
	})
}

// shares is how often the count of a collective is in its input, and in its output.
func shares(collective string, size int) [2]int64 {
	n := int64(size)
	switch collective {
	case "all_gather":
		return [2]int64{1, n}
	case "reduce_scatter":
		return [2]int64{n, 1}
	case "all_to_all":
		return [2]int64{n, n}
	}
	return [2]int64{1, 1}
}

// elementBytes is the size of an element of a type, of which the name ends in its bits; 0 if it does not.
func elementBytes(dtype string) int64 {
	bits, _ := strconv.Atoi(strings.TrimLeft(dtype, "abcdefghijklmnopqrstuvwxyz"))
	return int64(bits) / 8
}
