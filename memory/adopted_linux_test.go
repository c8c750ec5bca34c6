package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// adopter is the host backend, and adopts any memory, which only this rank reaches.
type adopter struct{ *host.Backend }

func (b adopter) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.Register = true
	return c
}

func (b adopter) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	return &adoption{p, bytes}, nil
}

type adoption struct {
	ptr   device.Ptr
	bytes int64
}

func (a *adoption) Ptr() device.Ptr               { return a.ptr }
func (a *adoption) Bytes() int64                  { return a.bytes }
func (a *adoption) RoundedBytes() int64           { return a.bytes }
func (a *adoption) Release(context.Context) error { return nil }

// TestAdoptedInParts: memory of which parts are adopted too is put from as a whole, also behind the parts and when they are freed, in whatever order it was adopted.
func TestAdoptedInParts(t *testing.T) {
	const size = 4096
	parts := [][2]int64{{0, size}, {0, 64}, {1024, 512}, {1024, 64}, {size - 8, 8}} // offset and bytes
	for first := range parts {
		backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			return backendtest.WithMemory(ctx, g, adopter{near}, func(m *memory.Memory) error {
				d := m.Device()
				p, err := d.Alloc(size)
				if err != nil {
					return err
				}
				var adopted []backend.Allocation
				for k := range parts {
					x := parts[(first+k)%len(parts)]
					a, err := m.Register(ctx, p.Add(x[0]), x[1], "")
					if err != nil {
						return err
					}
					adopted = append(adopted, a)
				}
				err = backendtest.WithWindow(ctx, m, size, func(w *memory.Window) error { return putParts(ctx, m, w, p, size) })
				for _, a := range adopted {
					if a.Bytes() < size {
						err = errors.Join(err, m.Free(ctx, a))
					}
				}
				err = errors.Join(err, backendtest.WithWindow(ctx, m, size, func(w *memory.Window) error { return putParts(ctx, m, w, p, size) }))
				for _, a := range adopted {
					if a.Bytes() == size {
						err = errors.Join(err, m.Free(ctx, a))
					}
				}
				return errors.Join(err, d.Free(p))
			})
		}))
	}
}

// putParts puts parts of size bytes at p, which are adopted, to a window of this rank alone, and finds each.
func putParts(ctx context.Context, m *memory.Memory, w *memory.Window, p device.Ptr, size int64) error {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	for _, x := range [][2]int64{{0, size}, {0, 65}, {63, 2}, {64, 1}, {1024, 513}, {1088, 449}, {1536, 100}, {size - 9, 9}, {size - 1, 1}} {
		at, bytes := p.Add(x[0]), x[1]
		if err := m.Copy(s, backend.Write, 0, w, x[0], at, bytes); err != nil {
			return fmt.Errorf("%d bytes at %d: %w", bytes, x[0], err)
		}
		a, _, offset, err := m.Find(at)
		if err != nil || a.Ptr().Add(offset) != at || offset >= a.Bytes() {
			return fmt.Errorf("what is at %d: %w", x[0], err)
		}
		if err := m.Copy(s, backend.Write, 0, w, 0, at, size-x[0]+1); !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("a byte too many at %d: %w", x[0], err)
		}
	}
	if _, _, _, err := m.Find(p.Add(size)); !errors.Is(err, errs.ErrNotSymmetric) {
		return fmt.Errorf("what is behind: %w", err)
	}
	return errors.Join(s.Synchronize(ctx), s.Close())
}

// together is a backend whose allocations are collective.
type together struct{ adopter }

func (b together) Capabilities() backend.Capabilities {
	c := b.adopter.Capabilities()
	c.CollectiveAllocate = true
	return c
}

// TestEmptyIsLocal: a tensor without elements of the caller's memory waits for nobody, also where allocations are collective and a rank makes it before one, and another rank behind it.
func TestEmptyIsLocal(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, together{adopter{near}}, func(m *memory.Memory) error {
			var none, some *tensor.Tensor
			adopt := func() (err error) { none, err = tensor.FromPtr(ctx, m, 0, tensor.Float32, 0); return err }
			zeros := func() (err error) { some, err = tensor.Zeros(ctx, m, tensor.Float32, 4); return err }
			first, second := adopt, zeros
			if g.Rank() == 1 {
				first, second = zeros, adopt
			}
			if err := errors.Join(first(), second()); err != nil {
				return err
			}
			if err := errors.Join(none.Rendezvous(ctx), some.Rendezvous(ctx)); err != nil {
				return err
			}
			return errors.Join(none.Close(ctx), some.Close(ctx))
		})
	}))
}
