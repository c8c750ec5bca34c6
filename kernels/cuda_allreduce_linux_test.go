package kernels

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// cudaRuns is a plan's launch whose kernels end when a test says so: each of their blocks has counted then, in the channel, the runs that
// it has ended.
type cudaRuns struct {
	device.PreparedLaunch
	work   *cudaWork
	refuse error // of launches, unless nil
	queued int   // launches that have not ended
}

// holdRuns takes the place of the launch of a plan on a simulated device.
func holdRuns(p *Plan) *cudaRuns {
	w := p.work.(*cudaWork)
	r := &cudaRuns{PreparedLaunch: w.launch, work: w}
	w.launch = r
	return r
}

func (r *cudaRuns) Launch(device.Stream) error {
	if r.refuse == nil {
		r.queued++
	}
	return r.refuse
}

// blocks is how many blocks each kernel has.
func (r *cudaRuns) blocks() int { return r.work.layout.Blocks }

// end lets the blocks from lo to hi-1 of the queued kernels end; the last one ends the kernels.
func (r *cudaRuns) end(lo, hi int) error {
	w := r.work
	own, err := w.plan.channel.Peer(w.plan.in.Rank())
	if err != nil {
		return err
	}
	control := make([]byte, w.layout.ControlBytes())
	if err := w.plan.device.CopyToHost(control, own); err != nil {
		return err
	}
	record := len(control) / r.blocks()
	for b := lo; b < hi; b++ {
		at := control[b*record:]
		binary.LittleEndian.PutUint32(at, binary.LittleEndian.Uint32(at)+uint32(r.queued))
	}
	if hi == r.blocks() {
		r.queued = 0
	}
	return w.plan.device.CopyFromHost(own, control)
}

// TestCUDAPlanMoves: a plan moves to another stream when every block of every run has ended, and not before, whatever its count begins at;
// a launch that was refused is no run.
func TestCUDAPlanMoves(t *testing.T) {
	for _, first := range []uint32{0, 7, 1<<32 - 3} {
		t.Run(fmt.Sprintf("first=%d", first), func(t *testing.T) {
			onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
				p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: TwoShotPull, Out: out, FirstEpoch: first})
				if err != nil {
					return err
				}
				runs := holdRuns(p)
				from, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				to, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				for round := range 4 {
					for range round + 1 {
						if err := p.Run(from); err != nil {
							return err
						}
					}
					if err := p.Run(to); !errors.Is(err, ErrTwoStreams) {
						return fmt.Errorf("round %d, with %d runs queued on another stream: %w", round, runs.queued, err)
					}
					if err := runs.end(0, runs.blocks()-1); err != nil {
						return err
					}
					if err := p.Run(to); !errors.Is(err, ErrTwoStreams) {
						return fmt.Errorf("round %d, with the last of %d blocks at work: %w", round, runs.blocks(), err)
					}
					if err := runs.end(runs.blocks()-1, runs.blocks()); err != nil {
						return err
					}
					runs.refuse = errBroken
					if err := p.Run(to); !errors.Is(err, errBroken) {
						return fmt.Errorf("round %d, a launch that is refused: %w", round, err)
					}
					runs.refuse = nil
					if err := p.Run(from); err != nil {
						return fmt.Errorf("round %d, when all has ended: %w", round, err)
					}
					if err := runs.end(0, runs.blocks()); err != nil {
						return err
					}
					from, to = to, from
				}
				return errors.Join(from.Close(), to.Close(), p.Close(ctx))
			})
		})
	}
}

// faulted is a fault word in which a kernel has written.
type faulted struct {
	device.FaultWord
	word uint64
}

func (f *faulted) Load() uint64 { return f.word }

// TestCUDAPlanAfterFault: once a kernel of a plan has given up none is launched any more, also before anybody has synchronized and been
// told; the run is, and the plan has failed.
func TestCUDAPlanAfterFault(t *testing.T) {
	onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: TwoShotPull, Out: out})
		if err != nil {
			return err
		}
		runs := holdRuns(p)
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := p.Run(s); err != nil {
			return err
		}
		peer := 1 - m.Group().Rank()
		runs.work.fault = &faulted{runs.work.fault, ptx.FaultTimeout<<56 | uint64(ptx.TwoShotPull)<<48 | uint64(peer)<<32}
		for what, run := range map[string]func() error{
			"a run": func() error { return p.Run(s) },
			"a recorded run": func() error {
				err := s.BeginCapture()
				if err != nil {
					return err
				}
				run := p.Run(s)
				g, err := s.EndCapture()
				if err != nil {
					return err
				}
				return errors.Join(run, g.Close())
			},
		} {
			err := run()
			wait, ok := errors.AsType[*device.WaitError](err)
			if !ok || wait.Peer != peer || !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("%s after a fault: %w", what, err)
			}
		}
		if runs.queued != 1 {
			return fmt.Errorf("%d launches, of which one was before the fault", runs.queued)
		}
		if err := p.Err(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the plan's error: %w", err)
		}
		return errors.Join(s.Close(), p.Close(ctx))
	})
}

// TestOneShotInPlaceIsStaged: a rank whose result goes where its peers still read has its input copied aside first; a result that goes
// elsewhere costs no copy.
func TestOneShotInPlaceIsStaged(t *testing.T) {
	onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		for _, alg := range []Algorithm{OneShotPull, OneShotMultimem} {
			for _, to := range []*tensor.Tensor{in, out} {
				p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: alg, Out: to})
				if err != nil {
					return err
				}
				w := p.work.(*cudaWork)
				staged := w.launch.(*simLaunch).p.Flags&ptx.Staged != 0
				if room := w.layout.ChannelBytes()-w.layout.ControlBytes() >= in.Bytes(); staged != (to == in) || room != staged {
					return fmt.Errorf("%s, in place %t: staged %t, with room for that %t", alg, to == in, staged, room)
				}
				if err := p.Close(ctx); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
