package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// gpuWorld is ranks with simulated GPUs, one each, over fake engines.
type gpuWorld struct {
	hosts   []string // by rank; "" for all is one host
	net     *network
	peers   func(gpu, peer int) bool
	driver  func(rank int, d *cu.Driver) // changes a rank's
	options func(rank int) Options
	loses   bool // a rank leaves without a word
}

// inUse counts the open files of this process, and the memory in files that it maps.
func inUse(t *testing.T) (files, maps int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	text, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return len(entries), strings.Count(string(text), "memfd:")
}

// run runs f on each rank. Whatever is left in the driver, in the engines or in the process in the end is a failure.
func (w gpuWorld) run(t *testing.T, f func(ctx context.Context, m *memory.Memory) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	size := len(w.hosts)
	files, maps := inUse(t)
	machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1, Peers: w.peers})
	require.NoError(t, err)
	if w.net == nil {
		w.net = &network{}
	}
	for i := range size {
		d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: i})
		require.NoError(t, err)
		w.net.gpus = append(w.net.gpus, d)
	}
	groups, err := group.Local(size, &group.LocalOptions{BootIDs: w.hosts})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := w.rank(ctx, machine, g, f); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
	for _, d := range w.net.gpus {
		require.NoError(t, d.Close())
	}
	assert.NoError(t, machine.Err())
	assert.Empty(t, machine.Violations())
	assert.Empty(t, machine.Left())
	for name, e := range w.net.engines {
		assert.True(t, e.closed, name)
	}
	nowFiles, nowMaps := inUse(t)
	assert.LessOrEqual(t, nowFiles, files, "open files")
	assert.LessOrEqual(t, nowMaps, maps, "mapped memory of files")
}

func (w gpuWorld) rank(ctx context.Context, machine *simcuda.Machine, g *group.Group, f func(ctx context.Context, m *memory.Memory) error) error {
	table := machine.Driver()
	if w.driver != nil {
		w.driver(g.Rank(), table)
	}
	d, err := cuda.Open(&cuda.Options{Driver: table, LocalRank: g.Rank(), Err: g.Err, WaitTimeout: 30 * time.Second})
	if err != nil {
		return err
	}
	o := Options{}
	if w.options != nil {
		o = w.options(g.Rank())
	}
	o.Opened, o.engine, o.pads, o.NetDevices = d, w.net.engine, true, []string{"lo"}
	b, err := New(ctx, g, &o)
	if err != nil {
		return errors.Join(err, g.Close(ctx), d.Close())
	}
	m := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: o.KernelTimeout})
	err = f(ctx, m)
	left := errors.Join(m.Close(ctx), g.Close(ctx))
	if w.loses && errors.Is(left, errs.ErrPeerLost) {
		left = nil
	}
	return errors.Join(err, left, d.Close())
}

// hostsOf are n ranks of one host.
func hostsOf(n int) []string { return make([]string, n) }

// allReduced sums a tensor in which each rank has its number and one.
func allReduced(ctx context.Context, m *memory.Memory, a kernels.Algorithm) error {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
	if err != nil {
		return err
	}
	in := slices.Repeat([]float32{float32(m.Group().Rank() + 1)}, 100)
	if err := errors.Join(x.Rendezvous(ctx), tensor.Write(x.Local(), in, 0)); err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: a})
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	err = errors.Join(p.Run(s), s.Synchronize(ctx))
	if err == nil {
		var out []float32
		if out, err = tensor.ReadAll[float32](x.Local()); err == nil {
			size := m.Group().Size()
			if want := slices.Repeat([]float32{float32(size * (size + 1) / 2)}, 100); !slices.Equal(out, want) {
				err = fmt.Errorf("%s: the sums are %v", a, out)
			}
		}
	}
	return errors.Join(err, s.Close(), p.Close(ctx), x.Close(ctx))
}

// putRound puts a byte to each of the peers with a signal, waits for theirs, and checks what came.
func putRound(ctx context.Context, m *memory.Memory, peers []int) error {
	me := m.Group().Rank()
	a, w, err := mapped(ctx, m, 64)
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	err = errors.Join(m.Device().CopyFromHost(a.Ptr(), []byte{byte(me + 1)}), m.Group().Barrier(ctx, "filled"))
	for _, peer := range peers {
		err = errors.Join(err, m.PutSignal(s, peer, w, int64(8+me), a.Ptr(), 1, 0))
	}
	for _, peer := range peers {
		err = errors.Join(err, m.Wait(s, peer, 0))
	}
	err = errors.Join(err, s.Synchronize(ctx), s.Close())
	got := make([]byte, 16)
	err = errors.Join(err, m.Device().CopyToHost(got, a.Ptr().Add(8)))
	for _, peer := range peers {
		if int(got[peer]) != peer+1 {
			err = errors.Join(err, fmt.Errorf("%d came from rank %d", got[peer], peer))
		}
	}
	return errors.Join(err, m.Free(ctx, a))
}

// others are the ranks that near is true or false of, but for me.
func others(size, me int, is func(rank int) bool) []int {
	var ranks []int
	for r := range size {
		if r != me && is(r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func everybody(int) bool { return true }

// TestIslandOfGPUs: where all GPUs reach each other, everything goes by address, by kernels, and nothing through the library: as on backend native.
func TestIslandOfGPUs(t *testing.T) {
	for size := 1; size <= 3; size++ {
		net := newCounting()
		gpuWorld{hosts: hostsOf(size), net: &net.network}.run(t, func(ctx context.Context, m *memory.Memory) error {
			me := m.Group().Rank()
			before := net.of(me)
			c := m.Capabilities()
			assert.True(t, c.PeerPointers && c.Contiguous, c.Why)
			assert.False(t, c.Multicast)
			assert.Equal(t, size-1, c.PointerPeers)
			assert.Positive(t, m.SignalsBytes(1), "signals lie in symmetric memory")
			a, w, err := mapped(ctx, m, 100)
			if err != nil {
				return err
			}
			base, stride, err := w.Contiguous(0)
			assert.NoError(t, err)
			assert.Equal(t, a.RoundedBytes(), stride)
			for peer := range size {
				p, err := w.Peer(peer, 0)
				assert.NoError(t, err)
				assert.Equal(t, peer == me, p == a.Ptr())
				assert.True(t, peer == me || p == base.Add(int64(peer)*stride))
			}
			if err := errors.Join(m.Free(ctx, a), putRound(ctx, m, others(size, me, everybody))); err != nil {
				return err
			}
			for _, a := range []kernels.Algorithm{kernels.OneShotLL, kernels.TwoShotPull, kernels.Transfers, kernels.Auto} {
				if err := allReduced(ctx, m, a); err != nil {
					return err
				}
			}
			assert.Equal(t, before, net.of(me), "posts of the library after it was opened")
			return nil
		})
	}
}

// TestIslandsOfGPUs: what is between ranks of one island goes by address, and the rest through the library; all-reduce too.
func TestIslandsOfGPUs(t *testing.T) {
	hosts := []string{"a", "b", "a"}
	net := newCounting()
	gpuWorld{hosts: hosts, net: &net.network}.run(t, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		c := m.Capabilities()
		assert.False(t, c.PeerPointers || c.Contiguous)
		assert.Equal(t, len(others(3, me, func(r int) bool { return hosts[r] == hosts[me] })), c.PointerPeers)
		assert.Contains(t, c.Why["peer_pointers"], "0,2; 1")
		a, w, err := mapped(ctx, m, 100)
		if err != nil {
			return err
		}
		sizes, err := m.Group().AllGather(ctx, "sizes", fmt.Appendf(nil, "%d", a.RoundedBytes()))
		if err != nil {
			return err
		}
		for peer := range 3 {
			assert.Equal(t, sizes[me], sizes[peer], "memory is as large on every rank")
			if _, err := w.Peer(peer, 0); hosts[peer] == hosts[me] {
				assert.NoError(t, err)
			} else {
				assert.ErrorIs(t, err, errs.ErrNotReachable)
			}
		}
		if err := m.Free(ctx, a); err != nil {
			return err
		}
		for _, far := range []bool{false, true} {
			posts := 0
			for _, step := range []func() error{
				func() error { return m.Group().Barrier(ctx, "before") },
				func() error { posts = net.of(me); return nil },
				func() error {
					return putRound(ctx, m, others(3, me, func(r int) bool { return (hosts[r] != hosts[me]) == far }))
				},
			} {
				if err := step(); err != nil {
					return err
				}
			}
			posts = net.of(me) - posts
			// At rendezvous the first bytes go to the ranks elsewhere. A put and a signal are two posts more each.
			elsewhere := len(others(3, me, func(r int) bool { return hosts[r] != hosts[me] }))
			want := elsewhere
			if far {
				want += 2 * elsewhere
			}
			assert.Equal(t, want, posts, "rank %d, far %t", me, far)
		}
		return allReduced(ctx, m, kernels.Auto)
	})
}

// TestIslandOfGPUsInAGroup: a sub-group on one island does all by address, and closing it gives back what it holds.
func TestIslandOfGPUsInAGroup(t *testing.T) {
	net := newCounting()
	var streams [3]atomic.Int64
	driver := func(rank int, d *cu.Driver) {
		create, destroy := d.StreamCreate, d.StreamDestroy
		d.StreamCreate = func(s *cu.StreamHandle, flags uint32) cu.Result { streams[rank].Add(1); return create(s, flags) }
		d.StreamDestroy = func(s cu.StreamHandle) cu.Result { streams[rank].Add(-1); return destroy(s) }
	}
	gpuWorld{hosts: []string{"a", "b", "a"}, net: &net.network, driver: driver}.run(t, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		if me == 1 {
			return nil
		}
		g, err := m.Group().Sub(ctx, []int{0, 2})
		if err != nil {
			return err
		}
		had := streams[me].Load()
		b, err := New(ctx, g, &Options{Parent: m.Backend().(*Backend)})
		if err != nil {
			return errors.Join(err, g.Close(ctx))
		}
		sub := memory.New(b, g, &memory.Options{Channels: 1})
		before := net.of(me)
		assert.True(t, sub.Capabilities().PeerPointers)
		err = errors.Join(putRound(ctx, sub, []int{1 - g.Rank()}), allReduced(ctx, sub, kernels.OneShotLL))
		assert.Equal(t, before, net.of(me))
		err = errors.Join(err, sub.Close(ctx))
		assert.Equal(t, had, streams[me].Load(), "streams")
		return errors.Join(err, g.Close(ctx))
	})
}

// TestGPUsApart: if one rank cannot map another's memory, for whatever reason, all ranks leave the addresses out, say the same reason, and the library
// moves everything. Nothing is left of the trial.
func TestGPUsApart(t *testing.T) {
	onRank := func(rank int, change func(d *cu.Driver)) func(int, *cu.Driver) {
		return func(r int, d *cu.Driver) {
			if r == rank {
				change(d)
			}
		}
	}
	var registered atomic.Int64
	refuses := func(engine, call string) error { // the second memory of rank 1, behind that of its pads
		if call == "Register" && strings.Contains(engine, "-1-") && registered.Add(1) == 2 {
			return errBackend
		}
		return nil
	}
	for name, c := range map[string]struct {
		world gpuWorld
		why   string
	}{
		"off": {gpuWorld{options: func(rank int) Options { return Options{Islands: []string{"", islandsOff}[rank]} }}, "islands is off on rank 1"},
		"no peer access": {gpuWorld{peers: func(gpu, peer int) bool { return gpu == peer }},
			"ranks 0, 1 cannot map each other's memory: "},
		"no descriptor": {gpuWorld{driver: onRank(1, func(d *cu.Driver) {
			d.MemExportFD = func(*int32, cu.MemHandle, cu.HandleType, uint64) cu.Result { return cu.OperatingSystem }
		})}, "rank 1: "},
		"another driver's memory": {gpuWorld{driver: onRank(1, func(d *cu.Driver) {
			d.MemImportFD = func(*cu.MemHandle, uintptr, cu.HandleType) cu.Result { return cu.InvalidValue }
		})}, "rank 1: "},
		"no access": {gpuWorld{driver: onRank(0, func(d *cu.Driver) {
			access := d.MemSetAccess
			d.MemSetAccess = func(p device.Ptr, n uint64, a *cu.MemAccessDesc, count uint64) cu.Result {
				if n > 2<<20 { // the memory of both ranks
					return cu.NotSupported
				}
				return access(p, n, a, count)
			}
		})}, "rank 0: "},
		"other bytes": {gpuWorld{driver: onRank(1, func(d *cu.Driver) {
			out := d.MemcpyDtoHAsync
			var copies atomic.Int64
			d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
				return out(dst, src.Add(4*copies.Add(1)), n, s)
			}
		})}, "was read where"},
		"a library that cannot have it": {gpuWorld{net: &network{fail: refuses}}, "rank 1: NIXL takes no memory of cuMemCreate: "},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			c.world.hosts = hostsOf(2)
			c.world.run(t, func(ctx context.Context, m *memory.Memory) error {
				have := m.Capabilities()
				assert.False(t, have.PeerPointers || have.Contiguous)
				assert.Zero(t, have.PointerPeers)
				assert.Contains(t, have.Why["peer_pointers"], c.why)
				assert.NotContains(t, have.Why["peer_pointers"], "\n")
				whys, err := m.Group().AllGather(ctx, "whys", []byte(have.Why["peer_pointers"]))
				if err != nil {
					return err
				}
				assert.Equal(t, string(whys[0]), string(whys[1]))
				a, w, err := mapped(ctx, m, 10)
				if err != nil {
					return err
				}
				_, err = w.Peer(1-m.Group().Rank(), 0)
				assert.ErrorIs(t, err, errs.ErrNotReachable)
				if name == "other bytes" { // which this driver goes on with
					return m.Free(ctx, a)
				}
				return errors.Join(m.Free(ctx, a), putRound(ctx, m, []int{1 - m.Group().Rank()}), allReduced(ctx, m, kernels.Auto))
			})
		})
	}
}

// TestPartOfAnIslandOfGPUsApart: GPUs of one island that do not reach each other take nothing from another island.
func TestPartOfAnIslandOfGPUsApart(t *testing.T) {
	hosts := []string{"a", "a", "b", "b"}
	apart := func(gpu, peer int) bool { return gpu == peer || gpu > 1 }
	gpuWorld{hosts: hosts, peers: apart}.run(t, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		c := m.Capabilities()
		assert.False(t, c.PeerPointers)
		assert.Equal(t, me/2, c.PointerPeers)
		assert.Contains(t, c.Why["peer_pointers"], "0,1; 2,3; ranks 0, 1 cannot map each other's memory: ")
		return errors.Join(putRound(ctx, m, others(4, me, everybody)), allReduced(ctx, m, kernels.Auto))
	})
}

// TestAdoptedOnAnIslandOfGPUs: memory that all ranks have adopted is mapped as that of backend native is; if that cannot map the memory of one of them,
// it has addresses on no rank, and the library moves it.
func TestAdoptedOnAnIslandOfGPUs(t *testing.T) {
	for name, shift := range map[string]int64{"all": 0, "one unaligned": 8} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			gpuWorld{hosts: hostsOf(2)}.run(t, func(ctx context.Context, m *memory.Memory) error {
				me := m.Group().Rank()
				p, free, err := OnDevice(m.Backend(), me, 2*gpuBlock)
				if err != nil {
					return err
				}
				a, err := m.Register(ctx, p.Add(int64(me)*shift), gpuBlock, "")
				if err != nil {
					return err
				}
				w, err := m.Rendezvous(ctx, a, memory.Record{})
				if err != nil {
					return err
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				_, err = w.Peer(1-me, 0)
				assert.Equal(t, name == "all", err == nil, err)
				err = errors.Join(m.Device().CopyFromHost(a.Ptr(), []byte{byte(me + 1)}), m.Group().Barrier(ctx, "filled"),
					m.PutSignal(s, 1-me, w, 100, a.Ptr(), 1, 0), m.Wait(s, 1-me, 0), s.Synchronize(ctx), s.Close())
				var got [1]byte
				err = errors.Join(err, m.Device().CopyToHost(got[:], a.Ptr().Add(100)))
				assert.EqualValues(t, 2-me, got[0])
				return errors.Join(err, m.Free(ctx, a), free())
			})
		})
	}
}

// TestIslandOfGPUsFails: a rank that cannot go on, at any step of a rendezvous or of making flags, fails it on all ranks, soon, and it can be tried again.
func TestIslandOfGPUsFails(t *testing.T) {
	for _, call := range []string{"Know", "MetadataOf", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemSetAccess", "cuMemMap"} {
		t.Run(call, func(t *testing.T) {
			var failing atomic.Bool
			net := &network{fail: func(engine, c string) error {
				if failing.Load() && c == call && strings.HasPrefix(engine, "world-1-") {
					return errBackend
				}
				return nil
			}}
			driver := func(rank int, d *cu.Driver) {
				if rank != 1 {
					return
				}
				refused := func(name string) bool { return failing.Load() && name == call }
				export, imported, access, mapped := d.MemExportFD, d.MemImportFD, d.MemSetAccess, d.MemMap
				d.MemExportFD = func(fd *int32, h cu.MemHandle, kind cu.HandleType, flags uint64) cu.Result {
					if refused("cuMemExportToShareableHandle") {
						return cu.OperatingSystem
					}
					return export(fd, h, kind, flags)
				}
				d.MemImportFD = func(h *cu.MemHandle, fd uintptr, kind cu.HandleType) cu.Result {
					if refused("cuMemImportFromShareableHandle") {
						return cu.OperatingSystem
					}
					return imported(h, fd, kind)
				}
				d.MemSetAccess = func(p device.Ptr, n uint64, a *cu.MemAccessDesc, count uint64) cu.Result {
					if refused("cuMemSetAccess") {
						return cu.OutOfMemory
					}
					return access(p, n, a, count)
				}
				d.MemMap = func(p device.Ptr, n, offset uint64, h cu.MemHandle, flags uint64) cu.Result {
					if refused("cuMemMap") {
						return cu.OutOfMemory
					}
					return mapped(p, n, offset, h, flags)
				}
			}
			gpuWorld{hosts: []string{"a", "a", "b"}, net: net, driver: driver}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				first, _, err := mapped(ctx, m, 100) // and with it what signals need
				if err != nil {
					return err
				}
				if err := g.Barrier(ctx, "mapped"); err != nil {
					return err
				}
				// Memory is exported from its allocation on, for the rendezvous.
				failing.Store(call == "cuMemExportToShareableHandle")
				if err := g.Barrier(ctx, "exporting"); err != nil {
					return err
				}
				a, err := m.Allocate(ctx, 100, "")
				if err != nil {
					return err
				}
				flags := func() error {
					f, err := m.Backend().(*Backend).NewFlags(ctx, 4)
					if err == nil {
						err = errors.Join(g.Barrier(ctx, "flags"), f.Close())
					}
					return err
				}
				if err := g.Barrier(ctx, "allocated"); err != nil {
					return err
				}
				failing.Store(true)
				if err := g.Barrier(ctx, "failing"); err != nil {
					return err
				}
				_, err = m.Rendezvous(ctx, a, memory.Record{})
				assert.ErrorContains(t, err, "rank 1")
				if !strings.HasPrefix(call, "cu") {
					assert.ErrorContains(t, flags(), "rank 1")
				}
				if err := g.Barrier(ctx, "failed"); err != nil {
					return err
				}
				failing.Store(false)
				if err := g.Barrier(ctx, "working"); err != nil {
					return err
				}
				if _, err = m.Rendezvous(ctx, a, memory.Record{}); err != nil {
					return err
				}
				return errors.Join(flags(), m.Free(ctx, a), m.Free(ctx, first))
			})
		})
	}
}

// TestIslanderWithGPUIsLost: the death of a rank ends waits of all ranks, and the survivors give everything back.
func TestIslanderWithGPUIsLost(t *testing.T) {
	for _, hosts := range [][]string{{"a", "a"}, {"a", "a", "b"}} {
		t.Run(strings.Join(hosts, ""), func(t *testing.T) {
			gpuWorld{hosts: hosts, loses: true}.run(t, func(ctx context.Context, m *memory.Memory) error {
				_, w, err := mapped(ctx, m, 64)
				if err != nil {
					return err
				}
				if err := m.Group().Barrier(ctx, "mapped"); err != nil {
					return err
				}
				if m.Group().Rank() == 1 {
					m.Group().Abort("test")
					return nil
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				if err = errors.Join(m.Wait(s, 1, 0), s.Synchronize(ctx)); !errors.Is(err, errs.ErrPeerLost) {
					<-m.Group().Lost() // it was known before the wait
					assert.ErrorIs(t, m.Group().Err(), errs.ErrPeerLost)
				}
				assert.NoError(t, w.Err())
				return s.Close()
			})
		})
	}
}

// TestRankIsLostInTheTrial: a rank that dies while the island is tried makes opening the backend fail on the others: it is no reason to leave addresses
// out.
func TestRankIsLostInTheTrial(t *testing.T) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1})
	require.NoError(t, err)
	groups, err := group.Local(2, nil)
	require.NoError(t, err)
	net := &network{}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			table := machine.Driver()
			export := table.MemExportFD
			var calls atomic.Int64
			table.MemExportFD = func(fd *int32, h cu.MemHandle, kind cu.HandleType, flags uint64) cu.Result {
				if g.Rank() == 1 && calls.Add(1) == 2 { // the first is backend native's own trial
					g.Abort("test")
				}
				return export(fd, h, kind, flags)
			}
			d, err := cuda.Open(&cuda.Options{Driver: table, LocalRank: g.Rank(), Err: g.Err})
			if !assert.NoError(t, err) {
				return
			}
			_, err = New(t.Context(), g, &Options{Opened: d, engine: net.engine, pads: true})
			assert.Error(t, err)
			if g.Rank() == 0 {
				assert.ErrorIs(t, err, errs.ErrPeerLost)
			}
			_ = g.Close(t.Context()) // a rank is lost
			assert.NoError(t, d.Close())
		})
	}
	wg.Wait()
	assert.NoError(t, machine.Err())
	assert.Empty(t, machine.Left())
}

// TestConformanceOfIslandsOfGPUs: what every backend promises, on one island, on several, and on none.
func TestConformanceOfIslandsOfGPUs(t *testing.T) {
	for name, c := range map[string]struct {
		worlds  []int
		hosts   []string
		islands string
	}{
		"one island":    {[]int{1, 2}, nil, ""},
		"mixed islands": {[]int{3}, []string{"a", "b", "a"}, ""},
		"no islands":    {[]int{2}, nil, islandsOff},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			machine, err := simcuda.New(simcuda.Config{GPUs: 3, Seed: 1})
			require.NoError(t, err)
			net := &network{}
			for i := range 3 {
				d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: i})
				require.NoError(t, err)
				net.gpus = append(net.gpus, d)
			}
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Err: g.Err})
					if err != nil {
						return nil, err
					}
					b, err := New(ctx, g, &Options{Opened: d, engine: net.engine, pads: true, Islands: c.islands, NetDevices: []string{"lo"}})
					if err != nil {
						return nil, errors.Join(err, d.Close())
					}
					b.owned = true // so that the device is closed
					return b, nil
				},
				WorldSizes: c.worlds, Unreachable: c.islands == islandsOff, Hosts: c.hosts,
				Adoptable: func(b backend.Backend, rank int, bytes int64) (device.Ptr, func() error, error) {
					return OnDevice(b, rank, max(bytes, gpuBlock))
				},
			})
			for _, d := range net.gpus {
				require.NoError(t, d.Close())
			}
			assert.NoError(t, machine.Err())
			assert.Empty(t, machine.Left())
		})
	}
}

// TestIslandsOfGPUsApart: ranks whose GPUs do not reach each other are on no island together, and what goes by islands takes each of them for one.
func TestIslandsOfGPUsApart(t *testing.T) {
	for _, c := range []struct {
		peers func(gpu, peer int) bool
		want  []int
	}{
		{func(gpu, peer int) bool { return gpu == peer || gpu > 1 }, []int{0, 1, 2, 2}},
		{func(gpu, peer int) bool { return gpu == peer }, []int{0, 1, 2, 3}},
	} {
		t.Run(fmt.Sprint(c.want), func(t *testing.T) {
			gpuWorld{hosts: []string{"a", "a", "b", "b"}, peers: c.peers}.run(t, func(ctx context.Context, m *memory.Memory) error {
				assert.Equal(t, c.want, m.Islands())
				return allReduced(ctx, m, kernels.Hierarchical)
			})
		})
	}
}
