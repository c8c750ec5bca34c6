package nixl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// counting is a network whose posts are counted, by the rank that posts.
type counting struct {
	network
	mu    sync.Mutex
	posts map[string]int
}

func newCounting() *counting {
	c := &counting{posts: map[string]int{}}
	c.fail = func(engine, call string) error {
		if call == "Post" {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.posts[strings.Split(engine, "-")[1]]++
		}
		return nil
	}
	return c
}

// of returns how often a rank has posted.
func (c *counting) of(rank int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.posts[fmt.Sprint(rank)]
}

// onHosts are options for ranks of several hosts.
func onHosts(int) Options { return Options{NetDevices: []string{"lo"}} }

// TestIslands: what is between ranks of one island goes by address, put, signal and wait, and the rest through the library.
func TestIslands(t *testing.T) {
	hosts := []string{"a", "b", "b", "a", "c"}
	net := newCounting()
	onFakesAt(t, &net.network, hosts, onHosts, func(ctx context.Context, m *memory.Memory) error {
		me, size := m.Group().Rank(), m.Group().Size()
		c := m.Capabilities()
		assert.False(t, c.PeerPointers)
		assert.Equal(t, map[string]int{"a": 1, "b": 1, "c": 0}[hosts[me]], c.PointerPeers)
		assert.Contains(t, c.Why["peer_pointers"], "0,3; 1,2; 4")
		a, w, err := mapped(ctx, m, 64)
		if err != nil {
			return err
		}
		for peer := range size {
			p, err := w.Peer(peer, 0)
			if hosts[peer] != hosts[me] {
				assert.ErrorIs(t, err, errs.ErrNotReachable)
			} else if assert.NoError(t, err) {
				assert.Equal(t, peer == me, p == a.Ptr())
			}
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := m.Device().CopyFromHost(a.Ptr(), []byte{byte(me + 1)}); err != nil {
			return err
		}
		for _, far := range []bool{false, true} {
			peers := slices.DeleteFunc([]int{0, 1, 2, 3, 4}, func(r int) bool { return r == me || far != (hosts[r] != hosts[me]) })
			if err := m.Group().Barrier(ctx, "before"); err != nil {
				return err
			}
			before := net.of(me)
			for _, peer := range peers {
				if err := m.PutSignal(s, peer, w, int64(8+me), a.Ptr(), 1, 0); err != nil {
					return err
				}
			}
			for _, peer := range peers {
				if err := m.Wait(s, peer, 0); err != nil {
					return err
				}
			}
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
			assert.Equal(t, far && len(peers) > 0, net.of(me) > before, "rank %d, far %t", me, far)
			var got [5]byte
			if err := m.Device().CopyToHost(got[:], a.Ptr().Add(8)); err != nil {
				return err
			}
			for _, peer := range peers {
				assert.EqualValues(t, peer+1, got[peer])
			}
		}
		return errors.Join(m.Barrier(s, 1), s.Synchronize(ctx), s.Close(), m.Free(ctx, a))
	})
}

// TestWholeIsland: where all ranks share memory, nothing goes through the library, barriers neither; and so in a sub-group that lies on one island.
func TestWholeIsland(t *testing.T) {
	net := newCounting()
	onFakesAt(t, &net.network, []string{"a", "b", "a"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		if me == 1 {
			return nil
		}
		g, err := m.Group().Sub(ctx, []int{0, 2})
		if err != nil {
			return err
		}
		o := onHosts(me)
		o.Parent = m.Backend().(*Backend)
		b, err := New(ctx, g, &o)
		if err != nil {
			return err
		}
		sub := memory.New(b, g, &memory.Options{Channels: 1})
		c := sub.Capabilities()
		assert.True(t, c.PeerPointers && c.Contiguous)
		assert.Equal(t, 1, c.PointerPeers)
		assert.Positive(t, sub.SignalsBytes(1), "signals lie in symmetric memory")
		before := net.of(me)
		a, w, err := mapped(ctx, sub, 100)
		if err != nil {
			return err
		}
		_, stride, err := w.Contiguous(0)
		assert.NoError(t, err)
		assert.Equal(t, a.RoundedBytes(), stride)
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		x, err := prepare(sub, a, w)
		if err != nil {
			return err
		}
		if err := errors.Join(x.Post(s), s.Synchronize(ctx), x.Close(), g.Barrier(ctx, "moved")); err != nil {
			return err
		}
		err = errors.Join(sub.Barrier(s, 0), sub.PutSignal(s, 1-g.Rank(), w, 50, a.Ptr(), 8, 0), sub.Wait(s, 1-g.Rank(), 0), s.Synchronize(ctx), s.Close())
		assert.Equal(t, before, net.of(me))
		return errors.Join(err, sub.Free(ctx, a), sub.Close(ctx), g.Close(ctx))
	})
}

// TestIslandsOff: one rank's word keeps all from sharing.
func TestIslandsOff(t *testing.T) {
	opts := func(rank int) Options { return Options{Islands: []string{"", islandsAuto, islandsOff}[rank]} }
	onFakesAt(t, &network{}, []string{"", "", ""}, opts, func(ctx context.Context, m *memory.Memory) error {
		assert.False(t, m.Capabilities().PeerPointers)
		assert.Zero(t, m.Capabilities().PointerPeers)
		a, w, err := mapped(ctx, m, 10)
		if err != nil {
			return err
		}
		_, err = w.Peer((m.Group().Rank()+1)%3, 0)
		assert.ErrorIs(t, err, errs.ErrNotReachable)
		return m.Free(ctx, a)
	})
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	_, err = New(t.Context(), groups[0], &Options{Islands: "some"})
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, `islands is "some"; allowed: auto, off`)
	require.NoError(t, groups[0].Close(t.Context()))
}

// TestAdoptedOnAnIsland: memory that one rank has adopted has no addresses on any, and the library moves it.
func TestAdoptedOnAnIsland(t *testing.T) {
	net := newCounting()
	onFakesAt(t, &net.network, []string{"a", "a", "b"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
		me := m.Group().Rank()
		p, free, err := OnDevice(m.Backend(), me, 4096)
		if err != nil {
			return err
		}
		a, err := m.Allocate(ctx, 4096, "")
		if me == 1 {
			if err = errors.Join(err, m.Free(ctx, a)); err == nil {
				a, err = m.Register(ctx, p, 4096, "")
			}
		}
		if err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		for peer := range 3 {
			if _, err := w.Peer(peer, 0); peer != me {
				assert.ErrorIs(t, err, errs.ErrNotReachable)
			}
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := errors.Join(m.Device().CopyFromHost(a.Ptr(), []byte{byte(me + 1)}), m.Group().Barrier(ctx, "filled")); err != nil {
			return err
		}
		next, before := (me+1)%3, net.of(me)
		if err := errors.Join(m.PutSignal(s, next, w, 100, a.Ptr(), 1, 0), m.Wait(s, (me+2)%3, 0), s.Synchronize(ctx), s.Close()); err != nil {
			return err
		}
		assert.Greater(t, net.of(me), before)
		var got [1]byte
		if err := m.Device().CopyToHost(got[:], a.Ptr().Add(100)); err != nil {
			return err
		}
		assert.EqualValues(t, (me+2)%3+1, got[0])
		return errors.Join(m.Free(ctx, a), free())
	})
}

// TestIslandFails: a rank that cannot go on, at any step of a rendezvous or of making signals, fails it on all ranks, soon, and it can be tried
// again.
func TestIslandFails(t *testing.T) {
	for _, call := range []string{"Know", "MetadataOf", "Register"} {
		for _, hosts := range [][]string{{"a", "a", "a"}, {"a", "a", "b"}, {"b", "a", "a"}} {
			t.Run(call+" "+strings.Join(hosts, ""), func(t *testing.T) {
				var failing atomic.Bool
				net := &network{fail: func(engine, c string) error {
					if failing.Load() && c == call && strings.HasPrefix(engine, "world-1-") {
						return errBackend
					}
					return nil
				}}
				onFakesAt(t, net, hosts, onHosts, func(ctx context.Context, m *memory.Memory) error {
					g := m.Group()
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
					began := time.Now()
					if err := g.Barrier(ctx, "failing"); err != nil {
						return err
					}
					if call != "Register" { // it is registered already
						_, err = m.Rendezvous(ctx, a, memory.Record{})
						assert.ErrorContains(t, err, "rank 1")
						assert.NotErrorIs(t, err, errs.ErrInvalid, "nobody has passed anything that is not allowed")
					}
					err = flags()
					assert.ErrorContains(t, err, "rank 1")
					assert.NotErrorIs(t, err, errs.ErrInvalid)
					if g.Rank() == 1 && call == "Register" {
						_, err := m.Backend().Allocate(ctx, 100)
						assert.ErrorIs(t, err, errBackend)
					}
					assert.Less(t, time.Since(began), 20*time.Second)
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
					return errors.Join(flags(), m.Free(ctx, a))
				})
			})
		}
	}
}

// TestForeignOnAnIsland: one rank's allocation of another backend fails the rendezvous of all, which goes on working.
func TestForeignOnAnIsland(t *testing.T) {
	onFakesAt(t, &network{}, []string{"a", "a", "b"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
		b, g := m.Backend(), m.Group()
		a, err := b.Allocate(ctx, 64)
		if err != nil {
			return err
		}
		bring := backend.Allocation(a)
		if g.Rank() == 0 {
			bring = foreignAllocation{a}
		}
		_, err = b.Rendezvous(ctx, bring)
		assert.ErrorIs(t, err, errs.ErrInvalid)
		mapping, err := b.Rendezvous(ctx, a)
		if err != nil {
			return err
		}
		return errors.Join(g.Barrier(ctx, "end"), mapping.Unmap(ctx), a.Release(ctx))
	})
}

type foreignAllocation struct{ backend.Allocation }

// TestIslanderIsLost: the death of a rank of an island ends waits of all ranks, and the survivors give everything back.
func TestIslanderIsLost(t *testing.T) {
	for _, victim := range []int{1, 2} { // on the island of rank 0, and elsewhere
		t.Run(fmt.Sprint("rank ", victim), func(t *testing.T) {
			onFakesAt(t, &network{}, []string{"a", "a", "b"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
				_, w, err := mapped(ctx, m, 64)
				if err != nil {
					return err
				}
				if err := m.Group().Barrier(ctx, "mapped"); err != nil {
					return err
				}
				if m.Group().Rank() == victim {
					m.Group().Abort("test")
					return nil
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				err = errors.Join(m.Wait(s, victim, 0), s.Synchronize(ctx))
				if !errors.Is(err, errs.ErrPeerLost) {
					<-m.Group().Lost() // it was known before the wait
					assert.ErrorIs(t, m.Group().Err(), errs.ErrPeerLost)
				}
				assert.NoError(t, w.Err())
				return s.Close()
			})
		})
	}
}

// TestIslandSignalsAreStores: a word of a peer of the island is written at once, and has arrived.
func TestIslandSignalsAreStores(t *testing.T) {
	var slow atomic.Bool
	net := &network{slow: func(string) time.Duration {
		if slow.Load() {
			return 500 * time.Millisecond
		}
		return 0
	}}
	onFakesAt(t, net, []string{"a", "a", "b"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
		b, g := m.Backend().(*Backend), m.Group()
		f, err := b.NewFlags(ctx, 3)
		if err := errors.Join(err, g.Barrier(ctx, "made")); err != nil {
			return err
		}
		slow.Store(true)
		for peer := range 3 {
			if peer == g.Rank() {
				continue
			}
			store, err := f.PrepareStore(peer, g.Rank())
			if err != nil {
				return err
			}
			near := peer < 2 && g.Rank() < 2
			if err := store.Post(uint64(7 + g.Rank())); err != nil {
				return err
			}
			ended, err := store.Poll()
			assert.NoError(t, err)
			assert.Equal(t, near, ended)
			for !ended && err == nil {
				ended, err = store.Poll()
				time.Sleep(time.Millisecond)
			}
			if _, err := f.PrepareStore(peer, 99); err != nil {
				assert.ErrorIs(t, err, errs.ErrInvalid)
			} else {
				assert.Fail(t, "a word that is not there")
			}
			if err := errors.Join(err, store.Close()); err != nil {
				return err
			}
		}
		if err := g.Barrier(ctx, "written"); err != nil {
			return err
		}
		for peer := range 3 {
			if peer != g.Rank() {
				assert.EqualValues(t, 7+peer, f.Words()[peer].Load())
			}
		}
		return errors.Join(g.Barrier(ctx, "read"), f.Close())
	})
}
