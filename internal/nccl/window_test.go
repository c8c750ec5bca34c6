package nccl

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// structure returns a window's as NCCL lays it out, n bytes long.
func structure(n int) []byte {
	b := make([]byte, n)
	binary.LittleEndian.PutUint64(b[0:], 0x7f00_1234_5678)
	binary.LittleEndian.PutUint64(b[8:], 0x4000_0000_0000)
	binary.LittleEndian.PutUint32(b[16:], 1) // lsaRank
	binary.LittleEndian.PutUint32(b[20:], 3) // worldRank
	binary.LittleEndian.PutUint32(b[24:], 35)
	return b
}

// TestDecodeWindow: the beginning is the same in all versions whose structure is known, however long it is.
func TestDecodeWindow(t *testing.T) {
	for version, size := range map[Version]int{22803: 32, 22807: 72, 22809: 72, 22902: 72, 22907: 72, 23007: 88} {
		l, err := DecodeWindow(version, structure(size))
		require.NoError(t, err, version.String())
		assert.Equal(t, WindowLayout{FlatBase: 0x4000_0000_0000, LsaRank: 1, WorldRank: 3, Stride4G: 35}, l)
		assert.EqualValues(t, 35<<32, l.Stride())
		assert.EqualValues(t, 0x4000_0000_0000, l.Peer(2), "the first of those that reach each other is rank 2")
		assert.EqualValues(t, 0x4000_0000_0000+35<<32, l.Peer(3))
		assert.EqualValues(t, 0x4000_0000_0000+2*35<<32, l.Peer(4))
	}
	for _, version := range []Version{22707, 23100} {
		_, err := DecodeWindow(version, structure(88))
		require.ErrorIs(t, err, errs.ErrUnsupported, version.String())
		assert.ErrorContains(t, err, version.String())
	}
	_, err := DecodeWindow(22809, structure(32)[:31])
	require.ErrorIs(t, err, errs.ErrInvalid)
	for _, at := range []int{8, 24} {
		b := structure(72)
		clear(b[at : at+4])
		clear(b[at+4 : at+8])
		_, err := DecodeWindow(22809, b)
		require.ErrorIs(t, err, errs.ErrUnsupported, "nothing at %d", at)
	}
	b := structure(72)
	binary.LittleEndian.PutUint32(b[16:], 4)
	_, err = DecodeWindow(22809, b)
	require.ErrorIs(t, err, errs.ErrUnsupported, "a rank that cannot be")
}

func TestWindow(t *testing.T) {
	f := table()
	l := library(t, f)
	c, err := l.NewComm(t.Context(), options(true))
	require.NoError(t, err)
	for _, bad := range [][2]int64{{0, 64}, {4096, 0}, {4096, -1}} {
		_, err := c.Register(t.Context(), uint64(bad[0]), bad[1], WindowDefault)
		require.ErrorIs(t, err, errs.ErrInvalid)
	}
	w, err := c.Register(t.Context(), 4096, 64, WindowDefault)
	require.NoError(t, err)
	p, err := w.Peer(1, 5)
	require.NoError(t, err)
	assert.EqualValues(t, 1<<40+5, p)
	team, err := c.Lsa()
	require.NoError(t, err)
	assert.Equal(t, Team{2, 1, 1}, team)
	l.call.TeamLsa = func(CommHandle) Team { return Team{} }
	_, err = c.Lsa()
	require.ErrorIs(t, err, errs.ErrUnsupported)
	m := &Multicast{GetLsaMultimemDevicePointer: func(_ WindowHandle, offset uintptr,
		p *uint64) Result {
		*p = uint64(offset)
		return Success
	}}
	p, err = w.Multicast(t.Context(), m, 99)
	require.NoError(t, err)
	assert.EqualValues(t, 99, p)
	has, err := c.MulticastSupport()
	require.NoError(t, err)
	assert.True(t, has)
	l.call.CommQueryProperties = nil
	_, err = c.MulticastSupport()
	require.ErrorIs(t, err, errs.ErrUnsupported)
	l.call.CommWindowRegister, l.call.GetPeerDevicePointer, l.call.TeamLsa = nil, nil, nil
	_, err = c.Register(t.Context(), 4096, 64, WindowDefault)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	_, err = w.Peer(1, 5)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	_, err = c.Lsa()
	require.ErrorIs(t, err, errs.ErrUnsupported)
	require.NoError(t, c.Destroy(t.Context()))
}

// TestDevCommRequirements holds the layouts of ncclDevCommRequirements: lsaBarrierCount is where it is in each, and multicast
// is never asked for.
func TestDevCommRequirements(t *testing.T) {
	for version, want := range map[Version]struct{ requirements, comm, barriers, multimem int }{
		22803: {24, 88, 20, 16}, 22807: {56, 200, 24, 16}, 22809: {56, 200, 24, 16}, 22902: {72, 200, 40, 32}, 22907: {88, 224, 40,
			32},
		23007: {96, 240, 40, 32},
	} {
		b, size, err := devCommRequirements(version, 7)
		require.NoError(t, err)
		assert.Len(t, b, want.requirements, version.String())
		assert.Equal(t, want.comm, size)
		assert.EqualValues(t, 7, binary.LittleEndian.Uint32(b[want.barriers:]))
		assert.Zero(t, b[want.multimem])
		assert.Equal(t, version >= 22902, binary.LittleEndian.Uint32(b[8:]) == configMagic)
	}
	for _, version := range []Version{22707, 23100} {
		_, _, err := devCommRequirements(version, 1)
		require.ErrorIs(t, err, errs.ErrUnsupported)
	}
	l := library(t, table())
	c, err := l.NewComm(t.Context(), options(true))
	require.NoError(t, err)
	for _, bad := range []int{-1, 1 << 20} {
		_, err := c.NewDevComm(t.Context(), bad)
		require.ErrorIs(t, err, errs.ErrInvalid)
	}
	d, err := c.NewDevComm(t.Context(), 1)
	require.NoError(t, err)
	assert.Len(t, d.Bytes(), 200)
	assert.EqualValues(t, 9, d.Bytes()[0])
	require.NoError(t, d.Close(t.Context()))
	l.call.DevCommCreate = nil
	_, err = c.NewDevComm(t.Context(), 1)
	require.ErrorIs(t, err, errs.ErrUnsupported)
}
