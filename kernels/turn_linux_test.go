package kernels

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// waiting counts the calls of this process that wait until those of their rank that began before them have ended.
func waiting() int {
	stacks := make([]byte, 1<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "memory.(*place).wait(")
}

func zeros(ctx context.Context, m *memory.Memory, n int64) (*tensor.Tensor, error) {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err != nil {
		return nil, err
	}
	return x, x.Rendezvous(ctx)
}

// TestConstructorsComeOneAfterTheOther: a constructor that begins while another call of the rank is under way comes behind that, with all its steps, and in front of what
// begins later.
func TestConstructorsComeOneAfterTheOther(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(near, g, nil)
		x, err := zeros(ctx, m, 100)
		if err != nil {
			return err
		}
		y, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		var plans [2]*Plan
		calls := []func() error{
			func() error { return y.Rendezvous(ctx) },
			func() (err error) {
				plans[0], err = NewAllReduceMany(ctx, []Pair{{In: x}}, Sum, nil)
				return err
			},
			func() (err error) { plans[1], err = NewBroadcast(ctx, x, 0, nil); return err },
		}
		store := m.Group().Store()
		if m.Group().Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has begun"); err != nil {
				return err
			}
			for _, call := range calls {
				if err := call(); err != nil {
					return err
				}
			}
		} else {
			ended := make(chan error, len(calls))
			for i, call := range calls {
				go func() { ended <- call() }()
				for len(ended) == 0 && ctx.Err() == nil && (waiting() < i || !backendtest.InCall(m)) {
					time.Sleep(time.Millisecond)
				}
			}
			if err := store.Set(ctx, "rank 0 has begun", nil); err != nil {
				return err
			}
			for range calls {
				err = errors.Join(err, <-ended)
			}
			if err != nil {
				return err
			}
		}
		return errors.Join(plans[0].Close(ctx), plans[1].Close(ctx), y.Close(ctx), x.Close(ctx), m.Close(ctx))
	}))
}
