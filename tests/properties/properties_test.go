// Package properties holds the library against a plain model: random programs of everything that ranks can do together, on random groups that overlap,
// must leave every rank the memory that the model has, and random mistakes must give every rank the right error and change nothing.
//
// A program that fails is made smaller, and printed. -rapid.seed gives another sequence of programs, and repeats one; -rapid.checks says how many.
package properties

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

func TestMain(m *testing.M) {
	backend.Register("far", farFactory{})
	backend.Register("isles", farFactory{islands: true})
	goleak.VerifyTestMain(m)
}

// backends are where programs run. Another one that works without a machine of its own is a line here.
var backends = []string{"host", "far", "isles"}

// TestPrograms runs random programs.
func TestPrograms(t *testing.T) {
	for _, name := range backends {
		t.Run("backend="+name, func(t *testing.T) {
			steps := 12
			if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
				steps = 25
				setUnlessGiven(t, "rapid.checks", "400")
			} else {
				setUnlessGiven(t, "rapid.checks", "100")
			}
			rapid.Check(t, func(rt *rapid.T) {
				p := draw(rt, steps)
				if err := p.run(t.Context(), name); err != nil {
					rt.Fatalf("%v\n\nthe program, over %s:\n%v", err, name, p)
				}
			})
		})
	}
}

// setUnlessGiven sets a flag that the command line does not.
func setUnlessGiven(t *testing.T, name, value string) {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if !given {
		was := flag.Lookup(name).Value.String()
		require.NoError(t, flag.Lookup(name).Value.Set(value))
		t.Cleanup(func() { require.NoError(t, flag.Lookup(name).Value.Set(was)) })
	}
}

// The bounds of a program: it takes some milliseconds.
const (
	programTimeout = 20 * time.Second
	kernelTimeout  = 5 * time.Second
)

// rank is one rank of the world.
type rank struct {
	ctx    context.Context
	stream device.Stream
	groups map[int]*member
	rand   *rand.Rand
	form   func(a kernels.Algorithm) kernels.Algorithm
}

// member is a rank as a group has it.
type member struct {
	*symmem.Rank
	tensors map[int]*tensor.Tensor
}

func (g *member) rank() int              { return g.Rank.Rank() }
func (g *member) memory() *memory.Memory { return g.Memory() }

// view is a part of one of the group's tensors.
func (g *member) view(s span) tensor.SymmetricTensor {
	v, err := g.tensors[s.t].Sub(int64(s.from), int64(s.len()))
	if err != nil {
		panic(err) // of a legal program
	}
	return v
}

// run runs the program on all ranks, and returns what was wrong.
func (p *program) run(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	cfg := config.Default()
	cfg.Backend, cfg.Timeout, cfg.KernelTimeout = []string{name}, programTimeout, kernelTimeout
	ranks, err := symmem.OpenLocal(ctx, p.world, cfg, nil)
	if err != nil {
		return err
	}
	failed := make([]error, p.world)
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() {
			failed[i] = p.onRank(ctx, r)
			if failed[i] != nil {
				r.Group().Abort("the program has failed") // the others may wait
			}
			closed := r.Close(ctx)
			if failed[i] == nil {
				failed[i] = closed
			}
			if failed[i] != nil {
				failed[i] = fmt.Errorf("rank %d: %w", i, failed[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(failed...)
}

func (p *program) onRank(ctx context.Context, world *symmem.Rank) (err error) {
	r := &rank{ctx: ctx, groups: map[int]*member{0: {world, map[int]*tensor.Tensor{}}}, rand: rand.New(rand.NewPCG(p.seed, uint64(world.Rank())))}
	pointers := world.Capabilities().PeerPointers
	r.form = func(a kernels.Algorithm) kernels.Algorithm {
		if !pointers && a.NeedsPeerPointers() {
			return kernels.Auto
		}
		return a
	}
	if r.stream, err = world.NewStream(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stream.Close()) }()
	for i, s := range p.steps {
		g := r.groups[s.group]
		if g == nil {
			continue
		}
		if n := r.rand.IntN(6); n > 0 {
			time.Sleep(time.Duration(r.rand.IntN(60*n*n)) * time.Microsecond)
		}
		if err := s.run(r, g); err != nil {
			return fmt.Errorf("step %d, g%d: %s: %w", i, s.group, s.text, err)
		}
	}
	// What the program has left open goes with its group, the inner ones first.
	for i := len(p.steps); i > 0; i-- {
		if g := r.groups[i]; g != nil {
			for _, t := range sorted(g.tensors) {
				if g.tensors[t].Err() == nil {
					err = errors.Join(err, g.tensors[t].Close(ctx))
				}
			}
			err = errors.Join(err, g.Close(ctx))
		}
	}
	g := r.groups[0]
	for _, t := range sorted(g.tensors) {
		if g.tensors[t].Err() == nil {
			err = errors.Join(err, g.tensors[t].Close(ctx))
		}
	}
	return err
}

func sorted(tensors map[int]*tensor.Tensor) []int {
	var all []int
	for t := range tensors {
		all = append(all, t)
	}
	slices.Sort(all)
	return all
}

// fence is how the ranks of a group order a step before the next.
type fence int

const (
	deviceBarrier fence = iota // on the streams: no rank waits on the CPU
	signalsAll                 // each rank signals all, and waits for all, on the streams
	hostBarrier                // the streams are waited for, and then the ranks meet
	fences
)

func (f fence) String() string {
	return []string{"barrier on the streams", "signals all to all", "synchronize and barrier"}[f]
}

func (r *rank) fenced(g *member, t int, f fence, err error) error {
	if err != nil {
		return err
	}
	x := g.tensors[t]
	switch f {
	case deviceBarrier:
		return x.Barrier(r.stream, 0)
	case signalsAll:
		for peer := range g.WorldSize() {
			err = errors.Join(err, x.Signal(r.stream, peer, 5))
		}
		for peer := range g.WorldSize() {
			err = errors.Join(err, x.Wait(r.stream, peer, 5))
		}
		return err
	default:
		return errors.Join(r.stream.Synchronize(r.ctx), g.Barrier(r.ctx))
	}
}

func (r *rank) zeros(g *member, t int, dtype tensor.DType, n int) error {
	x, err := g.Zeros(r.ctx, dtype, int64(n))
	if err != nil {
		return err
	}
	g.tensors[t] = x
	return x.Rendezvous(r.ctx)
}

// write writes this rank's own memory from the CPU.
func (r *rank) write(g *member, s span, v []int64) error {
	if err := r.stream.Synchronize(r.ctx); err != nil {
		return err
	}
	x := g.tensors[s.t].Local()
	if g.tensors[s.t].DType() == tensor.Uint8 {
		return tensor.Write(x, narrow[uint8](v), int64(s.from))
	}
	return tensor.Write(x, narrow[int32](v), int64(s.from))
}

func narrow[T uint8 | int32](v []int64) []T {
	out := make([]T, len(v))
	for i := range v {
		out[i] = T(v[i])
	}
	return out
}

func (r *rank) copies(g *member, moves []move, put bool) error {
	for _, m := range moves {
		var err error
		switch {
		case m.by != g.rank():
		case put:
			err = g.view(m.dst).Put(r.stream, m.peer, g.view(m.src))
		default:
			err = g.view(m.src).Get(r.stream, m.peer, g.view(m.dst))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *rank) putSignal(g *member, m move, again span, channel int, bare bool) error {
	if m.by == g.rank() {
		var err error
		if bare {
			err = errors.Join(g.view(m.dst).Put(r.stream, m.peer, g.view(m.src)), g.tensors[m.dst.t].Signal(r.stream, m.peer, channel))
		} else {
			err = g.view(m.dst).PutSignal(r.stream, m.peer, g.view(m.src), channel)
		}
		if err != nil {
			return err
		}
	}
	if m.peer == g.rank() {
		return errors.Join(g.tensors[m.dst.t].Wait(r.stream, m.by, channel), g.view(again).Put(r.stream, m.peer, g.view(m.dst)))
	}
	return nil
}

func (r *rank) plan(g *member, runs int, make func(ctx context.Context) (*kernels.Plan, error)) error {
	p, err := make(r.ctx)
	if err != nil {
		return err
	}
	for range runs {
		err = errors.Join(err, p.Run(r.stream))
	}
	return errors.Join(err, p.Close(r.ctx))
}

func (r *rank) subGroup(g *member, sub int, ranks []int) error {
	if !slices.Contains(ranks, g.rank()) {
		return nil
	}
	s, err := g.Sub(r.ctx, ranks)
	if err != nil {
		return err
	}
	r.groups[sub] = &member{s, map[int]*tensor.Tensor{}}
	return nil
}

func (r *rank) closeGroup(g *member) error {
	for i, have := range r.groups {
		if have == g {
			delete(r.groups, i)
		}
	}
	return g.Close(r.ctx)
}

func (r *rank) check(g *member, want map[int][][]int64) error {
	if err := r.stream.Synchronize(r.ctx); err != nil {
		return err
	}
	for t, by := range want {
		x := g.tensors[t]
		for i, w := range by[g.rank()] {
			got, err := element(x, i)
			if err != nil {
				return err
			}
			if got != w {
				return fmt.Errorf("t%d[%d] is %d on rank %d of the group, and %d in the model", t, i, got, g.rank(), w)
			}
		}
	}
	return nil
}

// element reads one element.
func element(x *tensor.Tensor, i int) (int64, error) {
	if x.DType() == tensor.Uint8 {
		s, err := tensor.HostSlice[uint8](x.Local())
		if err != nil {
			return 0, err
		}
		return int64(s[i]), nil
	}
	s, err := tensor.HostSlice[int32](x.Local())
	if err != nil {
		return 0, err
	}
	return int64(s[i]), nil
}

// refused makes sure that a mistake has given the error, and no other.
func (r *rank) refused(err, want error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("the error is %w, and not %v", err, want)
	}
	return nil
}

// farFactory opens the host backend without peer pointers, or only between two ranks each.
type farFactory struct{ islands bool }

func (farFactory) Probe(ctx context.Context, env *backend.Env) (backend.Capabilities, error) {
	near, err := backend.Lookup("host")
	if err != nil {
		return backend.Capabilities{}, err
	}
	c, err := near.Probe(ctx, env)
	return backendtest.FarCapabilities(c), err
}

func (f farFactory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	near, err := backend.Lookup("host")
	if err != nil {
		return nil, err
	}
	b, err := near.Open(ctx, env)
	if err != nil {
		return nil, err
	}
	o := &backendtest.FarOptions{Delay: 5 * time.Microsecond}
	if f.islands {
		o.Name = "isles"
		for _, m := range env.Group.Members() {
			o.Islands = append(o.Islands, (m.WorldRank+1)/2)
		}
	}
	return backendtest.Far(b, env.Group, o), nil
}
