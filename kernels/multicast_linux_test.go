package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// castBackend is a simBackend whose windows can have multicast addresses.
type castBackend struct {
	*simBackend
	ranks   int
	why     string       // why there is no multicast; "" if there is
	enabled atomic.Int64 // windows that were given an address
}

func (b *castBackend) Capabilities() backend.Capabilities {
	c := b.simBackend.Capabilities()
	c.Multicast, c.Why = b.why == "", map[string]string{"multicast": b.why}
	return c
}

func (b *castBackend) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.simBackend.Rendezvous(ctx, a)
	if err != nil {
		return nil, err
	}
	return &castMapping{m, b, a, b.ranks}, nil
}

type castMapping struct {
	backend.Mapping
	backend *castBackend
	alloc   backend.Allocation
	ranks   int
}

// castCopies is a multicast address, and the addresses of what it stands for.
type castCopies struct {
	at     device.Ptr
	bytes  int64
	copies []uint64
}

const castAt device.Ptr = 1 << 60

func (m *castMapping) EnableMulticast(context.Context) (device.Ptr, error) {
	m.backend.enabled.Add(1)
	c := castCopies{at: castAt | m.alloc.Ptr(), bytes: m.alloc.Bytes()}
	for r := range m.ranks {
		p, err := m.Peer(r)
		if err != nil {
			return 0, err
		}
		c.copies = append(c.copies, uint64(p))
	}
	m.backend.dev.casts.Store(c.at, c)
	return c.at, nil
}

// TestPlansAskForMulticast: a plan of a form that needs multicast addresses makes the ranks have them, once for each tensor; no other plan
// does, and the workspace has none.
func TestPlansAskForMulticast(t *testing.T) {
	onCastRanks(t, "", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		plan := func(alg Algorithm, to *tensor.Tensor, want int64) error {
			p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: alg, Out: to})
			if err != nil {
				return err
			}
			if got := b.enabled.Load(); got != want {
				return fmt.Errorf("%s: %d windows with multicast, expected %d", alg, got, want)
			}
			if alg.NeedsMulticast() {
				params := b.dev.launches[len(b.dev.launches)-1].p
				if params.MulticastIn != uint64(castAt|in.Ptr()) || params.MulticastOut != uint64(castAt|to.Ptr()) {
					return fmt.Errorf("%s: multicast addresses %x and %x of %s and %s", alg, params.MulticastIn, params.MulticastOut, in.Ptr(), to.Ptr())
				}
			}
			return p.Close(ctx)
		}
		for _, alg := range []Algorithm{Auto, OneShotPull, TwoShotPull, Transfers} {
			if err := plan(alg, out, 0); err != nil {
				return err
			}
		}
		return errors.Join(plan(OneShotMultimem, in, 1), plan(TwoShotMultimem, in, 1), plan(TwoShotMultimem, out, 2), plan(Auto, out, 2))
	})
}

// TestPlanWithoutMulticast: where there can be none, every rank is told why, and the ranks go on.
func TestPlanWithoutMulticast(t *testing.T) {
	onCastRanks(t, "the switch is out of order", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		if _, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: TwoShotMultimem}); !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("a plan without multicast: %w", err)
		} else if why := "the switch is out of order"; !strings.Contains(err.Error(), why) {
			return fmt.Errorf("%w does not say that %s", err, why)
		}
		p, err := NewAllReduce(ctx, in, Sum, nil)
		if err != nil {
			return err
		}
		return p.Close(ctx)
	})
}

// TestAutoIsAlikeOnAllRanks: a form by which each rank loads sums from the switch itself, in an order of its own, Auto does not take for an all-reduce, whatever a table says: the ranks would have other
// bits than each other.
func TestAutoIsAlikeOnAllRanks(t *testing.T) {
	fastest := tuning.Rule{Collective: tuning.AllReduce, Ranks: 2, Steps: []tuning.Step{{Form: OneShotMultimem.String()}}}
	tables := tuning.Default(false)
	tables.Tables = append([]*tuning.Table{{Rules: []tuning.Rule{fastest}}}, tables.Tables...)
	onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		m.SetTuning(tables)
		for _, asked := range []Algorithm{Auto, OneShotMultimem} {
			p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: asked, Out: out})
			if err != nil {
				return err
			}
			if taken := p.Algorithm(); (taken == OneShotMultimem) != (asked == OneShotMultimem) {
				err = fmt.Errorf("%s: %s was taken", asked, taken)
			}
			if err := errors.Join(err, p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestAutoEndsWithARankThatFails: where one rank asks for a form that there is not, the other one, whose Auto has taken a form with multicast addresses, does not go on without it: both get the error of the
// one that failed, and are in step.
func TestAutoEndsWithARankThatFails(t *testing.T) {
	var rules []tuning.Rule
	for collective, form := range map[string]Algorithm{tuning.AllReduce: TwoShotMultimem, tuning.Broadcast: OneShotMultimem} {
		rules = append(rules, tuning.Rule{Collective: collective, Ranks: 2, Steps: []tuning.Step{{Form: form.String()}}})
	}
	tables := tuning.Default(false)
	tables.Tables = append([]*tuning.Table{{Rules: rules}}, tables.Tables...)
	onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		m.SetTuning(tables)
		for _, c := range []struct {
			name string
			plan func(a Algorithm) (*Plan, error)
		}{
			{"an all-reduce", func(a Algorithm) (*Plan, error) {
				return NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: a, Out: out})
			}},
			{"a broadcast", func(a Algorithm) (*Plan, error) { return NewBroadcast(ctx, in, 1, &Options{Algorithm: a}) }},
		} {
			name, plan := c.name, c.plan
			_, err := plan([]Algorithm{Auto, NVSHMEM}[m.Group().Rank()])
			if vote, ok := errors.AsType[*group.VoteError](err); !ok || !errors.Is(err, errs.ErrUnsupported) || len(vote.Failures) != 1 || vote.Failures[0].Rank != 1 {
				return fmt.Errorf("%s that rank 1 cannot have: %w", name, err)
			}
			p, err := plan(Auto)
			if err != nil {
				return fmt.Errorf("%s behind it: %w", name, err)
			}
			if !p.Algorithm().NeedsMulticast() {
				err = fmt.Errorf("%s: %s was taken", name, p.Algorithm())
			}
			if err := errors.Join(err, p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// onCastRanks runs f on two ranks with a tensor for the input and one for the output. The GPUs of the ranks in older have compute capability 8.0.
func onCastRanks(t *testing.T, why string, f func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error, older ...int) {
	t.Helper()
	groups, err := group.Local(2, nil)
	require.NoError(t, err)
	var ranks errgroup.Group
	for _, g := range groups {
		ranks.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			b := &castBackend{ranks: 2, why: why, simBackend: &simBackend{Backend: near,
				dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}}
			b.left.Store(math.MaxInt64)
			if slices.Contains(older, g.Rank()) {
				b.dev.capability = 80
			}
			m := memory.New(b, g, nil)
			in, err := tensor.Zeros(ctx, m, tensor.Float32, 4096)
			if err != nil {
				return err
			}
			out, err := tensor.Zeros(ctx, m, tensor.Float32, 4096)
			if err != nil {
				return err
			}
			return errors.Join(in.Rendezvous(ctx), out.Rendezvous(ctx), f(ctx, b, m, in, out), in.Close(ctx), out.Close(ctx), m.Close(ctx),
				g.Close(ctx))
		})
	}
	require.NoError(t, ranks.Wait())
}

// TestCollectivesAskForMulticast: the plans of the other collectives in the form that needs multicast addresses make the ranks have them, those that Auto takes
// do not; and where there can be none, every rank is told why.
func TestCollectivesAskForMulticast(t *testing.T) {
	makes := func(in, out *tensor.Tensor) map[string]func(ctx context.Context, alg Algorithm) (*Plan, error) {
		return map[string]func(ctx context.Context, alg Algorithm) (*Plan, error){
			"NewBroadcast": func(ctx context.Context, alg Algorithm) (*Plan, error) {
				return NewBroadcast(ctx, in, 1, &Options{Algorithm: alg})
			},
			"NewAllGather": func(ctx context.Context, alg Algorithm) (*Plan, error) {
				part, err := in.Sub(0, 2048)
				if err != nil {
					return nil, err
				}
				return NewAllGather(ctx, part, out, &Options{Algorithm: alg})
			},
			"NewReduce": func(ctx context.Context, alg Algorithm) (*Plan, error) {
				return NewReduce(ctx, in, out, Sum, 0, &Options{Algorithm: alg})
			},
			"NewReduceScatter": func(ctx context.Context, alg Algorithm) (*Plan, error) {
				part, err := out.Sub(0, 2048)
				if err != nil {
					return nil, err
				}
				return NewReduceScatter(ctx, in, part, Sum, &Options{Algorithm: alg})
			},
		}
	}
	for name := range makes(nil, nil) {
		t.Run(name, func(t *testing.T) {
			onCastRanks(t, "", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
				make := makes(in, out)[name]
				for _, alg := range []Algorithm{Auto, OneShot, OneShotLL, OneShotPull, Transfers, OneShotMultimem} {
					p, err := make(ctx, alg)
					if err != nil {
						return fmt.Errorf("%s: %w", alg, err)
					}
					if multimem := p.Algorithm() == OneShotMultimem; multimem != (alg == OneShotMultimem) || (b.enabled.Load() > 0) != multimem {
						return fmt.Errorf("%s: %s, and %d windows with multicast", alg, p.Algorithm(), b.enabled.Load())
					}
					if err := p.Close(ctx); err != nil {
						return err
					}
				}
				return nil
			})
			onCastRanks(t, "the switch is out of order", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
				make := makes(in, out)[name]
				if _, err := make(ctx, OneShotMultimem); !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "the switch is out of order") {
					return fmt.Errorf("a plan without multicast: %w", err)
				}
				p, err := make(ctx, Auto)
				if err != nil {
					return err
				}
				return p.Close(ctx)
			})
			onCastRanks(t, "", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
				_, err := makes(in, out)[name](ctx, OneShotMultimem)
				if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "9.0") {
					return fmt.Errorf("a plan where a device is without multimem: %w", err)
				}
				if b.enabled.Load() != 0 {
					return errors.New("there was nothing to enable multicast for")
				}
				return nil
			}, 1)
			onCastRanks(t, "", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
				make := makes(in, out)[name]
				mine := []Algorithm{OneShotMultimem, OneShotPull}[m.Group().Rank()]
				if _, err := make(ctx, mine); !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("ranks with other forms: %w", err)
				}
				p, err := make(ctx, OneShotMultimem)
				if err != nil {
					return err
				}
				return p.Close(ctx)
			})
		})
	}
}
