package host_test

import (
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/internal/errs"
)

func TestAllocRefusesHugeSizes(t *testing.T) {
	d := open(t, nil)
	for _, n := range []int64{math.MaxInt64, math.MaxInt64 - 4096} {
		_, err := d.Alloc(n)
		var arg *errs.ArgumentError
		require.ErrorAs(t, err, &arg, "%d bytes", n)
		assert.Equal(t, n, arg.Value)
	}
	_, err := d.Alloc(1 << 55)
	require.ErrorIs(t, err, device.ErrNoMemory, "more than there are addresses is an error of the system")
	assert.Equal(t, host.Stats{}, d.Stats())
}

func TestRangesAreChecked(t *testing.T) {
	d := open(t, nil)
	// Two mappings of one piece of memory, so that they are adjacent, with a hole before and behind.
	mem := make([]byte, 4096)
	low, err := d.Map(mem[1024:2048])
	require.NoError(t, err)
	high, err := d.Map(mem[2048:3072])
	require.NoError(t, err)
	require.Equal(t, low.Add(1024), high)

	for _, c := range []struct {
		p device.Ptr
		n int64
	}{{low, 1024}, {low.Add(1), 1023}, {low.Add(1023), 1}, {high, 1024}, {low, 0}, {high.Add(1024), 0}} {
		b, err := d.Bytes(c.p, c.n)
		require.NoError(t, err, "%v %d", c.p, c.n)
		require.Len(t, b, int(c.n))
	}
	s := newStream(t, d)
	for _, c := range []struct {
		p device.Ptr
		n int64
	}{
		{low, 1025}, {low, 2048}, {low.Add(-1), 2}, {low.Add(-1), 1}, {high.Add(1024), 1}, {high.Add(1), 1024},
		{0, 1}, {math.MaxUint64, 1}, {math.MaxUint64, math.MaxInt64}, {low, math.MaxInt64}, {low, -1}, {low, math.MinInt64},
		{low.Add(1025 - 2048), 1}, {0, math.MaxInt64},
	} {
		what := fmt.Sprintf("%v with %d bytes", c.p, c.n)
		_, err := d.Bytes(c.p, c.n)
		require.ErrorIs(t, err, device.ErrInvalid, what)
		require.ErrorIs(t, s.Fill(c.p, 1, c.n), device.ErrInvalid, what)
		require.ErrorIs(t, s.Copy(c.p, high, c.n), device.ErrInvalid, what)
		require.ErrorIs(t, s.Copy(high, c.p, c.n), device.ErrInvalid, what)
		if c.n > 0 && c.n < 4096 {
			require.ErrorIs(t, d.CopyFromHost(c.p, make([]byte, c.n)), device.ErrInvalid, what)
			require.ErrorIs(t, d.CopyToHost(make([]byte, c.n), c.p), device.ErrInvalid, what)
		}
	}
	for _, p := range []device.Ptr{low.Add(1), low.Add(2), low.Add(-4), high.Add(1024), 0, math.MaxUint64 - 3} {
		require.ErrorIs(t, s.WriteValue32(p, 1), device.ErrInvalid)
		require.ErrorIs(t, s.WaitValue32(p, 1), device.ErrInvalid)
	}
	synchronize(t, s)
	assert.NotContains(t, mem[:1024], byte(1))
}

func TestMap(t *testing.T) {
	d := open(t, nil)
	_, err := d.Map(nil)
	require.ErrorIs(t, err, device.ErrInvalid)
	mem := make([]byte, 3000)
	p, err := d.Map(mem[1000:2000])
	require.NoError(t, err)
	for _, overlap := range [][]byte{mem, mem[:1001], mem[1999:], mem[1000:2000], mem[1200:1300]} {
		_, err := d.Map(overlap)
		require.ErrorIs(t, err, device.ErrInvalid)
	}
	before, err := d.Map(mem[:1000])
	require.NoError(t, err)
	behind, err := d.Map(mem[2000:])
	require.NoError(t, err)
	assert.Equal(t, host.Stats{Mappings: 3}, d.Stats())

	require.NoError(t, d.CopyFromHost(p, []byte("symmetric")))
	assert.Equal(t, "symmetric", string(mem[1000:1009]))
	got := make([]byte, 4)
	require.NoError(t, d.CopyToHost(got, p.Add(2)))
	assert.Equal(t, "mmet", string(got))

	require.ErrorIs(t, d.Unmap(p.Add(1)), device.ErrInvalid)
	require.ErrorIs(t, d.Free(p), device.ErrInvalid, "memory of the caller is not freed")
	require.NoError(t, d.Unmap(p))
	require.ErrorIs(t, d.Unmap(p), device.ErrInvalid)
	require.ErrorIs(t, d.CopyToHost(got, p), device.ErrInvalid)
	require.NoError(t, d.CopyToHost(got, before))
	require.NoError(t, d.CopyToHost(got, behind))
	q := alloc(t, d, 8)
	require.ErrorIs(t, d.Unmap(q), device.ErrInvalid, "memory of Alloc is not unmapped")
}

func TestLookupAmongManyMappings(t *testing.T) {
	d := open(t, nil)
	mem := make([]byte, 64*1000)
	for i := range 1000 {
		j := i * 617 % 1000 // in no order
		_, err := d.Map(mem[j*64 : j*64+48])
		require.NoError(t, err)
	}
	first, err := d.Bytes(baseOf(t, d, mem), 48)
	require.NoError(t, err)
	require.Same(t, &mem[0], &first[0])
	for i := range 1000 {
		p := baseOf(t, d, mem).Add(int64(i * 64))
		b, err := d.Bytes(p.Add(7), 41)
		require.NoError(t, err)
		require.Same(t, &mem[i*64+7], &b[0])
		_, err = d.Bytes(p.Add(48), 1)
		require.Error(t, err)
		if i%3 == 1 {
			require.NoError(t, d.Unmap(p))
			_, err = d.Bytes(p.Add(7), 1)
			require.Error(t, err)
		}
	}
	p := baseOf(t, d, mem).Add(64 * 500)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = d.Bytes(p, 8) }))
}

// baseOf returns the address of mem, which begins where the first mapping does.
func baseOf(t *testing.T, d *host.Device, mem []byte) device.Ptr {
	t.Helper()
	require.NoError(t, d.Unmap(ptrOf(mem)))
	p, err := d.Map(mem[:48])
	require.NoError(t, err)
	return p
}

func TestUnmapEndsAWait(t *testing.T) {
	waiting := make(chan struct{}, 1)
	d := open(t, &host.Options{Err: func() error {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return nil
	}})
	s := newStream(t, d)
	mem := make([]byte, 64)
	p, err := d.Map(mem)
	require.NoError(t, err)
	require.NoError(t, s.WaitValue32(p, 1)) // nobody will write it
	require.NoError(t, s.Fill(p, 9, 8))     // and by then this is unmapped
	select {
	case <-waiting:
	case <-time.After(patience):
		require.FailNow(t, "the options' Err is not asked")
	}
	unmapped := make(chan error, 1)
	go func() { unmapped <- d.Unmap(p) }()
	select {
	case err := <-unmapped:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "Unmap does not end the wait")
	}
	err = s.Synchronize(bounded(t))
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, "WaitValue32", work.Op)
	assert.Equal(t, p, work.Addr)
	assert.ErrorContains(t, work, "unmapped meanwhile")
	assert.Equal(t, 1, work.More, "the Fill failed too")
	assert.Zero(t, mem[0])
}

func TestCopiesRaceWithFree(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	const n = 1 << 16
	keep := alloc(t, d, n)
	for range 200 {
		p := alloc(t, d, n)
		require.NoError(t, s.Fill(p, 1, n))
		require.NoError(t, s.Copy(keep, p, n))
		var wg sync.WaitGroup
		wg.Go(func() { _ = d.CopyToHost(make([]byte, n), p) })
		require.NoError(t, d.Free(p)) // whatever of this has not run yet must fail, not crash
		wg.Wait()
	}
	if err := s.Synchronize(bounded(t)); err != nil {
		require.ErrorIs(t, err, device.ErrInvalid)
	}
}
