package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// hosts are the hosts of ranks, by names, and the GPU of each on its host.
type hosts []string

// options are those of a rank: NCCL believes what it is told about its host, and the ranks of several use the same GPUs.
func (h hosts) options(m *machine, rank int) *Options {
	gpu := 0
	for _, host := range h[:rank] {
		if host == h[rank] {
			gpu++
		}
	}
	return m.onHost(h[rank], gpu)
}

// near lists the ranks of one rank's host.
func (h hosts) near(rank int) (ranks []int) {
	for r, host := range h {
		if host == h[rank] {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// onPretended runs f on a rank for each of the hosts, over one machine.
func onPretended(t *testing.T, m *machine, h hosts, f func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, len(h), nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, h.options(m, g.Rank()), func(b *Backend, mem *memory.Memory) error { return f(ctx, g, b, mem) })
	}))
	m.requireClean(t)
}

// tryHosts tries what there is between the ranks: addresses of those that isle lists, and collectives of all.
func tryHosts(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory, isle []int) error {
	c := mem.Capabilities()
	if c.PeerPointers || c.Contiguous || c.Transfers || c.Why["transfers"] == "" || c.PointerPeers != len(isle)-1 || !c.SeveralHosts || c.Why["peer_pointers"] == "" || c.Why["contiguous"] == "" {
		return fmt.Errorf("the capabilities are %+v", c)
	}
	err := backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
		for r := range g.Size() {
			p, err := w.Peer(r, 8)
			switch {
			case slices.Contains(isle, r) && (err != nil || p.IsNil()):
				return fmt.Errorf("rank %d: %s: %w", r, p, err)
			case !slices.Contains(isle, r) && !errors.Is(err, errs.ErrNotReachable):
				return fmt.Errorf("rank %d is reached: %s: %w", r, p, err)
			}
		}
		return tryAddresses(ctx, g, mem, w, isle)
	})
	if err != nil {
		return err
	}
	return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
		return errors.Join(p.Enqueue(s), s.Synchronize(ctx))
	})
}

// tryAddresses writes a word into the memory of each rank of the isle, and reads what these have written.
func tryAddresses(ctx context.Context, g *group.Group, mem *memory.Memory, w *memory.Window, isle []int) error {
	me := g.Rank()
	for _, r := range isle {
		p, err := w.Peer(r, int64(8*me))
		if err == nil {
			err = mem.Device().CopyFromHost(p, []byte{byte(100 + me), byte(r)})
		}
		if err != nil {
			return err
		}
	}
	if err := g.Barrier(ctx, "written"); err != nil {
		return err
	}
	for _, r := range isle {
		p, err := w.Peer(me, int64(8*r))
		got := make([]byte, 2)
		if err == nil {
			err = mem.Device().CopyToHost(got, p)
		}
		if err != nil || got[0] != byte(100+r) || got[1] != byte(me) {
			return fmt.Errorf("rank %d wrote %v here: %w", r, got, err)
		}
	}
	return nil
}

// TestHosts: windows have addresses inside a host and nowhere else, with every version, whatever that makes of windows of several hosts; collectives have
// all ranks. Hosts may have different numbers of ranks, in any order.
func TestHosts(t *testing.T) {
	for _, version := range []nccl.Version{22803, 22807, 22809, 22902, 22907, 23007, 23203} {
		t.Run(version.String(), func(t *testing.T) {
			for _, h := range []hosts{{"a", "b"}, {"a", "a", "b", "b"}, {"a", "b", "a"}, {"a", "a", "a", "b"}} {
				m := newMachine(3)
				m.version = version
				onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
					return tryHosts(ctx, g, b, mem, h.near(g.Rank()))
				})
				assert.Zero(t, m.refused, "windows of several hosts were asked for")
			}
		})
	}
}

// TestWindowsOfSeveralTeams: what the fake library makes of windows of several hosts, version by version, which is why the backend asks for none: NCCL makes
// them only between 2.28.7 and 2.28.9, or with the GPUs' own access to the network.
func TestWindowsOfSeveralTeams(t *testing.T) {
	for version, made := range map[nccl.Version][2]bool{22803: {}, 22807: {true, true}, 22809: {true, true}, 22902: {false, true}, 23007: {false, true}, 23203: {false, true}} {
		for i, gin := range []bool{false, true} {
			m := newMachine(1)
			m.version, m.gin = version, gin
			h := hosts{"a", "b"}
			onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, _ *memory.Memory) error {
				near, isle := b.near, b.isle
				b.near, b.isle = b.comm, newIsle([]int{0, 0}, g.Rank())
				a, err := b.Allocate(ctx, 4096)
				if err != nil {
					return err
				}
				w, err := b.register(ctx, a.(*allocation).base, a.(*allocation).span)
				switch {
				case made[i] && err == nil && !w.peers[1-g.Rank()].IsNil():
					err = errors.New("the window has an address of the other host")
				case made[i] && err == nil:
					err = b.deregister(ctx, w, a.(*allocation).base)
				case !made[i] && errors.Is(err, errs.ErrUnsupported):
					err = nil
				}
				err = b.group.Vote(ctx, "registering", err)
				b.near, b.isle = near, isle
				return errors.Join(err, a.Release(ctx))
			})
			if made[i] {
				assert.Zero(t, m.refused)
			} else {
				assert.NotZero(t, m.refused)
			}
		}
	}
}

// TestTeamsOfOneHost: NCCL may be told to make several teams of one host, which are then what windows have addresses of.
func TestTeamsOfOneHost(t *testing.T) {
	for _, h := range []hosts{{"", "", "", ""}, {"a", "a", "a", "a", "b", "b"}} {
		m := newMachine(4)
		m.version, m.lsaTeam = 22907, 2
		onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			first := g.Rank() / 2 * 2
			return tryHosts(ctx, g, b, mem, []int{first, first + 1})
		})
		assert.Zero(t, m.refused)
	}
}

// TestOneTeamOfHosts: hosts that share a domain of NVLink are one team, whose windows have addresses of all ranks, from 2.28.7 on.
func TestOneTeamOfHosts(t *testing.T) {
	for version, all := range map[nccl.Version]bool{22803: false, 22807: true, 22907: true} {
		m := newMachine(1)
		m.version, m.clique = version, true
		onPretended(t, m, hosts{"a", "b"}, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			if c := mem.Capabilities(); c.PeerPointers != all || c.Multicast {
				return fmt.Errorf("the capabilities are %+v", c)
			}
			if all {
				return backendtest.TryWindow(ctx, mem, 4096)
			}
			return tryHosts(ctx, g, b, mem, []int{g.Rank()})
		})
	}
}

// TestBetweenHosts: what needs an address of a peer on another host is ErrNotReachable and says which ranks have them; what needs none works.
func TestBetweenHosts(t *testing.T) {
	m := newMachine(2)
	m.Kernel = func(int, string, []unsafe.Pointer) {}
	h := hosts{"a", "a", "b", "b"}
	onPretended(t, m, h, func(ctx context.Context, g *group.Group, _ *Backend, mem *memory.Memory) error {
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		peer, far := g.Rank()^1, (g.Rank()+2)%4
		err = backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
			own, err := w.Peer(g.Rank(), 0)
			if err != nil {
				return err
			}
			if err := errors.Join(mem.Signal(s, peer, 0), mem.Wait(s, peer, 0), mem.PutSignal(s, peer, w, 0, own, 64, 0)); err != nil {
				return fmt.Errorf("on one host: %w", err)
			}
			_, prepared := mem.PrepareTransfer(backend.Read, far, []memory.TransferBlock{{Local: own, Window: w, Bytes: 64}})
			for what, err := range map[string]error{
				"signal": mem.Signal(s, far, 0), "wait": mem.Wait(s, far, 0), "barrier": mem.Barrier(s, 0), "transfer": prepared,
				"put": mem.Copy(s, backend.Write, far, w, 0, own, 64), "get": mem.Copy(s, backend.Read, far, w, 0, own, 64),
				"put with a signal": mem.PutSignal(s, far, w, 0, own, 64, 0), "long put with a signal": mem.PutSignal(s, far, w, 0, own, 4096, 0),
			} {
				if !errors.Is(err, errs.ErrNotReachable) || !assert.ErrorContains(t, err, "0,1; 2,3") {
					return fmt.Errorf("%s: %w", what, err)
				}
			}
			if mem.CanSignal() {
				return errors.New("the memory says that all ranks can signal each other")
			}
			ws, err := mem.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "a plan", Bytes: 1 << 16})
			if err != nil {
				return err
			}
			if _, err := ws.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "a plan", Failed: func(err error) error { return err }}); !errors.Is(err, errs.ErrNotReachable) {
				return fmt.Errorf("signals of a plan: %w", err)
			}
			return errors.Join(ws.Close(ctx), tryAuto(ctx, mem, s))
		})
		if err != nil {
			return err
		}
		_, err = mem.Allocate(ctx, 4096, "x")
		err = errors.Join(err, reduceBy(ctx, g, mem, symmetricForm, 10, nil), s.Close())
		if !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("symmetric kernels between hosts: %w", err)
		}
		return nil
	})
}

// tryAuto runs plans whose form is left open: between hosts they are NCCL's.
func tryAuto(ctx context.Context, mem *memory.Memory, s device.Stream) error {
	x, err := tensor.Zeros(ctx, mem, tensor.Float32, 8)
	if err == nil {
		err = x.Rendezvous(ctx)
	}
	if err != nil {
		return err
	}
	barrier, barrierErr := kernels.NewBarrier(ctx, mem, nil)
	reduce, reduceErr := kernels.NewAllReduce(ctx, x, kernels.Sum, nil)
	gather, gatherErr := kernels.NewBroadcast(ctx, x, 0, nil)
	if err := errors.Join(barrierErr, reduceErr, gatherErr); err != nil {
		return err
	}
	for _, p := range []*kernels.Plan{barrier, reduce, gather} {
		if p.Algorithm() != kernels.NCCL {
			return fmt.Errorf("auto took %s", p.Algorithm())
		}
		if err := errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx)); err != nil {
			return err
		}
	}
	for _, form := range []kernels.Algorithm{kernels.Transfers, kernels.OneShotPush} {
		if _, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: form}); !errors.Is(err, errs.ErrNotReachable) {
			return fmt.Errorf("%s: %w", form, err)
		}
	}
	return x.Close(ctx)
}

// conformanceOnHosts runs the conformance suite with ranks on several hosts.
func conformanceOnHosts(t *testing.T, m *machine) {
	t.Helper()
	h := hosts{"a", "b", "a"}
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			return open(ctx, g, h.options(m, g.Rank()))
		}, WorldSizes: []int{3}, Hosts: h,
		Adoptable: func(_ backend.Backend, rank int, bytes int64) (device.Ptr, func() error, error) {
			p := m.memoryOf(rank/2, bytes, true)
			return p, func() error { m.drop(p); return nil }, nil
		},
		AdoptAlign: nccl.WindowAlignment, AllReduces: []string{plainForm},
	})
	m.requireClean(t)
}

// TestConformanceOnHosts: the backend keeps what every backend promises, with ranks on several hosts.
func TestConformanceOnHosts(t *testing.T) { conformanceOnHosts(t, newMachine(2)) }

// TestConformanceOfPuts: so it does where NCCL puts between the hosts.
func TestConformanceOfPuts(t *testing.T) {
	m := newMachine(2)
	m.version, m.gin = 23203, true
	conformanceOnHosts(t, m)
	assert.NotZero(t, m.puts)
}

// TestSubGroupsOnHosts: sub-groups split by hosts too, and leave all of their communicators to the next of the same ranks.
func TestSubGroupsOnHosts(t *testing.T) {
	m := newMachine(2)
	h := hosts{"a", "a", "b", "b"}
	onPretended(t, m, h, func(ctx context.Context, g *group.Group, b *Backend, _ *memory.Memory) error {
		child := func() *Options {
			o := h.options(m, g.Rank())
			o.Opened, o.Parent = b.device, b
			return o
		}
		for _, tt := range []struct{ ranks, isle []int }{{[]int{0, 1, 2, 3}, nil}, {[]int{1, 2, 3}, nil}, {h.near(g.Rank()), nil}, {[]int{0, 3}, nil}} {
			if !slices.Contains(tt.ranks, g.Rank()) {
				if _, err := made(ctx, m, g); err != nil {
					return err
				}
				if _, err := made(ctx, m, g); err != nil {
					return err
				}
				continue
			}
			var isle []int
			for at, r := range tt.ranks {
				if h[r] == h[g.Rank()] {
					isle = append(isle, at)
				}
			}
			var before int
			for round := range 3 {
				err := inSub(ctx, g, tt.ranks, child(), func(sub *Backend, mem *memory.Memory) error {
					if len(isle) == len(tt.ranks) {
						return tryAll(ctx, mem, sub.group)
					}
					return tryHosts(ctx, sub.group, sub, mem, isle)
				})
				if err != nil {
					return fmt.Errorf("ranks %v: %w", tt.ranks, err)
				}
				if round == 0 {
					if before, err = made(ctx, m, g); err != nil {
						return err
					}
				}
			}
			after, err := made(ctx, m, g)
			if err != nil || after != before {
				return fmt.Errorf("ranks %v: %d communicators were made, and before %d: %w", tt.ranks, after, before, err)
			}
		}
		return nil
	})
}

// TestHostsFailHalfWay: what fails on one rank while the communicators of the hosts are made and tried is an error of all, also on the other hosts, and the
// next opening works.
func TestHostsFailHalfWay(t *testing.T) {
	h := hosts{"a", "a", "b", "b"}
	for _, joint := range []bool{false, true} {
		for _, call := range []string{"ncclCommSplit", "ncclCommWindowRegister", "ncclCommFinalize"} {
			for _, rank := range []int{0, 3} {
				t.Run(fmt.Sprintf("%s on rank %d, joint %t", call, rank, joint), func(t *testing.T) {
					m := newMachine(2)
					m.joint = joint
					var failed atomic.Bool
					fails := func() bool { return !failed.Swap(true) }
					opts := func(r int) *Options {
						o := h.options(m, r)
						f := m.libraryOf(h[r])
						split, register, finalize := f.CommSplit, f.CommWindowRegister, f.CommFinalize
						switch {
						case r != rank:
						case call == "ncclCommSplit":
							f.CommSplit = func(p nccl.CommHandle, color, key int32, c *nccl.CommHandle, config *nccl.ConfigLayout) nccl.Result {
								if fails() {
									return nccl.SystemError
								}
								return split(p, color, key, c, config)
							}
						case call == "ncclCommWindowRegister":
							f.CommWindowRegister = func(c nccl.CommHandle, p uint64, n uintptr, w *nccl.WindowHandle, flags nccl.WindowFlags) nccl.Result {
								if fails() {
									return nccl.SystemError
								}
								return register(c, p, n, w, flags)
							}
						default:
							f.CommFinalize = func(c nccl.CommHandle) nccl.Result {
								if fails() {
									return nccl.SystemError
								}
								return finalize(c)
							}
						}
						o.load = func(*nccl.Options) (*nccl.Library, error) { return nccl.New("/fake/libnccl.so.2", f) }
						return o
					}
					one := func(ctx context.Context, g *group.Group) error {
						return withMemory(ctx, g, opts(g.Rank()), func(b *Backend, mem *memory.Memory) error {
							return tryHosts(ctx, g, b, mem, h.near(g.Rank()))
						})
					}
					for r, err := range backendtest.OnRanks(t, 4, nil, one) {
						if call == "ncclCommFinalize" {
							if r == rank {
								require.ErrorContains(t, err, call)
							}
							continue
						}
						require.Error(t, err, "rank %d", r)
						assert.ErrorContains(t, err, call)
					}
					m.requireClean(t)
					require.True(t, failed.Load())
					backendtest.RequireAll(t, backendtest.OnRanks(t, 4, nil, one))
					m.requireClean(t)
				})
			}
		}
	}
}

// TestRankOfAHostStaysAway: a rank that never comes to what takes the ranks of its host alone makes the others give up, those of the other host too, and
// nothing is left.
func TestRankOfAHostStaysAway(t *testing.T) {
	for _, call := range []string{"ncclCommSplit", "ncclCommWindowRegister"} {
		m := newMachine(2)
		h := hosts{"a", "a", "b", "b"}
		m.absent = func(c string, rank int) bool { return c == call && rank == 1 }
		for r, err := range backendtest.OnRanks(t, 4, nil, func(ctx context.Context, g *group.Group) error {
			o := h.options(m, g.Rank())
			o.KernelTimeout = 300 * time.Millisecond
			_, err := New(ctx, g, o)
			return err
		}) {
			require.Error(t, err, "rank %d, %s", r, call)
		}
		m.requireClean(t)
	}
}

// TestLossBetweenHosts: when a rank is lost, the collectives of all hosts end, and every communicator is given up.
func TestLossBetweenHosts(t *testing.T) {
	m := newMachine(2)
	m.holds = true
	h := hosts{"a", "a", "b", "b"}
	for r, err := range backendtest.OnRanks(t, 4, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, h.options(m, g.Rank()), func(b *Backend, mem *memory.Memory) error {
			m.set(func() { m.holds = false })
			err := g.Barrier(ctx, "not yet")
			if err != nil {
				return err
			}
			return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
				m.set(func() { m.holds = true })
				if err := errors.Join(g.Barrier(ctx, "held"), p.Enqueue(s)); err != nil {
					return err
				}
				if g.Rank() == 3 {
					g.Abort("the test loses it")
				}
				return s.Synchronize(ctx)
			})
		})
	}) {
		require.Error(t, err, "rank %d", r)
	}
	m.requireClean(t)
}

// TestOnHosts: ranks are on one host if the group and NCCL say so.
func TestOnHosts(t *testing.T) {
	groups, err := group.Local(5, &group.LocalOptions{BootIDs: []string{"x", "y", "x", "x", "y"}})
	require.NoError(t, err)
	var peers []member
	for _, id := range []string{"", "", "p", "", ""} {
		peers = append(peers, member{HostID: id})
	}
	islands, err := groups[0].Islands(t.Context())
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1, 2, 0, 1}, onHosts(islands, peers))
	assert.Equal(t, "0,3; 1,4; 2", newIsle(onHosts(islands, peers), 0).String())
	for _, g := range groups {
		g.Abort("the test is over")
		_ = g.Close(t.Context())
	}
}

// TestInTeams: NCCL's teams are believed only where they are consecutive ranks of one number.
func TestInTeams(t *testing.T) {
	two := []team{{2, 0, 1}, {2, 1, 1}, {2, 0, 1}, {2, 1, 1}}
	one := []int{0, 0, 0, 0}
	assert.Equal(t, []int{0, 0, 2, 2}, inTeams(one, two))
	assert.Equal(t, []int{0, 1, 2, 3}, inTeams(one, slices.Repeat([]team{{1, 0, 1}}, 4)))
	assert.Equal(t, one, inTeams(one, make([]team, 4)), "NCCL does not know")
	for _, bad := range []team{{3, 1, 1}, {2, 0, 1}, {2, 1, 2}, {-1, 0, 0}, {8, 1, 1}} {
		teams := slices.Clone(two)
		teams[1] = bad
		assert.Equal(t, one, inTeams(one, teams), "%+v", bad)
	}
	assert.Equal(t, []int{0, 0, 2, 2, 4, 5}, inTeams([]int{0, 0, 0, 0, 4, 4}, append(slices.Clone(two), team{1, 0, 1}, team{1, 0, 1})))
}
