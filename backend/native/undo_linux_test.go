package native

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/memory"
)

// TestMappedAddressesAreKept: where cuMemUnmap fails, the addresses are not given back, since the driver could give them to somebody else while something
// is mapped there, and the error says that they stay; nor is a multicast object unbound that is still mapped. Everything else is given back.
func TestMappedAddressesAreKept(t *testing.T) {
	for _, multicast := range []bool{false, true} {
		m := newMachine(2)
		m.multicast = 1
		var failing atomic.Bool
		var failed device.Ptr // what could not be unmapped on rank 0
		var unbound, freed atomic.Int32
		ended := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.Multicast = "auto"
			d := m.driver()
			if g.Rank() == 0 {
				unmap, free := d.MemUnmap, d.MemAddressFree
				d.MemUnmap = func(p device.Ptr, bytes uint64) cu.Result {
					if failing.CompareAndSwap(true, false) {
						failed = p
						return cu.Unknown
					}
					return unmap(p, bytes)
				}
				d.MemAddressFree = func(p device.Ptr, bytes uint64) cu.Result {
					if failed != 0 && p <= failed && failed < p.Add(int64(bytes)) {
						freed.Add(1)
					}
					return free(p, bytes)
				}
				source := d.MulticastSource
				d.MulticastSource = func() (*cu.Multicast, error) {
					c, err := source()
					if err != nil {
						return nil, err
					}
					own := *c
					own.Unbind = func(h cu.MemHandle, dev cu.DeviceOrdinal, at, bytes uint64) cu.Result {
						unbound.Add(1)
						return c.Unbind(h, dev, at, bytes)
					}
					return &own, nil
				}
			}
			o.Driver = d
			b, err := New(ctx, g, o)
			if err != nil {
				return err
			}
			return backendtest.WithMemory(ctx, g, b, func(mem *memory.Memory) error {
				a, err := mem.Allocate(ctx, 4096, "")
				if err != nil {
					return err
				}
				w, err := mem.Rendezvous(ctx, a, memory.Record{})
				if err == nil && multicast {
					err = mem.EnableMulticast(ctx, w, nil)
				}
				if err = errors.Join(err, g.Barrier(ctx, "mapped")); err != nil {
					return err
				}
				if g.Rank() == 0 {
					failing.Store(true)
				}
				freeing := mem.Free(ctx, a)
				if err := backendtest.TryWindow(ctx, mem, 4096); err != nil { // the next
					return err
				}
				return freeing
			})
		})
		require.NoError(t, ended[1])
		require.ErrorContains(t, ended[0], "cuMemUnmap")
		require.ErrorContains(t, ended[0], "bytes of addresses at")
		require.ErrorContains(t, ended[0], "stay reserved until the process ends")
		require.Zero(t, freed.Load(), "addresses were freed that are mapped")
		if multicast {
			require.Zero(t, unbound.Load(), "an object was unbound that is mapped")
		}
	}
}
