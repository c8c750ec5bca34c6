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
)

// casting is a backend whose windows can have multicast addresses, which nobody uses.
type casting struct {
	backend.Backend
	none bool  // there can be none
	fail error // of the next EnableMulticast
	made int
}

func (b *casting) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	if c.Multicast = !b.none; b.none {
		c.Why = map[string]string{"multicast": "the switch is out of order"}
	}
	return c
}

func (b *casting) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.Backend.Rendezvous(ctx, a)
	return &castingMapping{m, b}, err
}

type castingMapping struct {
	backend.Mapping
	backend *casting
}

const castBase device.Ptr = 1 << 60

func (m *castingMapping) EnableMulticast(context.Context) (device.Ptr, error) {
	b := m.backend
	b.made++
	if err := b.fail; err != nil {
		b.fail = nil
		return 0, err
	}
	return castBase.Add(int64(b.made) << 20), nil
}

// onCasting runs f on two ranks whose backend has multicast.
func onCasting(t *testing.T, f func(ctx context.Context, b *casting, m *memory.Memory) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &casting{Backend: near}
		m := memory.New(b, g, &memory.Options{Channels: 2})
		if err := f(ctx, b, m); err != nil {
			g.Abort("the test has failed") // the other rank may be waiting
			return errors.Join(err, m.Close(ctx))
		}
		return m.Close(ctx)
	}))
}

// castAt fails unless the byte at offset of w has the multicast address want, or the error.
func castAt(w *memory.Window, offset int64, want device.Ptr, wantErr error) error {
	p, err := w.Multicast(offset)
	if p != want || !errors.Is(err, wantErr) {
		return fmt.Errorf("byte %d of a window of %d bytes has multicast address %s and not %s: %w", offset, w.Bytes(), p, want, err)
	}
	return nil
}

// TestMulticastAddresses: a window has an address once it was asked for, from its first byte to its end, and for as long as it lives. What
// failed says why until it works.
func TestMulticastAddresses(t *testing.T) {
	onCasting(t, func(ctx context.Context, b *casting, m *memory.Memory) error {
		var freed *memory.Window
		err := backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error {
			freed = w
			if err := castAt(w, 0, 0, errs.ErrNoMulticast); err != nil {
				return err
			}
			b.fail = errs.ErrNoMemory
			if err := m.EnableMulticast(ctx, w, nil); !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("no objects are left: %w", err)
			}
			if err := castAt(w, 0, 0, errs.ErrNoMemory); err != nil {
				return err
			}
			for range 2 {
				if err := m.EnableMulticast(ctx, w, nil); err != nil {
					return err
				}
			}
			if b.made != 2 {
				return fmt.Errorf("the backend was asked %d times", b.made)
			}
			base := castBase.Add(2 << 20)
			return errors.Join(castAt(w, 0, base, nil), castAt(w, 8, base.Add(8), nil), castAt(w, 4096, base.Add(4096), nil),
				castAt(w, 4097, 0, errs.ErrInvalid), castAt(w, -1, 0, errs.ErrInvalid))
		})
		if err != nil {
			return err
		}
		if err := m.EnableMulticast(ctx, freed, nil); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a freed window: %w", err)
		}
		if err := castAt(freed, 0, 0, errs.ErrClosed); err != nil {
			return err
		}
		made := b.made
		return backendtest.WithWindow(ctx, m, 0, func(w *memory.Window) error {
			for range 2 {
				if err := castAt(w, 0, 0, nil); err != nil {
					return err
				}
				if err := m.EnableMulticast(ctx, w, nil); err != nil || b.made != made {
					return fmt.Errorf("an empty window: %w", err)
				}
			}
			return nil
		})
	})
}

// TestMulticastIsAgreed: ranks that come with different windows, of which one has none, or of which one has the address already while
// another does not, are all told; so they are where a backend has no multicast, which is not asked then.
func TestMulticastIsAgreed(t *testing.T) {
	onCasting(t, func(ctx context.Context, b *casting, m *memory.Memory) error {
		first := m.Group().Rank() == 0
		return backendtest.WithWindow(ctx, m, 4096, func(one *memory.Window) error {
			return backendtest.WithWindow(ctx, m, 4096, func(two *memory.Window) error {
				mine := one
				if first {
					mine = two
				}
				if err := m.EnableMulticast(ctx, mine, nil); !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("different windows: %w", err)
				}
				if mine = one; first {
					mine = nil
				}
				err := m.EnableMulticast(ctx, mine, nil)
				if vote, ok := errors.AsType[*group.VoteError](err); !ok || len(vote.Failures) != 1 || !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("no window on rank 0: %w", err)
				}
				var failure error
				if first {
					failure = errBroken
				}
				err = m.EnableMulticast(ctx, mine, failure)
				if _, ok := errors.AsType[*group.VoteError](err); !ok || errors.Is(err, errBroken) != first {
					return fmt.Errorf("rank 0 knows that it cannot: %w", err)
				}
				if b.made != 0 {
					return fmt.Errorf("the backend was asked %d times", b.made)
				}
				if first { // whose context has ended in the backend's last step, say
					b.fail = context.DeadlineExceeded
				}
				if err := m.EnableMulticast(ctx, one, nil); errors.Is(err, context.DeadlineExceeded) != first || err != nil != first {
					return fmt.Errorf("only rank 0 fails: %w", err)
				}
				if err := m.EnableMulticast(ctx, one, nil); !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("a window that has multicast on rank 1 only: %w", err)
				}
				made := b.made
				b.none = true
				if err := m.EnableMulticast(ctx, two, nil); !errors.Is(err, errs.ErrUnsupported) || b.made != made {
					return fmt.Errorf("a backend that has no multicast any more: %w", err)
				}
				return castAt(two, 0, 0, errs.ErrUnsupported)
			})
		})
	})
}

// TestMulticastOfAnotherMemory: the window is one of the memory that is asked, which is open.
func TestMulticastOfAnotherMemory(t *testing.T) {
	onCasting(t, func(ctx context.Context, b *casting, m *memory.Memory) error {
		near, err := host.New(m.Group(), nil)
		if err != nil {
			return err
		}
		other := memory.New(&casting{Backend: near}, m.Group(), nil)
		var left *memory.Window
		err = backendtest.WithWindow(ctx, other, 64, func(w *memory.Window) error {
			left = w
			if err := m.EnableMulticast(ctx, w, nil); !errors.Is(err, errs.ErrNotSymmetric) {
				return fmt.Errorf("a window of another memory: %w", err)
			}
			return nil
		})
		if err := errors.Join(err, other.Close(ctx)); err != nil {
			return err
		}
		if err := other.EnableMulticast(ctx, nil, nil); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("no window of a closed memory: %w", err)
		}
		if err := other.EnableMulticast(ctx, left, nil); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a window of a closed memory: %w", err)
		}
		return nil
	})
}
