package nccl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

// putsRank makes the test binary a rank of TestPutsOnGPU: "0 127.0.0.1:1234 1" is rank 0 on GPU 1.
const putsRank = "SYMMEM_TEST_PUTS_RANK"

// TestPutsOnGPU: two ranks, processes that NCCL takes for two hosts, put and signal over its sockets. They may share a GPU.
func TestPutsOnGPU(t *testing.T) {
	if spec := os.Getenv(putsRank); spec != "" {
		beRankOfPuts(t, spec)
		return
	}
	count := gpus(t)
	version, err := versionHere(t)
	require.NoError(t, err)
	if version < ginOverSockets {
		testneed.Missing(t, "gin", fmt.Sprintf("NCCL %s has no GIN over sockets: name 2.32 or newer in %s", version, libraryEnv))
	}
	if _, err := os.Stat("/dev/gdrdrv"); err != nil {
		testneed.Missing(t, "gin", "NCCL's GIN over sockets wants GDRCopy, and there is no /dev/gdrdrv")
	}
	addr := testneed.FreeAddress(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var outs [2]bytes.Buffer
	var cmds [2]*exec.Cmd
	for r := range cmds {
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestPutsOnGPU$", "-test.v", "-test.timeout=4m")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s %d", putsRank, r, addr, r%count), fmt.Sprintf("%s=pretended%d", hostEnv, r), "NCCL_GIN_TYPE=2", "NCCL_GIN_ENABLE=1")
		cmd.Stdout, cmd.Stderr = &outs[r], &outs[r]
		require.NoError(t, cmd.Start())
		cmds[r] = cmd
	}
	for r, cmd := range cmds {
		err := cmd.Wait()
		t.Logf("rank %d:\n%s", r, &outs[r])
		assert.NoError(t, err, "rank %d", r)
	}
}

// beRankOfPuts is what a process does that TestPutsOnGPU has started.
func beRankOfPuts(t *testing.T, spec string) {
	var rank, gpu int
	var addr string
	_, err := fmt.Sscanf(spec, "%d %s %d", &rank, &addr, &gpu)
	require.NoError(t, err)
	ctx := t.Context()
	g, err := group.Join(ctx, &group.Options{Rank: rank, WorldSize: 2, Addr: addr, Timeout: time.Minute})
	require.NoError(t, err)
	o := onGPU(rank)
	o.Device = strconv.Itoa(gpu)
	err = withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
		if !b.Moves() {
			return errors.New("NCCL has no puts: " + b.noPuts)
		}
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		err = backendtest.WithWindow(ctx, mem, 64<<20, func(w *memory.Window) error {
			if err := errors.Join(putToAll(ctx, g, mem, w, s), replayPuts(ctx, g, mem, w, s), putLong(ctx, g, mem, w, s), getNear(ctx, g, mem, w, s)); err != nil {
				return err
			}
			return timePuts(ctx, t, g, mem, w)
		})
		return errors.Join(err, s.Close())
	})
	require.NoError(t, errors.Join(err, g.Close(ctx)))
}

// timePuts tells how long a put with a signal takes, there and back.
func timePuts(ctx context.Context, t *testing.T, g *group.Group, mem *memory.Memory, w *memory.Window) error {
	s, err := mem.Device().NewStream()
	if err != nil {
		return err
	}
	own, err := w.Peer(g.Rank(), 0)
	if err != nil {
		return err
	}
	peer := 1 - g.Rank()
	for _, n := range []int64{8, 64 << 10, 16 << 20} {
		const rounds = 20
		began := time.Now()
		for range rounds {
			if g.Rank() == 0 {
				err = errors.Join(mem.PutSignal(s, peer, w, 32<<20, own, n, 0), mem.Wait(s, peer, 0))
			} else {
				err = errors.Join(mem.Wait(s, peer, 0), mem.PutSignal(s, peer, w, 32<<20, own, n, 0))
			}
			if err = errors.Join(err, s.Synchronize(ctx)); err != nil {
				return err
			}
		}
		t.Logf("a put of %d bytes with its signal, there and back: %v", n, time.Since(began)/rounds)
	}
	return s.Close()
}

// versionHere returns the version of the machine's NCCL.
func versionHere(t *testing.T) (nccl.Version, error) {
	t.Helper()
	lib, err := nccl.Load(&nccl.Options{Look: true, Path: os.Getenv(libraryEnv)})
	if err != nil {
		return 0, err
	}
	return lib.Version(), nil
}
