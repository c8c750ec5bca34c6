package nixl

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Ranks that can share memory do: what is between them goes by address, and only the rest through the library. How memory of the CPU is shared is
// backend host's affair, which serves the ranks of one island here as it serves a group of its own.

// The values of Options.Islands.
const (
	islandsAuto = "auto" // found out by trying
	islandsOff  = "off"  // the library moves everything
)

// isle is the ranks whose memory this rank maps, itself included.
type isle struct {
	group *group.Group  // of these ranks
	owned bool          // whether close closes it
	ranks []int         // as they are numbered in the backend's group
	near  *host.Backend // over that group
}

// mayMap reports whether ranks of this backend can map each other's memory: memory of the CPU, whose device is backend host's too.
func (b *Backend) mayMap(o *Options) bool {
	_, cpu := b.device.(*devhost.Device)
	return cpu && !o.pads && o.Islands != islandsOff
}

// settle finds out which ranks share memory, and makes them an island. It is collective, and then it is for the ranks of each island alone: meet
// tells the others of a failure.
func (b *Backend) settle(ctx context.Context, where []location) error {
	islands, err := b.group.Islands(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(where, func(l location) bool { return !l.Maps }) {
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
	i.near, err = host.New(i.group, &host.Options{Device: b.device.(*devhost.Device)})
	if err != nil {
		return errors.Join(err, i.close(ctx))
	}
	b.isle = i
	return nil
}

// whole reports whether all ranks map each other's memory.
func (b *Backend) whole() bool { return b.isle != nil && len(b.isle.ranks) == b.group.Size() }

// Islands returns, by rank, the lowest rank of its island; nil if no rank maps another's memory.
func (b *Backend) Islands() []int {
	if b.islands == nil {
		return nil
	}
	of := make([]int, b.group.Size())
	for r := range of {
		of[r] = b.islands.Of(r)[0]
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
	if failure != nil {
		_, err := i.near.Rendezvous(ctx, nil) // which the others are in, and which fails on all then
		return nil, errors.Join(failure, err)
	}
	m, err := i.near.Rendezvous(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("sharing memory with %s: %w", errs.Ranks(i.ranks), err)
	}
	return m, nil
}

// close gives back what the island holds.
func (i *isle) close(ctx context.Context) error {
	if i == nil || !i.owned {
		return nil
	}
	return i.group.Close(ctx)
}

// capabilities adds what the ranks can do because they share memory, or why they cannot.
func (b *Backend) shareCapabilities(c *backend.Capabilities) {
	switch {
	case b.isle == nil:
	case b.whole():
		c.PeerPointers, c.Contiguous, c.PointerPeers = true, true, len(b.isle.ranks)-1
		delete(c.Why, "peer_pointers")
		delete(c.Why, "contiguous")
		return
	default:
		c.PointerPeers = len(b.isle.ranks) - 1
	}
	if b.islands != nil && b.islands.Count() > 1 {
		c.Why["peer_pointers"] = fmt.Sprintf("only ranks of one of these have addresses of each other's memory: %s", b.islands)
		c.Why["contiguous"] = c.Why["peer_pointers"]
	}
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
