package kernels

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
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestLateRankKeepsItsMemory: while a rank has not come to a run, its tensors are its own. Peers that give up waiting for it write nothing to them, in plans of any
// kind and in any form, but those of Transfers between GPUs: copies that are enqueued on a GPU cannot be held back.
func TestLateRankKeepsItsMemory(t *testing.T) {
	eachPlanKind(t, 2, func(ctx context.Context, m *memory.Memory, where string, k planKind, a Algorithm, n int64) error {
		if a == Transfers && where == "gpu" {
			return nil
		}
		return lateRank(ctx, m, k, a, n)
	})
}

// TestLateRankIsNotMisled: a rank that comes to a run when the others have given it up, and gone on to write to their inputs, gets an error, or what the run was
// to give; in plans of any kind and in any form.
func TestLateRankIsNotMisled(t *testing.T) {
	eachPlanKind(t, 3, func(ctx context.Context, m *memory.Memory, _ string, k planKind, a Algorithm, n int64) error {
		for range 20 {
			if ran, err := misledRank(ctx, m, k, a, n, func(rank int) bool { return rank == m.Group().Size()-1 }); ran || err != nil {
				return err
			}
		}
		return errNoRun
	})
}

// TestLateIslandsAreNotMisled: so it is over islands, where ranks pass on what others of their island have: if one has given up waiting for the others, and gone on to write to its input, nobody gets
// that for its result, on its island or on another one.
func TestLateIslandsAreNotMisled(t *testing.T) {
	shortLaps(t)
	kinds := []planKind{{name: "NewAllReduce", make: allReduceOf}}
	for _, k := range planKinds {
		if slices.Contains([]string{"NewAllGather", "NewReduceScatter", "NewAllToAll"}, k.name) {
			kinds = append(kinds, k)
		}
	}
	for root := range 4 {
		kinds = append(kinds, planKind{name: fmt.Sprintf("NewBroadcast from %d", root), make: func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
			return NewBroadcast(ctx, x.of(ctx, tensor.Float32, n), root, &Options{Algorithm: a})
		}}, planKind{name: fmt.Sprintf("NewReduce to %d", root), make: func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
			return NewReduce(ctx, x.of(ctx, tensor.Float32, n), x.of(ctx, tensor.Float32, n), Sum, root, &Options{Algorithm: a})
		}})
	}
	const elements = 1200 // of a block, which is short, and of a message in laps
	for _, places := range [][]int{{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 0, 1, 2}} {
		for early := range places {
			t.Run(fmt.Sprintf("%v/%d", places, early), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				onIslands(t, places, 100*time.Millisecond, nil, func(ctx context.Context, m *memory.Memory, _ device.Stream) error {
					var failed error
					for _, k := range kinds {
						n := int64(elements)
						if k.name != "NewAllToAll" {
							n *= 10
						}
						ran := false
						for try := 0; try < 20 && !ran; try++ {
							var err error
							if ran, err = misledRank(ctx, m, k, Hierarchical, n, func(rank int) bool { return rank != early }); err != nil {
								failed = errors.Join(failed, fmt.Errorf("%s: %w", k.name, err))
							}
						}
						if !ran {
							failed = errors.Join(failed, fmt.Errorf("%s: %w", k.name, errNoRun))
						}
					}
					return failed
				})
			})
		}
	}
}

// errNoRun is the error of a kind of plan whose runs take longer than waits last.
var errNoRun = errors.New("no run has ended while waits last")

// eachPlanKind runs f on each of so many ranks for every kind of plan in every form, where waits are short: on the host device, where peers have addresses and where
// not, and on GPUs. Where f finds that the machine is too slow for that, waits are longer for this kind.
func eachPlanKind(t *testing.T, size int, f func(ctx context.Context, m *memory.Memory, where string, k planKind, a Algorithm, n int64) error) {
	for _, where := range []string{"host", "far", "gpu"} {
		t.Run(where, func(t *testing.T) {
			elements := []int64{100, 300_000}
			open := func(g *group.Group) (backend.Backend, error) {
				b, err := host.New(g, nil)
				if err == nil && where == "far" {
					return backendtest.Far(b, g, nil), nil
				}
				return b, err
			}
			if where == "gpu" {
				elements = []int64{128}
				machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
				require.NoError(t, err)
				defer func() { assert.NoError(t, machine.Err()) }()
				open = func(g *group.Group) (backend.Backend, error) {
					return native.New(t.Context(), g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
				}
			}
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				const short = 10 * time.Millisecond
				var m *memory.Memory
				last := time.Duration(0)
				waits := func(next time.Duration) error {
					if next == last {
						return nil
					}
					if m != nil {
						if err := m.Close(ctx); err != nil {
							return err
						}
					}
					b, err := open(g)
					if err != nil {
						return err
					}
					m, last = memory.New(b, g, &memory.Options{KernelTimeout: next}), next
					return nil
				}
				if err := waits(short); err != nil {
					return err
				}
				var failed error
				for _, k := range planKinds {
					for _, a := range k.forms(m.Device().Kind()) {
						if a.NeedsMulticast() || a.NeedsPeerPointers() && where == "far" {
							continue
						}
						for _, n := range elements {
							err := f(ctx, m, where, k, a, n)
							for longer := 10 * short; errors.Is(err, errNoRun) && longer <= 10*time.Second; longer *= 10 {
								if err = waits(longer); err != nil {
									return err
								}
								err = f(ctx, m, where, k, a, n)
							}
							if again := waits(short); again != nil {
								return again
							}
							if err != nil {
								failed = errors.Join(failed, fmt.Errorf("%s, %s, %d elements: %w", k.name, a, n, err))
							}
						}
					}
				}
				return errors.Join(failed, m.Close(ctx))
			}))
		})
	}
}

// lateRank has the first rank run a plan to which the other one does not come, and looks at the other's tensors. Collective.
func lateRank(ctx context.Context, m *memory.Memory, k planKind, a Algorithm, n int64) error {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, n, a)
	if err := errors.Join(append(tensors.errs, err)...); err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	late := m.Group().Rank() == 1
	var had [][]byte
	for _, t := range tensors.all {
		if !late && t.DType() == tensor.Float32 {
			err = errors.Join(err, m.Device().CopyFromHost(t.Ptr(), bytes.Repeat([]byte{0x3f}, int(t.Bytes()))))
		}
		b := make([]byte, t.Bytes())
		err = errors.Join(err, m.Device().CopyToHost(b, t.Ptr()))
		had = append(had, b)
	}
	err = errors.Join(err, m.Group().Barrier(ctx, "filled"))
	if !late && err == nil {
		err = waitedInVain(ctx, p, s) // but a root that waits for nobody may have done its part
	}
	err = errors.Join(err, m.Group().Barrier(ctx, "given up"))
	for i, t := range tensors.all {
		if !late {
			break
		}
		b := make([]byte, t.Bytes())
		err = errors.Join(err, m.Device().CopyToHost(b, t.Ptr()))
		if !bytes.Equal(b, had[i]) {
			err = errors.Join(err, fmt.Errorf("tensor %d of a rank that has not come to the run was written", i))
		}
	}
	return errors.Join(err, p.Close(ctx), s.Close(), tensors.close(ctx))
}

// waitedInVain runs a plan to which a rank does not come. It is no error that a wait ends for that: on the stream, or in Run, where that still enqueues when the wait's time is over.
func waitedInVain(ctx context.Context, p *Plan, s device.Stream) (err error) {
	for _, e := range []error{p.Run(s), s.Synchronize(ctx)} {
		if _, ok := errors.AsType[*device.WaitError](e); !ok {
			err = errors.Join(err, e)
		}
	}
	return err
}

// misledRank has some ranks come late to the second run of a plan, when the others have given that up. It reports whether the first run, which says what there is to
// give, ended in the short time that waits last here. Collective.
func misledRank(ctx context.Context, m *memory.Memory, k planKind, a Algorithm, n int64, comesLate func(rank int) bool) (ran bool, err error) {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, n, a)
	if err := errors.Join(append(tensors.errs, err)...); err != nil {
		return false, err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return false, err
	}
	d, rank := m.Device(), m.Group().Rank()
	late := comesLate(rank)
	fill := func(value byte) (err error) {
		for _, t := range tensors.all {
			if t.DType() == tensor.Float32 {
				err = errors.Join(err, d.CopyFromHost(t.Ptr(), bytes.Repeat([]byte{value}, int(t.Bytes()))))
			}
		}
		return err
	}
	read := func() (all [][]byte, err error) {
		for _, t := range tensors.all {
			b := make([]byte, t.Bytes())
			err = errors.Join(err, d.CopyToHost(b, t.Ptr()))
			all = append(all, b)
		}
		return all, err
	}
	meet := func(what string) { err = errors.Join(err, m.Group().Barrier(ctx, what)) }

	err = fill(byte(0x30 + rank))
	meet("filled")
	first := p.Run(s)
	first = m.Group().Vote(ctx, "the first run", errors.Join(first, s.Synchronize(ctx)))
	ran = first == nil
	want, e := read()
	err = errors.Join(err, e, fill(byte(0x30+rank)))
	meet("filled again")
	if ran && !late && err == nil {
		err = errors.Join(waitedInVain(ctx, p, s), fill(0x45))
	}
	meet("given up")
	if ran && late && err == nil {
		e := p.Run(s)
		if e = errors.Join(e, s.Synchronize(ctx)); e == nil {
			got, e := read()
			err = errors.Join(err, e)
			for i, b := range got {
				if !bytes.Equal(b, want[i]) {
					err = errors.Join(err, fmt.Errorf("the run has not failed on the rank that came late, and tensor %d is not what it was to give", i))
				}
			}
		}
	}
	meet("looked")
	return ran, errors.Join(err, p.Close(ctx), s.Close(), tensors.close(ctx))
}
