package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

const (
	// workspaceName is the name of the allocations that a Memory makes for itself.
	workspaceName = "workspace"
	// workspaceKind is what records of requests for workspaces have as their dtype.
	workspaceKind = "workspace"
	// workspaceBlock is the least size of one, in bytes. A backend whose granularity is 2 MiB loses little by it, and a
	// rendezvous is needed only once in many workspaces.
	workspaceBlock = 8 << 20
	// workspaceAlign keeps workspaces on pages of their own.
	workspaceAlign = 4096
	// maxWorkspaceBytes is far above what any plan needs; beyond it the caller has made a mistake.
	maxWorkspaceBytes = 1 << 40
)

// keptWorkspace is the size of a block above which it is not kept for workspaces to come when nothing of it is used.
var keptWorkspace = int64(256 << 20)

// pool is symmetric memory that plans share: blocks, each one allocation, cut into workspaces. Every rank cuts alike,
// because workspaces are taken and given back collectively.
type pool struct {
	blocks []*workspaceBlk
}

type workspaceBlk struct {
	alloc  backend.Allocation
	window *Window
	free   []span // sorted, never adjacent
}

type span struct{ start, bytes int64 }

// taken says what of the blocks is taken. Ranks of which it is the same cut the next workspace at the same place. It differs where the answer to an
// earlier call has come to some ranks only, as when one gave up just then: nothing else tells, and they would write where nobody looks.
func (p *pool) taken() string {
	var taken int64
	pieces := 0
	sum := fnv.New64a()
	for _, b := range p.blocks {
		taken += b.alloc.Bytes()
		for _, s := range b.free {
			taken -= s.bytes
			pieces++
		}
		_, _ = fmt.Fprintln(sum, b.window.number, b.free) // a hash never fails
	}
	return fmt.Sprintf("%d bytes of %d blocks, %d pieces between them are free (%016x)", taken, len(p.blocks), pieces, sum.Sum64())
}

// Workspace is a piece of symmetric memory at the same place on every rank, filled with zeros when it is handed out: for one plan's
// flags and message buffers, so that two plans never disturb each other.
type Workspace struct {
	memory *Memory
	block  *workspaceBlk
	span   span
	closed atomic.Bool
	given  atomic.Bool // nothing works on it any more, nor begins to
}

// WorkspaceRequest is what a rank brings to [Memory.NewWorkspace].
type WorkspaceRequest struct {
	// Purpose says what the workspace is for, and Bytes is its size, more than 0. Both must be the same on all ranks, or all get
	// ErrMismatch with everybody's.
	Purpose string
	Bytes   int64
	// Size, if it is not nil, gives the size in place of Bytes, from what all ranks offer. It must give the same on every rank, or all
	// get ErrMismatch; its error is every rank's.
	Size func(offers []WorkspaceOffer) (int64, error)
	// Offer is what the other ranks' Size is to know of this rank. It is not compared.
	Offer []byte
	// Failure is why this rank already knows that it cannot use the workspace. Every rank gets an error that names it.
	Failure error
}

// WorkspaceOffer is what one rank has said in its [WorkspaceRequest].
type WorkspaceOffer struct {
	Device string // UUID of the rank's device: ranks that share one have the same
	Offer  []byte
}

// NewWorkspace returns a workspace. Collective: it blocks until all ranks have come. A rank that brings a Failure fails the call on every
// rank. If the memory has not enough for it and cannot get more, every rank gets a [*WorkspaceError]. What is closed stays with the memory
// for later workspaces; see [Memory.TrimWorkspace].
func (m *Memory) NewWorkspace(ctx context.Context, r WorkspaceRequest) (*Workspace, error) {
	if err := m.made("NewWorkspace"); err != nil {
		return nil, err
	}
	if err := errs.Given("NewWorkspace", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	return inTurn(ctx, &m.collective, "taking a workspace for "+r.Purpose, func(ctx context.Context, gaveUp error) (*Workspace, error) {
		r.Failure = cmp.Or(gaveUp, r.Failure)
		return m.newWorkspace(ctx, r)
	})
}

func (m *Memory) newWorkspace(ctx context.Context, r WorkspaceRequest) (*Workspace, error) {
	failure := r.Failure
	if failure == nil {
		failure = m.Err()
	}
	records, err := m.exchange(ctx, m.record(workspaceKind, r.Purpose, &Record{Bytes: r.Bytes, Offer: r.Offer, Taken: m.workspace.taken()}), failure)
	if err != nil {
		return nil, err // it says more than what the workspace is for: the caller knows that, and plans give all that is compared of them as the purpose
	}
	if m.devices == nil {
		for _, r := range records {
			m.devices = append(m.devices, r.DeviceUUID)
		}
	}
	bytes := r.Bytes
	if r.Size != nil {
		offers := make([]WorkspaceOffer, len(records))
		for rank, r := range records {
			offers[rank] = WorkspaceOffer{r.DeviceUUID, r.Offer}
		}
		if bytes, err = r.Size(offers); err == nil {
			err = checkWorkspace(bytes)
		}
		// A size of its own would lead a rank to other steps than the rest, and leave them waiting.
		err = m.group.Vote(ctx, fmt.Sprintf("workspace of %d bytes", bytes), err)
	} else {
		err = checkWorkspace(bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("taking a workspace: %w", err)
	}
	need := (bytes + workspaceAlign - 1) / workspaceAlign * workspaceAlign
	for _, b := range m.workspace.blocks {
		if s, ok := b.take(need); ok {
			return &Workspace{memory: m, block: b, span: s}, nil
		}
	}
	b, err := m.growWorkspace(group.Heard(ctx), max(need, workspaceBlock))
	if err != nil {
		return nil, fmt.Errorf("taking a workspace: %w", err)
	}
	s, _ := b.take(need)
	return &Workspace{memory: m, block: b, span: s}, nil
}

// checkWorkspace refuses sizes that no workspace has.
func checkWorkspace(bytes int64) error {
	if bytes <= 0 || bytes > maxWorkspaceBytes {
		return errs.Invalid("NewWorkspace", "bytes", bytes, fmt.Sprintf("1 to %d", int64(maxWorkspaceBytes)))
	}
	return nil
}

// growWorkspace adds a block. Collective; the caller holds m.collective.
func (m *Memory) growWorkspace(ctx context.Context, bytes int64) (*workspaceBlk, error) {
	alloc, err := m.fromBackend(ctx, bytes)
	if voteErr := m.group.Vote(ctx, "workspace", err); voteErr != nil {
		if err == nil {
			err = alloc.Release(context.WithoutCancel(ctx))
		} else {
			err = nil // it is part of the vote's
		}
		return nil, errors.Join(noWorkspace(bytes, voteErr), err)
	}
	e := &entry{alloc: alloc, name: workspaceName, place: workspaceName, own: true}
	m.add(e)
	w, err := m.rendezvous(ctx, alloc, Record{Name: workspaceName}, nil)
	if err != nil {
		m.remove(alloc, false)
		return nil, errors.Join(noWorkspace(bytes, err), alloc.Release(context.WithoutCancel(ctx)))
	}
	b := &workspaceBlk{alloc: alloc, window: w, free: []span{{0, bytes}}}
	m.workspace.blocks = append(m.workspace.blocks, b)
	return b, nil
}

// noWorkspace is the error of workspace that could not be made: a [*WorkspaceError] if the ranks have agreed on that.
func noWorkspace(bytes int64, err error) error {
	if _, agreed := errors.AsType[*group.VoteError](err); agreed {
		return &WorkspaceError{Bytes: bytes, Err: err}
	}
	return fmt.Errorf("making %d bytes of workspace: %w", bytes, err)
}

// take cuts bytes from the first free span that has them.
func (b *workspaceBlk) take(bytes int64) (span, bool) {
	for i, s := range b.free {
		if s.bytes < bytes {
			continue
		}
		if s.bytes == bytes {
			b.free = slices.Delete(b.free, i, i+1)
		} else {
			b.free[i] = span{s.start + bytes, s.bytes - bytes}
		}
		return span{s.start, bytes}, true
	}
	return span{}, false
}

// give puts a span back, joining it with its neighbours.
func (b *workspaceBlk) give(s span) {
	i, _ := slices.BinarySearchFunc(b.free, s.start, func(f span, start int64) int { return int(f.start - start) })
	b.free = slices.Insert(b.free, i, s)
	if i+1 < len(b.free) && b.free[i].start+b.free[i].bytes == b.free[i+1].start {
		b.free[i].bytes += b.free[i+1].bytes
		b.free = slices.Delete(b.free, i+1, i+2)
	}
	if i > 0 && b.free[i-1].start+b.free[i-1].bytes == b.free[i].start {
		b.free[i-1].bytes += b.free[i].bytes
		b.free = slices.Delete(b.free, i, i+1)
	}
}

// unused reports whether no workspace has anything of the block.
func (b *workspaceBlk) unused() bool {
	return len(b.free) == 1 && b.free[0] == span{0, b.alloc.Bytes()}
}

// TrimWorkspace releases what large plans have left: blocks of more than 256 MiB that have no workspace any more. Collective; without such
// a block it does nothing, and ranks do not wait for each other. Call it when nothing that used the workspaces is left. Its errors are
// those of [Memory.Free]; after one, no rank uses the block any more, and it is released when the memory is closed.
func (m *Memory) TrimWorkspace(ctx context.Context) error {
	if err := m.made("TrimWorkspace"); err != nil {
		return err
	}
	if err := errs.Given("TrimWorkspace", "ctx", ctx, "a context"); err != nil {
		return err
	}
	return m.collective.do(ctx, "trimming workspace", m.trimWorkspace)
}

func (m *Memory) trimWorkspace(ctx context.Context, gaveUp error) error {
	if m.closed.Load() {
		return nil // it went with the memory
	}
	var err error
	m.workspace.blocks = slices.DeleteFunc(m.workspace.blocks, func(b *workspaceBlk) bool {
		if b.alloc.Bytes() <= keptWorkspace || !b.unused() {
			return false
		}
		err = errors.Join(err, m.free(ctx, b.alloc, gaveUp))
		return true
	})
	return err
}

// made refuses a workspace that NewWorkspace did not give.
func (w *Workspace) made(call string) error {
	if w == nil || w.memory == nil {
		return errs.Invalid(call, "workspace", "the zero Workspace", "one that NewWorkspace gave")
	}
	return nil
}

// Bytes is the size of the workspace, at least what was asked for.
func (w *Workspace) Bytes() int64 {
	if w == nil {
		return 0
	}
	return w.span.bytes
}

// Peer is the address in this process of the first byte of rank's part of the workspace, 4096-byte aligned.
func (w *Workspace) Peer(rank int) (device.Ptr, error) {
	if err := w.made("Peer"); err != nil {
		return 0, err
	}
	if w.closed.Load() {
		return 0, fmt.Errorf("workspace: %w", errs.ErrClosed)
	}
	return w.block.window.Peer(rank, w.span.start)
}

// Err is ErrClosed once the workspace was closed, alone or with the memory, and nothing may work on it any more. Work that a graph has kept
// checks it when it runs.
func (w *Workspace) Err() error {
	if err := w.made("using a workspace"); err != nil {
		return err
	}
	if w.given.Load() {
		return fmt.Errorf("workspace: %w", errs.ErrClosed)
	}
	return w.block.window.Err()
}

// Close releases the workspace. Collective: it waits for this rank's device and for all ranks. A workspace that a peer may
// still write, because it is lost or its device is busy, is not handed out again, nor are those of ranks that close different ones: all of them get ErrMismatch.
// Closing twice is ErrClosed.
func (w *Workspace) Close(ctx context.Context) error {
	if err := errors.Join(w.made("Close"), errs.Given("Close", "ctx", ctx, "a context")); err != nil {
		return err
	}
	return w.memory.collective.do(ctx, "closing a workspace", w.close)
}

func (w *Workspace) close(ctx context.Context, gaveUp error) error {
	m := w.memory
	if w.closed.Swap(true) {
		return fmt.Errorf("closing a workspace: %w", errs.ErrClosed)
	}
	if m.closed.Load() {
		return nil // it went with the memory
	}
	busy, err := m.quiesce(ctx, w.closing(), false, gaveUp, w.given.Store)
	if err := errors.Join(busy, err); err != nil {
		return fmt.Errorf("closing a workspace: %w", err)
	}
	p, err := w.block.window.Peer(m.group.Rank(), w.span.start)
	if err == nil {
		err = zero(context.WithoutCancel(ctx), m.device, p, w.span.bytes)
	}
	// The next to take it needs zeros on every rank, so a rank that could not clear its part withholds it everywhere.
	if err := m.group.Vote(group.Heard(ctx), "clearing a workspace", err); err != nil {
		return fmt.Errorf("closing a workspace: %w", err)
	}
	w.block.give(w.span)
	return nil
}

// closing says which workspace is closed, which the ranks compare: of two that they close at once each would be given out again on one rank only.
func (w *Workspace) closing() string {
	return fmt.Sprintf("closing the workspace of %d bytes at byte %d of window %d", w.span.bytes, w.span.start, w.block.window.Number())
}

// zero fills memory of the device with zeros and returns when it is done.
func zero(ctx context.Context, d device.Device, p device.Ptr, bytes int64) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	return errors.Join(s.Fill(p, 0, bytes), s.Synchronize(ctx), s.Close())
}

// WorkspaceError says that the workspace cannot grow, because some rank lacks the memory or cannot make it reachable. Every rank of the call
// gets it, so that all can go on with something that takes less. The group goes on working.
type WorkspaceError struct {
	Bytes int64 // of workspace on each rank
	Err   error // names the ranks; on those it wraps the reason, such as ErrNoMemory
}

// Error says how much was asked for, and why there is none.
func (e *WorkspaceError) Error() string {
	return fmt.Sprintf("making %d bytes of workspace: %v", e.Bytes, e.Err)
}

// Unwrap returns the vote's error.
func (e *WorkspaceError) Unwrap() error { return e.Err }
