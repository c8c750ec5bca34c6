package nixl

import (
	"context"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// real loads the library that is installed, or skips the test.
func real(t *testing.T) *Library {
	t.Helper()
	l, err := Load(nil)
	if err != nil {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		testneed.Missing(t, "nixl", err)
	}
	return l
}

// memory returns anonymous memory of the process, which the garbage collector does not know.
func memory(t *testing.T, bytes int) ([]byte, Block) {
	t.Helper()
	b, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b, Block{Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), Bytes: uint64(bytes), Device: 77}
}

// TestTwoAgents moves memory between two agents of this process, in both directions, with and without progress threads. Those without
// are driven on by whoever waits.
func TestTwoAgents(t *testing.T) {
	l := real(t)
	t.Run("with threads", func(t *testing.T) { twoAgents(t, l, nil) })
	t.Run("without", func(t *testing.T) { twoAgents(t, l, &AgentOptions{NoThread: true}) })
}

func twoAgents(t *testing.T, l *Library, opts *AgentOptions) {
	t.Logf("NIXL at %s, CUDA %d, modules %s", l.Path(), l.CUDA(), l.Modules())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const n = 1 << 20
	var agents [2]*Agent
	var mem [2][]byte
	var blocks [2]Block
	for i, name := range []string{"a", "b"} {
		began := time.Now()
		a, err := Bound(ctx, "making an agent", func() (*Agent, error) { return l.NewAgent(name, opts) })
		require.NoError(t, err)
		defer func() { assert.NoError(t, a.Close()) }()
		t.Logf("agent %s after %v", name, time.Since(began))
		mem[i], blocks[i] = memory(t, n)
		agents[i] = a
		plugins, err := a.Plugins()
		require.NoError(t, err)
		require.Contains(t, plugins, "UCX")
	}
	for i, a := range agents {
		blob, err := a.Metadata()
		require.NoError(t, err)
		name, err := agents[1-i].Know(blob)
		require.NoError(t, err)
		require.Equal(t, a.Name(), name)
		require.NoError(t, a.Register(DRAM, blocks[i]))
		defer func() { assert.NoError(t, a.Deregister(DRAM, blocks[i])) }()
		blob, err = a.MetadataOf(DRAM, blocks[i])
		require.NoError(t, err)
		_, err = agents[1-i].Know(blob)
		require.NoError(t, err)
		t.Logf("metadata of %d bytes", len(blob))
	}
	run := func(r *Request) {
		ended, err := r.Post()
		for !ended && err == nil {
			require.NoError(t, ctx.Err())
			require.NoError(t, agents[1].Progress())
			ended, err = r.Status()
		}
		require.NoError(t, err)
	}
	w, err := agents[0].NewRequest(Write, DRAM, blocks[:1], blocks[1:], "b")
	require.NoError(t, err)
	for round := range 3 {
		mem[0][round*1000] = byte(round + 1)
		began := time.Now()
		run(w)
		t.Logf("write after %v", time.Since(began))
		require.Equal(t, mem[0], mem[1])
	}
	require.NoError(t, w.Release())
	require.ErrorIs(t, w.Release(), errs.ErrClosed)
	_, err = w.Post()
	require.ErrorIs(t, err, errs.ErrClosed)
	mem[1][n-1] = 99
	r, err := agents[0].NewRequest(Read, DRAM, blocks[:1], blocks[1:], "b")
	require.NoError(t, err)
	run(r)
	require.Equal(t, byte(99), mem[0][n-1])
	require.NoError(t, r.Release())

	outside := blocks[1]
	outside.Bytes = 2 * n
	mine := blocks[0]
	mine.Bytes = 2 * n
	_, err = agents[0].NewRequest(Write, DRAM, []Block{mine}, []Block{outside}, "b")
	t.Log(err)
	require.Error(t, err, "memory that is not registered")
	_, err = agents[0].NewRequest(Write, DRAM, blocks[:1], blocks[1:], "nobody")
	t.Log(err)
	require.Error(t, err, "an agent that is not known")
	_, err = agents[0].Know([]byte("not metadata"))
	t.Log(err)
	require.Error(t, err)
}
