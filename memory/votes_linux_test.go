package memory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

var errBroken = errors.New("it is broken")

// ailing is a backend over the host's memory that fails where it is told to, and counts what it has given out.
type ailing struct {
	backend.Backend
	device *ailingDevice

	collective              bool // Allocate is
	adoptsNone              bool // the capabilities do not say that Register is there
	lives                   bool // the device does, after Close
	noAllocation, noMapping bool
	noUnmapping             bool         // says so, and unmaps
	allocations, mappings   atomic.Int32 // that were not given back
	asked                   atomic.Int32 // for allocations
	closed                  atomic.Int32
}

type ailingDevice struct {
	*devhost.Device
	noStream, noBytes atomic.Bool
	lost              atomic.Bool // the context is
}

func (d *ailingDevice) Synchronize(ctx context.Context) error {
	if d.lost.Load() {
		return fmt.Errorf("synchronizing: %w", errs.ErrContextLost)
	}
	return d.Device.Synchronize(ctx)
}

func (d *ailingDevice) Bytes(p device.Ptr, n int64) ([]byte, error) {
	if d.noBytes.Load() {
		return nil, errBroken
	}
	return d.Device.Bytes(p, n)
}

func (d *ailingDevice) NewStream() (device.Stream, error) {
	if d.noStream.Load() {
		return nil, errBroken
	}
	return d.Device.NewStream()
}

func newAiling(g *group.Group) (*ailing, error) {
	d, err := devhost.New(&devhost.Options{Err: g.Err})
	if err != nil {
		return nil, err
	}
	b, err := host.New(g, &host.Options{Device: d})
	if err != nil {
		return nil, err
	}
	return &ailing{Backend: b, device: &ailingDevice{Device: d}}, nil
}

func (b *ailing) Device() device.Device { return b.device }

func (b *ailing) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.CollectiveAllocate, c.Register = b.collective, !b.adoptsNone
	return c
}

func (b *ailing) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	b.asked.Add(1)
	return nil, errBroken
}

func (b *ailing) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	b.asked.Add(1)
	if b.noAllocation {
		return nil, errBroken
	}
	a, err := b.Backend.Allocate(ctx, bytes)
	if err == nil {
		b.allocations.Add(1)
		a = &ailingAllocation{Allocation: a, backend: b}
	}
	return a, err
}

type ailingAllocation struct {
	backend.Allocation
	backend *ailing
}

func (a *ailingAllocation) Release(ctx context.Context) error {
	a.backend.allocations.Add(-1)
	return a.Allocation.Release(ctx)
}

func (b *ailing) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.Backend.Rendezvous(ctx, a.(*ailingAllocation).Allocation)
	if err != nil {
		return nil, err
	}
	if b.noMapping {
		return nil, errors.Join(errBroken, m.Unmap(ctx))
	}
	b.mappings.Add(1)
	return &ailingMapping{Mapping: m, backend: b}, nil
}

type ailingMapping struct {
	backend.Mapping
	backend *ailing
}

func (m *ailingMapping) Unmap(ctx context.Context) error {
	m.backend.mappings.Add(-1)
	err := m.Mapping.Unmap(ctx)
	if m.backend.noUnmapping {
		err = errors.Join(errBroken, err)
	}
	return err
}

func (b *ailing) Close(ctx context.Context) error {
	b.closed.Add(1)
	if b.lives {
		return b.Backend.Close(ctx)
	}
	return errors.Join(b.Backend.Close(ctx), b.device.Device.Close())
}

// onAiling runs f on three ranks, of which the last is to be the one that fails, closes the memory, and looks at what is left.
func onAiling(t *testing.T, f func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newAiling(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 2})
		if err = f(ctx, b, m, g.Rank() == g.Size()-1); err != nil {
			g.Abort("the test has failed") // the other ranks may be waiting
		}
		err = errors.Join(err, m.Close(ctx))
		if a, n := b.allocations.Load(), b.mappings.Load(); err == nil && (a != 0 || n != 0 || b.closed.Load() != 1) {
			err = fmt.Errorf("after closing there are %d allocations and %d mappings, and the backend was closed %d times", a, n, b.closed.Load())
		}
		return err
	}))
}

// wantVote expects the vote that names the last of three ranks, which failed because it is broken.
func wantVote(err error, fails bool) error {
	vote, ok := errors.AsType[*group.VoteError](err)
	if !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 2 || !strings.Contains(vote.Failures[0].Text, errBroken.Error()) {
		return fmt.Errorf("a step that fails on rank 2: %w", err)
	}
	if errors.Is(err, errBroken) != fails {
		return fmt.Errorf("on the rank that failed the error is its own, and on the others it is not: %w", err)
	}
	return nil
}

// TestOneRankCannotUnmap: a rank that could not give memory back, and leaves, tells the others why it does not come to what they do next.
func TestOneRankCannotUnmap(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		var both [2]backend.Allocation
		for i := range both {
			a, err := m.Allocate(ctx, 100, "")
			if err != nil {
				return err
			}
			if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
				return err
			}
			both[i] = a
		}
		b.noUnmapping = fails
		if err := m.Free(ctx, both[0]); errors.Is(err, errBroken) != fails || (err != nil) != fails {
			return fmt.Errorf("freeing: %w", err)
		}
		b.noUnmapping = false
		if fails {
			return wantVote(m.Group().Barrier(ctx, "leaving"), fails)
		}
		return wantVote(m.Free(ctx, both[1]), fails)
	})
}

// TestOneRankCannotMap: what cannot be mapped on one rank is unmapped on all, and can be tried again.
func TestOneRankCannotMap(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		if err := backendtest.TryWindow(ctx, m, 100); err != nil { // the workspace is there
			return err
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		had := b.mappings.Load()
		b.noMapping = fails
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		if err := wantVote(err, fails); err != nil {
			return err
		}
		if have := b.mappings.Load(); have != had {
			return fmt.Errorf("%d mappings where %d were", have, had)
		}
		b.noMapping = false
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		return errors.Join(backendtest.ExchangeBytes(ctx, m, w), m.Free(ctx, a))
	})
}

// TestOneRankHasNoWorkspace: where one rank cannot have workspace, no rank has it, and it can be asked for again.
func TestOneRankHasNoWorkspace(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		for _, broken := range []*bool{&b.noAllocation, &b.noMapping} {
			*broken = fails
			_, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 100})
			if err := wantVote(err, fails); err != nil {
				return err
			}
			if _, ok := errors.AsType[*memory.WorkspaceError](err); !ok {
				return fmt.Errorf("no workspace: %w", err)
			}
			*broken = false
			if a, n := b.allocations.Load(), b.mappings.Load(); a != 0 || n != 0 {
				return fmt.Errorf("%d allocations and %d mappings are left", a, n)
			}
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 100})
		if err != nil {
			return err
		}
		return c.Close(ctx)
	})
}

// TestOneRankCannotAllocate: over a backend whose allocation is collective, it fails on all ranks or on none. Sizes that differ, or that cannot
// be, do not come to it.
func TestOneRankCannotAllocate(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		b.collective = true
		for _, odd := range []struct {
			bytes int64
			want  error
		}{{101, errs.ErrMismatch}, {-1, errs.ErrInvalid}} {
			bytes := int64(100)
			if fails {
				bytes = odd.bytes
			}
			if _, err := m.Allocate(ctx, bytes, ""); !errors.Is(err, odd.want) || b.asked.Load() != 0 {
				return fmt.Errorf("%d bytes where rank 2 asks for %d: %w", bytes, odd.bytes, err)
			}
		}
		b.noAllocation = fails
		_, err := m.Allocate(ctx, 100, "")
		if err := wantVote(err, fails); err != nil {
			return err
		}
		b.noAllocation = false
		if have := b.allocations.Load(); have != 0 {
			return fmt.Errorf("%d allocations are left", have)
		}
		return backendtest.TryWindow(ctx, m, 100)
	})
}

// TestOneRankGivesUp: ranks that wait in a rendezvous for one that has no memory for it, and that goes elsewhere, are told why.
func TestOneRankGivesUp(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		for what, get := range []func() error{
			func() error {
				b.noAllocation = true
				_, err := m.Allocate(ctx, 100, "")
				b.noAllocation = false
				return err
			},
			func() error { _, err := m.Register(ctx, 1<<20, 100, ""); return err },
		} {
			// What was noted of a rank before is forgotten.
			err := m.Group().Barrier(ctx, "so far")
			if err != nil {
				return err
			}
			if fails {
				if err := get(); !errors.Is(err, errBroken) {
					return err
				}
				err = m.Group().Barrier(ctx, "elsewhere")
			} else {
				_, err = m.Rendezvous(ctx, a, memory.Record{})
			}
			vote, ok := errors.AsType[*group.VoteError](err)
			if !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 2 || !strings.Contains(vote.Failures[0].Text, errBroken.Error()) {
				return fmt.Errorf("%d: rank 2 has no memory, and has gone on: %w", what, err)
			}
		}
		return m.Free(ctx, a)
	})
}

// TestRegisterAsksForMemory: a backend is asked to adopt 1 byte and more, at an address, if it adopts any, and while it is open.
func TestRegisterAsksForMemory(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, _ bool) error {
		for _, r := range []struct {
			p     device.Ptr
			bytes int64
		}{{1 << 20, 0}, {1 << 20, -1}, {0, 100}} {
			if _, err := m.Register(ctx, r.p, r.bytes, ""); !errors.Is(err, errs.ErrInvalid) || b.asked.Load() != 0 {
				return fmt.Errorf("%d bytes at %s: %w", r.bytes, r.p, err)
			}
		}
		b.adoptsNone = true
		if _, err := m.Register(ctx, 1<<20, 100, ""); !errors.Is(err, errs.ErrUnsupported) || b.asked.Load() != 0 {
			return fmt.Errorf("a backend that adopts nothing: %w", err)
		}
		return nil
	})
}

// TestAfterClose: a memory that was closed gives nothing and prepares nothing, though its group and its device live on.
func TestAfterClose(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newAiling(g)
		if err != nil {
			return err
		}
		b.lives = true
		m := memory.New(b, g, nil)
		if err := m.Close(ctx); err != nil {
			return err
		}
		_, allocated := m.Allocate(ctx, 100, "")
		_, empty := m.Allocate(ctx, 0, "")
		_, nothing := m.Empty("")
		_, registered := m.Register(ctx, 1<<20, 100, "")
		_, prepared := m.PrepareTransfer(backend.Write, 0, make([]memory.TransferBlock, 1))
		for what, err := range map[string]error{
			"Allocate": allocated, "Allocate of nothing": empty, "Empty": nothing, "Register": registered, "PrepareTransfer of nothing": prepared, "Close": m.Close(ctx),
		} {
			if !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("%s after Close: %w", what, err)
			}
		}
		if n, closed := b.asked.Load(), b.closed.Load(); n != 0 || closed != 1 {
			return fmt.Errorf("the backend was asked %d times, and closed %d times", n, closed)
		}
		return b.device.Close()
	}))
}

// TestLeaks: what was not freed before Close is logged, with its name and the place that made it; workspace, which is the memory's own, is not,
// and does not count.
func TestLeaks(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newAiling(g)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		m := memory.New(b, g, &memory.Options{Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		if _, err := m.Allocate(ctx, 100, "forgotten"); err != nil {
			return err
		}
		if n, all := m.Allocations(), m.Entries(); n != 1 || all < 2 {
			return fmt.Errorf("%d allocations, and %d with the workspace", n, all)
		}
		err = m.Close(ctx)
		if said := out.String(); strings.Count(said, "\n") != 1 || !strings.Contains(said, "forgotten") || !strings.Contains(said, "votes_linux_test.go:") {
			return fmt.Errorf("of one leak the log has %q", said)
		}
		return err
	}))
}

// TestRanksBringOtherMemory: all ranks are told where one brings memory that is mapped and the others some that is not, or one brings what
// was freed or is another memory's; they go on from there.
func TestRanksBringOtherMemory(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		allocate := func() (a, next backend.Allocation, err error) {
			if a, err = m.Allocate(ctx, 100, ""); err != nil {
				return nil, nil, err
			}
			next, err = m.Allocate(ctx, 100, "")
			return a, next, err
		}
		a, next, err := allocate()
		if err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		mine := a
		if fails {
			mine = next
		}
		if _, err := m.Rendezvous(ctx, mine, memory.Record{}); !errors.Is(err, errs.ErrMismatch) {
			return fmt.Errorf("one rank has not mapped what it brings: %w", err)
		}
		freed, foreign, err := allocate()
		if err != nil {
			return err
		}
		if err := m.Free(ctx, freed); err != nil {
			return err
		}
		near := foreign.(*ailingAllocation).Allocation
		for i, wrong := range []backend.Allocation{nil, freed, near} {
			mine := foreign
			if fails {
				mine = wrong
			}
			_, err := m.Rendezvous(ctx, mine, memory.Record{})
			told := errors.Is(err, errs.ErrNotSymmetric)
			if !fails {
				vote, ok := errors.AsType[*group.VoteError](err)
				told = ok && len(vote.Failures) == 1 && vote.Failures[0].Rank == 2
			}
			if !told {
				return fmt.Errorf("rank 2 brings %s: %w", [...]string{"nothing", "what was freed", "what the memory never gave"}[i], err)
			}
		}
		for _, a := range []backend.Allocation{next, foreign} {
			w, err := m.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return fmt.Errorf("the next rendezvous: %w", err)
			}
			if err := errors.Join(backendtest.ExchangeBytes(ctx, m, w), m.Free(ctx, a)); err != nil {
				return err
			}
		}
		return m.Free(ctx, a)
	})
}

// TestAllocateAsksForBytes: a backend is asked for memory of 1 byte and more, whatever its users ask for, and whether its allocation is
// collective or not.
func TestAllocateAsksForBytes(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, _ bool) error {
		for _, b.collective = range []bool{false, true} {
			for _, bytes := range []int64{-1, -2, -1 << 63} {
				if _, err := m.Allocate(ctx, bytes, ""); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("%d bytes: %w", bytes, err)
				}
			}
			a, err := m.Allocate(ctx, 0, "")
			if err != nil {
				return err
			}
			if n := b.asked.Load(); n != 0 {
				return fmt.Errorf("the backend was asked %d times", n)
			}
			if err := m.Free(ctx, a); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestOneRankCannotClear: a workspace that one rank could not clear is not handed out again, on any rank.
func TestOneRankCannotClear(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 100})
		if err != nil {
			return err
		}
		own, err := c.Peer(m.Group().Rank())
		if err != nil {
			return err
		}
		b.device.noStream.Store(fails)
		err = c.Close(ctx)
		b.device.noStream.Store(false)
		if err := wantVote(err, fails); err != nil {
			return err
		}
		next, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 100})
		if err != nil {
			return err
		}
		p, err := next.Peer(m.Group().Rank())
		if err != nil {
			return err
		}
		if p == own {
			return errors.New("the workspace that could not be cleared was handed out again")
		}
		return next.Close(ctx)
	})
}

// TestFreeWithoutContext: memory that no other rank knows of is released when this rank's context is lost, as all other memory is: nothing works on it any
// more. The error says what has happened.
func TestFreeWithoutContext(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		b.device.lost.Store(fails)
		err = m.Free(ctx, a)
		b.device.lost.Store(false)
		if errors.Is(err, errs.ErrContextLost) != fails || !fails && err != nil {
			return fmt.Errorf("freeing: %w", err)
		}
		if n := b.allocations.Load(); n != 0 || m.Holds(a) {
			return fmt.Errorf("%d allocations are left: %w", n, err)
		}
		if err := m.Free(ctx, a); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("freeing again: %w", err)
		}
		return nil
	})
}

// TestRanksFreeDifferentMemory: ranks that free different allocations at once are told which, as each has mapped what a peer frees. All of it is released, and
// what the ranks do alike works.
func TestRanksFreeDifferentMemory(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, _ bool) error {
		var both [2]backend.Allocation
		var numbers [2]string
		for i := range both {
			var err error
			if both[i], err = m.Allocate(ctx, 100, ""); err != nil {
				return err
			}
			w, err := m.Rendezvous(ctx, both[i], memory.Record{})
			if err != nil {
				return err
			}
			numbers[i] = fmt.Sprintf("what rendezvous %d has mapped", w.Number())
		}
		for _, i := range []int{m.Group().Rank() % 2, 1 - m.Group().Rank()%2} {
			err := m.Free(ctx, both[i])
			mismatch, ok := errors.AsType[*group.MismatchError](err)
			if !ok || !strings.Contains(mismatch.Error(), numbers[0]) || !strings.Contains(mismatch.Error(), numbers[1]) {
				return fmt.Errorf("freeing different memory: %w", err)
			}
			if m.Holds(both[i]) {
				return errors.New("it is still there")
			}
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		if _, err = m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		return m.Free(ctx, a)
	})
}

// TestOneRankHasNoSignals: signals of the memory and of plans are there on all ranks or on none.
func TestOneRankHasNoSignals(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		b.device.noBytes.Store(fails)
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		b.device.noBytes.Store(false)
		if err := wantVote(err, fails); err != nil {
			return fmt.Errorf("the memory's signals: %w", err)
		}
		whole, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "all that there is", Bytes: 8 << 20})
		if err != nil {
			return err
		}
		if n := m.Entries(); n != 2 {
			return fmt.Errorf("%d allocations: the pads were not given back", n)
		}
		if err := whole.Close(ctx); err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return fmt.Errorf("the second time: %w", err)
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: m.SignalsBytes(1)})
		if err != nil {
			return err
		}
		o := memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }}
		b.device.noBytes.Store(fails)
		_, err = c.Signals(ctx, 0, &o)
		b.device.noBytes.Store(false)
		if err := wantVote(err, fails); err != nil {
			return fmt.Errorf("a plan's signals: %w", err)
		}
		s, err := c.Signals(ctx, 0, &o)
		if err != nil {
			return fmt.Errorf("the second time: %w", err)
		}
		return errors.Join(c.Close(ctx), s.Close(), m.Free(ctx, a))
	})
}

// sickly is a backend without peer pointers whose transfers are counted, and fail where it is told to.
type sickly struct {
	backend.Backend
	backend.Transferrer
	backend.Flagger
	backend.Quiescer
	noStart, noPoll atomic.Bool
	unreachable     atomic.Int32 // unless 0, transfers to this rank do not start
	panics          atomic.Bool  // a transfer does when it ends
	held            atomic.Bool  // transfers do not get on
	moving          atomic.Bool  // Quiesce finds that something still moves
	started         atomic.Int32 // transfers that began
	live            atomic.Int32 // transfers that were not closed
}

func newSickly(g *group.Group) (*sickly, error) {
	near, err := host.New(g, nil)
	if err != nil {
		return nil, err
	}
	far := backendtest.Far(near, g, nil)
	return &sickly{Backend: far, Transferrer: far.(backend.Transferrer), Flagger: far.(backend.Flagger), Quiescer: far.(backend.Quiescer)}, nil
}

func (b *sickly) Quiesce(ctx context.Context) error {
	if b.moving.Load() {
		return context.DeadlineExceeded
	}
	return b.Quiescer.Quiesce(ctx)
}

func (b *sickly) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.Block) (backend.PreparedTransfer, error) {
	t, err := b.Transferrer.PrepareTransfer(op, peer, blocks)
	if err != nil {
		return nil, err
	}
	b.live.Add(1)
	return &sicklyTransfer{t, b, peer}, nil
}

type sicklyTransfer struct {
	backend.PreparedTransfer
	backend *sickly
	peer    int
}

func (t *sicklyTransfer) Start() (device.HostProgress, error) {
	if t.backend.noStart.Load() || t.peer != 0 && int(t.backend.unreachable.Load()) == t.peer {
		return nil, errBroken
	}
	run, err := t.PreparedTransfer.Start()
	t.backend.started.Add(1)
	return sicklyRun{run, t.backend}, err
}

func (t *sicklyTransfer) Close() error {
	t.backend.live.Add(-1)
	return t.PreparedTransfer.Close()
}

type sicklyRun struct {
	device.HostProgress
	backend *sickly
}

func (r sicklyRun) Poll() (bool, error) {
	if r.backend.held.Load() {
		return false, nil
	}
	ended, err := r.HostProgress.Poll()
	if ended && r.backend.panics.Load() {
		panic(errBroken)
	}
	if ended && r.backend.noPoll.Load() {
		return false, errBroken
	}
	return ended, err
}

// TestCopiesAreGivenBack: what is prepared for a put is used for the next one like it, whether the last has failed or not, and goes
// with the memory.
func TestCopiesAreGivenBack(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		return errors.Join(copies(ctx, m, b), g.Barrier(ctx, "end"), m.Close(ctx))
	}))
}

// TestFreeWaitsForTheLibrary: memory that the library of one rank still works on is kept on all of them, which are told whose fault it is, and can be freed again.
func TestFreeWaitsForTheLibrary(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		b.moving.Store(g.Rank() == 1)
		why := "other ranks may still write it, so it was kept"
		if g.Rank() == 1 {
			why = "the device still works on it, so it was kept"
		}
		if err := m.Free(ctx, a); err == nil || !m.Holds(a) || !strings.Contains(err.Error(), why) {
			return fmt.Errorf("memory that the library of rank 1 works on: %w", err)
		}
		b.moving.Store(false)
		if err := m.Free(ctx, a); err != nil || m.Holds(a) {
			return fmt.Errorf("freeing again: %w", err)
		}
		return m.Close(ctx)
	}))
}

func copies(ctx context.Context, m *memory.Memory, b *sickly) error {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	err = backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error {
		own, err := w.Peer(m.Group().Rank(), 0)
		if err != nil {
			return err
		}
		put := func() error { return m.Copy(s, backend.Write, 1-m.Group().Rank(), w, 0, own.Add(2048), 64) }
		want := func(what string, n int32) error {
			if have := b.live.Load(); have != n {
				return fmt.Errorf("%s: %d prepared transfers, not %d", what, have, n)
			}
			return nil
		}
		for _, broken := range []*atomic.Bool{nil, &b.noStart, &b.noPoll, nil} {
			if broken != nil {
				broken.Store(true)
			}
			for range 3 {
				if err := put(); err != nil {
					return err
				}
				if err := s.Synchronize(ctx); errors.Is(err, errBroken) != (broken != nil) {
					return fmt.Errorf("a put, broken %t: %w", broken != nil, err)
				}
			}
			if broken != nil {
				broken.Store(false)
			}
			if err := want("one after the other", 1); err != nil {
				return err
			}
		}
		// Two that are as long are not one: each has its place.
		for _, at := range []int64{512, 1024, 512} {
			from := own.Add(2048 + at)
			mine := []byte{byte(at >> 8), byte(m.Group().Rank())}
			err := errors.Join(m.Device().CopyFromHost(from, mine), m.Copy(s, backend.Write, 1-m.Group().Rank(), w, at, from, 64),
				s.Synchronize(ctx), m.Group().Barrier(ctx, "put"))
			if err != nil {
				return err
			}
			got := make([]byte, 2)
			if err := m.Device().CopyToHost(got, own.Add(at)); err != nil {
				return err
			}
			if got[0] != byte(at>>8) || got[1] != byte(1-m.Group().Rank()) {
				return fmt.Errorf("at %d there is %v of the peer", at, got)
			}
		}
		if err := want("of three places", 3); err != nil {
			return err
		}
		// A graph's is its own.
		if err := errors.Join(s.BeginCapture(), put()); err != nil {
			return err
		}
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		for range 2 {
			if err := errors.Join(g.Launch(s), s.Synchronize(ctx), put(), s.Synchronize(ctx)); err != nil {
				return err
			}
		}
		return errors.Join(g.Close(), want("beside a graph", 4))
	})
	if have := b.live.Load(); err == nil && have != 0 {
		err = fmt.Errorf("%d prepared transfers have outlived their memory", have)
	}
	return errors.Join(err, s.Close())
}
