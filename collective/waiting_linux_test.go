package collective_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// waiting is a Spec of a program that has the kernels, all of which a run waits for peers in.
func waiting(name string, among []int, kernels ...*collective.Kernel) collective.Spec {
	return collective.Spec{Name: name, Program: &collective.Program{Kernels: kernels, Among: among, Build: func(_ context.Context, b *collective.Builder) error {
		for i := range kernels {
			b.Waiting(i)
		}
		return nil
	}}}
}

// TestFaultAmong: a kernel that waits for some ranks knows them by their places among these. Errors have their ranks.
func TestFaultAmong(t *testing.T) {
	late := fake{sizes: []int{int(unsafe.Sizeof(ptx.Comm{}))}, run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
		if c := commAt(p[0], grid); c.World == 2 && c.Rank == 0 {
			c.fail(ptx.FaultTimeout, 1)
		}
	}}
	m := newMachine(3, map[string]fake{"late": late})
	onRanks(t, 3, patience, m.open, func(ctx context.Context, r *rank) error {
		among := [][]int{{0}, {1, 2}, {1, 2}}[r.Rank()]
		p, err := collective.New(ctx, r.m, waiting("late", among, &collective.Kernel{
			Image: []byte(image), Function: "late", Blocks: 1, Threads: 32,
			Params: func(a *collective.Addresses) []any { return []any{a.Comm()} },
		}))
		if err != nil {
			return err
		}
		err = errors.Join(p.Run(r.s), r.s.Synchronize(ctx))
		if wait, ok := errors.AsType[*device.WaitError](err); r.Rank() != 1 && err != nil || r.Rank() == 1 && (!ok || wait.Peer != 2) {
			return fmt.Errorf("rank 2 does not come to rank 1: %w", err)
		}
		return errors.Join(r.Barrier(ctx, "late"), p.Close(ctx))
	})
	assert.Empty(t, m.left())
}

// TestRoomOfPrograms: a program takes as much of a device as the largest of its kernels, whichever that is.
func TestRoomOfPrograms(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		large := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 100, Threads: 32}
		small := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}
		plans, streams, err := r.large(ctx, collective.Spec{Name: "one"}, collective.Spec{Name: "two"}, collective.Spec{Name: "three"})
		if err != nil {
			return err
		}
		if err := errors.Join(plans[0].Run(streams[0]), plans[1].Run(streams[1])); err != nil {
			return err
		}
		for _, c := range []struct {
			kernels []*collective.Kernel
			want    error
		}{
			{[]*collective.Kernel{small, small}, nil},
			{[]*collective.Kernel{large, small}, errs.ErrNoRoom},
			{[]*collective.Kernel{small, large}, errs.ErrNoRoom},
		} {
			p, err := collective.New(ctx, r.m, waiting("program", nil, c.kernels...))
			if err != nil {
				return err
			}
			if err := p.Run(streams[2]); !errors.Is(err, c.want) {
				return fmt.Errorf("of %d and %d blocks beside two plans: %w", c.kernels[0].Blocks, c.kernels[1].Blocks, err)
			}
			if err := errors.Join(streams[2].Synchronize(ctx), p.Close(ctx)); err != nil {
				return err
			}
		}
		for _, p := range plans {
			err = errors.Join(err, p.Close(ctx))
		}
		return errors.Join(err, streams[0].Close(), streams[1].Close(), streams[2].Close())
	})
	assert.Empty(t, m.left())
}

// TestLaneWaitsLonger: the lane waits for the plan's stream for longer than that does for the lane, and than kernels in front of that for peers: it is not the one that gives up.
func TestLaneWaitsLonger(t *testing.T) {
	var mu sync.Mutex
	waits := map[uint32]time.Duration{} // by stream: the plan's, and the lane
	meet := fake{sizes: []int{int(unsafe.Sizeof(ptx.Comm{}))}, run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
		c := commAt(p[0], grid)
		mu.Lock()
		defer mu.Unlock()
		waits[c.Rank] = time.Duration(c.Timeout)
	}}
	m := newMachine(1, map[string]fake{"still": still, ptx.Meet(false).Name: meet})
	onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
		spec := waiting("meeting", nil, &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32})
		spec.Program.Lane = true
		steps := spec.Program.Build
		spec.Program.Build = func(ctx context.Context, b *collective.Builder) error {
			b.JoinInTime(func() error { return errOwn })
			return steps(ctx, b)
		}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		return errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx))
	})
	assert.Equal(t, map[uint32]time.Duration{0: patience, 1: 8 * patience}, waits)
	assert.Empty(t, m.left())
}

// TestAddressesOfPrograms: each kernel that waits for peers has records of its own, and addresses of the ranks that it waits for; behind it the builder has those of all.
func TestAddressesOfPrograms(t *testing.T) {
	m := newMachine(3, map[string]fake{"still": {sizes: []int{int(unsafe.Sizeof(ptx.Comm{})), 8}, run: still.run}})
	onRanks(t, 3, patience, m.open, func(ctx context.Context, r *rank) error {
		const blocks = 3
		var comms []ptx.Comm
		kernel := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: blocks, Threads: 32, Params: func(a *collective.Addresses) []any {
			comms = append(comms, a.Comm())
			return []any{comms[len(comms)-1], a.Table()}
		}}
		among := [][]int{{0}, {1, 2}, {1, 2}}[r.Rank()]
		spec := waiting("addresses", among, kernel, kernel)
		spec.Tensors = []tensor.SymmetricTensor{r.x}
		steps := spec.Program.Build
		var all, want []device.Ptr
		spec.Program.Build = func(ctx context.Context, b *collective.Builder) error {
			if err := steps(ctx, b); err != nil {
				return err
			}
			table := b.Table()
			for peer := range b.WorldSize() {
				all = append(all, *(*device.Ptr)(at(table.Add(int64(8 * peer)))), *(*device.Ptr)(at(table.Add(int64(8 * (b.WorldSize() + peer))))))
				want = append(want, b.Tensor(0, peer), b.Records(peer))
			}
			return nil
		}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		if !slices.Equal(all, want) {
			return fmt.Errorf("the builder's table is %v and not %v", all, want)
		}
		first, second := comms[0], comms[1]
		for i := range among {
			if apart := int64(second.Workspace[i] - first.Workspace[i]); apart < ptx.ControlBytes(blocks, r.Size()) {
				return fmt.Errorf("records of two kernels are %d bytes apart", apart)
			}
		}
		return p.Close(ctx)
	})
	assert.Empty(t, m.left())
}

// TestWhichStopItWas: of several looks at words, and of several joins in time, the error is that of the one that has given up.
func TestWhichStopItWas(t *testing.T) {
	var words [2]uint32 // that the plan looks at
	const stops = len(words)
	var gives int // the join that gives up, from 1 on; 0 is none
	joins := 0    // of this run
	give := func(c comm, kind, why uint64) {
		fault := why<<56 | kind<<48 | uint64(c.Rank&0xffff)<<32
		if kind == ptx.FaultMeet {
			fault |= uint64(c.Index&0xffff) << 16
		}
		(*atomic.Uint32)(at(device.Ptr(c.Dead))).Store(1)
		(*atomic.Uint64)(at(device.Ptr(c.Fault))).CompareAndSwap(0, fault)
	}
	told := fake{sizes: []int{int(unsafe.Sizeof(ptx.Comm{})), 8}, run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
		if *(*uint32)(at(*(*device.Ptr)(p[1]))) != 0 {
			give(commAt(p[0], grid), ptx.FaultTeller, ptx.FaultTold)
		}
	}}
	meet := fake{sizes: []int{int(unsafe.Sizeof(ptx.Comm{}))}, run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
		c := commAt(p[0], grid)
		if c.Rank != 0 { // the lane
			return
		}
		if joins++; joins == gives {
			give(c, ptx.FaultMeet, ptx.FaultTimeout)
		}
	}}
	for which := range 2 * stops {
		t.Run(fmt.Sprint(which), func(t *testing.T) {
			words, gives, joins = [2]uint32{}, 0, 0
			if which < stops {
				words[which] = 1
			} else {
				gives = which - stops + 1
			}
			m := newMachine(1, map[string]fake{"still": still, ptx.Told.Name: told, ptx.Meet(false).Name: meet})
			onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
				reasons := make([]error, 2*stops)
				for i := range reasons {
					reasons[i] = fmt.Errorf("reason %d", i)
				}
				spec := waiting("stopping", nil, &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32})
				spec.Program.Lane = true
				steps := spec.Program.Build
				spec.Program.Build = func(ctx context.Context, b *collective.Builder) error {
					for i := range stops {
						b.JoinInTime(func() error { return reasons[stops+i] })
						b.StopIf(b.Upload(binary.NativeEndian.AppendUint32(nil, words[i])), func() error { return reasons[i] })
					}
					return steps(ctx, b)
				}
				p, err := collective.New(ctx, r.m, spec)
				if err != nil {
					return err
				}
				if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); !errors.Is(err, reasons[which]) {
					return fmt.Errorf("%w, and not %w", err, reasons[which])
				}
				if err := p.Err(); !errors.Is(err, reasons[which]) {
					return fmt.Errorf("the plan: %w, and not %w", err, reasons[which])
				}
				return p.Close(ctx)
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestWrongKernelOfProgram: what a kernel of a program must not be is told with its number.
func TestWrongKernelOfProgram(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		for _, c := range []struct { // a slice: New is collective, and a map would have an order of its own on each rank
			says   string
			change func(k *collective.Kernel)
		}{
			{"Program.Kernels[1].Blocks is 0", func(k *collective.Kernel) { k.Blocks = 0 }},
			{"Program.Kernels[1].MinBlocks is 40", func(k *collective.Kernel) { k.Blocks, k.MinBlocks = 100, 40 }},
		} {
			right := collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}
			wrong := right
			c.change(&wrong)
			if err := r.refused(ctx, waiting("wrong", nil, &right, &wrong), errs.ErrInvalid, c.says); err != nil {
				return err
			}
		}
		return nil
	})
	assert.Empty(t, m.left())
}
