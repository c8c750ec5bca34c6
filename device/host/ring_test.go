package host_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/internal/futex"
)

// barrier is a kernel that adds itself to a word and waits for all others, as the kernels of ranks do.
type barrier struct {
	word    *futex.Word
	members uint32
	turn    uint32
	bound   futex.Bound
}

func (b *barrier) RunKernel() error {
	b.turn += b.members
	b.word.Add(1)
	return b.word.WaitAtLeast(b.turn, b.bound)
}

// ranks opens a device and a stream for each of n ranks.
func ranks(t testing.TB, n int) (devices []*host.Device, streams []*host.Stream) {
	t.Helper()
	for range n {
		d := open(t, nil)
		devices, streams = append(devices, d), append(streams, newStream(t, d))
	}
	return devices, streams
}

// launchAll launches on every stream, and then waits for all.
func launchAll(t testing.TB, streams []*host.Stream, kernels []device.HostKernel) {
	for i, s := range streams {
		if err := s.Launch(kernels[i]); err != nil {
			require.NoError(t, err)
		}
	}
	for _, s := range streams {
		if err := s.Synchronize(context.Background()); err != nil {
			require.NoError(t, err)
		}
	}
}

// barriers makes a barrier kernel for each of n ranks.
func barriers(t testing.TB, n int) []device.HostKernel {
	t.Helper()
	word, err := futex.At(make([]byte, futex.WordSize))
	require.NoError(t, err)
	kernels := make([]device.HostKernel, n)
	for i := range kernels {
		kernels[i] = &barrier{word: word, members: uint32(n), bound: futex.Bound{Deadline: time.Now().Add(10 * patience)}}
	}
	return kernels
}

func TestMoreRanksThanCores(t *testing.T) {
	_, streams := ranks(t, 9)
	kernels := barriers(t, len(streams))
	for range 200 {
		launchAll(t, streams, kernels)
	}
}

// TestValueRing hands a token round between the devices of several ranks by WriteValue32 and WaitValue32 alone.
func TestValueRing(t *testing.T) {
	const laps = 100
	devices, streams := ranks(t, 5)
	mem := make([]byte, 64*len(devices))
	base := make([]device.Ptr, len(devices))
	for i, d := range devices {
		p, err := d.Map(mem) // every rank knows the same memory, as peers do
		require.NoError(t, err)
		base[i] = p
	}
	for lap := uint32(1); lap <= laps; lap++ {
		for i, s := range streams {
			next := (i + 1) % len(streams)
			if i == 0 {
				require.NoError(t, s.WriteValue32(base[i].Add(int64(64*next)), lap))
				require.NoError(t, s.WaitValue32(base[i], lap))
				continue
			}
			require.NoError(t, s.WaitValue32(base[i].Add(int64(64*i)), lap))
			require.NoError(t, s.WriteValue32(base[i].Add(int64(64*next)), lap))
		}
	}
	for _, s := range streams {
		synchronize(t, s)
	}
}

// BenchmarkBarrier is a kernel launch on every rank, a barrier in it, and a Synchronize on every rank.
func BenchmarkBarrier(b *testing.B) {
	for _, n := range []int{2, 4, 8} {
		b.Run(fmt.Sprintf("ranks=%d", n), func(b *testing.B) {
			_, streams := ranks(b, n)
			kernels := barriers(b, n)
			b.ReportAllocs()
			for b.Loop() {
				launchAll(b, streams, kernels)
			}
		})
	}
}
