package collective_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/tensor"
)

// onGPUs runs f on two ranks with a simulated GPU each, which have addresses of each other's memory.
func onGPUs(t *testing.T, f func(ctx context.Context, r *rank) error) {
	t.Helper()
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1})
	require.NoError(t, err)
	onRanks(t, 2, patience, func(g *group.Group, near backend.Backend) (backend.Backend, error) {
		b, err := native.New(context.Background(), g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: patience})
		return b, errors.Join(err, near.Close(context.Background()))
	}, f)
	assert.NoError(t, machine.Err())
	assert.Empty(t, machine.Left())
}

// onCopies runs f on two ranks with memory of every kind.
func onCopies(t *testing.T, f func(ctx context.Context, r *rank) error) {
	t.Run("host", func(t *testing.T) { onRanks(t, 2, patience, onHost, f) })
	t.Run("far", func(t *testing.T) {
		onRanks(t, 2, patience, farWith(&backendtest.FarOptions{Delay: 100 * time.Microsecond}), f)
	})
	t.Run("gpu", func(t *testing.T) { onGPUs(t, f) })
}

// What a relay's tensor holds: whom its byte is for, and what that is; it comes to where a peer's is looked for.
const (
	relayWhere = iota // how far behind relayTo the byte goes, on both ranks; 0 is nothing
	relayByte
	relayTo
	relayCopied = 100 // and, by a copy of this rank's own, behind here
)

// relay is a program that reads from memory of the device where its byte is to go, on this rank and on the peer. Fails is asked in each
// such step. Fixed is one whose send puts nothing, and needs nothing of the CPU.
func (r *rank) relay(ctx context.Context, lane, fixed bool, fails func(step string) ([]collective.Copy, []collective.Put, error)) (*collective.Plan, error) {
	return collective.New(ctx, r.m, r.program(lane, func(b *collective.Builder) {
		stage, at := b.Stage(2)
		b.Fork()
		b.Signal(0) // the peer may write to x
		b.Wait(0)
		b.Join()
		b.CopyComputed(func() ([]collective.Copy, error) { return []collective.Copy{{Dst: at, Src: r.x.Ptr(), Bytes: 2}}, nil })
		b.CopyComputed(func() ([]collective.Copy, error) {
			if copies, _, err := fails("copy"); copies != nil || err != nil {
				return copies, err
			}
			if stage[relayWhere] == 0 {
				return nil, nil
			}
			return []collective.Copy{{}, {Dst: r.x.Ptr().Add(relayCopied + int64(stage[relayWhere])), Src: at.Add(relayByte), Bytes: 1}}, nil
		})
		b.Fork()
		if fixed {
			b.Send(1)
			b.Join()
			b.Finish(1)
			return
		}
		b.SendComputed(1, func() ([]collective.Put, error) {
			if _, puts, err := fails("send"); puts != nil || err != nil {
				return puts, err
			}
			n := int64(stage[relayWhere])
			return []collective.Put{{Peer: 1 - r.Rank(), Offset: relayTo + n, Local: r.x.Ptr().Add(relayByte), Bytes: min(n, 1)}}, nil
		})
		b.Join()
		b.Finish(1)
	}))
}

func never(string) ([]collective.Copy, []collective.Put, error) { return nil, nil, nil }

// TestComputedCopies: copies and puts follow what is in memory of the device when each run, or replay, comes to them.
func TestComputedCopies(t *testing.T) {
	for _, lane := range []bool{false, true} {
		for _, graph := range []bool{false, true} {
			t.Run(fmt.Sprintf("lane=%t/graph=%t", lane, graph), func(t *testing.T) {
				onCopies(t, func(ctx context.Context, r *rank) error {
					p, err := r.relay(ctx, lane, false, never)
					if err != nil {
						return err
					}
					run, g, err := r.runner(p, graph)
					if err != nil {
						return err
					}
					d := r.m.Device()
					for k := range 6 {
						data := make([]byte, r.x.Bytes())
						data[relayWhere], data[relayByte] = byte(7*k%5), byte(1+k+50*r.Rank())
						if err := errors.Join(d.CopyFromHost(r.x.Ptr(), data), r.Barrier(ctx, "filled"), run(), r.s.Synchronize(ctx)); err != nil {
							return err
						}
						if n := data[relayWhere]; n > 0 {
							data[relayCopied+n], data[relayTo+n] = data[relayByte], byte(1+k+50*(1-r.Rank()))
						}
						got := make([]byte, len(data))
						if err := errors.Join(d.CopyToHost(got, r.x.Ptr()), r.Barrier(ctx, "looked")); err != nil {
							return err
						}
						if !bytes.Equal(got, data) {
							return fmt.Errorf("run %d: %v, and %v was expected", k, got[:110], data[:110])
						}
					}
					// Only a graph can still ask: it is told, and nothing is touched.
					if err := p.Close(ctx); err != nil || g == nil {
						return err
					}
					if d.Kind() == device.CUDA {
						return g.Close() // what a GPU does by itself, its signals here, cannot be kept from running
					}
					if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) {
						return fmt.Errorf("a graph of a closed plan: %w", err)
					}
					return g.Close()
				})
			})
		}
	}
}

// TestComputedCopiesFail: whatever fails on one rank, in finding out what to copy or put or in doing it, is the plan's error there; no signal goes to the
// peer, which learns of it only when the rank leaves, and nothing is written.
func TestComputedCopiesFail(t *testing.T) {
	outside := []collective.Put{{Peer: 1, Offset: 1 << 40, Local: 1, Bytes: 1}}
	for _, c := range []struct {
		name, step string
		fails      func() ([]collective.Copy, []collective.Put, error)
		want       error // nil is any
		fixed      bool
	}{
		{name: "copy error", step: "copy", want: errOwn, fails: func() ([]collective.Copy, []collective.Put, error) { return nil, nil, errOwn }},
		{name: "copy panic", step: "copy", fails: func() ([]collective.Copy, []collective.Put, error) { panic("nothing to copy") }},
		{name: "copy error before a send", step: "copy", fixed: true, want: errOwn, fails: func() ([]collective.Copy, []collective.Put, error) { return nil, nil, errOwn }},
		{name: "copy panic before a send", step: "copy", fixed: true, fails: func() ([]collective.Copy, []collective.Put, error) { panic("nothing to copy") }},
		{name: "copy from nowhere", step: "copy", fails: func() ([]collective.Copy, []collective.Put, error) {
			return []collective.Copy{{Dst: 0, Src: 0, Bytes: 8}}, nil, nil
		}},
		{name: "send error", step: "send", want: errOwn, fails: func() ([]collective.Copy, []collective.Put, error) { return nil, nil, errOwn }},
		{name: "send panic", step: "send", fails: func() ([]collective.Copy, []collective.Put, error) { panic("nothing to put") }},
		{name: "send outside", step: "send", want: errs.ErrInvalid, fails: func() ([]collective.Copy, []collective.Put, error) { return nil, outside, nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			onCopies(t, func(ctx context.Context, r *rank) error {
				runs := 0
				p, err := r.relay(ctx, false, c.fixed, func(step string) ([]collective.Copy, []collective.Put, error) {
					if step == "copy" {
						runs++
					}
					if runs < 2 || r.Rank() == 1 || step != c.step {
						return nil, nil, nil
					}
					return c.fails()
				})
				if err != nil {
					return err
				}
				d, data := r.m.Device(), make([]byte, r.x.Bytes())
				if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
					return err
				}
				data[relayWhere], data[relayByte] = 3, 9
				if err := errors.Join(d.CopyFromHost(r.x.Ptr(), data), r.Barrier(ctx, "filled"), p.Run(r.s)); err != nil {
					return err
				}
				if r.Rank() == 0 {
					told := r.s.Synchronize(ctx)
					if told == nil || p.Err() == nil || c.want != nil && (!errors.Is(told, c.want) || !errors.Is(p.Err(), c.want)) {
						told = fmt.Errorf("Synchronize gave %w, and the plan's error is %v", told, p.Err())
					} else if err := p.Run(r.s); err == nil || !errors.Is(err, p.Err()) {
						told = fmt.Errorf("the next run gave %w", err)
					} else {
						told = nil
					}
					r.Abort("failed") // a signal that had gone out would be there before this
					return told
				}
				if err := r.s.Synchronize(ctx); !errors.Is(err, errs.ErrPeerLost) {
					return fmt.Errorf("the peer was told %w", err)
				}
				got := make([]byte, len(data))
				if err := d.CopyToHost(got, r.x.Ptr()); err != nil {
					return err
				}
				if !slices.Equal(got[relayTo:relayCopied], data[relayTo:relayCopied]) {
					return errors.New("a failed run has written to the peer")
				}
				return nil
			})
		})
	}
}

// TestCopiesOfARunInPart: copies that are left out, since the run could not be enqueued to its end, are followed by no signal, also where that is a kernel's.
func TestCopiesOfARunInPart(t *testing.T) {
	onCopies(t, func(ctx context.Context, r *rank) error {
		const gate, from, made, to = 0, 4, 8, 12
		w := &watched{}
		at := func(place int64) device.Ptr { return r.x.Ptr().Add(place) }
		p, err := collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) {
			b.CopyComputed(func() ([]collective.Copy, error) {
				return []collective.Copy{{Dst: at(made), Src: at(from), Bytes: 1}}, nil
			})
			b.Send(1, collective.Put{Peer: 1 - r.Rank(), Offset: to, Local: at(made), Bytes: 1})
			b.Finish(1)
			b.Launch(w)
		}))
		if err != nil {
			return err
		}
		d := r.m.Device()
		other, err := d.NewStream()
		if err := errors.Join(err, d.CopyFromHost(at(from), []byte{5}), p.Run(r.s), r.s.Synchronize(ctx), d.CopyFromHost(at(from), []byte{6}), r.Barrier(ctx, "one run")); err != nil {
			return err
		}
		if r.Rank() == 1 {
			w.refuse = errOwn
			err := r.s.WaitValue32(at(gate), 1)
			if ran := p.Run(r.s); err != nil || !errors.Is(ran, errOwn) {
				return fmt.Errorf("%w, and of a run whose last step is refused %w", err, ran)
			}
			err = errors.Join(other.WriteValue32(at(gate), 1), other.Synchronize(ctx), other.Close())
			_ = r.s.Synchronize(ctx) // which may tell it, too
			r.Abort("failed")        // a signal that had gone out would be there before this
			return err
		}
		got := make([]byte, 1)
		ran := errors.Join(p.Run(r.s), r.s.Synchronize(ctx))
		if err := d.CopyToHost(got, at(to)); err != nil || !errors.Is(ran, errs.ErrPeerLost) {
			return fmt.Errorf("the peer of a run that has failed has %d, and the error %w; %w", got[0], ran, err)
		}
		return other.Close()
	})
}

// TestStageOfHalf: what a program takes that no plan comes of is given back.
func TestStageOfHalf(t *testing.T) {
	onGPUs(t, func(ctx context.Context, r *rank) error {
		had := held(r)
		err := r.refused(ctx, r.program(false, func(b *collective.Builder) {
			b.Stage(1000)
			b.CopyComputed(func() ([]collective.Copy, error) { return nil, nil })
			if r.Rank() == 1 {
				b.Stage(0)
			}
		}), errs.ErrInvalid, "Stage", "1 and more")
		now := held(r)
		// A group's first plan loads what all plans have.
		if had.StopWords, had.Modules = now.StopWords, now.Modules; err == nil && had != now {
			err = fmt.Errorf("%+v is held, and %+v was before", now, had)
		}
		return err
	})
}

// TestComputedCopiesOfAClosedPlan: a graph that has kept the plan is told, and does not ask what to copy.
func TestComputedCopiesOfAClosedPlan(t *testing.T) {
	onCopies(t, func(ctx context.Context, r *rank) error {
		asked := 0
		p, err := collective.New(ctx, r.m, collective.Spec{
			Name: "copies", Tensors: []tensor.SymmetricTensor{r.x},
			Program: &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
				b.CopyComputed(func() ([]collective.Copy, error) { asked++; return nil, nil })
				return nil
			}},
		})
		if err != nil {
			return err
		}
		g, err := r.graph(p)
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx), p.Close(ctx)); err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) || asked != 1 {
			return fmt.Errorf("asked %d times, %w", asked, err)
		}
		return g.Close()
	})
}
