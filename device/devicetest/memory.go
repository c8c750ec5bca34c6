package devicetest

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

func identity(t *testing.T, h Harness) {
	d, again := h.open(t), h.open(t)
	assert.NotContains(t, d.Kind().String(), "Kind(", "a kind that package device knows")
	assert.GreaterOrEqual(t, d.Index(), 0)
	assert.NotEmpty(t, d.Name())
	assert.NotEmpty(t, d.UUID())
	assert.Equal(t, d.Kind(), again.Kind())
	assert.Equal(t, d.Index(), again.Index())
	assert.Equal(t, d.Name(), again.Name())
	assert.Equal(t, d.UUID(), again.UUID(), "all who open the device must agree")
}

func allocIsZeroed(t *testing.T, h Harness) {
	d := h.open(t)
	var total int64
	seen := map[device.Ptr]int64{}
	for _, n := range []int64{1, 255, 256, 4096, 4097, 1 << 20, 3<<20 + 5, 9<<20 + 5} {
		p := alloc(t, d, n)
		assert.Zero(t, p%256, "alignment of %v", p)
		assert.Equal(t, int(n), bytes.Count(read(t, d, p, int(n)), []byte{0}), "memory is zeroed")
		require.NoError(t, d.CopyFromHost(p, bytes.Repeat([]byte{7}, int(n)))) // whoever gets it next must not see this
		seen[p] = n
		total += n
	}
	assert.Equal(t, Held{Allocations: 8, Bytes: total}, h.Held(d))
	for p := range seen {
		require.NoError(t, d.Free(p))
		require.ErrorIs(t, d.Free(p), device.ErrInvalid, "a second Free")
	}
	assert.Equal(t, Held{}, h.Held(d))
	for _, n := range []int64{0, -1, math.MinInt64} {
		_, err := d.Alloc(n)
		var arg *errs.ArgumentError
		require.ErrorAs(t, err, &arg, "%d bytes", n)
		assert.Equal(t, n, arg.Value)
	}
	_, err := d.Alloc(1 << 50)
	require.ErrorIs(t, err, device.ErrNoMemory)
	assert.Equal(t, Held{}, h.Held(d))
}

func hostMemory(t *testing.T, h Harness) {
	d := h.open(t)
	m, ok := d.(device.HostMemory)
	if !ok {
		t.Skip("this process cannot address the device's memory")
	}
	for _, n := range []int64{1, 255, 256, 4096, 4097, 1 << 20, 3<<20 + 5} {
		p := alloc(t, d, n)
		b, err := m.Bytes(p, n)
		require.NoError(t, err)
		require.Len(t, b, int(n))
		assert.Equal(t, int(n), cap(b), "the slice must not reach beyond what was asked for")
		assert.Equal(t, -1, bytes.IndexFunc(b, func(r rune) bool { return r != 0 }), "memory is zeroed")
		b[n-1] = 2
		assert.Equal(t, []byte{2}, read(t, d, p.Add(n-1), 1), "the slice is the memory itself")
		b[0] = 1
		assert.Equal(t, []byte{1}, read(t, d, p, 1))
		for _, bad := range []struct {
			p device.Ptr
			n int64
		}{{p, n + 1}, {p.Add(-1), 1}, {p.Add(1), n}, {p, -1}, {0, 1}, {p, math.MinInt64}, {p, math.MaxInt64}, {math.MaxUint64, 1}} {
			_, err := m.Bytes(bad.p, bad.n)
			require.ErrorIs(t, err, device.ErrInvalid, "%d bytes at %v", bad.n, bad.p)
		}
		require.NoError(t, d.Free(p))
		_, err = m.Bytes(p, 1)
		require.ErrorIs(t, err, device.ErrInvalid)
	}
	p := alloc(t, d, 8)
	require.NoError(t, d.Close())
	_, err := m.Bytes(p, 1)
	require.ErrorIs(t, err, device.ErrClosed)
}

func copiesOfAnySize(t *testing.T, h Harness) {
	d := h.open(t)
	for _, n := range []int{0, 1, 3, 4096, 4 << 20, 4<<20 + 1, 21<<20 + 7} {
		p := alloc(t, d, int64(max(n, 1)))
		src := make([]byte, n)
		for i := range src {
			src[i] = byte(i*7 + i>>12)
		}
		require.NoError(t, d.CopyFromHost(p, src))
		require.True(t, bytes.Equal(src, read(t, d, p, n)), "%d bytes", n)
		require.ErrorIs(t, d.CopyFromHost(p, make([]byte, max(n, 1)+1)), device.ErrInvalid, "one byte too many")
		require.ErrorIs(t, d.CopyToHost(make([]byte, max(n, 1)+1), p), device.ErrInvalid)
		require.NoError(t, d.Free(p))
	}
	for _, p := range []device.Ptr{0, 8, math.MaxUint64} {
		require.ErrorIs(t, d.CopyFromHost(p, []byte{1, 2}), device.ErrInvalid, "%v", p)
		require.ErrorIs(t, d.CopyToHost(make([]byte, 2), p), device.ErrInvalid, "%v", p)
	}
}

func badRangesAreRefused(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	p := alloc(t, d, 1024)
	for _, c := range []struct {
		p device.Ptr
		n int64
	}{{0, 1}, {p, -1}, {p, math.MinInt64}, {math.MaxUint64, 1}, {math.MaxUint64 - 3, 8}, {0x1000, 8}} {
		require.ErrorIs(t, s.Fill(c.p, 1, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
		require.ErrorIs(t, s.Copy(c.p, p, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
		require.ErrorIs(t, s.Copy(p, c.p, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
	}
	for _, q := range []device.Ptr{p + 1, p + 2, 0, math.MaxUint64 - 3} {
		require.ErrorIs(t, s.WriteValue32(q, 1), device.ErrInvalid)
		require.ErrorIs(t, s.WaitValue32(q, 1), device.ErrInvalid)
	}
	require.ErrorIs(t, s.Copy(p, p.Add(8), 16), device.ErrInvalid, "overlap")
	require.ErrorIs(t, s.Copy(p.Add(8), p, 16), device.ErrInvalid, "overlap")
	require.ErrorIs(t, s.Copy(p, p, 16), device.ErrInvalid, "overlap")
	require.NoError(t, s.Copy(p, p.Add(16), 16))
	require.NoError(t, s.Copy(0, 0, 0), "0 bytes is no work")
	require.NoError(t, s.Fill(0, 0, 0))
	require.ErrorIs(t, s.WriteValue32(0x1000, 1), device.ErrInvalid, "nothing is there")
	require.ErrorIs(t, s.WaitValue32(0x1000, 1), device.ErrInvalid)
	synchronize(t, s)
	assert.Equal(t, 1024, bytes.Count(read(t, d, p, 1024), []byte{0}), "what was refused has not run")
	_ = alloc(t, d, 8) // the device has survived
}
