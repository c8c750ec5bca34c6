package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestCollectives: NCCL's other collectives get their operands, root and counts, on one communicator with the all-reduce.
func TestCollectives(t *testing.T) {
	const size, count = 3, 5
	m := newMachine(size)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 1024, func(w *memory.Window) error {
				for _, what := range []string{"broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"} {
					for root := range size {
						if err := oneCollective(ctx, g, b, mem, w, what, count, root); err != nil {
							return fmt.Errorf("%s, root %d: %w", what, root, err)
						}
					}
				}
				if len(b.reducers) != 1 {
					return fmt.Errorf("%d communicators", len(b.reducers))
				}
				for _, c := range []backend.AllReduce{
					{Name: plainForm, Collective: "scan", Count: 1, DType: "f32", Op: "sum"},
					{Name: symmetricForm, Collective: "broadcast", Count: 1, DType: "f32", Op: "sum"},
				} {
					if _, err := mem.PrepareCollective(ctx, memory.Place{Window: w}, memory.Place{Window: w}, 4, 4, c); !errors.Is(err, errs.ErrUnsupported) {
						return fmt.Errorf("%s of %s: %w", c.Collective, c.Name, err)
					}
				}
				c := backend.AllReduce{Name: plainForm, Collective: "reduce", Count: 1, Root: size, DType: "f32", Op: "sum"}
				if _, err := mem.PrepareCollective(ctx, memory.Place{Window: w}, memory.Place{Window: w}, 4, 4, c); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("a root that is no rank: %w", err)
				}
				if _, err := mem.PrepareCollective(ctx, memory.Place{Window: w}, memory.Place{Window: w}, 4, 2048, c); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("an output beyond the window: %w", err)
				}
				return nil
			})
		})
	}))
	m.requireClean(t)
}

// oneCollective prepares one, runs it twice and looks at what came of it.
func oneCollective(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory, w *memory.Window, what string, count int64, root int) error {
	size, rank := g.Size(), g.Rank()
	ins, outs := count, count
	switch what {
	case "all_gather":
		outs *= int64(size)
	case "reduce_scatter":
		ins *= int64(size)
	case "all_to_all":
		ins, outs = ins*int64(size), outs*int64(size)
	}
	in, out := memory.Place{Window: w, Offset: 64}, memory.Place{Window: w, Offset: 512}
	p, err := mem.PrepareCollective(ctx, in, out, 4*ins, 4*outs, backend.AllReduce{Name: plainForm, Collective: what, Root: root, Count: count, DType: "f32", Op: "sum"})
	if err := g.Vote(ctx, "plan", err); err != nil {
		return err
	}
	s, err := mem.Device().NewStream()
	if err != nil {
		return err
	}
	value := func(rank int, i int64) float32 { return float32(100*rank) + float32(i) }
	total := func(i int64) (sum float32) {
		for r := range size {
			sum += value(r, i)
		}
		return sum
	}
	numbers := func(n int64, of func(i int64) float32) (b []byte) {
		for i := range n {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(of(i)))
		}
		return b
	}
	at := &p.(*reduction).calls[0]
	into, from := device.Ptr(at.Recv), device.Ptr(at.Send)
	for range 2 {
		poison := func(int64) float32 { return -1 }
		if err := errors.Join(mem.Device().CopyFromHost(from, numbers(ins, func(i int64) float32 { return value(rank, i) })),
			mem.Device().CopyFromHost(into, numbers(outs, poison)), g.Barrier(ctx, "filled"), p.Enqueue(s), s.Synchronize(ctx)); err != nil {
			return err
		}
		got := make([]byte, 4*outs)
		if err := mem.Device().CopyToHost(got, into); err != nil {
			return err
		}
		want := numbers(outs, func(i int64) float32 {
			switch what {
			case "broadcast":
				return value(root, i)
			case "reduce":
				if rank != root {
					return -1
				}
				return total(i)
			case "all_gather":
				return value(int(i/count), i%count)
			case "reduce_scatter":
				return total(int64(rank)*count + i)
			}
			return value(int(i/count), int64(rank)*count+i%count)
		})
		if string(got) != string(want) {
			return fmt.Errorf("rank %d: %x, not %x", rank, got, want)
		}
		if err := g.Barrier(ctx, "looked"); err != nil {
			return err
		}
	}
	return errors.Join(s.Close(), p.Close())
}
