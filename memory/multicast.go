package memory

import (
	"cmp"
	"context"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// EnableMulticast makes a multicast address for w, which [Window.Multicast] returns. Collective: every rank comes with the same window; it
// blocks until all have come or ctx has ended. The address lives as long as the window; asking again is nothing. A rank that already knows that it cannot
// take part brings its failure, with a nil window if it has none, and every rank gets an error that names it.
//
// Switches have few multicast objects, and a backend that makes its own takes one for each window, so ask for what needs it. ErrUnsupported
// says why there can be none. After ErrNoMemory (all objects are taken, or there is no memory to map one) and ErrUnavailable (the
// machine's multicast is not ready) it may be asked for again. The condition is the same on every rank.
func (m *Memory) EnableMulticast(ctx context.Context, w *Window, failure error) error {
	if err := m.made("EnableMulticast"); err != nil {
		return err
	}
	if err := errs.Given("EnableMulticast", "ctx", ctx, "a context"); err != nil {
		return err
	}
	err := m.collective.do(ctx, "multicast", func(ctx context.Context, gaveUp error) error {
		return m.enableMulticast(ctx, w, cmp.Or(gaveUp, failure))
	})
	if err != nil {
		return fmt.Errorf("enabling multicast: %w", err)
	}
	return nil
}

func (m *Memory) enableMulticast(ctx context.Context, w *Window, failure error) error {
	if failure == nil {
		failure = m.Err()
	}
	purpose := "multicast"
	switch {
	case w == nil && failure == nil:
		failure = errs.Invalid("EnableMulticast", "w", "nil", "a window")
	case w == nil:
	case w.memory != m:
		failure = fmt.Errorf("the window is of another memory: %w", errs.ErrNotSymmetric)
	default:
		if failure == nil {
			failure = w.Err()
		}
		w = w.base()
		purpose = fmt.Sprintf("multicast of window %d", w.number)
		if !w.castAddress().IsNil() {
			purpose += ", which has it"
		}
	}
	_, err := m.exchange(group.Heard(ctx), m.record("bytes", purpose, &Record{}), failure)
	if err != nil {
		return err
	}
	// What follows is decided alike on every rank: all have the same window, and have agreed on the capabilities.
	if !w.castAddress().IsNil() {
		return nil
	}
	if c := m.backend.Capabilities(); !c.Multicast {
		return c.Missing(m.backend.Name(), "multicast")
	}
	if w.mapping == nil {
		return nil // an empty window needs none
	}
	mc, ok := w.mapping.(backend.Multicaster)
	if !ok {
		return fmt.Errorf("backend %s has no multicast for this window: %w", m.backend.Name(), errs.ErrUnsupported)
	}
	p, err := mc.EnableMulticast(group.Heard(ctx))
	if err != nil {
		w.noMulticast.Store(&err)
		return err
	}
	w.multicast.Store(uint64(p))
	m.log.Info("multicast enabled", "window", w.number, "address", w.alloc.Ptr(), "bytes", w.Bytes(), "multicast", p)
	return nil
}

func (w *Window) castAddress() device.Ptr { return device.Ptr(w.multicast.Load()) }

// Multicast is the address that reaches the byte at offset in every rank's copy at once; nil for an empty window. Before
// [Memory.EnableMulticast] it is ErrNoMulticast, after one that failed its error, and ErrUnsupported with the reason where there can be none.
func (w *Window) Multicast(offset int64) (device.Ptr, error) {
	if err := w.check("Multicast", offset); err != nil {
		return 0, err
	}
	w = w.base()
	if p := w.castAddress(); !p.IsNil() {
		return p.Add(offset), nil
	}
	if c := w.memory.backend.Capabilities(); !c.Multicast {
		return 0, c.Missing(w.memory.backend.Name(), "multicast")
	}
	if w.mapping == nil {
		return 0, nil
	}
	if err := w.noMulticast.Load(); err != nil {
		return 0, fmt.Errorf("multicast address: %w", *err)
	}
	return 0, fmt.Errorf("multicast address: %w", errs.ErrNoMulticast)
}
