package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Name is the name that the backend is registered under.
const Name = "nvshmem"

// closeTimeout bounds how long Close waits for the other ranks: those that are busy do not take part.
const closeTimeout = 20 * time.Second

// Backend is one rank's side of the NVSHMEM backend.
type Backend struct {
	device  *cuda.Device
	drv     *cu.Driver
	owned   bool
	group   *group.Group
	log     *slog.Logger
	timeout time.Duration
	stream  device.Stream // fills new memory with zeros

	home  *home
	first bool   // it has started the library, and finalizes it
	world *world // nil until the library is started
	pes   []int  // by rank
	all   bool   // the group is of all PEs
	parts *parts // of the arena; nil if the group is of all PEs

	mustCast   bool   // the policy of some rank is "on"
	noRegister string // why no memory can be adopted; "" if it can

	mu          sync.Mutex
	noMulticast string   // why there is no multicast, the same on all ranks; "" if there is
	aliases     []*alias // of registered memory that is mapped
}

var (
	_ backend.Backend    = (*Backend)(nil)
	_ backend.AllReducer = (*Backend)(nil)
)

// New opens the NVSHMEM backend for this rank of g; nil options are the defaults. The first group starts the library in this process;
// sub-groups are opened with Options.Parent. Collective: it blocks until every rank has come. A rank that cannot take part makes it
// fail on every rank. Until the library itself starts, it can be tried again. ErrUnavailable without the library, the driver or a GPU;
// ErrUnsupported if ranks share a process or are on several hosts. See the package comment for how NVSHMEM can end the process.
func New(ctx context.Context, g *group.Group, opts *Options) (*Backend, error) {
	o, err := opts.withDefaults()
	b := &Backend{group: g, log: o.Logger.With("backend", Name, "rank", g.Rank()), timeout: o.KernelTimeout, home: o.home}
	if o.Parent != nil {
		err = b.share(ctx, &o, err)
	} else {
		err = b.start(ctx, &o, err)
	}
	if err != nil {
		return nil, errors.Join(err, b.giveUp())
	}
	b.log.Debug("NVSHMEM backend opened", "device", b.device.UUID(), "PE", b.world.pe, "PEs", b.world.pes, "all", b.all,
		"capabilities", b.Capabilities().String(), "no_multicast", b.noMulticast)
	return b, nil
}

// share makes the backend of a sub-group on the library that the parent's group has started. Collective over the sub-group.
func (b *Backend) share(ctx context.Context, o *Options, failure error) error {
	p := o.Parent
	w := p.world
	b.device, b.drv, b.home = p.device, p.drv, p.home
	b.noRegister, b.mustCast = p.noRegister, p.mustCast
	members := b.group.Members()
	for r, m := range members {
		pe, known := w.peOf[m.WorldRank]
		if !known && failure == nil {
			failure = errs.Invalid("nvshmem.New", "group", fmt.Sprintf("rank %d of the job as rank %d", m.WorldRank, r), "ranks of the parent's group")
		}
		b.pes = append(b.pes, pe)
	}
	b.all = len(members) == w.pes
	b.noMulticast = p.whyNoMulticast()
	if !b.all {
		b.parts = newParts()
		if b.noMulticast == "" {
			b.noMulticast = "NVSHMEM has multicast addresses for groups of all its PEs"
		}
	}
	if failure == nil {
		b.stream, failure = b.device.NewStream()
	}
	if err := b.group.Vote(ctx, "opening backend nvshmem", failure); err != nil {
		return err
	}
	w.mu.Lock()
	w.groups++
	w.mu.Unlock()
	b.world = w
	return nil
}

// Name returns "nvshmem".
func (b *Backend) Name() string { return Name }

// Device returns the GPU of this rank.
func (b *Backend) Device() device.Device { return b.device }

// Capabilities says what works between the ranks of the group.
func (b *Backend) Capabilities() backend.Capabilities {
	c := capabilities(b.home.own)
	for _, bit := range []struct {
		name string
		have *bool
		why  string
	}{{"multicast", &c.Multicast, b.whyNoMulticast()}, {"register", &c.Register, b.whyNoRegister()}} {
		if *bit.have = bit.why == ""; !*bit.have {
			c.Why[bit.name] = bit.why
		}
	}
	return c
}

// capabilities returns what works wherever the library works; own says that each rank has one of its own.
func capabilities(own bool) backend.Capabilities {
	c := backend.Capabilities{
		PeerPointers: true, Register: true, Transfers: true, Graphs: true, CollectiveAllocate: true,
		Why: map[string]string{
			"contiguous":           "NVSHMEM maps every rank's own heap before those of the others, so that no two ranks have the same order",
			"multicast":            "it is not known before the library is started",
			"ranks_in_one_process": "NVSHMEM has one state for a process: start a process for each rank (symmem run, torchrun, mpirun)",
			"several_hosts":        "signals and kernels need peer pointers, which NVSHMEM has on one host: use nixl",
		},
	}
	if c.RanksInOneProcess = own; own {
		delete(c.Why, "ranks_in_one_process")
	}
	return c
}

// whyNoMulticast says why there is no multicast; "" if there is.
func (b *Backend) whyNoMulticast() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.noMulticast
}

func (b *Backend) whyNoRegister() string {
	if b.noRegister == "" && !b.all {
		return "NVSHMEM registers memory with all its PEs, and this group has only some of them"
	}
	return b.noRegister
}

// Close ends the use of the library by this group. The first group finalizes it, with all other ranks: if they do not come,
// because one is lost or busy, the library is left as it is, with a warning, and cannot be opened again in this process. If one of them comes and
// cannot finalize it, that is every rank's error.
func (b *Backend) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	var err error
	switch {
	case b.world == nil:
	case b.first:
		err = b.finalize(ctx)
	default:
		b.leave(ctx)
	}
	if err := errors.Join(err, b.giveUp()); err != nil {
		return fmt.Errorf("closing backend %s: %w", Name, err)
	}
	return nil
}

// leave ends a sub-group.
func (b *Backend) leave(ctx context.Context) {
	w := b.world
	if !b.all {
		b.closeParts(ctx)
	}
	w.mu.Lock()
	w.groups--
	w.mu.Unlock()
}

// finalize ends the library. That it could not be ended is logged, and it is the error unless this rank knows why: it was given up before, sub-groups
// are open, or another rank did not come.
func (b *Backend) finalize(ctx context.Context) error {
	w := b.world
	w.mu.Lock()
	groups, known := w.groups, w.broken != nil || w.groups > 0
	w.mu.Unlock()
	var open error
	if groups > 0 {
		open = fmt.Errorf("%d sub-groups are still open: %w", groups, errs.ErrInvalid)
	}
	err := w.collectively(ctx, b.group, ask{Op: "finalizing"}, open, func(uint64, []ask) error { return w.lib.Finalize() })
	if err == nil {
		b.home.leave(nil)
		return nil
	}
	vote, told := errors.AsType[*group.VoteError](err)
	known = known && told && len(vote.Failures) == b.group.Size() // else some rank does not, and all say it
	err = fmt.Errorf("it was not finalized: %w", err)
	b.log.Warn("NVSHMEM stays as it is until the process ends, with its memory", "error", err)
	_ = w.breakUp(err)
	b.home.leave(err)
	if known || didNotCome(err) {
		return nil
	}
	return err
}

// didNotCome reports whether an error is that another rank, or this one, has not come in time or is lost.
func didNotCome(err error) bool {
	_, abandoned := errors.AsType[*group.AbandonedError](err)
	_, missing := errors.AsType[*group.MissingRanksError](err)
	return abandoned || missing || errors.Is(err, errs.ErrPeerLost) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// giveUp releases what belongs to this rank alone.
func (b *Backend) giveUp() error {
	var err error
	if b.stream != nil {
		err = b.stream.Close()
		b.stream = nil
	}
	if b.world != nil {
		b.world.mu.Lock()
		stuck := b.world.stuck
		b.world.mu.Unlock()
		if stuck && b.owned {
			b.log.Warn("the GPU's context stays until the process ends, because a call of NVSHMEM has not returned")
			return err
		}
	}
	if b.owned {
		b.owned = false
		err = errors.Join(err, b.device.Close())
	}
	return err
}
