package cuda_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/simcuda"
)

// TestRanksOfOneGPUFree: a rank frees memory while another one of the process, on the same GPU, waits for what the first does next.
func TestRanksOfOneGPUFree(t *testing.T) {
	m, err := simcuda.New(simcuda.Config{Seed: 1})
	require.NoError(t, err)
	open := func() *cuda.Device {
		d, err := cuda.Open(&cuda.Options{Driver: m.Driver(), WaitTimeout: 20 * time.Second})
		require.NoError(t, err)
		return d
	}
	d, other := open(), open()
	word, p := alloc(t, d, 4), alloc(t, d, 1<<20)
	waits, writes := newStream(t, other), newStream(t, d)
	require.NoError(t, waits.WaitValue32(word, 1))
	freed := make(chan error, 1)
	go func() {
		err := d.Free(p)
		if err == nil {
			err = writes.WriteValue32(word, 1)
		}
		freed <- err
	}()
	select {
	case err := <-freed:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		require.FailNow(t, "freeing waits for the other rank, which waits for this one")
	}
	synchronize(t, waits)
	require.NoError(t, d.Close())
	require.NoError(t, other.Close())
	require.NoError(t, m.Err())
}
