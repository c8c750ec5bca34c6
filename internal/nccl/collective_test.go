package nccl

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// TestEnqueue: each collective is the call of its name, with its arguments in the order of nccl.h.
func TestEnqueue(t *testing.T) {
	f := table()
	var calls [][]any
	call := func(args ...any) Result {
		calls = append(calls, args)
		return Success
	}
	f.Broadcast = func(send, recv uint64, count uintptr, dt DataType, root int32, comm CommHandle, stream uintptr) Result {
		return call("broadcast", send, recv, count, dt, root, comm, stream)
	}
	f.Reduce = func(send, recv uint64, count uintptr, dt DataType, op Op, root int32, comm CommHandle, stream uintptr) Result {
		return call("reduce", send, recv, count, dt, op, root, comm, stream)
	}
	f.AllGather = func(send, recv uint64, count uintptr, dt DataType, comm CommHandle, stream uintptr) Result {
		return call("all-gather", send, recv, count, dt, comm, stream)
	}
	f.ReduceScatter = func(send, recv uint64, count uintptr, dt DataType, op Op, comm CommHandle, stream uintptr) Result {
		return call("reduce-scatter", send, recv, count, dt, op, comm, stream)
	}
	f.AllToAll = func(send, recv uint64, count uintptr, dt DataType, comm CommHandle, stream uintptr) Result {
		return call("all-to-all", send, recv, count, dt, comm, stream)
	}
	f.Send = func(p uint64, count uintptr, dt DataType, peer int32, comm CommHandle, stream uintptr) Result {
		return call("send", p, count, dt, peer, comm, stream)
	}
	f.Recv = func(p uint64, count uintptr, dt DataType, peer int32, comm CommHandle, stream uintptr) Result {
		return call("receive", p, count, dt, peer, comm, stream)
	}
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	for what := AllReduce; what <= Recv; what++ {
		require.NoError(t, c.Enqueue(what, 5, 0x1000, 0x2000, 7, Float32, Max, 1), what.String())
		require.ErrorIs(t, c.Enqueue(what, 5, 0x1000, 0x2000, -1, Float32, Max, 1), errs.ErrInvalid, what.String())
	}
	from, to, n, comm, stream := uint64(0x1000), uint64(0x2000), uintptr(7), CommHandle(0xc0), uintptr(5)
	assert.Equal(t, [][]any{
		{"broadcast", from, to, n, Float32, int32(1), comm, stream}, {"reduce", from, to, n, Float32, Max, int32(1), comm, stream},
		{"all-gather", from, to, n, Float32, comm, stream}, {"reduce-scatter", from, to, n, Float32, Max, comm, stream}, {"all-to-all", from, to, n, Float32, comm, stream},
		{"send", from, n, Float32, int32(1), comm, stream}, {"receive", to, n, Float32, int32(1), comm, stream},
	}, calls)
	assert.Equal(t, "Collective(99)", Collective(99).String())
	require.NoError(t, c.Destroy(t.Context()))
}

// TestLacks: a library without one of them says which version has it.
func TestLacks(t *testing.T) {
	for what, lack := range map[Collective]func(f *Functions){
		Broadcast: func(f *Functions) { f.Broadcast = nil }, Reduce: func(f *Functions) { f.Reduce = nil }, AllGather: func(f *Functions) { f.AllGather = nil },
		ReduceScatter: func(f *Functions) { f.ReduceScatter = nil }, AllToAll: func(f *Functions) { f.AllToAll = nil },
		Send: func(f *Functions) { f.Send = nil }, Recv: func(f *Functions) { f.Recv = nil },
	} {
		f := table()
		lack(&f)
		c, err := library(t, f).NewComm(t.Context(), options(false))
		require.NoError(t, err)
		err = c.Enqueue(what, 1, 1, 1, 1, Float32, Sum, 0)
		require.ErrorIs(t, err, errs.ErrUnsupported, what.String())
		require.ErrorContains(t, err, collectiveSymbols[what])
		if what == AllToAll {
			require.ErrorContains(t, err, "2.28.3")
		}
		require.NoError(t, c.Destroy(t.Context()))
	}
}

// TestGroup: a list goes between a beginning and an end, which comes also where a call fails, and of a communicator that does not block it is awaited.
func TestGroup(t *testing.T) {
	f := table()
	var calls []string
	refuse, pending := uint64(0), 0
	f.GroupStart = func() Result { calls = append(calls, "start"); return Success }
	f.GroupEnd = func() Result {
		calls = append(calls, "end")
		if pending > 0 {
			return InProgress
		}
		return Success
	}
	f.AllReduce = func(send, recv uint64, count uintptr, dt DataType, op Op, comm CommHandle, stream uintptr) Result {
		calls = append(calls, fmt.Sprint(send, recv, count, dt, op, comm, stream))
		if send == refuse {
			return InvalidArgument
		}
		return Success
	}
	f.CommAsyncError = func(_ CommHandle, r *Result) Result {
		if *r = Success; pending > 0 {
			*r = InProgress
			pending--
		}
		return Success
	}
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	one := func(p uint64) string { return fmt.Sprint(p, p, uintptr(7), Float32, Sum, CommHandle(0xc0), uintptr(5)) }
	list := func(count int64, all ...uint64) (list []Call) {
		for _, p := range all {
			list = append(list, Call{What: AllReduce, Send: p, Recv: p, Count: count, Type: Float32, Op: Sum})
		}
		return list
	}
	pending = 3
	require.NoError(t, c.EnqueueAll(5, list(7, 64, 128)))
	assert.Equal(t, []string{"start", one(64), one(128), "end"}, calls)
	assert.Zero(t, pending, "its work is in the stream")
	require.ErrorIs(t, c.EnqueueAll(5, list(-1, 64)), errs.ErrInvalid)
	calls, refuse = nil, 64
	require.ErrorContains(t, c.EnqueueAll(5, list(7, 64, 128)), "call 1 of 2")
	assert.Equal(t, []string{"start", one(64), "end"}, calls)
	require.NoError(t, c.Destroy(t.Context()))
	require.ErrorIs(t, c.EnqueueAll(5, list(7, 64)), errs.ErrClosed)

	f.GroupEnd, calls, refuse = nil, nil, 0
	c, err = library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	require.NoError(t, c.EnqueueAll(5, list(7, 64, 128)))
	assert.Equal(t, []string{one(64), one(128)}, calls, "a library without groups")
	require.NoError(t, c.Destroy(t.Context()))
}

// TestMessages: what a rank sends and receives is one group with the collectives around it, also where one of them is refused, and nothing without groups.
func TestMessages(t *testing.T) {
	f := table()
	var calls []string
	refused := false
	note := func(format string, args ...any) Result {
		calls = append(calls, fmt.Sprintf(format, args...))
		if refused && len(calls) == 3 {
			return InvalidArgument
		}
		return Success
	}
	f.GroupStart = func() Result { return note("start") }
	f.GroupEnd = func() Result { return note("end") }
	f.Send = func(p uint64, count uintptr, dt DataType, peer int32, _ CommHandle, _ uintptr) Result {
		return note("send %d %d %v to %d", p, count, dt, peer)
	}
	f.Recv = func(p uint64, count uintptr, dt DataType, peer int32, _ CommHandle, _ uintptr) Result {
		return note("receive %d %d %v from %d", p, count, dt, peer)
	}
	f.AllReduce = func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ CommHandle, _ uintptr) Result {
		return note("all-reduce")
	}
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	all := []Call{
		{What: Send, Send: 64, Count: 3, Type: Uint8, Root: 1}, {What: Recv, Recv: 128, Count: 5, Type: Uint8, Root: 1}, {What: AllReduce, Send: 1, Recv: 1, Count: 1, Type: Uint32, Op: Max},
	}
	require.NoError(t, c.EnqueueAll(5, all))
	assert.Equal(t, []string{"start", "send 64 3 ncclUint8 to 1", "receive 128 5 ncclUint8 from 1", "all-reduce", "end"}, calls)
	calls, refused = nil, true
	err = c.EnqueueAll(5, all)
	require.ErrorContains(t, err, "Recv of 5 ncclUint8, rank 1, call 2 of 3")
	require.ErrorContains(t, err, "ncclRecv")
	assert.Equal(t, []string{"start", "send 64 3 ncclUint8 to 1", "receive 128 5 ncclUint8 from 1", "end"}, calls)
	for _, root := range []int{-1, c.Ranks()} {
		require.ErrorIs(t, c.EnqueueAll(5, []Call{{What: Send, Count: 1, Root: root}}), errs.ErrInvalid)
	}
	require.NoError(t, c.Destroy(t.Context()))

	calls, f.GroupEnd = nil, nil
	c, err = library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	err = c.EnqueueAll(5, all)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	require.ErrorContains(t, err, groupEnd)
	assert.Empty(t, calls)
	require.NoError(t, c.EnqueueAll(5, []Call{all[2], all[2]}), "collectives need no group")
	require.NoError(t, c.Destroy(t.Context()))
}
