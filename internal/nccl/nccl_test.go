package nccl

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

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
}

// table is a library whose functions succeed and do nothing, but for those that a test replaces.
func table() *Library {
	return &Library{call: functions{
		getUniqueID:    func(id *UniqueID) Result { id[0], id[127] = 1, 2; return Success },
		getErrorString: func(r Result) string { return "text of " + r.String() },
		getLastError:   func(commHandle) string { return "\n" },
		commInitRankScalable: func(comm *commHandle, _, _, _ int32, _ *UniqueID, _ uintptr) Result {
			*comm = 0xc0
			return Success
		},
		commDestroy: func(commHandle) Result { return Success },
		commAbort:   func(commHandle) Result { return Success },
		allReduce:   func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ commHandle, _ uintptr) Result { return Success },
	}}
}

func TestCommunicator(t *testing.T) {
	l := table()
	var calls []any
	l.call.commInitRankScalable = func(comm *commHandle, ranks, rank, ids int32, id *UniqueID, config uintptr) Result {
		calls = append(calls, []any{ranks, rank, ids, id[0], id[127], config})
		*comm = 0xc0
		return Success
	}
	l.call.allReduce = func(send, recv uint64, count uintptr, dt DataType, op Op, comm commHandle, stream uintptr) Result {
		calls = append(calls, []any{send, recv, count, dt, op, comm, stream})
		return Success
	}
	l.call.commDestroy = func(comm commHandle) Result { calls = append(calls, comm); return Success }
	id, err := l.NewUniqueID()
	require.NoError(t, err)
	c, err := l.NewComm(4, 3, id)
	require.NoError(t, err)
	assert.Equal(t, 4, c.Ranks())
	assert.Equal(t, 3, c.Rank())
	require.NoError(t, c.AllReduce(0x5, 0x1000, 0x2000, 77, BFloat16, Max))
	require.ErrorIs(t, c.AllReduce(0x5, 0x1000, 0x2000, -1, BFloat16, Max), errs.ErrInvalid)
	require.NoError(t, c.Destroy())
	assert.Equal(t, []any{
		[]any{int32(4), int32(3), int32(1), byte(1), byte(2), uintptr(0)},
		[]any{uint64(0x1000), uint64(0x2000), uintptr(77), BFloat16, Max, commHandle(0xc0), uintptr(5)},
		commHandle(0xc0),
	}, calls)
	require.ErrorIs(t, c.Destroy(), errs.ErrClosed)
	require.ErrorIs(t, c.Abort(), errs.ErrClosed)
	require.ErrorIs(t, c.AllReduce(0, 0, 0, 1, Float32, Sum), errs.ErrClosed)
	assert.Len(t, calls, 3, "a destroyed communicator's handle is not used")
}

func TestNewCommRefusesPlacesThatDoNotExist(t *testing.T) {
	for _, bad := range [][2]int{{0, 0}, {-1, 0}, {2, 2}, {2, -1}} {
		_, err := table().NewComm(bad[0], bad[1], UniqueID{})
		require.ErrorIs(t, err, errs.ErrInvalid, "%v", bad)
	}
}

func TestErrorsSayWhatTheLibrarySaid(t *testing.T) {
	l := table()
	l.call.getUniqueID = func(*UniqueID) Result { return SystemError }
	_, err := l.NewUniqueID()
	require.ErrorContains(t, err, "NCCL: ncclGetUniqueId returned 2 (ncclSystemError: text of ncclSystemError)")
	require.ErrorContains(t, err, "NCCL_DEBUG=WARN")

	l.call.getLastError = func(commHandle) string { return "Bootstrap : no socket interface found\n" }
	l.call.commInitRankScalable = func(*commHandle, int32, int32, int32, *UniqueID, uintptr) Result { return RemoteError }
	_, err = l.NewComm(2, 0, UniqueID{})
	require.ErrorContains(t, err, "its last warning was: Bootstrap : no socket interface found")
	require.ErrorIs(t, err, errs.ErrPeerLost)
	var failed *dl.Error
	require.ErrorAs(t, err, &failed)
	assert.Equal(t, int(RemoteError), failed.Code)

	l.call.commInitRankScalable = func(*commHandle, int32, int32, int32, *UniqueID, uintptr) Result { return InProgress }
	_, err = l.NewComm(2, 0, UniqueID{})
	require.ErrorContains(t, err, "NCCL_COMM_BLOCKING")
}

// TestAbortFreesWhoIsInside holds that Abort does not wait for the call that it is there to end.
func TestAbortFreesWhoIsInside(t *testing.T) {
	l := table()
	inside, aborted := make(chan struct{}), make(chan struct{})
	l.call.allReduce = func(_, _ uint64, _ uintptr, _ DataType, _ Op, _ commHandle, _ uintptr) Result {
		close(inside)
		<-aborted
		return RemoteError
	}
	l.call.commAbort = func(commHandle) Result { close(aborted); return Success }
	c, err := l.NewComm(2, 0, UniqueID{})
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() { assert.ErrorIs(t, c.AllReduce(1, 2, 3, 4, Float32, Sum), errs.ErrPeerLost) })
	<-inside
	require.NoError(t, c.Abort())
	wg.Wait()
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
	assert.ErrorContains(t, err, "making the communicator: NCCL has not returned")
	assert.ErrorContains(t, err, "end the process")
	close(release)
	inside.Wait()
}
