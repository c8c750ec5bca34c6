package memory_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// TestWhoWasLate: a kernel whose time is up names a rank that it waited for, which may wait for the lost one itself. So the error only says that this rank
// did not come, and who is lost as soon as the group knows.
func TestWhoWasLate(t *testing.T) {
	const gone = 2
	failures := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			if g.Rank() == gone {
				if err := g.Barrier(ctx, "before"); err != nil {
					return err
				}
				g.Abort("it is killed")
				return errors.New("killed")
			}
			late := func() (string, error) {
				err := m.WaitFailed("all-reduce", ptx.Fault{Why: ptx.FaultTimeout, Kernel: ptx.FaultMany, Peer: uint16(1 - g.Rank())})
				wait, ok := errors.AsType[*device.WaitError](err)
				if !ok || wait.Peer != 1-g.Rank() || !errors.Is(err, os.ErrDeadlineExceeded) {
					return "", fmt.Errorf("a wait whose time was up: %w", err)
				}
				for _, part := range []string{fmt.Sprintf("waiting for rank %d: it did not come in 2m0s", 1-g.Rank()), "may itself wait for another rank"} {
					if !strings.Contains(err.Error(), part) {
						return "", fmt.Errorf("%q is not said: %w", part, err)
					}
				}
				return err.Error(), err
			}
			text, err := late()
			if text == "" {
				return err
			}
			if errors.Is(err, errs.ErrPeerLost) || strings.Contains(text, "lost") {
				return fmt.Errorf("nobody is lost, and the error says so: %w", err)
			}
			if err := g.Barrier(ctx, "before"); err != nil {
				return err
			}
			select {
			case <-g.Lost():
			case <-time.After(time.Minute):
				return errors.New("the loss is not seen")
			}
			text, err = late()
			if lost, ok := errors.AsType[*group.PeerLostError](err); text == "" || !ok || lost.Rank != gone {
				return fmt.Errorf("when rank %d is lost: %w", gone, err)
			}
			return errors.New("done")
		})
	})
	for rank, err := range failures {
		if want := map[int]string{gone: "killed"}[rank]; want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.ErrorContains(t, err, "done", "rank %d", rank)
	}
}
