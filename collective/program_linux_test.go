package collective_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onFar is the host backend with peers that have no pointers.
func onFar(g *group.Group, near backend.Backend) (backend.Backend, error) {
	return backendtest.Far(near, g, nil), nil
}

func farWith(o *backendtest.FarOptions) opener {
	return func(g *group.Group, near backend.Backend) (backend.Backend, error) {
		return backendtest.Far(near, g, o), nil
	}
}

// The signals of the gathering.
const (
	signalData   = iota // the peer's x is in the workspace
	signalDirect        // the peer's x is in the tensor
	signalRoom          // the peer has room in its workspace; granted
	gatherSignals
)

// gather is a collective by puts: every rank's x goes to every rank, by the workspace into all and straight into direct, which have a row for
// each rank. Apart, signals of what goes to workspaces are given on the plan's stream.
func gather(x, all, direct tensor.SymmetricTensor, lane, apart bool) collective.Spec {
	n := x.Bytes()
	size, me := x.WorldSize(), x.Rank()
	return collective.Spec{
		Name: "gather", Tensors: []tensor.SymmetricTensor{x, all, direct}, Workspace: int64(size) * n,
		Program: &collective.Program{
			Signals: gatherSignals, Granted: 1, Lane: lane,
			Build: func(_ context.Context, b *collective.Builder) error {
				if b.Rank() != me || b.WorldSize() != size {
					return errors.New("another rank")
				}
				var box, direct []collective.Put
				for peer := range size {
					if peer == me {
						continue
					}
					box = append(box, collective.Put{Peer: peer, Tensor: collective.ToWorkspace, Offset: int64(me) * n, Local: x.Ptr(), Bytes: n})
					direct = append(direct, collective.Put{Peer: peer, Tensor: 2, Offset: int64(me) * n, Local: x.Ptr(), Bytes: n})
				}
				own, rows := b.Bytes(x.Ptr(), n), b.Bytes(b.Workspace(me), int64(size)*n)
				for _, v := range rows {
					if v != 0 {
						return errors.New("the workspace does not begin as zeros")
					}
				}
				to, straight := b.Bytes(b.Tensor(1, me), int64(size)*n), b.Bytes(b.Tensor(2, me), int64(size)*n)
				b.Fork()
				b.Wait(signalRoom)
				if apart {
					b.Put(signalData, box...)
					b.Join()
					b.Announce(signalData)
				} else {
					b.Send(signalData, box...)
				}
				b.Send(signalDirect, direct...)
				b.Wait(signalDirect)
				b.Join()
				b.Finish(signalData)
				b.Host(func() error {
					copy(rows[int64(me)*n:], own)
					copy(straight[int64(me)*n:], own)
					copy(to, rows)
					clear(rows) // nobody's next x comes before there is room
					return nil
				})
				b.Fork()
				b.Signal(signalRoom)
				return nil
			},
		},
	}
}

// TestProgram: puts come before their signals, waits are for all peers, granted signals are there from the beginning, and the lane and the
// stream wait for each other; run after run, from graphs, over the end of the count, with peers near and far.
func TestProgram(t *testing.T) {
	for _, far := range []bool{false, true} {
		for size := 1; size <= 4; size++ {
			for _, lane := range []bool{false, true} {
				for _, first := range []uint32{0, 1<<32 - 3} {
					for _, apart := range []bool{false, true} {
						if far && apart {
							continue // which is refused
						}
						t.Run(fmt.Sprintf("far=%t/size=%d/lane=%t/first=%d/apart=%t", far, size, lane, first, apart), func(t *testing.T) {
							open := onHost
							if far {
								open = farWith(&backendtest.FarOptions{Delay: 200 * time.Microsecond})
							}
							onRanks(t, size, patience, open, func(ctx context.Context, r *rank) error { return r.gathers(ctx, lane, apart, first) })
						})
					}
				}
			}
		}
	}
}

// gathers is one rank of TestProgram.
func (r *rank) gathers(ctx context.Context, lane, apart bool, first uint32) error {
	all, err := r.tensor(ctx, int64(r.Size()), elements)
	if err != nil {
		return err
	}
	direct, err := r.tensor(ctx, int64(r.Size()), elements)
	if err != nil {
		return err
	}
	spec := gather(r.x, all, direct, lane, apart)
	spec.FirstEpoch = first
	p, err := collective.New(ctx, r.m, spec)
	if err != nil {
		return err
	}
	g, err := r.graph(p)
	if err != nil {
		return err
	}
	for run := range 8 {
		launch := func() error { return p.Run(r.s) }
		if run%3 == 2 {
			launch = func() error { return g.Launch(r.s) }
		}
		if err := errors.Join(r.fill(r.x, run), launch(), r.s.Synchronize(ctx)); err != nil {
			return err
		}
		for _, t := range []*tensor.Tensor{all, direct} {
			got, err := tensor.ReadAll[float32](t.Local())
			if err != nil {
				return err
			}
			for i, v := range got {
				if want := float32(1000*run + 100*(i/elements) + i%elements); v != want {
					return fmt.Errorf("run %d: element %d of row %d is %v, not %v", run, i%elements, i/elements, v, want)
				}
			}
		}
		if err := r.Barrier(ctx, "looked"); err != nil { // direct has no room for a second run
			return err
		}
	}
	return errors.Join(g.Close(), p.Close(ctx), all.Close(ctx), direct.Close(ctx))
}

// TestPutsWithoutSignalsFar: puts without signals to memory without addresses are ErrUnsupported on every rank, and the memory goes on.
func TestPutsWithoutSignalsFar(t *testing.T) {
	onRanks(t, 2, patience, farWith(nil), func(ctx context.Context, r *rank) error {
		spec := r.program(true, func(b *collective.Builder) {
			b.Put(0, collective.Put{Peer: 1 - r.Rank(), Tensor: 0, Local: r.x.Ptr(), Bytes: 8})
		})
		if _, err := collective.New(ctx, r.m, spec); !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("puts without signals: %v, and ErrUnsupported was expected", err)
		}
		return r.gathers(ctx, true, false, 0)
	})
}

// program is a Spec of steps with two signals.
func (r *rank) program(lane bool, build func(b *collective.Builder)) collective.Spec {
	return collective.Spec{
		Name: "steps", Tensors: []tensor.SymmetricTensor{r.x}, Workspace: 64,
		Program: &collective.Program{Signals: 2, Lane: lane, Build: func(_ context.Context, b *collective.Builder) error { build(b); return nil }},
	}
}

// watched is a launch that counts, and refuses if it is told to.
type watched struct {
	refuse           error
	launched, closed atomic.Int32
	told             error // by Fail
}

func (w *watched) Launch(device.Stream) error { w.launched.Add(1); return w.refuse }
func (w *watched) Close() error               { w.closed.Add(1); return nil }
func (w *watched) Fail(err error)             { w.told = err }

// TestWrongSteps: a step that a program must not have is every rank's error of New, with the value. What was prepared is given back, what
// came behind is not looked at, and the memory goes on.
func TestWrongSteps(t *testing.T) {
	put := func(change func(p *collective.Put)) func(r *rank, b *collective.Builder) {
		return func(r *rank, b *collective.Builder) {
			p := collective.Put{Peer: 1 - r.Rank(), Tensor: 0, Local: r.x.Ptr(), Bytes: 8}
			change(&p)
			b.Send(0, p)
		}
	}
	for _, c := range []struct {
		name string
		step func(r *rank, b *collective.Builder)
		want error
		says string
	}{
		{"send signal", func(_ *rank, b *collective.Builder) { b.Send(2) }, errs.ErrInvalid, "2"},
		{"send negative", func(_ *rank, b *collective.Builder) { b.Send(-1) }, errs.ErrInvalid, "-1"},
		{"wait", func(_ *rank, b *collective.Builder) { b.Wait(2) }, errs.ErrInvalid, "2 signals"},
		{"finish", func(_ *rank, b *collective.Builder) { b.Finish(7) }, errs.ErrInvalid, "7"},
		{"signal", func(_ *rank, b *collective.Builder) { b.Signal(-5) }, errs.ErrInvalid, "-5"},
		{"put signal", func(_ *rank, b *collective.Builder) { b.Put(2) }, errs.ErrInvalid, "2"},
		{"announce", func(_ *rank, b *collective.Builder) { b.Announce(9) }, errs.ErrInvalid, "9"},
		{"no such tensor", put(func(p *collective.Put) { p.Tensor = 1 }), errs.ErrInvalid, "one of 1 tensors"},
		{"negative tensor", put(func(p *collective.Put) { p.Tensor = -2 }), errs.ErrInvalid, "-2"},
		{"before the tensor", put(func(p *collective.Put) { p.Offset = -4 }), errs.ErrInvalid, "offset -4"},
		{"behind the tensor", put(func(p *collective.Put) { p.Offset = 4*elements - 4 }), errs.ErrInvalid, "tensor of 400 bytes"},
		{"far behind the tensor", put(func(p *collective.Put) { p.Offset = 1<<63 - 1 }), errs.ErrInvalid, "9223372036854775807"},
		{"negative bytes", put(func(p *collective.Put) { p.Bytes = -1 }), errs.ErrInvalid, "-1 bytes"},
		{"behind the workspace", put(func(p *collective.Put) { p.Tensor, p.Offset = collective.ToWorkspace, 60 }), errs.ErrInvalid, "workspace of 64 bytes"},
		{"before the workspace", put(func(p *collective.Put) { p.Tensor, p.Offset = collective.ToWorkspace, -4 }), errs.ErrInvalid, "-4"},
		{"to itself", func(r *rank, b *collective.Builder) {
			b.Send(0, collective.Put{Peer: r.Rank(), Local: r.x.Ptr(), Bytes: 8})
		}, errs.ErrInvalid, "another rank than this one"},
		{"no such rank", put(func(p *collective.Put) { p.Peer = 2 }), errs.ErrInvalid, "2"},
		{"negative rank", put(func(p *collective.Put) { p.Peer = -1 }), errs.ErrInvalid, "-1"},
		{"nothing to no such rank", put(func(p *collective.Put) { p.Peer, p.Bytes = 2, 0 }), errs.ErrInvalid, "2"},
		{"from nowhere", put(func(p *collective.Put) { p.Local = 0 }), errs.ErrNotSymmetric, ""},
		{"two to one rank", func(r *rank, b *collective.Builder) {
			p := collective.Put{Peer: 1 - r.Rank(), Local: r.x.Ptr(), Bytes: 8}
			b.Send(0, p, p)
		}, errs.ErrInvalid, "two to rank"},
		{"computed send signal", func(_ *rank, b *collective.Builder) {
			b.SendComputed(2, func() ([]collective.Put, error) { return nil, nil })
		}, errs.ErrInvalid, "2 signals"},
		{"computed send of nothing", func(_ *rank, b *collective.Builder) { b.SendComputed(0, nil) }, errs.ErrInvalid, "a function"},
		{"computed copies of nothing", func(_ *rank, b *collective.Builder) { b.CopyComputed(nil) }, errs.ErrInvalid, "a function"},
		{"no stage", func(_ *rank, b *collective.Builder) { b.Stage(0) }, errs.ErrInvalid, "1 and more"},
		{"no launch beside", func(_ *rank, b *collective.Builder) { b.LaunchBeside(nil) }, errs.ErrInvalid, "Builder.LaunchBeside"},
		{"no function", func(_ *rank, b *collective.Builder) { b.Host(nil) }, errs.ErrInvalid, "a function"},
		{"no launch", func(_ *rank, b *collective.Builder) { b.Launch(nil) }, errs.ErrInvalid, "a prepared launch"},
		{"nil launch", func(_ *rank, b *collective.Builder) { b.Launch((*watched)(nil)) }, errs.ErrInvalid, "a prepared launch"},
		{"no kernel", func(_ *rank, b *collective.Builder) { b.Kernel(nil) }, errs.ErrInvalid, "a kernel"},
		{"a kernel for the CPU", func(_ *rank, b *collective.Builder) {
			b.Kernel(&collective.Kernel{Image: []byte(".version"), Function: "f", Blocks: 1, Threads: 1})
		}, errs.ErrUnsupported, ""},
		{"comm", func(_ *rank, b *collective.Builder) { b.Comm() }, errs.ErrUnsupported, "symmem::Comm"},
		{"number of a tensor", func(_ *rank, b *collective.Builder) { b.Tensor(1, 0) }, errs.ErrInvalid, "one of 1 tensors"},
		{"rank of a tensor", func(_ *rank, b *collective.Builder) { b.Tensor(0, 2) }, errs.ErrInvalid, "2"},
		{"multicast of no tensor", func(_ *rank, b *collective.Builder) { b.Multicast(-1) }, errs.ErrInvalid, "-1"},
		{"multicast", func(_ *rank, b *collective.Builder) { b.Multicast(0) }, errs.ErrUnsupported, ""},
		{"bytes of nothing that is there", func(_ *rank, b *collective.Builder) { b.Bytes(0, 8) }, errs.ErrInvalid, ""},
	} {
		for _, far := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/far=%t", c.name, far), func(t *testing.T) {
				open := onHost
				if far {
					open = onFar
				}
				onRanks(t, 2, patience, open, func(ctx context.Context, r *rank) error {
					if err := r.works(ctx); err != nil {
						return err
					}
					had := r.backend.bytes.Load()
					for bad := range 3 { // on all ranks, on one, on the other
						before, behind, looked := &watched{}, &watched{}, false
						spec := r.program(true, func(b *collective.Builder) {
							b.Send(0, collective.Put{Peer: 1 - r.Rank(), Local: r.x.Ptr(), Bytes: 8})
							b.Launch(before)
							if bad == 2 || r.Rank() == bad {
								c.step(r, b)
								b.Multicast(987654321) // a second error, which is not looked at
								looked = true
							}
							b.Launch(behind)
						})
						if err := r.refused(ctx, spec, c.want, "preparing steps", c.says); err != nil {
							return err
						}
						if _, err := collective.New(ctx, r.m, spec); strings.Contains(err.Error(), "987654321") {
							return fmt.Errorf("not the first: %w", err)
						}
						if n := before.closed.Load() * behind.closed.Load(); n != 4 || before.launched.Load() != 0 {
							return fmt.Errorf("launches were closed %d and %d times", before.closed.Load(), behind.closed.Load())
						}
						if looked == (bad == 1-r.Rank()) {
							return errors.New("the test is wrong")
						}
						if err := r.works(ctx); err != nil {
							return err
						}
					}
					if now := r.backend.bytes.Load(); now != had {
						return fmt.Errorf("%d bytes more are held", now-had)
					}
					return nil
				})
			})
		}
	}
}

// works makes sure that a plan can be made, run and closed.
func (r *rank) works(ctx context.Context) error {
	ran := false
	p, err := collective.New(ctx, r.m, r.program(true, func(b *collective.Builder) {
		b.Send(0, collective.Put{Peer: (r.Rank() + 1) % r.Size(), Tensor: collective.ToWorkspace, Local: r.x.Ptr(), Bytes: 64})
		b.Finish(0)
		b.Host(func() error { ran = true; return nil })
	}))
	if err != nil {
		return fmt.Errorf("a plan that is right: %w", err)
	}
	if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
		return err
	}
	if !ran {
		return errors.New("a run has not run")
	}
	return p.Close(ctx)
}

// TestWrongPrograms: what a Program must not say is refused on every rank.
func TestWrongPrograms(t *testing.T) {
	build := func(context.Context, *collective.Builder) error { return nil }
	for _, c := range []struct {
		name    string
		program collective.Program
		want    error
		says    string
	}{
		{"no build", collective.Program{Signals: 1}, errs.ErrInvalid, "Program.Build"},
		{"signals", collective.Program{Signals: -1, Build: build}, errs.ErrInvalid, "Program.Signals is -1"},
		{"too many signals", collective.Program{Signals: 1 << 40, Build: build}, errs.ErrInvalid, ""},
		{"far too many signals", collective.Program{Signals: 1<<63 - 1, Build: build}, errs.ErrInvalid, ""},
		{"granted", collective.Program{Signals: 1, Granted: 2, Build: build}, errs.ErrInvalid, "Program.Granted is 2"},
		{"peers", collective.Program{Signals: 1, Peers: [][]int{nil, nil}, Build: build}, errs.ErrInvalid, "Program.Peers is of 2 signals"},
		{"peer", collective.Program{Signals: 1, Peers: [][]int{{9}}, Build: build}, errs.ErrInvalid, "Peers is 9"},
		{"granted negative", collective.Program{Signals: 1, Granted: -1, Build: build}, errs.ErrInvalid, "Program.Granted is -1"},
		{"kernels", collective.Program{Kernels: []*collective.Kernel{nil}, Build: build}, errs.ErrInvalid, "Kernels[0]"},
		{"kernels elsewhere", collective.Program{Kernels: []*collective.Kernel{{Image: []byte("x"), Function: "f", Blocks: 1, Threads: 32}}, Build: build}, errs.ErrUnsupported, "kernels for"},
		{"block workspace", collective.Program{Kernels: []*collective.Kernel{{BlockWorkspace: 4}}, Build: build}, errs.ErrInvalid, "BlockWorkspace"},
		{"among nobody", collective.Program{Among: []int{}, Build: build}, errs.ErrInvalid, "Program.Among"},
		{"among twice", collective.Program{Among: []int{0, 0, 1, 1}, Build: build}, errs.ErrInvalid, "Program.Among"},
		{"among backwards", collective.Program{Among: []int{1, 0}, Build: build}, errs.ErrInvalid, "Program.Among"},
		{"among others", collective.Program{Among: []int{0, 1, 2}, Build: build}, errs.ErrInvalid, "Program.Among"},
		{"join in time, no kernels", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.JoinInTime(func() error { return nil })
			return nil
		}}, errs.ErrInvalid, "Kernels is none"},
		{"join in time, no error", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.JoinInTime(nil)
			return nil
		}}, errs.ErrInvalid, "why"},
		{"stop, no kernels", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.StopIf(8, func() error { return nil })
			return nil
		}}, errs.ErrInvalid, "Kernels is none"},
		{"stop, no error", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.StopIf(8, nil)
			return nil
		}}, errs.ErrInvalid, "why"},
		{"stop, no word", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.StopIf(0, func() error { return nil })
			return nil
		}}, errs.ErrInvalid, "word is"},
		{"stop, a part of a word", collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.StopIf(10, func() error { return nil })
			return nil
		}}, errs.ErrInvalid, "word is"},
		{"build fails", collective.Program{Build: func(context.Context, *collective.Builder) error { return errs.ErrUnavailable }}, errs.ErrUnavailable, "preparing wrong"},
	} {
		t.Run(c.name, func(t *testing.T) {
			onRanks(t, 2, patience, onFar, func(ctx context.Context, r *rank) error {
				for bad := range 3 {
					program := c.program
					if bad < 2 && r.Rank() != bad {
						program = collective.Program{Signals: c.program.Signals, Granted: c.program.Granted, Peers: c.program.Peers, Build: build}
						if c.name == "no build" || c.want == errs.ErrUnavailable {
							program = collective.Program{Signals: c.program.Signals, Build: build}
						}
					}
					if err := r.refused(ctx, collective.Spec{Name: "wrong", Program: &program}, c.want, c.says); err != nil {
						return err
					}
				}
				return r.works(ctx)
			})
		})
	}
}

// TestStepFails: a step that fails is the plan's last, whether it returns an error or panics, is told by the stream once, and the
// peers' waits end in time; what waits on the lane is told by Finish.
func TestStepFails(t *testing.T) {
	for _, c := range []struct {
		name string
		own  error // what the step of rank 0 returns; nil is a panic
	}{{"error", errOwn}, {"panic", nil}} {
		for _, lane := range []bool{false, true} {
			for _, graph := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/lane=%t/graph=%t", c.name, lane, graph), func(t *testing.T) {
					onRanks(t, 2, 100*time.Millisecond, onFar, func(ctx context.Context, r *rank) error {
						var behind atomic.Int32
						p, err := collective.New(ctx, r.m, r.program(lane, func(b *collective.Builder) {
							b.Host(func() error {
								switch {
								case r.Rank() == 1:
									return nil
								case c.own == nil:
									panic("a step is at its end")
								}
								return c.own
							})
							b.Fork()
							b.Send(0)
							b.Wait(0)
							b.Join()
							b.Send(1)
							b.Finish(1)
							b.Host(func() error { behind.Add(1); return nil })
						}))
						if err != nil {
							return err
						}
						run, g, err := r.runner(p, graph)
						if err != nil {
							return err
						}
						if err := run(); err != nil {
							return err
						}
						want := c.own
						if r.Rank() == 1 {
							want = os.ErrDeadlineExceeded
						}
						told := r.s.Synchronize(ctx)
						if told == nil || want != nil && !errors.Is(told, want) {
							return fmt.Errorf("Synchronize gave %v, and %v was expected", told, want)
						}
						if failed := p.Err(); failed == nil || want != nil && !errors.Is(failed, want) {
							return fmt.Errorf("the plan's error is %v", failed)
						}
						if _, panicked := errors.AsType[*device.PanicError](p.Err()); panicked != (want == nil) {
							return fmt.Errorf("the plan's error is %v", p.Err())
						}
						if err := p.Run(r.s); err == nil || !errors.Is(err, p.Err()) {
							return fmt.Errorf("the next run gave %v", err)
						}
						if n := behind.Load(); n != 0 {
							return fmt.Errorf("%d steps behind the one that failed were done", n)
						}
						if g != nil {
							err = g.Close()
						}
						return errors.Join(err, r.Barrier(ctx, "failed"), p.Close(ctx))
					})
				})
			}
		}
	}
}

// TestPutFails: a put that fails is the plan's failure on the rank whose it is, and its peer gets no signal for it.
func TestPutFails(t *testing.T) {
	var broken atomic.Bool
	open := farWith(&backendtest.FarOptions{Fail: func() error {
		if broken.Load() {
			return errOwn
		}
		return nil
	}})
	onRanks(t, 2, 3*time.Second, open, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, r.program(true, func(b *collective.Builder) {
			if b.Rank() == 0 {
				b.Send(0, collective.Put{Peer: 1, Local: r.x.Ptr(), Bytes: 8})
			} else {
				b.Signal(0)
			}
			b.Join()
			b.Finish(0)
		}))
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), r.Barrier(ctx, "one run")); err != nil {
			return err
		}
		broken.Store(true)
		want := errOwn
		if r.Rank() == 1 {
			want = os.ErrDeadlineExceeded
		}
		if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); !errors.Is(err, want) {
			return fmt.Errorf("%v and not %w", err, want)
		}
		if !errors.Is(p.Err(), want) {
			return fmt.Errorf("the plan's error is %v", p.Err())
		}
		return errors.Join(r.Barrier(ctx, "failed"), p.Close(ctx))
	})
}

// TestRunInPart: a run of which only the beginning could be enqueued is the plan's last, since its peers do the whole run; a run of which
// nothing was enqueued is none.
func TestRunInPart(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		for _, first := range []bool{true, false} {
			w := &watched{}
			p, err := collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) {
				if first {
					b.Launch(w)
				}
				b.Send(0)
				b.Launch(w)
			}))
			if err != nil {
				return err
			}
			w.refuse = errOwn
			if err := p.Run(r.s); !errors.Is(err, errOwn) {
				return fmt.Errorf("a run with a launch that is refused: %w", err)
			}
			if first != (w.told == nil) || !first && !errors.Is(w.told, errOwn) {
				return fmt.Errorf("first step %t: the launch was told of %w", first, w.told)
			}
			w.refuse = nil
			err = p.Run(r.s)
			if first != (err == nil) || first != (p.Err() == nil) || !first && !(errors.Is(err, errOwn) && errors.Is(p.Err(), errOwn)) {
				return fmt.Errorf("first step %t: the run after that gave %w; the plan's error is %w", first, err, p.Err())
			}
			if err := errors.Join(r.s.Synchronize(ctx), p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestRunInPartTellsNobody: what is already enqueued of a run that could not be enqueued to its end does nothing any more, and tells its peers nothing: neither of that run nor of one before it that is
// still under way. They do not take what was never made for a result.
func TestRunInPartTellsNobody(t *testing.T) {
	for _, far := range []bool{false, true} {
		for _, lane := range []bool{false, true} {
			for _, before := range []bool{false, true} {
				t.Run(fmt.Sprintf("far=%t/lane=%t/run before=%t", far, lane, before), func(t *testing.T) {
					open := onHost
					if far {
						open = onFar
					}
					onRanks(t, 2, 300*time.Millisecond, open, func(ctx context.Context, r *rank) error {
						return r.runsInPart(ctx, lane, before)
					})
				})
			}
		}
	}
}

// runsInPart is one rank of TestRunInPartTellsNobody. Rank 1 writes the first element in a step, behind a gate, and puts it to the second one of rank 0.
func (r *rank) runsInPart(ctx context.Context, lane, before bool) error {
	w := &watched{}
	gate := make(chan struct{}, 2)
	value := float32(1)
	var first []byte
	p, err := collective.New(ctx, r.m, r.program(lane, func(b *collective.Builder) {
		if r.Rank() == 1 {
			first = b.Bytes(r.x.Ptr(), 4)
			b.Host(func() error { <-gate; return nil })
			b.Host(func() error {
				binary.LittleEndian.PutUint32(first, math.Float32bits(value))
				return nil
			})
			b.Fork()
			b.Send(0, collective.Put{Peer: 0, Tensor: 0, Offset: 4, Local: r.x.Ptr(), Bytes: 4})
			b.Join()
		} else {
			b.Finish(0)
		}
		b.Launch(w)
	}))
	if err != nil {
		return err
	}
	gate <- struct{}{}
	if r.Rank() == 0 { // its waits are short, as others are in vain: it begins when the put has come
		err = r.Barrier(ctx, "put")
	}
	err = errors.Join(err, p.Run(r.s), r.s.Synchronize(ctx))
	if r.Rank() == 1 {
		err = errors.Join(err, r.Barrier(ctx, "put"))
	}
	if err := errors.Join(err, r.Barrier(ctx, "one run")); err != nil {
		return err
	}
	var ran error
	if r.Rank() == 1 {
		value = 2
		if before {
			ran = p.Run(r.s)
		}
		w.refuse = errOwn
		if err := p.Run(r.s); ran != nil || !errors.Is(err, errOwn) {
			return fmt.Errorf("%w, and of the run whose last step is refused %w", ran, err)
		}
		gate <- struct{}{}
		gate <- struct{}{}
		_ = r.s.Synchronize(ctx) // which may tell it, too
	} else {
		ran = errors.Join(p.Run(r.s), r.s.Synchronize(ctx))
		got, err := tensor.ReadAll[float32](r.x.Local())
		if err != nil || got[1] != 1 || !errors.Is(ran, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the peer of a run that has failed has %v, of which the second was to be 1, and the error %w; %w", got[:2], ran, err)
		}
	}
	return errors.Join(r.Barrier(ctx, "failed"), p.Close(ctx))
}

// TestOtherDevices: a plan does not take streams of other devices, nor none.
func TestOtherDevices(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		near, err := host.New(r.Group, nil)
		if err != nil {
			return err
		}
		other := memory.New(near, r.Group, nil)
		s, err := other.Device().NewStream()
		if err != nil {
			return err
		}
		p, err := collective.New(ctx, r.m, broadcast(r.x, 0))
		if err != nil {
			return err
		}
		for _, s := range []device.Stream{nil, s} {
			if err := p.Run(s); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("a run on %v: %w", s, err)
			}
		}
		var none context.Context
		if err := p.Close(none); !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("closing without a context: %w", err)
		}
		return errors.Join(s.Close(), p.Close(ctx), other.Close(ctx))
	})
}
