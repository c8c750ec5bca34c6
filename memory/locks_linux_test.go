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
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// watched is a backend that notes under which locks of its memory each of its calls comes.
type watched struct {
	backend.Backend
	device     *watchedDevice
	memory     *memory.Memory
	collective bool // Allocate is
	calls      []watchedCall
}

type watchedCall struct {
	what       string
	collective bool
	locals     string
}

func (b *watched) note(what string) {
	collective, locals := b.memory.Held()
	b.calls = append(b.calls, watchedCall{what, collective, locals})
}

func (b *watched) Device() device.Device { return b.device }

func (b *watched) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.Multicast, c.Register, c.CollectiveAllocate = true, true, b.collective
	return c
}

func (b *watched) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	b.note("Allocate")
	a, err := b.Backend.Allocate(ctx, bytes)
	return &watchedAllocation{a, b}, err
}

func (b *watched) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	b.note("Register")
	return nil, errBroken
}

func (b *watched) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	b.note("Rendezvous")
	m, err := b.Backend.Rendezvous(ctx, a.(*watchedAllocation).Allocation)
	return &watchedMapping{m, b}, err
}

func (b *watched) Close(ctx context.Context) error {
	b.note("Close")
	return errors.Join(b.Backend.Close(ctx), b.device.Device.Close())
}

type watchedAllocation struct {
	backend.Allocation
	backend *watched
}

func (a *watchedAllocation) Release(ctx context.Context) error {
	a.backend.note("Release")
	return a.Allocation.Release(ctx)
}

type watchedMapping struct {
	backend.Mapping
	backend *watched
}

func (m *watchedMapping) EnableMulticast(context.Context) (device.Ptr, error) {
	m.backend.note("EnableMulticast")
	return 1 << 60, nil
}

func (m *watchedMapping) Unmap(ctx context.Context) error {
	m.backend.note("Unmap")
	return m.Mapping.Unmap(ctx)
}

type watchedDevice struct {
	*devhost.Device
	backend *watched
}

func (d *watchedDevice) NewStream() (device.Stream, error) {
	d.backend.note("NewStream")
	s, err := d.Device.NewStream()
	return &watchedStream{s, d.backend}, err
}

type watchedStream struct {
	device.Stream
	backend *watched
}

func (s *watchedStream) Synchronize(ctx context.Context) error {
	s.backend.note("Synchronize")
	return s.Stream.Synchronize(ctx)
}

func (d *watchedDevice) Bytes(p device.Ptr, n int64) ([]byte, error) {
	d.backend.note("Bytes")
	return d.Device.Bytes(p, n)
}

// TestCallsUnderWay: while a collective call is under way on a rank, none of another goroutine comes between its steps, and while a local call
// makes or gives back memory Close does not take the backend away.
func TestCallsUnderWay(t *testing.T) {
	t.Cleanup(memory.KeepWorkspace(0))
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := devhost.New(&devhost.Options{Err: g.Err})
		if err != nil {
			return err
		}
		near, err := host.New(g, &host.Options{Device: d})
		if err != nil {
			return err
		}
		b := &watched{Backend: near}
		b.device = &watchedDevice{d, b}
		b.memory = memory.New(b, g, &memory.Options{Channels: 2})
		if err := callsUnderWay(ctx, b.memory, b); err != nil {
			g.Abort("the test has failed") // the other rank may be waiting
			return errors.Join(err, b.memory.Close(ctx))
		}
		return nil
	}))
}

func callsUnderWay(ctx context.Context, m *memory.Memory, b *watched) error {
	var a backend.Allocation
	var w *memory.Window
	var c *memory.Workspace
	var s *memory.Signals
	for _, x := range []struct {
		name       string
		call       func() error
		what       string // the call of the backend or the device that it makes, among others
		collective bool
		locals     string
	}{
		{"Allocate", func() (err error) { a, err = m.Allocate(ctx, 100, ""); return err }, "Allocate", false, "shared"},
		{"Register", func() error {
			if _, err := m.Register(ctx, 1<<20, 100, ""); !errors.Is(err, errBroken) {
				return fmt.Errorf("it was not asked: %w", err)
			}
			return nil
		}, "Register", false, "shared"},
		{"Free alone", func() error { return m.Free(ctx, a) }, "Release", false, "shared"},
		{"collective Allocate", func() (err error) {
			b.collective = true
			a, err = m.Allocate(ctx, 100, "")
			b.collective = false
			return err
		}, "Allocate", true, ""},
		{"Rendezvous", func() (err error) { w, err = m.Rendezvous(ctx, a, memory.Record{}); return err }, "Rendezvous", true, ""},
		{"EnableMulticast", func() error { return m.EnableMulticast(ctx, w, nil) }, "EnableMulticast", true, ""},
		{"Free", func() error { return m.Free(ctx, a) }, "Unmap", true, ""},
		{"NewWorkspace", func() (err error) {
			c, err = m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 16 << 20})
			return err
		}, "Rendezvous", true, ""},
		{"Signals", func() (err error) {
			s, err = c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "test", Failed: func(err error) error { return err }})
			return err
		}, "Bytes", true, ""},
		// The stream that clears it is waited for: not every device's Close does.
		{"Close of a workspace", func() error { return c.Close(ctx) }, "Synchronize", true, ""},
		{"TrimWorkspace", func() error { return m.TrimWorkspace(ctx) }, "Unmap", true, ""},
		{"Close", func() error { return errors.Join(s.Close(), m.Close(ctx)) }, "Close", true, "alone"},
	} {
		b.calls = nil
		if err := x.call(); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		seen := false
		for _, call := range b.calls {
			seen = seen || call.what == x.what
			if call.collective != x.collective || call.locals != x.locals {
				return fmt.Errorf("%s calls %s with the lock of collective calls %t, and that of local ones %q", x.name, call.what, call.collective, call.locals)
			}
		}
		if !seen {
			return fmt.Errorf("%s does not call %s", x.name, x.what)
		}
	}
	return nil
}
