package nvshmem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/memory"
)

// collectiveMemory is a window with numbers in it, that are other ones on each rank.
type collectiveMemory struct {
	b    *Backend
	m    *memory.Memory
	a    backend.Allocation
	w    *memory.Window
	s    device.Stream
	rank int
	size int
}

const collectiveBytes = 8192

// value is byte i of a rank's memory.
func value(rank, i int) byte { return byte(17*rank + 3*i + i/256 + 1) }

func (c *collectiveMemory) fill() error {
	all := make([]byte, collectiveBytes)
	for i := range all {
		all[i] = value(c.rank, i)
	}
	return c.b.device.CopyFromHost(c.a.Ptr(), all)
}

// prepare prepares a collective.
func (c *collectiveMemory) prepare(ctx context.Context, r backend.AllReduce, in, out, ins, outs int64) (backend.PreparedAllReduce, error) {
	r.Name = Name
	return c.m.PrepareCollective(ctx, memory.Place{Window: c.w, Offset: in}, memory.Place{Window: c.w, Offset: out}, ins, outs, r)
}

// run runs it, from byte in to byte out, and compares what is at out with want.
func (c *collectiveMemory) run(ctx context.Context, r backend.AllReduce, in, out, ins, outs int64, want func(i int) byte) error {
	if err := errors.Join(c.fill(), c.b.group.Barrier(ctx, "filled")); err != nil {
		return err
	}
	p, err := c.prepare(ctx, r, in, out, ins, outs)
	if err != nil {
		return fmt.Errorf("%s of %d %s: %w", r.Collective, r.Count, r.DType, err)
	}
	got := make([]byte, collectiveBytes)
	err = errors.Join(p.Enqueue(c.s), c.s.Synchronize(ctx), c.b.device.CopyToHost(got, c.a.Ptr()), c.b.group.Barrier(ctx, "read"), p.Close())
	for i := range got {
		expected := value(c.rank, i)
		if int64(i) >= out && int64(i) < out+outs {
			expected = want(i - int(out))
		}
		if got[i] != expected {
			return errors.Join(err, fmt.Errorf("%s of %d %s: byte %d of rank %d is %d, not %d", r.Collective, r.Count, r.DType, i, c.rank, got[i], expected))
		}
	}
	return err
}

// refused says whether the collective is refused, on this rank and so on all, as it should.
func (c *collectiveMemory) refused(ctx context.Context, why error, r backend.AllReduce, in, out, ins, outs int64) error {
	p, err := c.prepare(ctx, r, in, out, ins, outs)
	if err == nil {
		return errors.Join(fmt.Errorf("%s of %d %s at %d is not refused", r.Collective, r.Count, r.DType, in), p.Close())
	}
	if !errors.Is(err, why) {
		return fmt.Errorf("%s: %w", r.Collective, err)
	}
	return nil
}

// onCollectives runs f on each rank of a machine with memory for collectives.
func onCollectives(t *testing.T, m *machine, f func(ctx context.Context, c *collectiveMemory) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, m.pes, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			a, err := mem.Allocate(ctx, collectiveBytes, "")
			if err != nil {
				return err
			}
			w, err := mem.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			s, err := b.device.NewStream()
			if err != nil {
				return err
			}
			c := &collectiveMemory{b, mem, a, w, s, g.Rank(), g.Size()}
			return errors.Join(f(ctx, c), s.Close(), mem.Free(ctx, a))
		})
	}))
	assert.Empty(t, m.left())
}

// TestCollectives: NVSHMEM is asked for what the collective is, as integers of 32 bits where everything is aligned and as bytes otherwise, behind a barrier,
// and nothing but the output changes.
func TestCollectives(t *testing.T) {
	for _, size := range []int{1, 2, 3} {
		m := newMachine(size)
		onCollectives(t, m, func(ctx context.Context, c *collectiveMemory) error {
			var err error
			for _, at := range []int64{64, 65} { // all of 16 bytes, and not
				const n = 32
				w := int64(c.size)
				root := c.size - 1
				err = errors.Join(err,
					c.run(ctx, backend.AllReduce{Collective: "broadcast", Count: n, DType: "u8", Op: "sum", Root: root}, at, at, n, n,
						func(i int) byte { return value(root, int(at)+i) }),
					c.run(ctx, backend.AllReduce{Collective: "all_gather", Count: n, DType: "u8", Op: "sum"}, at, 1024, n, n*w,
						func(i int) byte { return value(i/n, int(at)+i%n) }),
					c.run(ctx, backend.AllReduce{Collective: "all_to_all", Count: n, DType: "u8", Op: "sum"}, at, 1024, n*w, n*w,
						func(i int) byte { return value(i/n, int(at)+n*c.rank+i%n) }))
			}
			var sums [2][4]byte
			for i := range sums {
				var sum float32
				for r := range c.size {
					var word [4]byte
					for k := range word {
						word[k] = value(r, 128+4*(2*c.rank+i)+k)
					}
					sum += math.Float32frombits(binary.LittleEndian.Uint32(word[:]))
				}
				binary.LittleEndian.PutUint32(sums[i][:], math.Float32bits(sum))
			}
			err = errors.Join(err, c.run(ctx, backend.AllReduce{Collective: "reduce_scatter", Count: 2, DType: "f32", Op: "sum"}, 128, 1024, 8*int64(c.size), 8,
				func(i int) byte { return sums[i/4][i%4] }))
			p, barrierErr := c.m.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, backend.AllReduce{Name: Name, Collective: barrier})
			if barrierErr != nil {
				return errors.Join(err, barrierErr)
			}
			return errors.Join(err, p.Enqueue(c.s), c.s.Synchronize(ctx), p.Close())
		})
		assert.Equal(t, 2, m.called("broadcast u32 of"), "one to warm up")
		assert.Equal(t, 2, m.called("broadcast u8 of"))
		assert.Equal(t, 2, m.called("fcollect u32 of 8 ")+m.called("fcollect u32 of 1 "))
		assert.Equal(t, 2, m.called("alltoall u8 of"))
		assert.Equal(t, 2, m.called("reducescatter f32 sum of"))
		assert.Equal(t, 7*2+2, m.called("barrier of"), "in front of each, and the barrier itself")
	}
}

// TestCollectivesRefuse: what NVSHMEM has not, or would end the process for, is refused on every rank, and the next one works.
func TestCollectivesRefuse(t *testing.T) {
	m := newMachine(2)
	onCollectives(t, m, func(ctx context.Context, c *collectiveMemory) error {
		gather := backend.AllReduce{Collective: "all_gather", Count: 32, DType: "u8", Op: "sum"}
		scatter := backend.AllReduce{Collective: "reduce_scatter", Count: 8, DType: "f32", Op: "sum"}
		with := func(r backend.AllReduce, f func(r *backend.AllReduce)) backend.AllReduce { f(&r); return r }
		err := errors.Join(
			c.refused(ctx, errs.ErrUnsupported, backend.AllReduce{Collective: "reduce", Count: 8, DType: "f32", Op: "sum"}, 0, 64, 32, 32),
			c.refused(ctx, errs.ErrUnsupported, gather, 128, 128, 32, 64),                   // in place
			c.refused(ctx, errs.ErrUnsupported, scatter, 128, 128+int64(32*c.rank), 64, 32), // in place
			c.refused(ctx, errs.ErrUnsupported, with(scatter, func(r *backend.AllReduce) { r.Op = "avg" }), 0, 1024, 64, 32),
			c.refused(ctx, errs.ErrUnsupported, with(scatter, func(r *backend.AllReduce) { r.DType = "f8" }), 0, 1024, 64, 32),
			c.refused(ctx, errs.ErrInvalid, with(gather, func(r *backend.AllReduce) { r.Count = 0 }), 0, 1024, 0, 0),
			c.refused(ctx, errs.ErrInvalid, with(gather, func(r *backend.AllReduce) { r.Collective, r.Root = "broadcast", 2 }), 0, 0, 32, 32),
			c.refused(ctx, errs.ErrInvalid, with(gather, func(r *backend.AllReduce) { r.Collective, r.Root = "broadcast", -1 }), 0, 0, 32, 32),
			c.refused(ctx, errs.ErrMismatch, gather, int64(64+c.rank), 1024, 32, 64), // bytes on one rank, integers on the other
		)
		// Half of its scratch memory: the kernel would end the context.
		m.libs[c.rank].scratch = "1K"
		err = errors.Join(err, c.refused(ctx, errs.ErrUnsupported, with(scatter, func(r *backend.AllReduce) { r.Count = 65 }), 0, 1024, 520, 260))
		p, scatterErr := c.prepare(ctx, with(scatter, func(r *backend.AllReduce) { r.Count = 64 }), 0, 1024, 512, 256)
		if scatterErr != nil {
			return errors.Join(err, scatterErr)
		}
		return errors.Join(err, p.Enqueue(c.s), p.Close())
	})
	assert.Equal(t, 2, m.called("reducescatter"))
	assert.Zero(t, m.called("fcollect"))
	w := &world{lib: &fakeLib{}}
	assert.EqualValues(t, 256<<10, w.reduceRoom())
	w.lib.(*fakeLib).scratch = "not a size"
	assert.EqualValues(t, 256<<10, w.reduceRoom())
}

// lateLib comes back from NewTeam late the first time.
type lateLib struct {
	library
	until <-chan struct{}
}

func (l *lateLib) NewTeam() (nvshmem.Team, error) {
	team, err := l.library.NewTeam()
	<-l.until
	return team, err
}

// TestTeamOfACollectiveThatWasNotPrepared: it is used for the next, where the ranks had it all, and could not tell each other.
func TestTeamOfACollectiveThatWasNotPrepared(t *testing.T) {
	m := newMachine(2)
	gaveUp := make(chan struct{})
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, &group.LocalOptions{Timeout: time.Second}, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		if load := o.load; g.Rank() == 1 {
			o.load = func(n *nvshmem.Options) (library, error) {
				l, err := load(n)
				return &lateLib{l, gaveUp}, err
			}
		}
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
			what := &backend.AllReduce{Name: Name, Collective: barrier}
			_, err := b.PrepareAllReduce(ctx, what)
			if g.Rank() == 0 {
				close(gaveUp)
			}
			if err == nil || b.world.usable() != nil {
				return fmt.Errorf("a rank that is late: %w, %w", err, b.world.usable())
			}
			p, err := b.PrepareAllReduce(ctx, what)
			if err != nil {
				return err
			}
			s, err := b.device.NewStream()
			if err != nil {
				return err
			}
			return errors.Join(p.Enqueue(s), s.Synchronize(ctx), p.Close(), s.Close())
		})
	}))
	assert.Equal(t, 1, m.called("team"), "the team was lost")
	assert.Empty(t, m.left())
}
