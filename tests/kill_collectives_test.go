package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// mixVictim is the rank that dies, and mixSize how many there were.
const mixSize, mixVictim = 3, 1

// mixElements is how many elements of float32 a plan of a mix has for each tensor of it.
const mixElements = 6 * 64

// mixForm is a collective other than a plain all-reduce in one form.
type mixForm struct {
	name string
	// make makes the plan on parts of a mix's tensors, and says what is first in p.out behind a run, if every rank r has put r+1 everywhere.
	make func(ctx context.Context, p *mixPlan) (want float64, err error)
}

// mixPlan is one plan of a mix, with a stream of its own.
type mixPlan struct {
	name             string
	memory           *memory.Memory
	in, out, more    tensor.SymmetricTensor // of mixElements each
	counts, received tensor.SymmetricTensor // of the ranks
	plan             *kernels.Plan
	stream           device.Stream
	graph            device.Graph // nil if it runs without
	want             float64
}

// mixForms are all that there are on a memory.
func mixForms(m *memory.Memory) []mixForm {
	kind, has, size := m.Device().Kind(), m.Backend().Capabilities(), m.Group().Size()
	sum := float64(size * (size + 1) / 2)
	var forms []mixForm
	add := func(name string, algorithms []kernels.Algorithm, make func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error)) {
		for _, alg := range algorithms {
			if alg.NeedsPeerPointers() && !has.PeerPointers || alg.NeedsMulticast() && !has.Multicast {
				continue
			}
			forms = append(forms, mixForm{name + "/" + alg.String(), func(ctx context.Context, p *mixPlan) (want float64, err error) {
				p.plan, want, err = make(ctx, p, &kernels.Options{Algorithm: alg, MaxBlocks: 1})
				return want, err
			}})
		}
	}
	of := func(constructor string) []kernels.Algorithm { return kernels.CollectiveAlgorithms(constructor, kind) }
	for _, root := range []int{0, min(mixVictim, size-1)} {
		add(fmt.Sprintf("broadcast_from_%d", root), of("NewBroadcast"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
			made, err := kernels.NewBroadcast(ctx, p.out, root, o)
			return made, float64(root + 1), err
		})
		add(fmt.Sprintf("reduce_to_%d", root), of("NewReduce"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
			made, err := kernels.NewReduce(ctx, p.in, p.out, kernels.Sum, root, o)
			if m.Group().Rank() != root {
				return made, float64(m.Group().Rank() + 1), err // stays as it is
			}
			return made, sum, err
		})
	}
	add("all_gather", of("NewAllGather"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		in, err := p.in.Sub(0, mixElements/int64(size))
		if err != nil {
			return nil, 0, err
		}
		made, err := kernels.NewAllGather(ctx, in, p.out, o)
		return made, 1, err
	})
	add("reduce_scatter", of("NewReduceScatter"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		out, err := p.out.Sub(0, mixElements/int64(size))
		if err != nil {
			return nil, 0, err
		}
		made, err := kernels.NewReduceScatter(ctx, p.in, out, kernels.Sum, o)
		return made, sum, err
	})
	add("all_to_all", of("NewAllToAll"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		made, err := kernels.NewAllToAll(ctx, p.in, p.out, o)
		return made, 1, err
	})
	add("all_to_all_v", of("NewAllToAllV"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		made, err := kernels.NewAllToAllV(ctx, p.in, p.out, p.counts, p.received, o)
		return made, 1, err
	})
	add("barrier", of("NewBarrier"), func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		made, err := kernels.NewBarrier(ctx, m, o)
		return made, float64(m.Group().Rank() + 1), err
	})
	reducing := []kernels.Algorithm{kernels.OneShot, kernels.TwoShot, kernels.Transfers}
	add("all_reduce_many", reducing, func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		made, err := kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: p.in, Out: p.out}, {In: p.more}}, kernels.Sum, o)
		return made, sum, err
	})
	var moving []kernels.Algorithm // OneShot is lines, for so little, or what the host has
	for _, a := range of("NewAllGatherMany") {
		if a != kernels.OneShotLL {
			moving = append(moving, a)
		}
	}
	if !slices.Contains(moving, kernels.OneShot) {
		moving = append(moving, kernels.OneShot)
	}
	add("all_gather_many", moving, func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		in, err := p.in.Sub(0, mixElements/int64(size))
		if err != nil {
			return nil, 0, err
		}
		made, err := kernels.NewAllGatherMany(ctx, []kernels.Pair{{In: in, Out: p.out}}, o)
		return made, 1, err
	})
	add("reduce_scatter_many", moving, func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		out, err := p.out.Sub(0, mixElements/int64(size))
		if err != nil {
			return nil, 0, err
		}
		made, err := kernels.NewReduceScatterMany(ctx, []kernels.Pair{{In: p.in, Out: out}}, kernels.Sum, o)
		return made, sum, err
	})
	add("broadcast_many", moving, func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		made, err := kernels.NewBroadcastMany(ctx, []tensor.SymmetricTensor{p.out, p.more}, size-1, o)
		return made, float64(size), err
	})
	add("all_reduce_rms_norm", reducing, func(ctx context.Context, p *mixPlan, o *kernels.Options) (*kernels.Plan, float64, error) {
		in, err := p.in.Sub(0, 4, 64)
		if err != nil {
			return nil, 0, err
		}
		local := func(at, n int64) kernels.Local {
			return kernels.Local{Ptr: p.more.Ptr().Add(4 * at), DType: tensor.Float32, NumElements: n}
		}
		made, err := kernels.NewAllReduceRMSNorm(ctx, in, kernels.RMSNorm{
			Residual: local(0, 4*64), Weight: local(4*64, 64), Out: kernels.Local{Ptr: p.out.Ptr(), DType: tensor.Float32, NumElements: 4 * 64},
		}, o)
		return made, float64(m.Group().Rank() + 1), err // the weight, as all elements are alike
	})
	forms = append(forms, mixForm{"all_reduce/" + kernels.QuantizedInt8.String(), func(ctx context.Context, p *mixPlan) (_ float64, err error) {
		p.plan, err = kernels.NewAllReduce(ctx, p.in, kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.QuantizedInt8, Out: p.out, MaxBlocks: 1})
		return sum, err
	}})
	return forms
}

// mix is plans over one memory: of every form one that is run and one in a graph, or of one form one of them.
type mix struct {
	memory  *memory.Memory
	tensors []*tensor.Tensor
	plans   []*mixPlan
}

// newMix makes plans of the forms that chosen lets through. What it made before an error is in the mix, too.
func newMix(ctx context.Context, m *memory.Memory, chosen func(form string, graph bool) bool) (*mix, error) {
	x := &mix{memory: m}
	size := int64(m.Group().Size())
	forms := mixForms(m)
	zeros := func(dtype tensor.DType, n int64) (*tensor.Tensor, error) {
		t, err := tensor.Zeros(ctx, m, dtype, n)
		if err != nil {
			return nil, err
		}
		x.tensors = append(x.tensors, t)
		return t, t.Rendezvous(ctx)
	}
	many := int64(2 * len(forms))
	values, err := zeros(tensor.Float32, many*3*mixElements)
	if err != nil {
		return x, err
	}
	counts, err := zeros(tensor.Int64, many*3*size)
	if err != nil {
		return x, err
	}
	mine, even := make([]float32, values.NumElements()), make([]int64, counts.NumElements())
	for i := range mine {
		mine[i] = float32(m.Group().Rank() + 1)
	}
	for i := range even {
		even[i] = mixElements / size
	}
	if err := errors.Join(tensor.Write(values.Local(), mine, 0), tensor.Write(counts.Local(), even, 0), m.Group().Barrier(ctx, "filled")); err != nil {
		return x, err
	}
	for i, form := range forms {
		for _, graph := range []bool{false, true} {
			if !chosen(form.name, graph) {
				continue
			}
			n := int64(2 * i)
			p := &mixPlan{name: fmt.Sprintf("%s/graph=%t", form.name, graph), memory: m}
			if graph {
				n++
			}
			var errs [5]error
			p.in, errs[0] = values.Sub(n*3*mixElements, mixElements)
			p.out, errs[1] = values.Sub((n*3+1)*mixElements, mixElements)
			p.more, errs[2] = values.Sub((n*3+2)*mixElements, mixElements)
			p.counts, errs[3] = counts.Sub(n*3*size, size)
			p.received, errs[4] = counts.Sub(n*3*size+size, 2, size)
			if err := errors.Join(errs[:]...); err != nil {
				return x, err
			}
			x.plans = append(x.plans, p)
			if p.want, err = form.make(ctx, p); err != nil {
				return x, fmt.Errorf("%s: %w", p.name, err)
			}
			if p.stream, err = m.Device().NewStream(); err != nil {
				return x, err
			}
			if graph {
				if err := errors.Join(p.stream.BeginCapture(), p.plan.Run(p.stream)); err != nil {
					return x, err
				}
				if p.graph, err = p.stream.EndCapture(); err != nil {
					return x, err
				}
			}
		}
	}
	return x, nil
}

// run enqueues a run.
func (p *mixPlan) run() error {
	if p.graph != nil {
		return p.graph.Launch(p.stream)
	}
	return p.plan.Run(p.stream)
}

// runs has all plans run some times, in one order on all ranks, and looks at what comes of it.
func (x *mix) runs(ctx context.Context, times int) error {
	for range times {
		for _, p := range x.plans {
			if err := p.run(); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	for _, p := range x.plans {
		if err := p.stream.Synchronize(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		var got [1]float32
		if err := tensor.Read(p.out.Local(), got[:], 0); err != nil {
			return err
		}
		if math.Abs(float64(got[0])-p.want) > 0.05 {
			return fmt.Errorf("%s gives %v, and %v was expected", p.name, got[0], p.want)
		}
	}
	return nil
}

// lost says what is wrong with an error that must tell of the rank that has died.
func lost(what string, err error) error {
	if err == nil {
		return fmt.Errorf("%s tells nothing of the rank that has died", what)
	}
	if e, ok := errors.AsType[*group.PeerLostError](err); !ok || e.Rank != mixVictim || !errors.Is(err, symmem.ErrPeerLost) {
		return fmt.Errorf("%s tells not of rank %d: %w", what, mixVictim, err)
	}
	return nil
}

// end takes all plans to their end after a rank has died in a run of them, which was enqueued.
func (x *mix) end(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var wrong []error
	for _, p := range x.plans {
		// A rank that needs nothing of the dead goes on until it needs what another one does not give any more, or is told by the next run.
		err := p.stream.Synchronize(ctx)
		for err == nil && ctx.Err() == nil {
			if err = p.run(); err == nil {
				err = p.stream.Synchronize(ctx)
			}
		}
		wrong = append(wrong, lost(p.name, err), lost(p.name+", run again", p.plan.Run(p.stream)))
		if p.graph != nil {
			wrong = append(wrong, lost(p.name+", launched again", errors.Join(p.graph.Launch(p.stream), p.stream.Synchronize(ctx))))
		}
	}
	return errors.Join(wrong...)
}

// close closes everything, in which a lost rank may be told of.
func (x *mix) close(ctx context.Context) error {
	var all []error
	closed := func(what string, err error) {
		if err != nil && !errors.Is(err, symmem.ErrPeerLost) {
			all = append(all, fmt.Errorf("closing %s: %w", what, err))
		}
	}
	for _, p := range x.plans {
		if p.graph != nil {
			closed(p.name, p.graph.Close())
		}
		if p.plan != nil {
			closed(p.name, p.plan.Close(ctx))
		}
		if p.stream != nil {
			closed(p.name, p.stream.Close())
		}
	}
	for _, t := range x.tensors {
		closed("a tensor", t.Close(ctx))
	}
	return errors.Join(all...)
}

// TestKillCollectives kills a rank in the middle of runs of every collective in every form, each on a stream of its own, and each also from a graph.
// The others are told in each of them, and go on among themselves.
func TestKillCollectives(t *testing.T) {
	for _, name := range backend.Names() {
		t.Run("backend="+name, func(t *testing.T) {
			requireBackend(t, name)
			requireGPUs(t, name, mixSize)
			for _, p := range runWorld(t, mixSize, "kill_collectives", "SYMMEM_BACKEND="+name, "SYMMEM_TIMEOUT=20s", "SYMMEM_KERNEL_TIMEOUT=60s") {
				if p.rank == mixVictim {
					assert.Error(t, p.err, "the victim was killed")
					assert.False(t, p.end.Done)
					assert.Empty(t, p.lines)
					continue
				}
				require.NoErrorf(t, p.err, "rank %d", p.rank)
				require.Truef(t, p.end.Done, "rank %d did not come to its end", p.rank)
				assert.Emptyf(t, p.end.Error, "rank %d", p.rank)
				require.Lenf(t, p.lines, 1, "rank %d", p.rank)
				var ended []string
				require.NoError(t, json.Unmarshal(p.lines[0], &ended))
				assert.GreaterOrEqual(t, len(ended), 20, "plans that were told")
				t.Logf("rank %d: %d plans", p.rank, len(ended))
			}
		})
	}
}

// killCollectivesJob is one rank of TestKillCollectives. It says the names of the plans that were told, all of them in the end.
func killCollectivesJob(ctx context.Context, cfg config.Config, _ string, say func(any)) error {
	goroutines := goleak.IgnoreCurrent()
	files, err := backendtest.OpenFiles()
	if err != nil {
		return err
	}
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	onHost := r.Device().Kind() == device.Host
	all := func(string, bool) bool { return true }
	x, err := newMix(ctx, r.Memory(), all)
	if err == nil {
		err = x.runs(ctx, 3)
	}
	if err != nil {
		return err
	}
	// The victim has come to some of the last runs, so that peers are in the middle of them, and to others not.
	for i, p := range x.plans {
		if r.Rank() == mixVictim && i%3 == 0 {
			continue
		}
		if err := p.run(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	if err := r.Barrier(ctx); err != nil {
		return err
	}
	if r.Rank() == mixVictim {
		p, err := os.FindProcess(os.Getpid())
		if err == nil {
			err = p.Kill()
		}
		time.Sleep(time.Minute) // until it takes effect
		return fmt.Errorf("still alive: %w", err)
	}
	if err := x.end(ctx, cfg.LivenessTimeout); err != nil {
		return err
	}
	var ended []string
	for _, p := range x.plans {
		ended = append(ended, p.name)
	}
	say(ended)
	sub, err := r.Sub(ctx, slices.DeleteFunc([]int{0, 1, 2}, func(r int) bool { return r == mixVictim }))
	if err != nil {
		return err
	}
	y, err := newMix(ctx, sub.Memory(), all)
	if err == nil {
		err = y.runs(ctx, 2)
	}
	if err := errors.Join(err, y.close(ctx), sub.Close(ctx), x.close(ctx)); err != nil {
		return fmt.Errorf("among survivors: %w", err)
	}
	if err := r.Close(ctx); err != nil && !errors.Is(err, symmem.ErrPeerLost) {
		return fmt.Errorf("closing: %w", err)
	}
	if err := goleak.Find(goroutines); err != nil {
		return err
	}
	if !onHost {
		return nil // a driver keeps what it likes
	}
	maps, _ := os.ReadFile("/proc/self/maps") // there is none elsewhere than on Linux
	if n := bytes.Count(maps, []byte("memfd:symmem")); n > 0 {
		return fmt.Errorf("%d mappings of shared memory are left", n)
	}
	_, err = backendtest.FilesLeft(files)
	return err
}

// TestLoseCollectives: a rank is lost in a run of one collective in one form, with peer pointers, without, and in the forms for islands with those of some peers. The others are told by that plan.
func TestLoseCollectives(t *testing.T) {
	for _, far := range []string{"false", "true", "islands"} {
		var forms []mixForm
		backendtest.RequireAll(t, backendtest.OnRanks(t, mixSize, nil, func(ctx context.Context, g *group.Group) error {
			return onMixMemory(ctx, g, far, func(m *memory.Memory) error {
				if g.Rank() == 0 {
					forms = mixForms(m)
				}
				return nil
			})
		}))
		for _, form := range forms {
			if far == "islands" && !strings.HasSuffix(form.name, "/"+kernels.Hierarchical.String()) {
				continue
			}
			for _, graph := range []bool{false, true} {
				t.Run(fmt.Sprintf("far=%s/%s/graph=%t", far, form.name, graph), func(t *testing.T) {
					backendtest.RequireAll(t, backendtest.OnRanks(t, mixSize, nil, func(ctx context.Context, g *group.Group) error {
						return onMixMemory(ctx, g, far, func(m *memory.Memory) error {
							return loseOne(ctx, m, form.name, graph)
						})
					}))
				})
			}
		}
	}
}

// onMixMemory runs f on memory of the CPU.
func onMixMemory(ctx context.Context, g *group.Group, far string, f func(m *memory.Memory) error) error {
	near, err := host.New(g, nil)
	if err != nil {
		return err
	}
	var b backend.Backend = near
	switch far {
	case "true":
		b = backendtest.Far(near, g, nil)
	case "islands": // the rank that is lost is on one with another rank
		b = backendtest.Far(near, g, &backendtest.FarOptions{Islands: []int{0, mixVictim, mixVictim}})
	}
	m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
	err = f(m)
	if closed := m.Close(ctx); !errors.Is(closed, symmem.ErrPeerLost) {
		err = errors.Join(err, closed)
	}
	return err
}

func loseOne(ctx context.Context, m *memory.Memory, form string, graph bool) (err error) {
	x, err := newMix(ctx, m, func(f string, g bool) bool { return f == form && g == graph })
	defer func() { err = errors.Join(err, x.close(ctx)) }()
	if err != nil {
		return err
	}
	if err := x.runs(ctx, 3); err != nil {
		return err
	}
	g := m.Group()
	if g.Rank() != mixVictim {
		if err := x.plans[0].run(); err != nil {
			return err
		}
	}
	if err := g.Barrier(ctx, "the last run"); err != nil {
		return err
	}
	if g.Rank() == mixVictim {
		g.Abort("test")
		return nil
	}
	return x.end(ctx, config.Default().LivenessTimeout)
}
