package nccl

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/memory"
)

// TestUnknownGPU: memory that the GPU may still fill, since the driver does not say, is kept until it does, and as long as it cannot be given back.
func TestUnknownGPU(t *testing.T) {
	m := newMachine(1)
	// set lets calls of the driver fail, and returns how much memory is used.
	var fail func(call string) cu.Result
	set := func(f func(call string) cu.Result) (used int64) {
		m.set(func() { fail, used = f, m.used[0] })
		return used
	}
	failure := func(call string) (r cu.Result) {
		m.set(func() {
			if fail != nil {
				r = fail(call)
			}
		})
		return r
	}
	o := m.plain(0)
	query, push := o.Driver.StreamQuery, o.Driver.CtxPushCurrent
	o.Driver.StreamQuery = func(s cu.StreamHandle) cu.Result { return cmp.Or(failure("cuStreamQuery"), query(s)) }
	o.Driver.CtxPushCurrent = func(c cu.ContextHandle) cu.Result { return cmp.Or(failure("cuCtxPushCurrent"), push(c)) }
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
			before := set(func(call string) cu.Result {
				if call == "cuStreamQuery" {
					return cu.Unknown
				}
				return cu.Success
			})
			if _, err := b.Allocate(ctx, 100); err == nil || !strings.Contains(err.Error(), "given back later") || !strings.Contains(err.Error(), "cuStreamQuery") {
				return fmt.Errorf("a GPU that cannot be asked: %w", err)
			}
			pushes := 0
			used := set(func(call string) cu.Result {
				if call == "cuCtxPushCurrent" {
					if pushes++; pushes == 2 { // after that for the query
						return cu.OperatingSystem
					}
				}
				return cu.Success
			})
			if used != before+granule {
				return fmt.Errorf("%d bytes are kept", used-before)
			}
			if _, err := b.Allocate(ctx, 100); err == nil || !strings.Contains(err.Error(), "cuCtxPushCurrent") {
				return fmt.Errorf("giving back without a context: %w", err)
			}
			if used := set(nil); used != before+granule {
				return fmt.Errorf("%d bytes are kept after it", used-before)
			}
			a, err := b.Allocate(ctx, 100)
			if err != nil {
				return err
			}
			if used := set(nil); used != before+granule {
				return fmt.Errorf("%d bytes are used after the GPU had ended", used-before)
			}
			return a.Release(ctx)
		})
	}))
	m.requireClean(t)
}
