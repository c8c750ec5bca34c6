package memory_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// reducing is a backend whose library has an all-reduce, which notes what it is asked for.
type reducing struct {
	backend.Backend
	asked []backend.AllReduce
}

func (b *reducing) PrepareAllReduce(_ context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	b.asked = append(b.asked, *r)
	return nil, nil
}

// TestPrepareAllReduce: the library is told of the windows and of the places in them, and of nothing that is not inside of them.
func TestPrepareAllReduce(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &reducing{Backend: near}
		m := memory.New(b, g, nil)
		err = backendtest.WithWindow(ctx, m, 4096, func(in *memory.Window) error {
			return backendtest.WithWindow(ctx, m, 2048, func(out *memory.Window) error {
				var freed *memory.Window
				if err := backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error { freed = w; return nil }); err != nil {
					return err
				}
				other := memory.New(&reducing{Backend: near}, g, nil)
				return backendtest.WithWindow(ctx, other, 4096, func(foreign *memory.Window) error {
					return reduceBetween(ctx, m, b, in, out, freed, foreign)
				})
			})
		})
		return errors.Join(err, g.Barrier(ctx, "end"), m.Close(ctx))
	}))
}

func reduceBetween(ctx context.Context, m *memory.Memory, b *reducing, in, out, freed, foreign *memory.Window) error {
	at := func(w *memory.Window, offset int64) memory.Place { return memory.Place{Window: w, Offset: offset} }
	prepare := func(from, to memory.Place, bytes int64) error {
		_, err := m.PrepareAllReduce(ctx, "theirs", from, to, bytes/4, bytes, "f32", "sum")
		return err
	}
	for _, c := range []struct {
		name     string
		from, to memory.Place
		bytes    int64
		want     error
	}{
		{"whole", at(in, 0), at(in, 0), 4096, nil},
		{"up to the last byte", at(in, 3072), at(out, 1024), 1024, nil},
		{"beyond the input", at(in, 3072), at(out, 0), 1028, errs.ErrInvalid},
		{"beyond the output", at(in, 0), at(out, 1024), 1028, errs.ErrInvalid},
		{"larger than the output", at(in, 0), at(out, 0), 2052, errs.ErrInvalid},
		{"before the input", at(in, -4), at(out, 0), 4, errs.ErrInvalid},
		{"less than nothing", at(in, 0), at(out, 0), -4, errs.ErrInvalid},
		{"from another memory", at(foreign, 0), at(out, 0), 4, errs.ErrNotSymmetric},
		{"to another memory", at(in, 0), at(foreign, 0), 4, errs.ErrNotSymmetric},
		{"from what was freed", at(freed, 0), at(out, 0), 4, errs.ErrClosed},
		{"to what was freed", at(in, 0), at(freed, 0), 4, errs.ErrClosed},
		{"from what has no window", at(nil, 0), at(out, 0), 4, errs.ErrNoRendezvous},
		{"to what has no window", at(in, 0), at(nil, 0), 4, errs.ErrNoRendezvous},
	} {
		had := len(b.asked)
		if err := prepare(c.from, c.to, c.bytes); !errors.Is(err, c.want) {
			return fmt.Errorf("%s: error %w, expected %w", c.name, err, c.want)
		}
		if asked := len(b.asked) - had; asked != 0 && c.want != nil {
			return fmt.Errorf("%s: the library was asked all the same", c.name)
		}
	}
	if len(b.asked) != 2 {
		return fmt.Errorf("the library was asked %d times", len(b.asked))
	}
	for _, c := range []memory.LibraryCollective{
		{Count: 257, DType: "f32"}, {Count: 513, DType: "bf16"}, {Count: 129, DType: "f64"}, {Count: 1 << 62, DType: "u8"}, {Count: math.MaxInt64, DType: "f64"},
		{Collective: "all_gather", Count: 129, DType: "f32"}, {Collective: "reduce_scatter", Count: 129, DType: "f32"}, {Collective: "all_to_all", Count: 129, DType: "f32"},
	} {
		c.Name, c.Op = "theirs", "sum"
		if _, err := m.PrepareCollective(ctx, at(in, 0), at(out, 0), 1024, 1024, c); !errors.Is(err, errs.ErrInvalid) || len(b.asked) != 2 {
			return fmt.Errorf("%d elements of %s of %q in 1024 bytes: %w", c.Count, c.DType, c.Collective, err)
		}
	}
	for i, want := range []backend.AllReduce{
		{Name: "theirs", In: in.Allocation(), Out: in.Allocation(), Count: 1024, DType: "f32", Op: "sum"},
		{Name: "theirs", In: in.Allocation(), Out: out.Allocation(), InOffset: 3072, OutOffset: 1024, Count: 256, DType: "f32", Op: "sum"},
	} {
		if !reflect.DeepEqual(b.asked[i], want) {
			return fmt.Errorf("the library was asked for %+v, expected %+v", b.asked[i], want)
		}
	}
	return nil
}

// TestTransferOfAnotherMemory: the window of a transfer, or of a copy, is one of the memory that moves it.
func TestTransferOfAnotherMemory(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := devhost.New(&devhost.Options{Err: g.Err}) // which both share, so that it can reach the memory of both
		if err != nil {
			return err
		}
		var memories [2]*memory.Memory
		for i := range memories {
			b, err := host.New(g, &host.Options{Device: d})
			if err != nil {
				return err
			}
			memories[i] = memory.New(b, g, nil)
		}
		m, other := memories[0], memories[1]
		err = backendtest.WithWindow(ctx, m, 64, func(w *memory.Window) error {
			return backendtest.WithWindow(ctx, other, 64, func(theirs *memory.Window) error {
				block := memory.TransferBlock{Local: w.Allocation().Ptr(), Window: theirs, Bytes: 8}
				if _, err := m.PrepareTransfer(backend.Write, 1-g.Rank(), []memory.TransferBlock{block}); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("a transfer into another memory's window: %w", err)
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				if err := m.Copy(s, backend.Write, 1-g.Rank(), theirs, 0, w.Allocation().Ptr(), 8); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("a copy into another memory's window: %w", err)
				}
				return s.Close()
			})
		})
		return errors.Join(err, m.Close(ctx), other.Close(ctx), d.Close())
	}))
}

// TestNoContext: a nil context is an error like any other argument that is not allowed, and no panic within a call that other ranks may be in.
func TestNoContext(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(&reducing{Backend: near}, g, nil)
		w, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 1 << 20})
		if err != nil {
			return err
		}
		var none context.Context
		o := &memory.SignalsOptions{Channels: 1, Op: "test"}
		for name, call := range map[string]func() error{
			"EnableMulticast":         func() error { return m.EnableMulticast(none, nil, nil) },
			"Signals":                 func() error { _, err := w.Signals(none, 0, o); return err },
			"Signals without options": func() error { _, err := w.Signals(ctx, 0, nil); return err },
			"PrepareAllReduce": func() error {
				_, err := m.PrepareAllReduce(none, "theirs", memory.Place{}, memory.Place{}, 1, 4, "f32", "sum")
				return err
			},
			"PrepareCollective": func() error {
				_, err := m.PrepareCollective(none, memory.Place{}, memory.Place{}, 0, 0, memory.LibraryCollective{Collective: "barrier"})
				return err
			},
		} {
			if err := call(); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return errors.Join(w.Close(ctx), m.Close(ctx))
	}))
}

// TestNoTransfer: a transfer that PrepareTransfer did not make is refused, whatever is asked of it.
func TestNoTransfer(t *testing.T) {
	var none *memory.Transfer
	for _, x := range []*memory.Transfer{none, {}} {
		_, status := x.Status()
		for call, err := range map[string]error{"Post": x.Post(nil), "WaitOn": x.WaitOn(nil), "Status": status, "Wait": x.Wait(t.Context()), "Close": x.Close()} {
			if _, ok := errors.AsType[*errs.ArgumentError](err); !ok {
				t.Errorf("%s: %v", call, err)
			}
		}
	}
}

// TestNoMemory: a memory that New did not make is refused, whatever is asked of it.
func TestNoMemory(t *testing.T) {
	ctx := t.Context()
	failure := func(_ any, err error) error { return err }
	var none *memory.Memory
	for _, m := range []*memory.Memory{none, {}} {
		for call, err := range map[string]error{
			"Err": m.Err(), "Closed": m.Closed(), "Allocate": failure(m.Allocate(ctx, 1, "")), "Empty": failure(m.Empty("")), "Register": failure(m.Register(ctx, 1, 1, "")),
			"Rendezvous": failure(m.Rendezvous(ctx, nil, memory.Record{})), "Free": m.Free(ctx, nil), "Close": m.Close(ctx), "NewHeap": failure(m.NewHeap(ctx, 1)),
			"NewWorkspace": failure(m.NewWorkspace(ctx, memory.WorkspaceRequest{Bytes: 1})), "TrimWorkspace": m.TrimWorkspace(ctx), "InTurn": m.InTurn(ctx, "", nil),
			"EnableMulticast": m.EnableMulticast(ctx, nil, nil), "PrepareTransfer": failure(m.PrepareTransfer(backend.Read, 0, nil)),
			"PrepareAllReduce": failure(m.PrepareAllReduce(ctx, "", memory.Place{}, memory.Place{}, 1, 1, "u8", "sum")), "NewWorkCopies": failure(m.NewWorkCopies()),
			"Copy": m.Copy(nil, backend.Read, 0, nil, 0, 0, 0), "PutSignal": m.PutSignal(nil, 0, nil, 0, 0, 0, 0), "PutSignalWait": m.PutSignalWait(nil, 0, nil, 0, 0, 0, 0, 0),
			"Signal": m.Signal(nil, 0, 0), "Wait": m.Wait(nil, 0, 0), "Barrier": m.Barrier(nil, 0),
		} {
			if bad, ok := errors.AsType[*errs.ArgumentError](err); !ok || bad.Arg != "memory" {
				t.Errorf("%s: %v", call, err)
			}
		}
	}
}
