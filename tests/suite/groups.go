package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// groupCases are about sub-groups.
func groupCases() []Case {
	return []Case{
		{Name: "groups/overlapping", MinWorld: 3, Needs: []string{"peer_pointers"}, Run: overlappingCase},
		{Name: "groups/ring_of_pairs", MinWorld: 3, Run: ringOfPairsCase},
		{Name: "groups/alone", Run: aloneCase},
		{Name: "groups/again", Needs: []string{Puts}, Run: groupAgainCase},
		{Name: "groups/errors", Run: groupErrorsCase},
		{Name: "groups/after_close", Needs: []string{"transfers"}, Run: groupAfterCloseCase},
	}
}

// overlappingCase: two groups that share ranks work at the same time, on one stream and on two.
func overlappingCase(ctx context.Context, e *Env) error {
	w := e.R.WorldSize()
	var lower, upper []int
	for r := range w {
		if r <= w/2 {
			lower = append(lower, r)
		}
		if r >= w/2 {
			upper = append(upper, r)
		}
	}
	type member struct {
		ranks []int
		sub   *symmem.Rank
		env   *Env
		o     *operands
		p     *kernels.Plan
	}
	r := reduction{kernels.Auto, tensor.Int64, kernels.Sum, true, 1000, blocked, false}
	var mine []*member
	for _, ranks := range [][]int{lower, upper} {
		if !slices.Contains(ranks, e.R.Rank()) {
			continue
		}
		sub, err := e.R.Sub(ctx, ranks)
		if err != nil {
			return err
		}
		if sub.WorldSize() != len(ranks) || ranks[sub.Rank()] != e.R.Rank() {
			return fmt.Errorf("rank %d is rank %d of %d in the group of %v", e.R.Rank(), sub.Rank(), sub.WorldSize(), ranks)
		}
		env := &Env{R: sub, S: e.S, Rand: e.Rand}
		o, err := newOperands(ctx, env, r)
		if err != nil {
			return err
		}
		p, err := o.plan(ctx, r)
		if err != nil {
			return err
		}
		mine = append(mine, &member{ranks, sub, env, o, p})
	}
	for range 20 {
		e.Skew()
		for _, m := range mine {
			if err := m.p.Run(e.S); err != nil {
				return err
			}
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	for range 20 {
		for i, m := range mine {
			s := e.S
			if i == 1 {
				s = other
			}
			if err := m.p.Run(s); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close()); err != nil {
		return err
	}
	for _, m := range mine {
		if err := m.o.check(ctx, m.env, r); err != nil {
			return fmt.Errorf("group of %v: %w", m.ranks, err)
		}
		if err := closeAll(ctx, m.p, m.o, m.sub); err != nil {
			return err
		}
	}
	return nil
}

// ringOfPairsCase: each rank makes a group with the next rank and one with the rank before, each on a goroutine of its own, several times
// over: makes memory and a plan there, runs it on a stream of its own, and closes all of it while the other goroutine is somewhere else.
// Neither waits for the other, and so nobody waits for himself around the ring.
func ringOfPairsCase(ctx context.Context, e *Env) error {
	me, w := e.R.Rank(), e.R.WorldSize()
	// A pair that waits for ever fails the case, and not the run.
	ctx, cancel := context.WithTimeout(ctx, pairsTimeout)
	defer cancel()
	var errs [2]error
	var wg sync.WaitGroup
	for i, other := range []int{(me + 1) % w, (me + w - 1) % w} {
		// Groups of the same ranks have the same name on all of them; with random numbers of its own each goroutine goes its own way.
		own := &Env{R: e.R, S: e.S, Rand: rand.New(rand.NewPCG(e.Rand.Uint64(), uint64(i)))}
		wg.Go(func() {
			pair := []int{min(me, other), max(me, other)}
			for round := range pairRounds {
				if errs[i] = pairOnce(ctx, own, pair); errs[i] != nil {
					errs[i] = fmt.Errorf("pair %v, round %d: %w", pair, round, errs[i])
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

const (
	pairRounds   = 4
	pairsTimeout = 30 * time.Second
)

// pairOnce makes a group of two ranks, uses it and closes it.
func pairOnce(ctx context.Context, e *Env, pair []int) error {
	sub, err := e.R.Sub(ctx, pair)
	if err != nil {
		return fmt.Errorf("making the group: %w", err)
	}
	s, err := sub.NewStream()
	if err != nil {
		return err
	}
	env := &Env{R: sub, S: s, Rand: e.Rand}
	r := reduction{kernels.Auto, tensor.Int64, kernels.Sum, true, 4000, blocked, false}
	o, err := newOperands(ctx, env, r)
	if err != nil {
		return fmt.Errorf("making tensors: %w", err)
	}
	p, err := o.plan(ctx, r)
	if err != nil {
		return fmt.Errorf("making the plan: %w", err)
	}
	for range 5 {
		e.Skew()
		if err := p.Run(s); err != nil {
			return err
		}
	}
	// The plan is closed with its runs under way, which closing waits for.
	if err := p.Close(ctx); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	if err := o.check(ctx, env, r); err != nil {
		return err
	}
	return errors.Join(s.Close(), closeAll(ctx, o, sub))
}

// aloneCase is a group of one rank, with everything in it.
func aloneCase(ctx context.Context, e *Env) error {
	sub, err := e.R.Sub(ctx, []int{e.R.Rank()})
	if err != nil {
		return err
	}
	env := &Env{R: sub, S: e.S, Rand: e.Rand}
	if sub.Capabilities().PeerPointers {
		if err := allReduceCase(ctx, env, reduction{kernels.OneShot, tensor.BFloat16, kernels.Avg, true, 100, blocked, false}); err != nil {
			return err
		}
	}
	if err := ringPutCase(ctx, env); err != nil {
		return err
	}
	return sub.Close(ctx)
}

// groupAgainCase makes and closes the same group several times.
func groupAgainCase(ctx context.Context, e *Env) error {
	all := make([]int, e.R.WorldSize())
	for i := range all {
		all[i] = i
	}
	for range 5 {
		sub, err := e.R.Sub(ctx, all)
		if err != nil {
			return err
		}
		env := &Env{R: sub, S: e.S, Rand: e.Rand}
		if err := ringPutCase(ctx, env); err != nil {
			return err
		}
		if err := sub.Close(ctx); err != nil {
			return err
		}
		if err := wantError("a closed group", sub.Err(), symmem.ErrClosed); err != nil {
			return err
		}
		if err := wantError("closing a closed group", sub.Close(ctx), symmem.ErrClosed); err != nil {
			return err
		}
		if _, err := sub.Zeros(ctx, tensor.Float32, 4); !errors.Is(err, symmem.ErrClosed) {
			return fmt.Errorf("a tensor of a closed group: %v", err)
		}
	}
	return nil
}

// groupAfterCloseCase: what was made of a group that is closed is closed too.
func groupAfterCloseCase(ctx context.Context, e *Env) error {
	all := make([]int, e.R.WorldSize())
	for i := range all {
		all[i] = i
	}
	sub, err := e.R.Sub(ctx, all)
	if err != nil {
		return err
	}
	env := &Env{R: sub, S: e.S, Rand: e.Rand}
	t, err := env.mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	alone, err := sub.Zeros(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	slice, err := t.Slice(10, 20)
	if err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, slice, kernels.Sum, nil)
	if err != nil {
		return err
	}
	next, _ := ring(env)
	x, err := tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: alone, Remote: t})
	if err != nil {
		return err
	}
	if err := errors.Join(plan.Run(e.S), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	graphs, err := signalGraphs(env, t)
	if err != nil {
		return err
	}
	m, view, part := sub.Memory(), t.Local(), slice.Local()
	w, _, err := t.Window()
	if err != nil {
		return err
	}
	if err := sub.Close(ctx); err != nil { // with warnings of what was left
		return err
	}
	first := func(_ any, err error) error { return err }
	allocated := func(_ backend.Allocation, err error) error { return err }
	window := func(_ *memory.Window, _ int64, err error) error { return err }
	for _, c := range []struct {
		what string
		err  error
	}{
		{"Err of a tensor", t.Err()}, {"Err of one without rendezvous", alone.Err()}, {"Err of a slice", slice.Err()}, {"Err of the memory", m.Err()},
		{"Err of a window", w.Err()}, {"Peer", first(w.Peer(0, 0))}, {"Remote", first(t.Remote(0))}, {"Remote of a slice", first(slice.Remote(next))},
		{"Multicast", first(t.Multicast())}, {"Contiguous", first(t.Contiguous())}, {"PeerTable", first(t.PeerTable())},
		{"Slice", first(t.Slice(0, 1))}, {"Sub", first(slice.Sub(0, 1))},
		{"Window", window(t.Window())}, {"Window of a slice", window(slice.Window())}, {"PutSignal of a slice", slice.PutSignal(e.S, next, slice, 0)},
		{"HostSlice", first(tensor.HostSlice[float32](part))}, {"Read", tensor.Read(view, make([]float32, 1), 0)}, {"Write", tensor.Write(part, make([]float32, 1), 0)},
		{"ReadAll", first(tensor.ReadAll[float32](alone.Local()))},
		{"Put", t.Put(e.S, next, alone)}, {"Get", t.Get(e.S, next, alone)}, {"PutSignal", t.PutSignal(e.S, next, alone, 0)},
		{"Signal", t.Signal(e.S, next, 0)}, {"Wait", slice.Wait(e.S, next, 0)}, {"Barrier", t.Barrier(e.S, 0)},
		{"Run", plan.Run(e.S)}, {"Post", x.Post(e.S)},
		{"NewAllReduce", first(kernels.NewAllReduce(ctx, t, kernels.Sum, nil))}, {"Rendezvous", alone.Rendezvous(ctx)},
		{"PrepareTransfer", first(tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: alone, Remote: t}))},
		{"Allocate", allocated(m.Allocate(ctx, 64, ""))}, {"NewWorkspace", first(m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "suite", Bytes: 64}))},
		{"Close of a tensor", t.Close(ctx)}, {"Close of one without rendezvous", alone.Close(ctx)}, {"Close of a slice", slice.Close(ctx)},
	} {
		if err := wantError(c.what+" after the group was closed", c.err, symmem.ErrClosed); err != nil {
			return err
		}
	}
	for _, g := range graphs {
		if err := g.Launch(e.S); err != nil {
			return err
		}
		if err := wantError("a graph after its group was closed", e.S.Synchronize(ctx), symmem.ErrClosed); err != nil {
			return err
		}
		if err := g.Close(); err != nil {
			return err
		}
	}
	// These give back what they have of the device, which goes on.
	if err := errors.Join(plan.Close(ctx), x.Close(), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	return worksAfterwards(ctx, e)
}

// signalGraphs gives a graph with a signal, one with a wait and one with a barrier; none where a GPU runs them by itself.
func signalGraphs(e *Env, t *tensor.Tensor) ([]device.Graph, error) {
	if !e.R.Capabilities().Graphs || e.R.Capabilities().PeerPointers && e.R.Device().Kind() != device.Host {
		return nil, nil
	}
	next, prev := ring(e)
	var graphs []device.Graph
	for _, enqueue := range []func() error{
		func() error { return t.Signal(e.S, next, 1) },
		func() error { return t.Wait(e.S, prev, 1) },
		func() error { return t.Barrier(e.S, 1) },
	} {
		if err := e.S.BeginCapture(); err != nil {
			return nil, err
		}
		err := enqueue()
		g, endErr := e.S.EndCapture()
		if err := errors.Join(err, endErr); err != nil {
			return nil, err
		}
		graphs = append(graphs, g)
	}
	return graphs, nil
}

func groupErrorsCase(ctx context.Context, e *Env) error {
	try := func(ranks ...int) error {
		s, err := e.R.Sub(ctx, ranks)
		if err == nil {
			err = errors.Join(errors.New("no error"), s.Close(ctx))
		}
		return err
	}
	me, w := e.R.Rank(), e.R.WorldSize()
	return errors.Join(
		wantArgument("no ranks", try()),
		wantArgument("a rank that does not exist", try(me, w)),
		wantArgument("a negative rank", try(-1, me)),
		wantArgument("a rank twice", try(me, me)),
		wantArgument("without oneself", try((me+1)%w+boolInt(w == 1))),
	)
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
