package backendtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// contiguous: the view reaches every rank's copy at its place, and each window has its own.
func contiguous(ctx context.Context, _ Harness, r *rank) error {
	const n = 4097
	var allocs [2]backend.Allocation
	var maps [2]backend.Mapping
	var bases [2]device.Ptr
	var strides [2]int64
	for i := range maps {
		var err error
		if allocs[i], maps[i], err = r.mapped(ctx, n); err != nil {
			return err
		}
		v, ok := maps[i].(backend.ContiguousViewer)
		if ok != r.Capabilities().Contiguous {
			return fmt.Errorf("the capability says %t and the mapping %t", r.Capabilities().Contiguous, ok)
		}
		if !ok {
			continue
		}
		if bases[i], strides[i], err = v.Contiguous(); err != nil {
			return err
		}
		if strides[i] < n {
			return fmt.Errorf("copies of %d bytes lie %d apart", n, strides[i])
		}
	}
	me := r.group.Rank()
	if r.Capabilities().Contiguous {
		// To the end of every copy through the view, a byte of this rank's; to the begin of the own one by its own address.
		for i := range maps {
			for peer := range r.group.Size() {
				at := bases[i].Add(int64(peer)*strides[i] + n - 1 - int64(me))
				if err := r.Device().CopyFromHost(at, []byte{byte(50*i + me + 1)}); err != nil {
					return err
				}
			}
			if err := r.Device().CopyFromHost(allocs[i].Ptr(), []byte{byte(50*i + me + 101)}); err != nil {
				return err
			}
		}
		if err := r.group.Barrier(ctx, "written"); err != nil {
			return err
		}
		for i := range maps {
			got := make([]byte, n)
			if err := r.Device().CopyToHost(got, allocs[i].Ptr()); err != nil {
				return err
			}
			for peer := range r.group.Size() {
				if want := byte(50*i + peer + 1); got[n-1-peer] != want {
					return fmt.Errorf("window %d: rank %d wrote %d through its view, and %d is there", i, peer, want, got[n-1-peer])
				}
				var first [1]byte
				if err := r.Device().CopyToHost(first[:], bases[i].Add(int64(peer)*strides[i])); err != nil {
					return err
				}
				if want := byte(50*i + peer + 101); first[0] != want {
					return fmt.Errorf("window %d: rank %d's first byte is %d, and %d through the view", i, peer, want, first[0])
				}
			}
		}
	}
	return errors.Join(r.done(ctx, allocs[1], maps[1]), r.done(ctx, allocs[0], maps[0]))
}

// multicast: each window has an address of its own, on all ranks or on none, and Unmap takes it away.
func multicast(ctx context.Context, _ Harness, r *rank) error {
	for round := range 2 {
		var allocs [2]backend.Allocation
		var maps [2]backend.Mapping
		var at [2]device.Ptr
		for i := range maps {
			var err error
			if allocs[i], maps[i], err = r.mapped(ctx, 64); err != nil {
				return err
			}
			mc, ok := maps[i].(backend.Multicaster)
			if !ok {
				if r.Capabilities().Multicast {
					return errors.New("the capability says multicast, and the mapping has none")
				}
				continue
			}
			had := r.Capabilities().Multicast
			p, err := mc.EnableMulticast(ctx)
			if err := r.alike(ctx, "multicast", errText(err, errs.ErrUnsupported, errs.ErrNoMemory, errs.ErrUnavailable)); err != nil {
				return err
			}
			switch {
			case had && (err != nil || p.IsNil()):
				return fmt.Errorf("the multicast address is %s: %w", p, err)
			case !had && !errors.Is(err, errs.ErrUnsupported):
				return fmt.Errorf("multicast without the capability: %w", err)
			}
			at[i] = p
		}
		if at[0] == at[1] && !at[0].IsNil() {
			return fmt.Errorf("round %d: two windows have the multicast address %s", round, at[0])
		}
		if err := errors.Join(r.done(ctx, allocs[0], maps[0]), r.done(ctx, allocs[1], maps[1])); err != nil {
			return err
		}
	}
	return nil
}

// windowHandle: a window has a name on all ranks or on none, always the same, which with the place in it is no other window's.
func windowHandle(ctx context.Context, _ Harness, r *rank) error {
	type name struct {
		handle uint64
		offset int64
	}
	var allocs [2]backend.Allocation
	var maps [2]backend.Mapping
	var names [2]name
	for i := range maps {
		var err error
		if allocs[i], maps[i], err = r.mapped(ctx, 5000); err != nil {
			return err
		}
		h, ok := maps[i].(backend.WindowHandler)
		if !ok {
			continue
		}
		handle, offset, err := h.WindowHandle()
		if err := r.alike(ctx, "window", errText(err, errs.ErrUnsupported, errs.ErrUnavailable)); err != nil {
			return err
		}
		if err != nil {
			continue
		}
		if handle == 0 || offset < 0 {
			return fmt.Errorf("the window's handle is %#x, and the place in it %d", handle, offset)
		}
		names[i] = name{handle, offset}
		if handle, offset, err = h.WindowHandle(); err != nil || names[i] != (name{handle, offset}) {
			return fmt.Errorf("asked again, the window is %#x at %d and not %v: %w", handle, offset, names[i], err)
		}
	}
	if names[0] == names[1] && names[0].handle != 0 {
		return fmt.Errorf("two windows are %#x at %d", names[0].handle, names[0].offset)
	}
	return errors.Join(r.done(ctx, allocs[0], maps[0]), r.done(ctx, allocs[1], maps[1]))
}

// errText says which of some conditions an error is in; "" is none.
func errText(err error, conditions ...error) string {
	if err == nil {
		return ""
	}
	for _, c := range conditions {
		if errors.Is(err, c) {
			return c.Error()
		}
	}
	return "another error: " + err.Error()
}

// alike tells if something is not the same on every rank. Collective.
func (r *rank) alike(ctx context.Context, what, mine string) error {
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	blobs, err := r.group.AllGather(ctx, what, blob)
	if err != nil {
		return err
	}
	for peer, b := range blobs {
		if string(b) != string(blob) {
			return fmt.Errorf("%s: %s here and %s on rank %d", what, blob, b, peer)
		}
	}
	return nil
}
