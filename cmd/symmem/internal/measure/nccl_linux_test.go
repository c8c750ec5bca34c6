package measure

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
)

// besideNCCL measures on simulated GPUs beside a simulated NCCL, whose functions change may change on each rank, and returns what rank 0 reports. What is left is not
// looked at where the measuring fails.
func besideNCCL(t *testing.T, ranks int, spec Spec, change func(rank int, f *nccl.Functions)) ([]Row, error) {
	t.Helper()
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: 1})
	require.NoError(t, err)
	lib := simlib.NewNCCL(m)
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{native.Name}, config.MulticastOff, time.Minute
	all, err := symmem.OpenLocal(t.Context(), ranks, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver(), Multicast: config.MulticastOff}})
	require.NoError(t, err)
	spec.Algorithms, spec.Repetitions = []string{"auto"}, 1
	if spec.Op == "" {
		spec.Op = "sum"
	}
	spec.Peer = &PeerSpec{Required: true, Timeout: time.Minute}
	var rep rowsOf
	failures := backendtest.OnAll(all, func(r *symmem.Rank) error {
		b, err := newBencher(r, spec, &rep)
		if err != nil {
			return err
		}
		b.most = 2
		b.openNCCL = func(*nccl.Options) (*nccl.Library, error) {
			f := *lib.Functions()
			if change != nil {
				change(r.Rank(), &f)
			}
			return nccl.New("simulated", f)
		}
		err = b.run(t.Context())
		if err != nil && r.Group().Err() == nil {
			r.Group().Abort("the test has failed") // the others may be waiting
		}
		return err
	})
	ended := backendtest.OnAll(all, func(r *symmem.Rank) error { return r.Close(context.WithoutCancel(t.Context())) })
	if err := errors.Join(failures...); err != nil {
		return rep.rows, err
	}
	backendtest.RequireAll(t, ended)
	require.Empty(t, lib.Left())
	require.Empty(t, m.Left())
	require.Empty(t, m.Violations())
	return rep.rows, nil
}

// TestNCCLBesideCollectives: each kind that NCCL has is measured right behind ours, of the same message, on plain memory and over windows.
func TestNCCLBesideCollectives(t *testing.T) {
	kinds := []string{AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll}
	for _, graph := range []bool{false, true} {
		rows, err := besideNCCL(t, 3, Spec{Kinds: append(slices.Clone(kinds), AllToAllV, Barrier), Sizes: []int64{1000}, DType: "f32", Graph: graph}, nil)
		require.NoError(t, err)
		require.Len(t, rows, 3*len(kinds)+2)
		for i, kind := range kinds {
			ours := rows[3*i]
			assert.Equal(t, kind, ours.Kind)
			assert.Empty(t, ours.Beside)
			for j, peer := range []string{NCCL, NCCLSymmetric} {
				row := rows[3*i+1+j]
				assert.Equal(t, peer, row.Backend)
				assert.Equal(t, ours.Backend, row.Beside)
				assert.Positive(t, row.Median)
				assert.Equal(t, []any{kind, ours.Bytes, ours.DType, ours.Op, ours.Mode, ours.Place, ours.Iterations},
					[]any{row.Kind, row.Bytes, row.DType, row.Op, row.Mode, row.Place, row.Iterations})
				assert.InDelta(t, ours.Bus/ours.Bandwidth, row.Bus/row.Bandwidth, 1e-9)
			}
		}
		for _, row := range rows[3*len(kinds):] {
			assert.Empty(t, row.Beside, "NCCL has no %s", row.Kind)
		}
	}
}

// TestNCCLBesideLists: a list is measured beside one group of NCCL's calls on as many messages.
func TestNCCLBesideLists(t *testing.T) {
	for _, graph := range []bool{false, true} {
		rows, err := besideNCCL(t, 3, Spec{Kinds: Lists, Sizes: []int64{200}, Tensors: 4, DType: "f32", Graph: graph}, nil)
		require.NoError(t, err)
		require.Len(t, rows, 2*len(Lists))
		for i, kind := range Lists {
			ours, row := rows[2*i], rows[2*i+1]
			assert.Equal(t, kind, ours.Kind)
			assert.Equal(t, []any{NCCL, ours.Backend}, []any{row.Backend, row.Beside})
			assert.Contains(t, row.Note, "one group of calls")
			assert.Positive(t, row.Median)
			assert.Equal(t, []any{kind, ours.Bytes, ours.Tensors, ours.DType, ours.Op, ours.Mode, ours.Place, ours.Iterations},
				[]any{row.Kind, row.Bytes, row.Tensors, row.DType, row.Op, row.Mode, row.Place, row.Iterations})
			assert.InDelta(t, ours.Bus/ours.Bandwidth, row.Bus/row.Bandwidth, 1e-9)
		}
	}
	rows, err := besideNCCL(t, 2, Spec{Kinds: []string{AllGatherMany}, Sizes: []int64{256}, Tensors: 3, DType: "f32"}, func(_ int, f *nccl.Functions) {
		calls := 0
		right := f.AllGather
		f.AllGather = func(send, recv uint64, n uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
			if calls++; calls%3 == 0 { // of each group the last
				return nccl.Success
			}
			return right(send, recv, n, t, h, stream)
		}
	})
	require.ErrorContains(t, err, "is right", "a list of which one is wrong is not measured")
	require.Len(t, rows, 1)
}

// TestNCCLOfOtherDTypes: NCCL has symmetric kernels of what it moves for every dtype, and of what it combines for some.
func TestNCCLOfOtherDTypes(t *testing.T) {
	rows, err := besideNCCL(t, 2, Spec{Kinds: []string{ReduceScatter, AllGather}, Sizes: []int64{64}, DType: "i32", Op: "max"}, nil)
	require.NoError(t, err)
	var backends []string
	for _, row := range rows {
		backends = append(backends, row.Kind+" "+row.Backend)
	}
	assert.Equal(t, []string{"reduce_scatter native", "reduce_scatter nccl", "all_gather native", "all_gather nccl", "all_gather nccl_symmetric"}, backends)
}

// TestNCCLThatLacks: what an older NCCL has not is said once, whatever the sizes, and the rest is measured.
func TestNCCLThatLacks(t *testing.T) {
	rows, err := besideNCCL(t, 2, Spec{Kinds: []string{AllToAll, AllGather}, Sizes: []int64{64, 128}, DType: "f32"}, func(rank int, f *nccl.Functions) {
		if rank == 1 { // one rank is enough
			f.AllToAll = nil
		}
	})
	require.NoError(t, err)
	var skipped []Row
	measured := 0
	for _, row := range rows {
		switch {
		case row.Iterations == 0:
			skipped = append(skipped, row)
		case row.Backend == NCCL:
			measured++
			assert.Equal(t, AllGather, row.Kind)
		}
	}
	assert.Equal(t, 2, measured)
	require.Len(t, skipped, 1)
	assert.Equal(t, AllToAll, skipped[0].Kind)
	assert.Contains(t, skipped[0].Note, "all_to_all is not measured: rank 1: NCCL")
	assert.Contains(t, skipped[0].Note, "2.28.3 or newer")
}

// TestNCCLWithLittleMemory: a rank that has no memory for what the peer works on leaves no other in a call of NCCL: all end, and what was measured before is there.
func TestNCCLWithLittleMemory(t *testing.T) {
	for at := range 2 { // the input, and the output
		rows, err := besideNCCL(t, 2, Spec{Kinds: []string{AllGather}, Sizes: []int64{256}, DType: "f32"}, func(rank int, f *nccl.Functions) {
			right, calls := f.MemAlloc, 0
			f.MemAlloc = func(p *uint64, bytes uintptr) nccl.Result {
				if calls++; rank == 1 && calls == 2+at { // the first one is tried without anything to measure
					return nccl.SystemError
				}
				return right(p, bytes)
			}
		})
		failure, ok := errors.AsType[*group.VoteError](err)
		require.True(t, ok, err)
		assert.Contains(t, failure.Error(), "memory for the peer's symmetric windows")
		var backends []string
		for _, row := range rows {
			backends = append(backends, row.Backend)
		}
		assert.Equal(t, []string{native.Name, NCCL}, backends)
	}
}

// TestNCCLWhereOneRankEnds: a rank that ends while the others' work in NCCL waits for it is missed at once: no loss of a rank ends such work.
func TestNCCLWhereOneRankEnds(t *testing.T) {
	rows, err := besideNCCL(t, 2, Spec{Kinds: []string{AllGather}, Sizes: []int64{256}, DType: "f32"}, func(rank int, f *nccl.Functions) {
		right, calls := f.AllGather, 0
		f.AllGather = func(send, recv uint64, n uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
			if calls++; rank == 1 && calls == 2 {
				return nccl.SystemError
			}
			return right(send, recv, n, t, h, stream)
		}
	})
	require.ErrorIs(t, err, symmem.ErrPeerLost)
	require.Len(t, rows, 1)
	assert.Equal(t, native.Name, rows[0].Backend)
}

// TestNCCLThatIsWrong: a peer whose results are wrong is not measured, whatever the collective.
func TestNCCLThatIsWrong(t *testing.T) {
	for kind, wrong := range map[string]func(f *nccl.Functions){
		AllGather: func(f *nccl.Functions) {
			f.AllGather = func(uint64, uint64, uintptr, nccl.DataType, nccl.CommHandle, uintptr) nccl.Result {
				return nccl.Success
			}
		},
		ReduceScatter: func(f *nccl.Functions) {
			right := f.ReduceScatter
			f.ReduceScatter = func(send, recv uint64, n uintptr, t nccl.DataType, _ nccl.Op, h nccl.CommHandle, stream uintptr) nccl.Result {
				return right(send, recv, n, t, nccl.Max, h, stream)
			}
		},
		AllToAll: func(f *nccl.Functions) { // the first share to everybody
			f.AllToAll = func(send, recv uint64, n uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
				return f.AllGather(send, recv, n, t, h, stream)
			}
		},
		Broadcast: func(f *nccl.Functions) {
			right := f.Broadcast
			f.Broadcast = func(send, recv uint64, n uintptr, t nccl.DataType, _ int32, h nccl.CommHandle, stream uintptr) nccl.Result {
				return right(send, recv, n, t, 1, h, stream)
			}
		},
		Reduce: func(f *nccl.Functions) {
			right := f.Reduce
			f.Reduce = func(send, recv uint64, n uintptr, t nccl.DataType, op nccl.Op, _ int32, h nccl.CommHandle, stream uintptr) nccl.Result {
				return right(send, recv, n, t, op, 1, h, stream)
			}
		},
	} {
		rows, err := besideNCCL(t, 2, Spec{Kinds: []string{kind}, Sizes: []int64{256}, DType: "f32"}, func(_ int, f *nccl.Functions) { wrong(f) })
		require.ErrorContains(t, err, "is right", kind)
		require.ErrorContains(t, err, "measuring NCCL's "+kind, kind)
		require.Len(t, rows, 1, kind)
		assert.Equal(t, native.Name, rows[0].Backend)
	}
}

// TestPartsOnGPUs: what has no peer is measured on GPUs as elsewhere, and nothing is left of it; as many rows come as were announced.
func TestPartsOnGPUs(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	var rep countedRows
	onRanks(t, ranks, func(r *symmem.Rank) error {
		b, err := newBencher(r, Spec{Kinds: []string{SignalWait, HeapAlloc, Enqueue, PutSignal, PlanRun}, Sizes: []int64{64, 4096}, DType: "f32", Op: "sum", Algorithms: []string{"auto"}, Repetitions: 2}, &rep)
		if err != nil {
			return err
		}
		b.most = 3
		return b.run(t.Context())
	})
	assert.Len(t, rep.rows, rep.announced)
	assert.Len(t, rep.rows, 1+2+enqueueRows+2+1)
	for _, row := range rep.rows {
		assert.Positive(t, row.Median, row.Kind)
	}
}

// countedRows collects rows, and how many were announced.
type countedRows struct {
	rowsOf
	announced int
}

func (r *countedRows) Rows(n int) error { r.announced = n; return nil }
