package nccl

import (
	"encoding/binary"
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// TestPut: puts are one group, with the arguments in the order of nccl.h, and the group ends also where one is refused.
func TestPut(t *testing.T) {
	f := table()
	var calls []string
	refuse, pending := int32(9), 0
	f.GroupStart = func() Result { calls = append(calls, "start"); return Success }
	f.GroupEnd = func() Result {
		calls = append(calls, "end")
		if pending > 0 {
			return InProgress
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
	f.PutSignal = func(send uint64, count uintptr, dt DataType, peer int32, w WindowHandle, offset uintptr, signal, context int32, flags uint32,
		comm CommHandle, stream uintptr,
	) Result {
		calls = append(calls, fmt.Sprint(send, count, dt, peer, w, offset, signal, context, flags, comm, stream))
		if peer == refuse {
			return InvalidArgument
		}
		return Success
	}
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	w := &Window{comm: c, handle: 77}
	one := func(local uint64, peer int32) string {
		return fmt.Sprint(local, uintptr(16), Int8, peer, WindowHandle(77), uintptr(32), 0, 0, 0, CommHandle(0xc0), uintptr(5))
	}
	put := func(local uint64, peer int) Put {
		return Put{Peer: peer, Window: w, Offset: 32, Local: local, Bytes: 16}
	}
	pending = 2
	require.NoError(t, c.Put(5, put(64, 0), put(128, 1)))
	assert.Equal(t, []string{"start", one(64, 0), one(128, 1), "end"}, calls)
	assert.Zero(t, pending, "the puts are in the stream")

	calls, refuse = nil, 0
	require.ErrorContains(t, c.Put(5, put(64, 0), put(128, 1)), "ncclPutSignal")
	assert.Equal(t, []string{"start", one(64, 0), "end"}, calls)
	require.Error(t, c.Sound(), "a failed put is a failure of the communicator")

	calls = nil
	for _, bad := range []Put{put(64, 2), put(64, -1), put(0, 1), {Peer: 1, Local: 64, Bytes: 1}, {Peer: 1, Window: w, Local: 64},
		{Peer: 1, Window: w, Local: 64, Bytes: 1, Offset: -1}, {Peer: 1, Window: &Window{}, Local: 64, Bytes: 1}} {
		require.ErrorIs(t, c.Put(5, put(64, 1), bad), errs.ErrInvalid, "%+v", bad)
	}
	assert.Empty(t, calls)
	require.NoError(t, c.Destroy(t.Context()))
	require.ErrorIs(t, c.Put(5, put(64, 1)), errs.ErrClosed)
}

// TestPutSupport: each version is asked in its own words, and one without puts says which has them.
func TestPutSupport(t *testing.T) {
	for version, want := range map[Version]struct {
		bytes, ask uint64
		at         int
	}{22902: {40, 22902, 34}, 22907: {56, 22907, 44}, 23203: {56, 22907, 44}} {
		for _, have := range []byte{0, 1} {
			f := table()
			f.GetVersion = func(v *int32) Result { *v = int32(version); return Success }
			f.GroupStart, f.GroupEnd = func() Result { return Success }, func() Result { return Success }
			f.CommQueryProperties = func(_ CommHandle, props *byte) Result {
				b := unsafe.Slice(props, want.bytes)
				if binary.LittleEndian.Uint64(b) != want.bytes || uint64(binary.LittleEndian.Uint32(b[12:])) != want.ask {
					return InvalidUsage
				}
				b[want.at] = have
				return Success
			}
			c, err := library(t, f).NewComm(t.Context(), options(false))
			require.NoError(t, err)
			has, err := c.PutSupport()
			require.NoError(t, err)
			assert.Equal(t, have == 1, has, "%s", version)
			require.NoError(t, c.Destroy(t.Context()))
		}
	}
	f := table()
	f.PutSignal = nil
	c, err := library(t, f).NewComm(t.Context(), options(false))
	require.NoError(t, err)
	_, err = c.PutSupport()
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.ErrorContains(t, err, "2.29.2 or newer")
	require.ErrorIs(t, c.Put(5, Put{}), errs.ErrUnsupported)
	require.NoError(t, c.Destroy(t.Context()))
}
