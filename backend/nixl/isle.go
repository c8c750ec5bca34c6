package nixl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Ranks that can share memory do: what is between them goes by address, and only the rest through the library. How memory is shared is the affair of
// the backends host, for that of the CPU, and native, for that of GPUs. They serve the ranks of one island here as they serve a group of their own.

// The values of Options.Islands.
const (
	islandsAuto = "auto" // found out by trying
	islandsOff  = "off"  // the library moves everything
)

// isle is the ranks whose memory this rank maps, itself included.
type isle struct {
	group *group.Group    // of these ranks
	owned bool            // whether close closes it
	ranks []int           // as they are numbered in the backend's group
	near  backend.Backend // over that group
}

// mayMap reports whether ranks of this backend can map each other's memory: memory of the CPU, whose device is backend host's too, or of GPUs.
func (b *Backend) mayMap(o *Options) bool {
	switch b.device.(type) {
	case *devhost.Device:
		return !o.pads && o.Islands != islandsOff
	case *cuda.Device:
		return o.Islands != islandsOff
	}
	return false
}

// settle finds out which ranks share memory, and makes them an island. It is collective, and then it is for the ranks of each island alone: meet
// tells the others of a failure. GPUs that cannot reach each other's memory are no failure.
func (b *Backend) settle(ctx context.Context, o *Options, where []location) error {
	islands, err := b.group.Islands(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(where, func(l location) bool { return l.Kind != where[0].Kind }) {
		return nil // meet refuses that
	}
	if r := slices.IndexFunc(where, func(l location) bool { return !l.Maps }); r >= 0 {
		b.apart = fmt.Sprintf("islands is off on rank %d, so the library moves memory and maps none", r)
		return nil
	}
	me, size := b.group.Rank(), b.group.Size()
	b.islands = islands
	for _, l := range where { // what the ranks allocate is alike, on an island or not
		b.granularity = max(b.granularity, l.Page)
	}
	i := &isle{group: b.group, ranks: islands.Of(me)}
	if len(i.ranks) < size {
		if len(i.ranks) == 1 {
			return nil
		}
		if i.group, err = b.group.Sub(ctx, i.ranks); err != nil {
			return fmt.Errorf("making an island of ranks that share memory: %w", err)
		}
		i.owned = true
	}
	if d, ok := b.device.(*cuda.Device); ok {
		return b.settleGPU(ctx, o, i, d)
	}
	near, err := host.New(i.group, &host.Options{Device: b.device.(*devhost.Device)})
	if err != nil {
		return errors.Join(err, i.close(ctx))
	}
	i.near, b.isle = near, i
	return nil
}

// settleGPU makes an island of ranks whose GPUs reach each other's memory. If one of them does not, there is none, and all ranks know the same reason.
func (b *Backend) settleGPU(ctx context.Context, o *Options, i *isle, d *cuda.Device) error {
	near, err := native.New(ctx, i.group, &native.Options{
		Opened: d, ShareDevice: o.ShareDevice || o.Parent != nil, Multicast: "off", KernelTimeout: o.KernelTimeout, Getenv: o.Getenv, Logger: o.Logger,
	})
	var unit int64
	why := ""
	if err == nil {
		i.near = near
		if c := near.Capabilities(); c.PeerPointers {
			unit, err = i.try(ctx)
		} else {
			why = c.Why["peer_pointers"]
		}
	}
	if err == nil && why == "" {
		b.isle, b.granularity = i, max(b.granularity, unit)
		return nil
	}
	return b.giveUp(ctx, i, why, err)
}

// giveUp makes the ranks of an island share nothing, because of what all of them know. An error is that of a rank which has ended.
func (b *Backend) giveUp(ctx context.Context, i *isle, why string, err error) error {
	// The end of a rank, or of the patience, is not what keeps memory from being shared.
	ended := errors.Join(b.group.Err(), i.group.Err(), ctx.Err())
	left := i.close(context.WithoutCancel(ctx))
	if ended != nil || left != nil || errors.Is(err, errs.ErrPeerLost) {
		return errors.Join(err, ended, left)
	}
	if err != nil {
		why = i.reason(err)
	}
	b.apart = fmt.Sprintf("%s cannot map each other's memory: %s", errs.Ranks(i.ranks), why)
	b.log.Warn("memory of GPUs is not shared, and the library moves it", "why", b.apart)
	return nil
}

// tryLibrary registers a little of the memory that an island of GPUs shares: a library that cannot have it has memory of its own on all ranks of the
// island. failure is why this rank takes no part any more. Collective on the island.
func (b *Backend) tryLibrary(ctx context.Context, failure error) error {
	i := b.isle
	if i == nil || b.device.Kind() != device.CUDA {
		return failure
	}
	err := failure
	if err == nil {
		if err = b.registerOne(ctx); err != nil {
			err = fmt.Errorf("NIXL takes no memory of cuMemCreate: %w", err)
		}
	}
	err = i.group.Vote(ctx, "registering shared memory", err)
	if failure != nil || err == nil {
		return failure
	}
	b.isle, b.granularity = nil, 0
	return b.giveUp(ctx, i, "", err)
}

// registerOne allocates memory of the island, and registers it for a moment.
func (b *Backend) registerOne(ctx context.Context) error {
	a, err := b.isle.near.Allocate(ctx, 1)
	if err != nil {
		return err
	}
	region, err := b.node.register(b.node.memory, a.Ptr(), a.RoundedBytes())
	if err == nil {
		err = b.node.deregister(b.node.memory, region)
	}
	return errors.Join(err, a.Release(ctx))
}

// try maps a little memory of all ranks of the island, and reads in it what they have written. It returns the unit, in bytes, in which memory is
// allocated. Collective; it fails on all ranks or on none.
func (i *isle) try(ctx context.Context) (unit int64, err error) {
	d := i.near.Device()
	mark := func(at int) []byte { return []byte{0x5a, byte(at), byte(at >> 8), 0xa5} }
	a, err := i.near.Allocate(ctx, 1)
	if err == nil {
		unit = a.RoundedBytes()
		err = d.CopyFromHost(a.Ptr(), mark(i.group.Rank()))
	}
	m, err := i.meet(ctx, a, err)
	for at := 0; at < i.group.Size() && err == nil; at++ {
		var p device.Ptr
		if p, err = m.Peer(at); err == nil {
			err = reads(d, p, mark(at))
		}
		if err != nil {
			err = fmt.Errorf("memory of rank %d: %w", i.ranks[at], err)
		}
	}
	var told *group.VoteError
	if !errors.As(err, &told) { // else all ranks know it
		err = i.group.Vote(ctx, "reading each other's memory", err)
	}
	// Nobody reads any more.
	var left error
	if m != nil {
		left = m.Unmap(ctx)
	}
	if a != nil {
		left = errors.Join(left, a.Release(ctx))
	}
	if err != nil {
		return 0, errors.Join(err, left)
	}
	return unit, i.group.Vote(ctx, "having read each other's memory", left)
}

// reads returns an error unless what is at p is what was written there.
func reads(d device.Device, p device.Ptr, want []byte) error {
	got := make([]byte, len(want))
	if err := d.CopyToHost(got, p); err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("%x was read where %x was written: %w", got, want, errs.ErrNotReachable)
	}
	return nil
}

// reason says in one line, which is the same on all ranks of the island, what all of them know to have failed.
func (i *isle) reason(err error) string {
	text := err.Error()
	var told *group.VoteError
	if errors.As(err, &told) {
		var whys []string
		for _, f := range told.Failures {
			whys = append(whys, fmt.Sprintf("rank %d: %s", i.ranks[f.Rank], f.Text))
		}
		text = strings.Join(whys, "; ")
	}
	return strings.ReplaceAll(text, "\n", "; ")
}

// whole reports whether all ranks map each other's memory.
func (b *Backend) whole() bool { return b.isle != nil && len(b.isle.ranks) == b.group.Size() }

// Islands returns, by rank, the lowest rank of its island; nil if no rank maps another's memory. Ranks that cannot map each other's memory though they share that of
// the CPU are alone.
func (b *Backend) Islands() []int {
	if b.islands == nil {
		return nil
	}
	of := make([]int, b.group.Size())
	for r := range of {
		if of[r] = r; b.peers[r].Apart == "" {
			of[r] = b.islands.Of(r)[0]
		}
	}
	return of
}

// number returns a rank's number on the island; -1 if it is elsewhere.
func (i *isle) number(rank int) int {
	if i == nil {
		return -1
	}
	return slices.Index(i.ranks, rank)
}

// meet maps the memory of all ranks of the island. All of them come; one that has failed already brings its failure, and all get that.
func (i *isle) meet(ctx context.Context, a backend.Allocation, failure error) (backend.Mapping, error) {
	// The other backend would tell of memory that is not its own, and not of what this rank has failed in.
	err := i.group.Vote(ctx, "sharing memory", failure)
	var m backend.Mapping
	if err == nil {
		m, err = i.near.Rendezvous(ctx, a)
	}
	if err != nil {
		return nil, &isleError{fmt.Sprintf("sharing memory with %s: %s", errs.Ranks(i.ranks), i.reason(err)), err}
	}
	return m, nil
}

// isleError is an error of the island's group, with a text in which ranks are numbered as in the backend's group.
type isleError struct {
	text string
	err  error
}

func (e *isleError) Error() string { return e.text }
func (e *isleError) Unwrap() error { return e.err }

// close gives back what the island holds.
func (i *isle) close(ctx context.Context) error {
	if i == nil {
		return nil
	}
	var err error
	if i.near != nil {
		err = i.near.Close(ctx)
	}
	if i.owned {
		err = errors.Join(err, i.group.Close(ctx))
	}
	return err
}

// shareCapabilities adds what the ranks can do because they share memory, or why they cannot.
func (b *Backend) shareCapabilities(c *backend.Capabilities) {
	if b.isle != nil {
		c.PointerPeers = len(b.isle.ranks) - 1
	}
	switch {
	case b.whole():
		c.PeerPointers, c.Contiguous = true, true
		delete(c.Why, "peer_pointers")
		delete(c.Why, "contiguous")
		return
	case b.islands != nil && b.islands.Count() > 1:
		whys := append([]string{fmt.Sprintf("only ranks of one of these have addresses of each other's memory: %s", b.islands)}, b.whys...)
		c.Why["peer_pointers"] = strings.Join(whys, "; ")
	case len(b.whys) > 0:
		c.Why["peer_pointers"] = strings.Join(b.whys, "; ")
	default:
		return
	}
	c.Why["contiguous"] = c.Why["peer_pointers"]
}

// wholeMapping is a mapping whose ranks are all on one island: their memory lies side by side.
type wholeMapping struct{ *mapping }

// Contiguous returns the range: the ranks' copies lie one rounded size apart.
func (m wholeMapping) Contiguous() (device.Ptr, int64, error) {
	return m.near.(backend.ContiguousViewer).Contiguous()
}

// mappingOf returns the mapping of this backend that m is; nil if it is another's.
func mappingOf(m backend.Mapping) *mapping {
	switch m := m.(type) {
	case *mapping:
		return m
	case wholeMapping:
		return m.mapping
	}
	return nil
}
