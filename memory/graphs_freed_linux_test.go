package memory_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestGraphsOfFreedMemory: puts, gets and transfers that a graph has kept until their memory was freed are ErrClosed in the graph's stream, also when other memory lies
// there, and a put with a signal does not signal.
func TestGraphsOfFreedMemory(t *testing.T) { keptByGraphs(t, time.Second, graphsOfFreedMemory) }

func graphsOfFreedMemory(ctx context.Context, m *memory.Memory, d device.Device) error {
	const n = 1 << 20
	allocate := func() (backend.Allocation, *memory.Window, error) {
		a, err := m.Allocate(ctx, n, "")
		if err != nil {
			return nil, nil, err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		return a, w, err
	}
	a, w, err := allocate()
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	peer := 1 - m.Group().Rank()
	x, err := m.PrepareTransfer(backend.Write, peer, []memory.TransferBlock{{Local: a.Ptr(), Window: w, Offset: 64, Bytes: 64}})
	if err != nil {
		return err
	}
	kept := []keptGraph{
		{what: "put", enqueue: func() error { return m.Copy(s, backend.Write, peer, w, 64, a.Ptr(), 64) }},
		{what: "get", enqueue: func() error { return m.Copy(s, backend.Read, peer, w, 0, a.Ptr().Add(64), 64) }},
		{what: "transfer", enqueue: func() error { return x.Post(s) }},
		{what: "put with a signal", enqueue: func() error { return m.PutSignal(s, peer, w, 64, a.Ptr(), 64, 0) }},
	}
	if err := keep(ctx, s, kept); err != nil {
		return err
	}
	if err := m.Free(ctx, a); err != nil {
		return err
	}
	var others []backend.Allocation // where the memory was, on this rank and of the peer
	for range 4 {
		a, _, err := allocate()
		if err != nil {
			return err
		}
		others = append(others, a)
	}
	for _, k := range kept {
		if err := errors.Join(k.graph.Launch(s), s.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a graph with a %s of memory that was freed: %w", k.what, err)
		}
	}
	if err := errors.Join(m.Wait(s, peer, 0), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("the signal of the launch before: %w", err)
	}
	if err := errors.Join(m.Wait(s, peer, 0), s.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("a signal behind a put of memory that was freed: %w", err)
	}
	err = x.Close()
	for _, k := range kept {
		err = errors.Join(err, k.graph.Close())
	}
	for _, a := range others {
		err = errors.Join(err, m.Free(ctx, a))
	}
	return errors.Join(err, s.Close(), m.Close(ctx))
}
