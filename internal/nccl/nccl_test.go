package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNames(t *testing.T) {
	assert.Equal(t, "2.28.9", Version(22809).String())
	assert.Equal(t, "2.30.11", Version(23011).String())
	assert.Equal(t, "ncclRemoteError", RemoteError.String())
	assert.Equal(t, "ncclBfloat16", BFloat16.String())
	assert.Equal(t, "ncclMin", Min.String())
	assert.Equal(t, "ncclRedOp_t(-1)", Op(-1).String())
	assert.Equal(t, "ncclDataType_t(10)", DataType(10).String())
	assert.Equal(t, "ncclResult_t(8)", Result(8).String())
	for size, types := range map[int64][]DataType{1: {Int8, Uint8}, 2: {Float16, BFloat16}, 4: {Int32, Uint32, Float32},
		8: {Int64, Uint64, Float64}} {
		for _, dt := range types {
			assert.Equal(t, size, dt.Bytes(), dt.String())
		}
	}
}

// TestConfigLayout holds the offsets of ncclConfig_t of NCCL 2.32, and what libraries before are given.
func TestConfigLayout(t *testing.T) {
	var l ConfigLayout
	assert.EqualValues(t, 120, unsafe.Sizeof(l))
	for name, at := range map[string][2]uintptr{
		"magic": {unsafe.Offsetof(l.Magic), 8}, "version": {unsafe.Offsetof(l.Version),
			12}, "blocking": {unsafe.Offsetof(l.Blocking), 16},
		"minCTAs": {unsafe.Offsetof(l.MinCTAs), 24}, "maxCTAs": {unsafe.Offsetof(l.MaxCTAs),
			28}, "netName": {unsafe.Offsetof(l.NetName), 32},
		"splitShare": {unsafe.Offsetof(l.SplitShare), 40}, "commName": {unsafe.Offsetof(l.CommName), 48},
		"CTAPolicy": {unsafe.Offsetof(l.CTAPolicy), 60}, "nvlsCTAs": {unsafe.Offsetof(l.NvlsCTAs), 68},
		"nChannelsPerNetPeer": {unsafe.Offsetof(l.NChannelsPerNetPeer), 72}, "graphUsageMode": {unsafe.Offsetof(l.GraphUsageMode), 80},
		"maxP2pPeers": {unsafe.Offsetof(l.MaxP2pPeers), 88}, "launchOrderImplicit": {unsafe.Offsetof(l.LaunchOrderImplicit), 96},
		"hostCftMode": {unsafe.Offsetof(l.HostCftMode), 108}, "nvlsHostMode": {unsafe.Offsetof(l.NvlsHostMode), 112},
	} {
		assert.Equal(t, at[1], at[0], name)
	}
	none := (*Config)(nil).layout(22809)
	assert.Equal(t, &ConfigLayout{Size: 72, Magic: 0xcafebeef, Version: 22700, Blocking: 1, CgaClusterSize: undefined,
		MinCTAs: undefined,
		MaxCTAs: undefined, SplitShare: undefined, TrafficClass: undefined, CollnetEnable: undefined, CTAPolicy: undefined,
		ShrinkShare: undefined, NvlsCTAs: undefined, NChannelsPerNetPeer: undefined, NvlinkCentricSched: undefined, GraphUsageMode: undefined,
		NumRmaCtx: undefined, MaxP2pPeers: undefined, GraphStreamOrdering: undefined, LaunchOrderImplicit: undefined, NumRmaSig: undefined,
		RmaEagerInit: undefined, HostCftMode: undefined, NvlsHostMode: undefined}, none)
	some := (&Config{NonBlocking: true, MinCTAs: 16, MaxCTAs: 32}).layout(22304)
	assert.Equal(t, []int32{0, 16, 32}, []int32{some.Blocking, some.MinCTAs, some.MaxCTAs})
	assert.EqualValues(t, 22304, some.Version, "an older library does not hear of a newer one")
	for v, want := range map[Version][3]int64{
		22809: {72, 22700, undefined}, 23102: {72, 22700, undefined}, 23199: {72, 22700, undefined},
		23200: {120, 23200, math.MaxInt32}, 23203: {120, 23203, math.MaxInt32}, 23301: {120, 23203, math.MaxInt32},
	} {
		off, auto := (&Config{NoMulticast: true}).layout(v), (&Config{}).layout(v)
		assert.Equal(t, want, [3]int64{int64(off.Size), int64(off.Version), int64(off.NvlsHostMode)}, "%s", v)
		assert.EqualValues(t, undefined, auto.NvlsHostMode, "%s", v)
		assert.Equal(t, off.Size, auto.Size, "%s", v)
	}
}

// table returns functions that succeed and do nothing, but for those that a test replaces.
func table() Functions {
	return Functions{
		GetVersion:     func(v *int32) Result { *v = 22809; return Success },
		GetUniqueID:    func(id *UniqueID) Result { id[0], id[127] = 1, 2; return Success },
		GetErrorString: func(r Result) string { return "text of " + r.String() },
		GetLastError:   func(CommHandle) string { return "\n" },
		CommInitRankScalable: func(comm *CommHandle, _, _, _ int32, _ *UniqueID, _ *ConfigLayout) Result {
			*comm = 0xc0
			return Success
		},
		CommQueryProperties: func(_ CommHandle, props *byte) Result {
			b := unsafe.Slice(props, propertiesBytes)
			if binary.LittleEndian.Uint64(b) != 40 || binary.LittleEndian.Uint32(b[8:]) != 0xcafebeef || binary.LittleEndian.Uint32(b[12:]) != 22902 {
				return InvalidUsage
			}
			b[33] = 1
			return Success
		},
		CommDestroy:    func(CommHandle) Result { return Success },
		CommAbort:      func(CommHandle) Result { return Success },
		CommFinalize:   func(CommHandle) Result { return Success },
		CommAsyncError: func(_ CommHandle, r *Result) Result { *r = Success; return Success },
		CommCount:      func(_ CommHandle, n *int32) Result { *n = 2; return Success },
		CommUserRank:   func(_ CommHandle, n *int32) Result { *n = 1; return Success },
		CommCuDevice:   func(_ CommHandle, n *int32) Result { *n = 7; return Success },
		CommSplit: func(_ CommHandle, _, _ int32, comm *CommHandle, _ *ConfigLayout) Result {
			*comm = 0xc1
			return Success
		},
		AllReduce: func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result { return Success },
		PutSignal: func(uint64, uintptr, DataType, int32, WindowHandle, uintptr, int32, int32, uint32, CommHandle, uintptr) Result {
			return Success
		},
		Broadcast: func(_, _ uint64, _ uintptr, _ DataType, _ int32, _ CommHandle, _ uintptr) Result { return Success },
		Reduce: func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ int32, _ CommHandle, _ uintptr) Result {
			return Success
		},
		AllGather:     func(_, _ uint64, _ uintptr, _ DataType, _ CommHandle, _ uintptr) Result { return Success },
		ReduceScatter: func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result { return Success },
		AllToAll:      func(_, _ uint64, _ uintptr, _ DataType, _ CommHandle, _ uintptr) Result { return Success },
		Send:          func(uint64, uintptr, DataType, int32, CommHandle, uintptr) Result { return Success },
		Recv:          func(uint64, uintptr, DataType, int32, CommHandle, uintptr) Result { return Success },
		GroupStart:    func() Result { return Success },
		GroupEnd:      func() Result { return Success },
		MemAlloc:      func(p *uint64, _ uintptr) Result { *p = 1 << 40; return Success },
		MemFree:       func(uint64) Result { return Success },
		CommWindowRegister: func(_ CommHandle, p uint64, _ uintptr, w *WindowHandle, _ WindowFlags) Result {
			*w = WindowHandle(p + 1)
			return Success
		},
		CommWindowDeregister: func(CommHandle, WindowHandle) Result { return Success },
		TeamLsa:              func(CommHandle) Team { return Team{2, 1, 1} },
		GetPeerDevicePointer: func(_ WindowHandle, offset uintptr, rank int32, p *uint64) Result {
			*p = uint64(rank)<<40 + uint64(offset)
			return Success
		},
		DevCommCreate:  func(_ CommHandle, _, out *byte) Result { *out = 9; return Success },
		DevCommDestroy: func(CommHandle, *byte) Result { return Success },
	}
}

// library makes one of a table.
func library(t *testing.T, f Functions) *Library {
	t.Helper()
	l, err := New("/fake/libnccl.so.2", f)
	require.NoError(t, err)
	return l
}

// options returns those of rank 1 of 2.
func options(nonBlocking bool) *CommOptions {
	return &CommOptions{Ranks: 2, Rank: 1, Config: &Config{NonBlocking: nonBlocking}}
}

func TestCommunicator(t *testing.T) {
	f := table()
	var calls []any
	f.CommInitRankScalable = func(comm *CommHandle, ranks, rank, ids int32, id *UniqueID, config *ConfigLayout) Result {
		calls = append(calls, []any{ranks, rank, ids, id[0], id[127], config.MaxCTAs})
		*comm = 0xc0
		return Success
	}
	f.AllReduce = func(send, recv uint64, count uintptr, dt DataType, op Op, comm CommHandle, stream uintptr) Result {
		calls = append(calls, []any{send, recv, count, dt, op, comm, stream})
		return Success
	}
	f.CommFinalize = func(CommHandle) Result { calls = append(calls, "finalize"); return Success }
	f.CommDestroy = func(comm CommHandle) Result { calls = append(calls, comm); return Success }
	scopes := 0
	l := library(t, f)
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	c, err := l.NewComm(t.Context(), &CommOptions{Ranks: 4, Rank: 3, ID: id, Config: &Config{MaxCTAs: 8},
		Scope: func(fn func() error) error { scopes++; return fn() }})
	require.NoError(t, err)
	assert.Equal(t, 4, c.Ranks())
	assert.Equal(t, 3, c.Rank())
	require.NoError(t, c.AllReduce(0x5, 0x1000, 0x2000, 77, BFloat16, Max))
	require.ErrorIs(t, c.AllReduce(0x5, 0x1000, 0x2000, -1, BFloat16, Max), errs.ErrInvalid)
	require.NoError(t, c.Err())
	require.NoError(t, c.Destroy(t.Context()))
	assert.Equal(t, []any{
		[]any{int32(4), int32(3), int32(1), byte(1), byte(2), int32(8)},
		[]any{uint64(0x1000), uint64(0x2000), uintptr(77), BFloat16, Max, CommHandle(0xc0), uintptr(5)},
		"finalize", CommHandle(0xc0),
	}, calls)
	assert.Equal(t, 4, scopes, "every call but AllReduce, and but asking whether one is done, was in the scope")
	require.ErrorIs(t, c.Destroy(t.Context()), errs.ErrClosed)
	require.ErrorIs(t, c.Abort(t.Context(), nil), errs.ErrClosed)
	require.ErrorIs(t, c.AllReduce(0, 0, 0, 1, Float32, Sum), errs.ErrClosed)
	_, err = c.Split(t.Context(), nil)
	require.ErrorIs(t, err, errs.ErrClosed)
	_, err = c.Register(t.Context(), 4096, 64, WindowDefault)
	require.ErrorIs(t, err, errs.ErrClosed)
	assert.Len(t, calls, 4, "a destroyed communicator's handle is not used")
}

func TestNewCommRefusesPlacesThatDoNotExist(t *testing.T) {
	l := library(t, table())
	for _, bad := range [][2]int{{0, 0}, {-1, 0}, {2, 2}, {2, -1}} {
		_, err := l.NewComm(t.Context(), &CommOptions{Ranks: bad[0], Rank: bad[1]})
		require.ErrorIs(t, err, errs.ErrInvalid, "%v", bad)
	}
	for _, bad := range []Config{{MinCTAs: -1}, {MaxCTAs: -1}, {MinCTAs: 9, MaxCTAs: 8}} {
		_, err := l.NewComm(t.Context(), &CommOptions{Ranks: 1, Config: &bad})
		require.ErrorIs(t, err, errs.ErrInvalid, "%v", bad)
	}
}

// slow makes every call that can be in progress take a few questions.
func slow(f *Functions, asked *atomic.Int32) {
	var left atomic.Int32
	begin := func() Result { left.Store(3); return InProgress }
	f.CommInitRankScalable = func(comm *CommHandle, _, _, _ int32, _ *UniqueID, config *ConfigLayout) Result {
		if config.Blocking != 0 {
			return InvalidUsage
		}
		*comm = 0xc0
		return begin()
	}
	f.CommAsyncError = func(_ CommHandle, r *Result) Result {
		asked.Add(1)
		if *r = Success; left.Add(-1) >= 0 {
			*r = InProgress
		}
		return Success
	}
	f.CommFinalize = func(CommHandle) Result { return begin() }
	f.CommSplit = func(_ CommHandle, _, _ int32, comm *CommHandle, _ *ConfigLayout) Result { *comm = 0xc1; return begin() }
	f.CommWindowRegister = func(_ CommHandle, _ uint64, _ uintptr, w *WindowHandle, _ WindowFlags) Result {
		*w = 0x77
		begin()
		return Success // as the library does
	}
	f.AllReduce = func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result { return begin() }
}

// TestPolling: what a communicator that does not block has begun is waited for.
func TestPolling(t *testing.T) {
	f := table()
	var asked atomic.Int32
	slow(&f, &asked)
	c, err := library(t, f).NewComm(t.Context(), options(true))
	require.NoError(t, err)
	assert.EqualValues(t, 4, asked.Swap(0))
	child, err := c.Split(t.Context(), nil)
	require.NoError(t, err)
	assert.EqualValues(t, 0xc1, child.Handle())
	w, err := c.Register(t.Context(), 1<<40, 4096, WindowSymmetric)
	require.NoError(t, err)
	assert.EqualValues(t, 0x77, w.Handle())
	require.NoError(t, c.AllReduce(0, 0, 0, 1, Float32, Sum))
	assert.EqualValues(t, 12, asked.Swap(0), "registering was waited for too, though NCCL said that it was done")
	require.NoError(t, w.Deregister(t.Context()))
	require.NoError(t, w.Deregister(t.Context()), "twice is nothing")
	require.NoError(t, c.Destroy(t.Context()))
}

// TestPollingFails: the error is the one that NCCL tells when it is asked.
func TestPollingFails(t *testing.T) {
	f := table()
	var asked, aborted atomic.Int32
	slow(&f, &asked)
	f.CommAsyncError = func(_ CommHandle, r *Result) Result { *r = RemoteError; return Success }
	f.CommAbort = func(CommHandle) Result { aborted.Add(1); return Success }
	f.GetLastError = func(CommHandle) string { return "socketPollConnect: connection refused" }
	_, err := library(t, f).NewComm(t.Context(), options(true))
	require.ErrorIs(t, err, errs.ErrPeerLost)
	require.ErrorContains(t, err, "ncclCommInitRankScalable returned 6")
	require.ErrorContains(t, err, "connection refused")
	assert.EqualValues(t, 1, aborted.Load(), "what was begun is given back")
}

// TestPollingEnds: a call that does not end is given up with the context, and then there is nothing but to abort.
func TestPollingEnds(t *testing.T) {
	f := table()
	var asked, aborted atomic.Int32
	slow(&f, &asked)
	f.CommAbort = func(h CommHandle) Result { aborted.Add(int32(h)); return Success }
	l := library(t, f)
	c, err := l.NewComm(t.Context(), options(true))
	require.NoError(t, err)
	l.call.CommAsyncError = func(_ CommHandle, r *Result) Result { *r = InProgress; return Success }
	ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, errs.ErrPeerLost)
	defer cancel()
	_, err = c.Register(ctx, 1<<40, 4096, WindowDefault)
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	assert.True(t, stuck.Abortable)
	require.ErrorIs(t, err, errs.ErrPeerLost, "the cause is why")
	assert.NotContains(t, err.Error(), "end the process")
	assert.True(t, c.Stuck())
	_, err = c.Register(t.Context(), 1<<40, 4096, WindowDefault)
	require.ErrorIs(t, err, errs.ErrClosed)
	require.ErrorIs(t, err, errs.ErrPeerLost, "the reason is kept")
	require.NoError(t, c.Destroy(t.Context()), "which aborts it")
	assert.EqualValues(t, 0xc0, aborted.Load())

	// One that is never whole is aborted at once.
	aborted.Store(0)
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = l.NewComm(ctx, options(true))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.EqualValues(t, 0xc0, aborted.Load())
}

// TestWindowThatStays: a communicator with a window that could not be removed is aborted where it was to be destroyed. Ended tells when it is gone.
func TestWindowThatStays(t *testing.T) {
	f := table()
	var aborted atomic.Int32
	f.CommAbort = func(h CommHandle) Result { aborted.Add(int32(h)); return Success }
	f.CommDestroy = func(CommHandle) Result { t.Error("it was destroyed"); return Success }
	l := library(t, f)
	c, err := l.NewComm(t.Context(), options(true))
	require.NoError(t, err)
	w, err := c.Register(t.Context(), 1<<40, 4096, WindowDefault)
	require.NoError(t, err)
	l.call.CommWindowDeregister = func(CommHandle, WindowHandle) Result { return SystemError }
	require.ErrorContains(t, w.Deregister(t.Context()), "ncclCommWindowDeregister")
	select {
	case <-c.Ended():
		t.Error("it is still there")
	default:
	}
	require.NoError(t, c.Destroy(t.Context()))
	assert.EqualValues(t, 0xc0, aborted.Load())
	<-c.Ended()
}

// TestMaking: the call that makes a communicator has a scope of its own.
func TestMaking(t *testing.T) {
	f := table()
	var where string
	var seen []string
	initialise, register := f.CommInitRankScalable, f.CommWindowRegister
	f.CommInitRankScalable = func(h *CommHandle, ranks, rank, n int32, id *UniqueID, c *ConfigLayout) Result {
		seen = append(seen, where)
		return initialise(h, ranks, rank, n, id, c)
	}
	f.CommWindowRegister = func(h CommHandle, p uint64, n uintptr, w *WindowHandle, flags WindowFlags) Result {
		seen = append(seen, where)
		return register(h, p, n, w, flags)
	}
	scope := func(name string) func(func() error) error {
		return func(fn func() error) error { where = name; return fn() }
	}
	o := options(true)
	o.Scope, o.Making = scope("usual"), scope("making")
	c, err := library(t, f).NewComm(t.Context(), o)
	require.NoError(t, err)
	_, err = c.Register(t.Context(), 1<<40, 4096, WindowDefault)
	require.NoError(t, err)
	assert.Equal(t, []string{"making", "usual"}, seen)
}

// TestWindowsOfAnAbortedCommunicator are gone with it.
func TestWindowsOfAnAbortedCommunicator(t *testing.T) {
	f := table()
	f.CommWindowDeregister = func(CommHandle, WindowHandle) Result { t.Error("the library was called"); return InvalidArgument }
	c, err := library(t, f).NewComm(t.Context(), options(true))
	require.NoError(t, err)
	w, err := c.Register(t.Context(), 1<<40, 4096, WindowDefault)
	require.NoError(t, err)
	d, err := c.NewDevComm(t.Context(), 2)
	require.NoError(t, err)
	require.NoError(t, c.Abort(t.Context(), errs.ErrPeerLost))
	require.NoError(t, w.Deregister(t.Context()))
	require.NoError(t, d.Close(t.Context()))
	require.ErrorIs(t, c.Err(), errs.ErrPeerLost)
}

// TestSound: a communicator is sound until one of its calls fails, whichever, NCCL reports an error, or it is given up.
func TestSound(t *testing.T) {
	ctx := t.Context()
	for name, spoil := range map[string]func(f *Functions) (use func(c *Comm)){
		"collective": func(f *Functions) func(c *Comm) {
			f.CommWindowRegister = func(CommHandle, uint64, uintptr, *WindowHandle, WindowFlags) Result { return SystemError }
			return func(c *Comm) { _, _ = c.Register(ctx, 4096, 4096, 0) }
		},
		"local": func(f *Functions) func(c *Comm) {
			f.CommCuDevice = func(CommHandle, *int32) Result { return InternalError }
			return func(c *Comm) { _, _ = c.Device() }
		},
		"all-reduce": func(f *Functions) func(c *Comm) {
			f.AllReduce = func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result { return InvalidUsage }
			return func(c *Comm) { _ = c.AllReduce(1, 1, 1, 1, Float32, Sum) }
		},
		"split into none": func(f *Functions) func(c *Comm) {
			f.CommSplit = func(CommHandle, int32, int32, *CommHandle, *ConfigLayout) Result { return Success }
			return func(c *Comm) { _, _ = c.Split(ctx, nil) }
		},
		"reported": func(f *Functions) func(c *Comm) {
			var once atomic.Bool
			f.CommAsyncError = func(_ CommHandle, r *Result) Result {
				if *r = Success; once.CompareAndSwap(true, false) {
					*r = RemoteError
				}
				return Success
			}
			return func(c *Comm) { once.Store(true); _ = c.Err() }
		},
		"given up": func(f *Functions) func(c *Comm) {
			f.CommWindowRegister = func(CommHandle, uint64, uintptr, *WindowHandle, WindowFlags) Result { return InProgress }
			var begun atomic.Bool
			f.CommAsyncError = func(_ CommHandle, r *Result) Result {
				if *r = Success; begun.Load() {
					*r = InProgress
				}
				return Success
			}
			return func(c *Comm) {
				begun.Store(true)
				ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
				defer cancel()
				_, _ = c.Register(ctx, 4096, 4096, 0)
				begun.Store(false)
			}
		},
		"aborted": func(*Functions) func(c *Comm) {
			return func(c *Comm) { _ = c.Abort(ctx, errors.New("a fault")) }
		},
	} {
		f := table()
		use := spoil(&f)
		c, err := library(t, f).NewComm(ctx, options(true))
		require.NoError(t, err, name)
		_, err = c.Register(ctx, 0, 0, 0) // the caller's fault, of which NCCL hears nothing
		require.ErrorIs(t, err, errs.ErrInvalid, name)
		require.NoError(t, c.Sound(), name)
		use(c)
		require.Error(t, c.Sound(), name)
		require.Error(t, c.Sound(), name)
	}
}

func TestAdopted(t *testing.T) {
	f := table()
	f.CommDestroy = func(CommHandle) Result { t.Error("destroyed"); return Success }
	f.CommAbort = func(CommHandle) Result { t.Error("aborted"); return Success }
	f.CommFinalize = f.CommAbort
	l := library(t, f)
	_, err := l.Adopt(0, nil)
	require.ErrorIs(t, err, errs.ErrInvalid)
	for _, end := range []func(c *Comm) error{
		func(c *Comm) error { return c.Destroy(t.Context()) },
		func(c *Comm) error { return c.Abort(t.Context(), errs.ErrPeerLost) },
	} {
		c, err := l.Adopt(0xad, nil)
		require.NoError(t, err)
		assert.Equal(t, []int{2, 1}, []int{c.Ranks(), c.Rank()})
		gpu, err := c.Device()
		require.NoError(t, err)
		assert.Equal(t, 7, gpu)
		require.NoError(t, end(c))
		require.ErrorIs(t, end(c), errs.ErrClosed)
	}
	l.call.CommUserRank = func(CommHandle, *int32) Result { return InvalidArgument }
	_, err = l.Adopt(0xad, nil)
	require.ErrorContains(t, err, "ncclCommUserRank")
}

func TestSplitErrors(t *testing.T) {
	f := table()
	f.CommSplit = func(_ CommHandle, _, _ int32, comm *CommHandle, _ *ConfigLayout) Result { return Success }
	l := library(t, f)
	c, err := l.NewComm(t.Context(), options(false))
	require.NoError(t, err)
	_, err = c.Split(t.Context(), nil)
	require.ErrorContains(t, err, "given none")
	for _, bad := range []Part{{Color: -1, Ranks: 1}, {Ranks: 0}, {Ranks: c.Ranks() + 1}, {Ranks: 1, Rank: 1}, {Ranks: 1, Rank: -1}} {
		_, err = c.SplitBy(t.Context(), bad, nil)
		require.ErrorIs(t, err, errs.ErrInvalid, "%+v", bad)
	}
	var given [2]int32
	l.call.CommSplit = func(_ CommHandle, color, key int32, comm *CommHandle, _ *ConfigLayout) Result {
		given = [2]int32{color, key}
		*comm = 0xc1
		return Success
	}
	child, err := c.SplitBy(t.Context(), Part{Color: 3, Ranks: 2, Rank: 1}, nil)
	require.NoError(t, err)
	assert.Equal(t, []int{2, 1, 3, c.Rank()}, []int{child.Ranks(), child.Rank(), int(given[0]), int(given[1])})
	l.call.CommSplit = nil
	_, err = c.Split(t.Context(), nil)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	require.ErrorContains(t, err, "2.18.1")
}

func TestMemory(t *testing.T) {
	f := table()
	l := library(t, f)
	p, err := l.MemAlloc(5)
	require.NoError(t, err)
	assert.EqualValues(t, 1<<40, p)
	require.NoError(t, l.MemFree(p))
	_, err = l.MemAlloc(0)
	require.ErrorIs(t, err, errs.ErrInvalid)
	l.call.MemAlloc = func(*uint64, uintptr) Result { return Success }
	_, err = l.MemAlloc(5)
	require.ErrorIs(t, err, errs.ErrNoMemory)
	l.call.MemAlloc = nil
	_, err = l.MemAlloc(5)
	require.ErrorIs(t, err, errs.ErrUnsupported)
}

func TestErrorsSayWhatTheLibrarySaid(t *testing.T) {
	f := table()
	f.GetUniqueID = func(*UniqueID) Result { return SystemError }
	_, err := library(t, f).NewUniqueID()
	require.ErrorContains(t, err, "NCCL: ncclGetUniqueId returned 2 (ncclSystemError: text of ncclSystemError)")
	require.ErrorContains(t, err, "NCCL_DEBUG=WARN")

	f.GetLastError = func(CommHandle) string { return "Bootstrap : no socket interface found\n" }
	f.CommInitRankScalable = func(*CommHandle, int32, int32, int32, *UniqueID, *ConfigLayout) Result { return RemoteError }
	_, err = library(t, f).NewComm(t.Context(), options(false))
	require.ErrorContains(t, err, "its last warning was: Bootstrap : no socket interface found")
	require.ErrorIs(t, err, errs.ErrPeerLost)
	var failed *dl.Error
	require.ErrorAs(t, err, &failed)
	assert.Equal(t, int(RemoteError), failed.Code)
}

// TestAbortFreesWhoIsInside holds that Abort does not wait for the call that it is there to end.
func TestAbortFreesWhoIsInside(t *testing.T) {
	f := table()
	inside, aborted := make(chan struct{}), make(chan struct{})
	f.AllReduce = func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result {
		close(inside)
		<-aborted
		return InternalError
	}
	f.CommAbort = func(CommHandle) Result { close(aborted); return Success }
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		// The error is why it was aborted, and not what NCCL made of it.
		assert.ErrorIs(t, c.AllReduce(1, 2, 3, 4, Float32, Sum), errs.ErrPeerLost)
	})
	<-inside
	require.NoError(t, c.Err(), "asking does not wait")
	require.NoError(t, c.Abort(t.Context(), errs.ErrPeerLost))
	wg.Wait()
}

// TestBlockingCallsHaveABoundToo: a thread stays behind in the library.
func TestBlockingCallsHaveABoundToo(t *testing.T) {
	f := table()
	release := make(chan struct{})
	var left sync.WaitGroup
	left.Add(1)
	f.CommSplit = func(CommHandle, int32, int32, *CommHandle, *ConfigLayout) Result {
		defer left.Done()
		<-release
		return Success
	}
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = c.Split(ctx, nil)
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	require.ErrorContains(t, err, "end the process")
	close(release)
	left.Wait()
}

func TestBound(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n, err := Bound(ctx, "counting", func() (int, error) { return 7, nil })
	require.NoError(t, err)
	assert.Equal(t, 7, n)
	bad := errors.New("bad")
	_, err = Bound(ctx, "counting", func() (int, error) { return 0, bad })
	require.ErrorIs(t, err, bad)

	var inside sync.WaitGroup
	release := make(chan struct{})
	inside.Add(1)
	cancel()
	_, err = Bound(ctx, "making the communicator", func() (int, error) {
		defer inside.Done()
		<-release
		return 1, nil
	})
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	require.ErrorIs(t, err, context.Canceled)
	assert.ErrorContains(t, err, "making the communicator: NCCL has not done it")
	assert.ErrorContains(t, err, "end the process")
	close(release)
	inside.Wait()
}
