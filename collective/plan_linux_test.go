package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// forms are a plan without peers to wait for whose work is f, as a kernel for the CPU, as a program, and as one with a lane.
func (r *rank) forms(f func() error) []form {
	host := collective.Spec{Name: "form", Tensors: []tensor.SymmetricTensor{r.x}, Host: func(*collective.Addresses) (collective.HostKernel, error) {
		return func(*collective.HostRun) error { return f() }, nil
	}}
	steps := func(b *collective.Builder) { b.Host(f) }
	// Nothing orders the lane's step to the stream's: the plan begins and ends them together.
	laned := func(b *collective.Builder) { b.Host(f); b.Signal(0); b.Fork() }
	return []form{{"host", host}, {"program", r.program(false, steps)}, {"lane", r.program(true, laned)}}
}

// form is a Spec with a name for errors.
type form struct {
	name string
	spec collective.Spec
}

// streams makes another stream.
func (r *rank) streams() (device.Stream, error) { return r.m.Device().NewStream() }

// TestPlanMoves: a plan moves to another stream when its runs have ended, and not before.
func TestPlanMoves(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		hold, began := make(chan struct{}), make(chan struct{}, 100)
		for _, form := range r.forms(func() error { began <- struct{}{}; <-hold; return nil }) {
			name, spec := form.name, form.spec
			p, err := collective.New(ctx, r.m, spec)
			if err != nil {
				return err
			}
			to, err := r.streams()
			if err != nil {
				return err
			}
			from := r.s
			for round := range 3 {
				hold = make(chan struct{})
				err := errors.Join(p.Run(from), p.Run(from))
				if err == nil {
					<-began
				}
				moved := p.Run(to)
				close(hold)
				if err := errors.Join(err, from.Synchronize(ctx)); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				<-began
				if !errors.Is(moved, errs.ErrTwoStreams) {
					return fmt.Errorf("%s, round %d: a run on another stream gave %w", name, round, moved)
				}
				from, to = to, from
			}
			if err := errors.Join(p.Run(from), from.Synchronize(ctx)); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			<-began
			other := from
			if other == r.s {
				other = to
			}
			if err := errors.Join(other.Close(), p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestGraphsOnTwoStreams: a graph of a plan that is launched while another graph runs it on another stream is an error of its stream.
func TestGraphsOnTwoStreams(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		var hold, began chan struct{}
		for _, form := range r.forms(func() error { began <- struct{}{}; <-hold; return nil }) {
			name, spec := form.name, form.spec
			if name == "lane" {
				continue // its graphs wait for each other's lane
			}
			hold, began = make(chan struct{}), make(chan struct{}, 2)
			p, err := collective.New(ctx, r.m, spec)
			if err != nil {
				return err
			}
			other, err := r.streams()
			if err != nil {
				return err
			}
			var graphs [2]device.Graph // launches of one graph follow each other
			for i := range graphs {
				if graphs[i], err = r.graph(p); err != nil {
					return err
				}
			}
			if err := graphs[0].Launch(r.s); err != nil {
				return err
			}
			select {
			case <-began:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := graphs[1].Launch(other); err != nil {
				return err
			}
			soon, cancel := context.WithTimeout(ctx, patience)
			told := other.Synchronize(soon)
			cancel()
			close(hold)
			if !errors.Is(told, errs.ErrTwoStreams) {
				return fmt.Errorf("%s: a graph on a second stream: %w", name, told)
			}
			if err := r.s.Synchronize(ctx); err != nil {
				return fmt.Errorf("%s: the run under way: %w", name, err)
			}
			if err := p.Run(r.s); !errors.Is(err, errs.ErrTwoStreams) {
				return fmt.Errorf("%s: the plan after that: %w", name, err)
			}
			if err := errors.Join(graphs[0].Close(), graphs[1].Close(), other.Close(), p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestLaneIsRecorded: while a stream records a plan with a lane, no other stream runs it; the lane's steps are the graph's, also where the
// program has no fork before them and no join behind.
func TestLaneIsRecorded(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		ran := 0
		p, err := collective.New(ctx, r.m, r.program(true, func(b *collective.Builder) {
			b.Send(0, collective.Put{Peer: 1 - b.Rank(), Tensor: 0, Offset: 4, Local: r.x.Ptr(), Bytes: 4})
			b.Wait(0)
			b.Host(func() error { ran++; return nil })
			b.Signal(1)
			b.Wait(1)
		}))
		if err != nil {
			return err
		}
		other, err := r.streams()
		if err != nil {
			return err
		}
		if err := errors.Join(tensor.Write(r.x.Local(), []float32{float32(r.Rank() + 1), 0}, 0), r.s.BeginCapture(), p.Run(r.s)); err != nil {
			return err
		}
		if err := p.Run(other); !errors.Is(err, errs.ErrTwoStreams) {
			return fmt.Errorf("a run beside a capture: %w", err)
		}
		g, err := r.s.EndCapture()
		if err != nil {
			return err
		}
		if err := errors.Join(r.m.Device().Synchronize(ctx), r.Barrier(ctx, "recorded")); err != nil {
			return err
		}
		value := func() (float32, error) {
			all, err := tensor.ReadAll[float32](r.x.Local())
			return all[1], err
		}
		if v, err := value(); err != nil || v != 0 || ran != 0 {
			return fmt.Errorf("recording has put %v, and ran %d steps: %w", v, ran, err)
		}
		if err := errors.Join(r.Barrier(ctx, "looked"), g.Launch(r.s), r.s.Synchronize(ctx)); err != nil {
			return err
		}
		if v, err := value(); err != nil || v != float32(2-r.Rank()) || ran != 1 {
			return fmt.Errorf("the graph has put %v, and ran %d steps: %w", v, ran, err)
		}
		return errors.Join(p.Run(other), other.Synchronize(ctx), g.Close(), other.Close(), p.Close(ctx))
	})
}

// TestFailedProgramIsOver: a program without signals has nobody else to tell that a graph of it does nothing any more.
func TestFailedProgramIsOver(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		ran := 0
		spec := collective.Spec{Name: "steps", Program: &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.Host(func() error { ran++; return errOwn })
			return nil
		}}}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		g, err := r.graph(p)
		if err != nil {
			return err
		}
		for range 3 {
			if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(err, errOwn) {
				return fmt.Errorf("a graph of a plan that has failed: %w", err)
			}
		}
		if ran != 1 {
			return fmt.Errorf("%d runs", ran)
		}
		return errors.Join(g.Close(), p.Close(ctx))
	})
}

// TestBusyPlanKeepsItsWork: what a plan uses is not given back while the device still works, although the context of Close has ended; else it
// is, once.
func TestBusyPlanKeepsItsWork(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("busy=%t", busy), func(t *testing.T) {
			onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
				w := &watched{}
				p, err := collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) { b.Launch(w) }))
				if err != nil {
					return err
				}
				hold := make(chan struct{})
				if !busy {
					close(hold)
				}
				if err := errors.Join(r.s.HostFunc(func() { <-hold }), p.Run(r.s)); err != nil {
					return err
				}
				if !busy {
					if err := p.Close(ctx); err != nil || w.closed.Load() != 1 {
						return fmt.Errorf("closed %d times: %w", w.closed.Load(), err)
					}
					return nil
				}
				soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				err = p.Close(soon)
				cancel()
				kept := w.closed.Load() == 0
				close(hold)
				if !errors.Is(err, context.DeadlineExceeded) || !kept {
					return fmt.Errorf("closing a plan whose device works on, kept %t: %w", kept, err)
				}
				return r.s.Synchronize(ctx)
			})
		})
	}
}

// TestPlanWaitsForItsRuns: closing a plan waits for what is queued.
func TestPlanWaitsForItsRuns(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		for _, form := range r.forms(func() error { time.Sleep(5 * time.Millisecond); return nil }) {
			name, spec := form.name, form.spec
			var ran atomic.Int32
			p, err := collective.New(ctx, r.m, spec)
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(r.s), p.Run(r.s), r.s.HostFunc(func() { ran.Add(1) }), p.Close(ctx)); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if ran.Load() != 1 {
				return fmt.Errorf("%s: closed before its runs have ended", name)
			}
			if err := r.s.Synchronize(ctx); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return nil
	})
}

// TestPlanGivesLargeWorkspaceBack: closing a plan gives back what large workspace nobody uses any more, and a plan beside it keeps its own.
func TestPlanGivesLargeWorkspaceBack(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		const large = 257 << 20
		had := r.backend.bytes.Load()
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "a large plan", Workspace: large, Host: r.forms(nil)[0].spec.Host})
		if err != nil {
			return err
		}
		if held := r.backend.bytes.Load() - had; held < large {
			return fmt.Errorf("%d bytes more are held by a plan with %d", held, int64(large))
		}
		if err := p.Close(ctx); err != nil {
			return err
		}
		if held := r.backend.bytes.Load() - had; held >= large {
			return fmt.Errorf("%d bytes more are held after closing", held)
		}
		return nil
	})
}

// TestRanksMakeOnePlan: where the ranks' Specs differ in anything but functions, all of them are told, with everybody's value, and the
// memory goes on.
func TestRanksMakeOnePlan(t *testing.T) {
	onRanks(t, 3, patience, onHost, func(ctx context.Context, r *rank) error {
		y, err := r.tensor(ctx, elements)
		if err != nil {
			return err
		}
		z, err := r.tensor(ctx, elements)
		if err != nil {
			return err
		}
		halves := make([]tensor.SymmetricTensor, 2)
		for i := range halves {
			if halves[i], err = z.Sub(int64(i)*elements/2, elements/2); err != nil {
				return err
			}
		}
		flat, err := z.Sub(0, elements/4)
		if err != nil {
			return err
		}
		none, err := z.Sub(0, 0)
		if err != nil {
			return err
		}
		kernel := func(*collective.Addresses) (collective.HostKernel, error) {
			return func(*collective.HostRun) error { return nil }, nil
		}
		build := func(context.Context, *collective.Builder) error { return nil }
		tensors := func(ts ...tensor.SymmetricTensor) func(s *collective.Spec) {
			return func(s *collective.Spec) { s.Tensors = ts }
		}
		program := func(p collective.Program) func(s *collective.Spec) {
			p.Build = build
			return func(s *collective.Spec) { s.Host, s.Program = nil, &p }
		}
		for _, c := range []struct {
			what   string
			change func(s *collective.Spec) // on rank 1
			others func(s *collective.Spec) // on the other ranks; nil is nothing
		}{
			{"name", func(s *collective.Spec) { s.Name = "another" }, nil},
			{"parameters", func(s *collective.Spec) { s.Parameters = "root 2" }, func(s *collective.Spec) { s.Parameters = "root 1" }},
			{"workspace", func(s *collective.Spec) { s.Workspace = 101 }, nil},
			{"first epoch", func(s *collective.Spec) { s.FirstEpoch = 1 }, nil},
			{"multicast", func(s *collective.Spec) { s.Multicast = true }, nil},
			{"a tensor", tensors(z, y), nil},
			{"the second tensor", tensors(r.x, z), nil},
			{"the order of tensors", tensors(y, r.x), nil},
			{"more tensors", tensors(r.x, y, y), nil},
			{"fewer tensors", tensors(r.x), nil},
			{"the place in a tensor", tensors(r.x, halves[0]), tensors(r.x, halves[1])},
			{"the size of a tensor", tensors(r.x, flat), tensors(r.x, halves[0])},
			{"an empty tensor", tensors(r.x, none), tensors(r.x, halves[0])},
			{"the form", program(collective.Program{}), nil},
			{"signals", program(collective.Program{Signals: 2}), program(collective.Program{Signals: 1})},
			{"granted", program(collective.Program{Signals: 2, Granted: 1}), program(collective.Program{Signals: 2})},
			{"lane", program(collective.Program{Signals: 2, Lane: true}), program(collective.Program{Signals: 2})},
		} {
			spec := collective.Spec{Name: "one plan", Tensors: []tensor.SymmetricTensor{r.x, y}, Workspace: 100, Host: kernel}
			if c.others != nil && r.Rank() != 1 {
				c.others(&spec)
			}
			if r.Rank() == 1 {
				c.change(&spec)
			}
			var says []string
			if c.what == "workspace" {
				says = []string{"workspace of 101 bytes"} // as the plan has it: what the memory would make of it is another thing
			}
			if err := r.refused(ctx, spec, errs.ErrMismatch, says...); err != nil {
				return fmt.Errorf("another %s: %w", c.what, err)
			}
		}
		return errors.Join(r.works(ctx), y.Close(ctx), z.Close(ctx))
	})
}

// TestWrongSpecs: what a Spec must not have is every rank's error, whichever rank has it, and the memory goes on.
func TestWrongSpecs(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		other, err := tensor.Zeros(ctx, r.m, tensor.Float32, elements) // without a rendezvous
		if err != nil {
			return err
		}
		closed, err := r.tensor(ctx, elements)
		if err != nil {
			return err
		}
		near, err := hostMemory(r)
		if err != nil {
			return err
		}
		foreign, err := tensor.Zeros(ctx, near, tensor.Float32, elements)
		if err != nil {
			return err
		}
		if err := errors.Join(foreign.Rendezvous(ctx), closed.Close(ctx), r.works(ctx)); err != nil {
			return err
		}
		had := r.backend.bytes.Load()
		tensors := func(t tensor.SymmetricTensor) func(s *collective.Spec) {
			return func(s *collective.Spec) { s.Tensors = append(s.Tensors, t) }
		}
		for _, c := range []struct {
			what   string
			change func(s *collective.Spec)
			want   error
			says   string
			alone  bool // one rank alone is a difference
		}{
			{"no name", func(s *collective.Spec) { s.Name = "" }, errs.ErrInvalid, "Name", false},
			{"workspace", func(s *collective.Spec) { s.Workspace = -3 }, errs.ErrInvalid, "Workspace is -3", false},
			{"huge workspace", func(s *collective.Spec) { s.Workspace = 1<<63 - 1 }, errs.ErrInvalid, "9223372036854775807", true},
			{"large workspace", func(s *collective.Spec) { s.Workspace = 1 << 50 }, errs.ErrInvalid, "1125899906842624", true},
			{"no memory", func(s *collective.Spec) { s.Workspace = 1 << 39 }, errs.ErrNoMemory, "", true},
			{"nothing", func(s *collective.Spec) { s.Host = nil }, errs.ErrInvalid, "at least one", false},
			{"no form", func(s *collective.Spec) { s.Host, s.CUDA = nil, &collective.Kernel{} }, errs.ErrUnsupported, "cuda devices only", false},
			{"nil tensor", tensors(nil), errs.ErrInvalid, "Tensors[1]", false},
			{"typed nil tensor", tensors((*tensor.Tensor)(nil)), errs.ErrInvalid, "Tensors[1]", false},
			{"no rendezvous", tensors(other), errs.ErrNoRendezvous, "", false},
			{"closed tensor", tensors(closed), errs.ErrClosed, "", false},
			{"foreign tensor", tensors(foreign), errs.ErrNotSymmetric, "another memory", false},
			{"failure", func(s *collective.Spec) { s.Failure = errOwn }, nil, errOwn.Error(), false},
			{"typed failure", func(s *collective.Spec) { s.Failure = errs.ErrUnavailable }, errs.ErrUnavailable, "", false},
			{"failure without words", func(s *collective.Spec) { s.Failure = errors.New("") }, nil, "errorString", false},
			{"multicast", func(s *collective.Spec) { s.Multicast = true }, errs.ErrUnsupported, "", true},
			{"host fails", func(s *collective.Spec) {
				s.Host = func(*collective.Addresses) (collective.HostKernel, error) { return nil, errs.ErrUnavailable }
			}, errs.ErrUnavailable, "", false},
			{"host gives nothing", func(s *collective.Spec) {
				s.Host = func(*collective.Addresses) (collective.HostKernel, error) { return nil, nil }
			}, errs.ErrInvalid, "returned no kernel", false},
			{"host asks for no such tensor", func(s *collective.Spec) {
				kernel := s.Host
				s.Host = func(a *collective.Addresses) (collective.HostKernel, error) { a.Tensor(1, 0); return kernel(a) }
			}, errs.ErrInvalid, "one of 1 tensors", false},
			{"host asks for no such workspace", func(s *collective.Spec) {
				kernel := s.Host
				s.Host = func(a *collective.Addresses) (collective.HostKernel, error) { a.Workspace(2); return kernel(a) }
			}, errs.ErrInvalid, "2", false},
			{"host asks for Comm", func(s *collective.Spec) {
				kernel := s.Host
				s.Host = func(a *collective.Addresses) (collective.HostKernel, error) { a.Comm(); return kernel(a) }
			}, errs.ErrUnsupported, "Comm", false},
		} {
			for bad := range 3 { // on one rank, on the other, on all
				if bad < 2 && c.alone {
					continue
				}
				spec := collective.Spec{
					Name: "wrong", Tensors: []tensor.SymmetricTensor{r.x}, Host: r.forms(nil)[0].spec.Host,
					Workspace: 5 << 20, // of which a block has room for one
				}
				if bad == 2 || bad == r.Rank() {
					c.change(&spec)
				}
				if err := r.refused(ctx, spec, c.want, c.says); err != nil {
					return fmt.Errorf("%s on %d: %w", c.what, bad, err)
				}
				if err := r.works(ctx); err != nil {
					return fmt.Errorf("after %s on %d: %w", c.what, bad, err)
				}
			}
		}
		if now := r.backend.bytes.Load(); now != had {
			return fmt.Errorf("%d bytes more are held", now-had)
		}
		var none context.Context
		for _, err := range []error{
			errorOf(collective.New(none, r.m, collective.Spec{})), errorOf(collective.New(ctx, nil, collective.Spec{})),
		} {
			if !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("without context or memory: %w", err)
			}
		}
		return errors.Join(other.Close(ctx), foreign.Close(ctx), near.Close(ctx))
	})
}

func errorOf(_ *collective.Plan, err error) error { return err }

// hostMemory is another memory of the rank's group.
func hostMemory(r *rank) (*memory.Memory, error) {
	b, err := host.New(r.Group, nil)
	if err != nil {
		return nil, err
	}
	return memory.New(b, r.Group, nil), nil
}

// TestNoPlan: a plan that New did not make is refused, whatever is asked of it.
func TestNoPlan(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		var none *collective.Plan
		for _, p := range []*collective.Plan{none, {}} {
			for call, err := range map[string]error{"Run": p.Run(r.s), "Run without a stream": p.Run(nil), "Err": p.Err(), "Close": p.Close(ctx)} {
				if _, ok := errors.AsType[*errs.ArgumentError](err); !ok {
					return fmt.Errorf("%s of %s: %w", call, p, err)
				}
			}
		}
		return nil
	})
}

// TestWorkspaceError: where a rank has no memory for the workspace every rank gets the same typed error, so that all can do with less.
func TestWorkspaceError(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		_, err := collective.New(ctx, r.m, collective.Spec{Name: "large", Workspace: 1 << 39, Host: r.forms(nil)[0].spec.Host})
		if _, ok := errors.AsType[*memory.WorkspaceError](err); !ok {
			return fmt.Errorf("no WorkspaceError: %w", err)
		}
		return r.works(ctx)
	})
}

// TestFarNeedsAProgram: where peers have no addresses a kernel alone is refused, and the program is taken beside one.
func TestFarNeedsAProgram(t *testing.T) {
	onRanks(t, 2, patience, onFar, func(ctx context.Context, r *rank) error {
		spec := r.forms(nil)[0].spec
		if err := r.refused(ctx, spec, errs.ErrNotReachable, "has no Program"); err != nil {
			return err
		}
		spec.Tensors = nil
		if err := r.refused(ctx, spec, errs.ErrNotReachable, "has no Program"); err != nil {
			return err
		}
		return r.takes(ctx, "program", nil)
	})
	onRanks(t, 1, patience, onFar, func(ctx context.Context, r *rank) error { // a rank alone has no peers
		return r.takes(ctx, "host", nil)
	})
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error { return r.takes(ctx, "host", &collective.Kernel{}) })
}

// takes makes sure which form New takes of all.
func (r *rank) takes(ctx context.Context, want string, cuda *collective.Kernel) error {
	taken := ""
	p, err := collective.New(ctx, r.m, collective.Spec{
		Name: "any", Tensors: []tensor.SymmetricTensor{r.x}, CUDA: cuda,
		Host: func(*collective.Addresses) (collective.HostKernel, error) {
			taken += "host"
			return func(*collective.HostRun) error { return nil }, nil
		},
		Program: &collective.Program{Build: func(context.Context, *collective.Builder) error { taken += "program"; return nil }},
	})
	if err != nil {
		return err
	}
	if taken != want {
		return fmt.Errorf("it is the form %s, and not %s", taken, want)
	}
	return errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx))
}

// TestRanksCloseOnePlan: ranks that close different plans at once are all told, and of one mind about what is taken: they make other plans, and close those.
func TestRanksCloseOnePlan(t *testing.T) {
	all := func(ctx context.Context, r *rank) error {
		barrier := func() (*collective.Plan, error) {
			return collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) { b.Signal(0); b.Finish(0) }))
		}
		one, err := barrier()
		if err != nil {
			return err
		}
		two, err := barrier()
		if err != nil {
			return err
		}
		if r.Rank() == 1 {
			one, two = two, one
		}
		for _, p := range []*collective.Plan{one, two} {
			if err := p.Close(ctx); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("ranks that close different plans: %w", err)
			}
			next, err := barrier()
			if err != nil {
				return err
			}
			if err := errors.Join(next.Run(r.s), r.s.Synchronize(ctx), next.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	}
	for where, open := range map[string]opener{"host": onHost, "far": onFar} {
		t.Run(where, func(t *testing.T) { onRanks(t, 2, patience, open, all) })
	}
}

// TestManyTensorsAreCompared: ranks compare all tensors of a plan that has very many, and an error about them can be read.
func TestManyTensorsAreCompared(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		spec := collective.Spec{Name: "many", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(*collective.HostRun) error { return nil }, nil
		}}
		for i := range int64(2000) {
			part, err := r.x.Sub(i%elements, 1)
			if err != nil {
				return err
			}
			spec.Tensors = append(spec.Tensors, part)
		}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		for _, differ := range []int{0, 31, 32, 1000, 1999} {
			had := spec.Tensors[differ]
			if spec.Tensors[differ], err = r.x.Sub(int64(r.Rank()), 1); err != nil {
				return err
			}
			_, err := collective.New(ctx, r.m, spec)
			if !errors.Is(err, errs.ErrMismatch) || len(err.Error()) > 16<<10 {
				return fmt.Errorf("another tensor %d is an error of %d bytes: %w", differ, len(fmt.Sprint(err)), err)
			}
			spec.Tensors[differ] = had
		}
		return p.Close(ctx)
	})
}
