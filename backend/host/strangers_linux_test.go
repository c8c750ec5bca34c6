package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/memfd"
)

// TestFilesOfPeersAreChecked: a peer's file that could shrink, or that has another size, is refused and not mapped: loads from it could end
// the process.
func TestFilesOfPeersAreChecked(t *testing.T) {
	const bytes = 1 << 16
	for name, bring := range map[string]func() (*os.File, error){
		"not sealed": func() (*os.File, error) {
			fd, err := unix.MemfdCreate("stranger", unix.MFD_CLOEXEC)
			if err != nil {
				return nil, err
			}
			return os.NewFile(uintptr(fd), "stranger"), unix.Ftruncate(fd, bytes)
		},
		"too small": func() (*os.File, error) { return memfd.New(bytes / 2) },
		"too large": func() (*os.File, error) { return memfd.New(2 * bytes) },
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				if g.Rank() == 1 { // does what the backend does, with a file that the backend would not make
					f, err := bring()
					if err != nil {
						return err
					}
					files, err := g.ExchangeFile(ctx, "shared memory", f)
					for _, other := range files {
						if other != nil {
							err = errors.Join(err, other.Close())
						}
					}
					return errors.Join(err, f.Close())
				}
				b, err := host.New(g, nil)
				if err != nil {
					return err
				}
				a, err := b.Allocate(ctx, bytes)
				if err != nil {
					return err
				}
				if _, err := b.Rendezvous(ctx, a); !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("a file that is %s was mapped: %w", name, err)
				}
				return errors.Join(a.Release(ctx), b.Close(ctx))
			}))
		})
	}
}
