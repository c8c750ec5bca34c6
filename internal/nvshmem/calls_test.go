package nvshmem

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// fake returns a library of one PE whose functions note that they were called.
func fake() (*Library, *[]string) {
	calls := &[]string{}
	note := func(name string) { *calls = append(*calls, name) }
	status := NotStarted
	l := &Library{bootstrap: "plugin"}
	l.call = functions{
		getUniqueID: func(*UniqueID) result { note("getUniqueID"); return 0 },
		setUniqueID: func(rank, ranks int32, id *UniqueID, a *initAttr) result {
			a.args.id.id, a.args.id.rank, a.args.id.ranks = id, rank, ranks
			return 0
		},
		initAttr: func(flags uint32, a *initAttr) result {
			note("initAttr")
			if flags != 8 || a.version != attrVersion || a.args.version != argsVersion || a.args.id.version != idArgsVersion {
				return 1
			}
			status = Started
			return 0
		},
		initStatus: func() Status { return status },
		finalize:   func() { note("finalize"); status = NotStarted },
		myPE:       func() int32 { return 0 },
		pes:        func() int32 { return 1 },
		align:      func(_, bytes uintptr) uint64 { note("align"); return 1 << 20 },
		ptr:        func(p uint64, _ int32) uint64 { note("ptr"); return p },
		register:   func(p uint64, _ uintptr, _ int32) uint64 { note("register"); return p + 1<<30 },
		unregister: func(uint64, uintptr) result { note("unregister"); return 7 },
		teamSplit: func(_ Team, _, _, _ int32, _ uintptr, _ int64, team *Team) result {
			note("teamSplit")
			*team = 12
			return 0
		},
		barrier: func(Team, uintptr) result { note("barrier"); return 0 },
		put:     func(uint64, uint64, uintptr, int32, uintptr) { note("put") },
		get:     func(uint64, uint64, uintptr, int32, uintptr) { note("get") },
		collective: func(symbol string) (collective, error) {
			return func(Team, uint64, uint64, uintptr, uintptr) result { note(symbol); return 0 }, nil
		},
		broadcast: func(symbol string) (broadcast, error) {
			return func(Team, uint64, uint64, uintptr, int32, uintptr) result { note(symbol); return 0 }, nil
		},
	}
	return l, calls
}

// everything calls all that needs a library that is started.
func everything(l *Library) []error {
	first := func(_ any, err error) error { return err }
	r, err := l.Collective(Reduce, "bf16", "sum")
	b, broadcastErr := l.Collective(Broadcast, "u8", "sum")
	return []error{errors.Join(err, broadcastErr), first(l.Align(4096, 1)), first(l.Ptr(1, 0)), first(l.Register(1, 1)), first(l.NewTeam()), l.Barrier(0, 0),
		l.Put(1, 1, 1, 0, 0), l.Get(1, 1, 1, 0, 0), r(0, 1, 1, 1, 0, 0), b(0, 1, 1, 1, 0, 0), l.Finalize()}
}

func TestNothingIsCalledBeforeStartAndAfterFinalize(t *testing.T) {
	l, calls := fake()
	for i, err := range everything(l)[1:] {
		assert.ErrorIs(t, err, errs.ErrClosed, i)
	}
	require.Empty(t, *calls)
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	require.NoError(t, l.Start(1, 0, id))
	require.ErrorIs(t, l.Start(1, 0, id), errs.ErrInvalid, "it is started already")
	require.NoError(t, errors.Join(everything(l)...))
	assert.Equal(t, []string{"getUniqueID", "initAttr", "align", "ptr", "register", "teamSplit", "barrier", "put", "get",
		"nvshmemx_bfloat16_sum_reduce_on_stream", "nvshmemx_broadcastmem_on_stream", "finalize"}, *calls)
	*calls = nil
	for i, err := range everything(l)[1:] {
		assert.ErrorIs(t, err, errs.ErrClosed, i)
	}
	require.Empty(t, *calls)
	require.NoError(t, l.Start(1, 0, id), "and again")
}

func TestArgumentsAreCheckedBeforeTheLibraryIsCalled(t *testing.T) {
	l, calls := fake()
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	for _, bad := range [][2]int{{0, 0}, {2, 2}, {2, -1}, {1 << 40, 0}} {
		require.ErrorIs(t, l.Start(bad[0], bad[1], id), errs.ErrInvalid)
	}
	require.ErrorIs(t, l.Start(1, 0, nil), errs.ErrInvalid)
	require.ErrorIs(t, l.Start(1, 0, &UniqueID{}), errs.ErrInvalid)
	require.NoError(t, l.Start(1, 0, id))
	*calls = nil
	first := func(_ any, err error) error { return err }
	r, err := l.Collective(Reduce, "f64", "max")
	require.NoError(t, err)
	b, err := l.Collective(Broadcast, "u32", "")
	require.NoError(t, err)
	for i, err := range []error{
		first(l.Align(0, 1)), first(l.Align(48, 1)), first(l.Align(4096, 0)), first(l.Align(4096, -1)), first(l.Ptr(1, 1)),
		first(l.Ptr(1, -1)), first(l.Register(0, 1)), first(l.Register(1, 0)), l.Put(1, 1, 1, 1, 0), l.Get(1, 1, 0, 0, 0), l.Put(0, 1, 1, 0, 0),
		r(-1, 1, 1, 1, 0, 0), r(0, 0, 1, 1, 0, 0), r(0, 1, 1, 0, 0, 0), b(0, 1, 1, 1, 1, 0), b(0, 1, 1, 1, -1, 0),
	} {
		assert.ErrorIs(t, err, errs.ErrInvalid, i)
	}
	assert.Empty(t, *calls)
	_, err = l.MulticastPtr(1)
	require.ErrorIs(t, err, errs.ErrUnsupported)
}

// TestStartThatFailedHalf: the library says that all is well, and its status says otherwise.
func TestStartThatFailedHalf(t *testing.T) {
	l, _ := fake()
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	init, is := l.call.initAttr, l.call.initStatus
	l.call.initStatus = func() Status {
		if is() == Started {
			return Bootstrapped
		}
		return is()
	}
	err = l.Start(1, 0, id)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, "bootstrapped only")
	_, err = l.Align(4096, 1)
	require.ErrorIs(t, err, errs.ErrClosed)

	l, _ = fake()
	l.call.initAttr = func(flags uint32, a *initAttr) result { init(flags, a); return 7 }
	err = l.Start(1, 0, id)
	var native *dl.Error
	require.ErrorAs(t, err, &native)
	assert.Equal(t, "NVSHMEMX_ERROR_INTERNAL", native.Name)

	l, _ = fake()
	l.call.pes = func() int32 { return 2 }
	require.ErrorIs(t, l.Start(1, 0, id), errs.ErrMismatch)
}

// TestStartKeepsTheID: the id is kept as long as the attributes that the library has written its address to, by this program's own store.
func TestStartKeepsTheID(t *testing.T) {
	l, _ := fake()
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	set := l.call.setUniqueID
	l.call.setUniqueID = func(rank, ranks int32, id *UniqueID, attr *initAttr) result {
		assert.Same(t, id, attr.args.id.id)
		return set(rank, ranks, id, attr)
	}
	require.NoError(t, l.Start(1, 0, id))
	assert.Same(t, id, l.attr.Load().args.id.id)
}

func TestUniqueIDFromElsewhere(t *testing.T) {
	_, err := ParseUniqueID(make([]byte, 3))
	require.ErrorContains(t, err, "3 came")
	_, err = ParseUniqueID(make([]byte, UniqueIDBytes))
	require.ErrorContains(t, err, "0x10080")
}

func TestBound(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	release := make(chan struct{})
	defer close(release)
	err := Bound(ctx, "waiting", func() error { <-release; return nil })
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "end the process")
	require.NoError(t, Bound(t.Context(), "quick", func() error { return nil }))
	require.ErrorIs(t, Bound(t.Context(), "quick", func() error { return errs.ErrInvalid }), errs.ErrInvalid)
}

// TestSymbols: which function does what, and what NVSHMEM has not.
func TestSymbols(t *testing.T) {
	for _, c := range [][4]string{
		{Reduce, "f32", "sum", "nvshmemx_float_sum_reduce_on_stream"}, {ReduceScatter, "bf16", "max", "nvshmemx_bfloat16_max_reducescatter_on_stream"},
		{Broadcast, "u8", "sum", "nvshmemx_broadcastmem_on_stream"}, {Collect, "u8", "", "nvshmemx_fcollectmem_on_stream"},
		{AllToAll, "u8", "", "nvshmemx_alltoallmem_on_stream"}, {Collect, "u32", "", "nvshmemx_uint32_fcollect_on_stream"},
		{Reduce, "f32", "avg", ""}, {ReduceScatter, "f32", "", ""}, {Broadcast, "f8", "sum", ""}, {"gather", "f32", "sum", ""},
	} {
		assert.Equal(t, c[3], symbolOf(c[0], c[1], c[2]), c)
	}
	l, _ := fake()
	_, err := l.Collective(Reduce, "f32", "avg")
	require.ErrorIs(t, err, errs.ErrUnsupported)
}

func TestNames(t *testing.T) {
	assert.Equal(t, "NVSHMEMX_ERROR_OUT_OF_MEMORY", result(2).String())
	assert.Equal(t, "nvshmemx_status(99)", result(99).String())
	assert.Equal(t, "limited MPG", LimitedMPG.String())
	assert.Equal(t, "nvshmemx_init_status 9", Status(9).String())
	require.ErrorIs(t, check("nvshmem_x", 2), errs.ErrNoMemory)
}
