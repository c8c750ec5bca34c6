package nixl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// silenced passes connections on to a service, whose answers it holds back while it is held.
func silenced(t *testing.T, to string, held *sync.Mutex) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			service, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			pass := func(to, from net.Conn, wait bool) {
				b := make([]byte, 4096)
				for {
					n, err := from.Read(b)
					if wait {
						held.Lock()
					}
					_, failed := to.Write(b[:n])
					if wait {
						held.Unlock()
					}
					if err != nil || failed != nil {
						_, _ = to.Close(), from.Close()
						return
					}
				}
			}
			go pass(service, client, false)
			go pass(client, service, true)
		}
	}()
	return l.Addr().String()
}

// TestFlagsOfARankThatIsNotTold: a rank that never hears that all ranks have flags keeps its own, which the others write to.
func TestFlagsOfARankThatIsNotTold(t *testing.T) {
	var fakes network
	fakes.blind = true
	var armed atomic.Pointer[func()]
	fakes.fail = func(engine, call string) error {
		if call == "Know" && strings.HasPrefix(engine, "world-1-") {
			if last := armed.Swap(nil); last != nil {
				(*last)() // all that is left is the vote
			}
		}
		return nil
	}
	flagsUntold(t, &fakes, []string{"", ""}, Options{Islands: islandsOff}, func(ctx context.Context, b *Backend, last func()) (backend.Flags, error) {
		if last != nil {
			armed.Store(&last)
		}
		if err := b.group.Barrier(ctx, "armed"); err != nil {
			return nil, err
		}
		return b.newFlags(ctx, 2)
	})
}

// TestFlagsOfARankOfAnIslandThatIsNotTold is the same where it shares its flags with others.
func TestFlagsOfARankOfAnIslandThatIsNotTold(t *testing.T) {
	fakes := &network{blind: true}
	flagsUntold(t, fakes, []string{"a", "b", "b"}, Options{NetDevices: []string{"lo"}}, func(ctx context.Context, b *Backend, last func()) (backend.Flags, error) {
		if last == nil {
			return b.NewFlags(ctx, 2)
		}
		return b.newIsleFlagsIn(ctx, 2, &lastWords{&allocatedWords{isle: b.isle}, last})
	})
}

// lastWords are words that have met when all that is left is the vote.
type lastWords struct {
	wordMemory
	met func()
}

func (w *lastWords) meet(ctx context.Context, failure error) ([]device.Ptr, error) {
	defer w.met()
	return w.wordMemory.meet(ctx, failure)
}

// flagsUntold makes flags of ranks of those hosts by flagsOf, which on rank 1 calls last before the vote: what comes of that the rank does not hear. Rank 0 writes a word of its then.
func flagsUntold(t *testing.T, fakes *network, hosts []string, opts Options, flagsOf func(ctx context.Context, b *Backend, last func()) (backend.Flags, error)) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := silenced(t, addr, &held)
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	last := func() {
		held.Lock()
		time.AfterFunc(300*time.Millisecond, giveUp)
	}
	gone := make(chan struct{})
	rank := func(r int) (err error) {
		o := &group.Options{Rank: r, WorldSize: len(hosts), Addr: addr, Timeout: 20 * time.Second, BootID: hosts[r]}
		switch r {
		case 0:
			o.Listener = l
		case 1:
			o.Addr = deaf
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		mine := opts
		mine.Opened, mine.engine = d, fakes.engine
		b, err := New(ctx, g, &mine)
		if err != nil {
			return err
		}
		if r == 1 {
			_, err := flagsOf(within, b, last)
			if err == nil {
				err = errors.New("it was told")
			} else {
				err = nil
			}
			close(gone)
			held.Unlock()
			return errors.Join(err, g.Barrier(ctx, "written"), b.Close(ctx), g.Close(ctx), d.Close())
		}
		f, err := flagsOf(ctx, b, nil)
		if err != nil {
			return err
		}
		<-gone
		if r == 0 {
			var w backend.FlagStore
			if w, err = f.PrepareStore(1, 0); err != nil {
				return err
			}
			err = errors.Join(w.Post(7), await(ctx, []*flagStore{w.(*flagStore)}), w.Close())
		}
		return errors.Join(err, g.Barrier(ctx, "written"), f.Close(), b.Close(ctx), g.Close(ctx), d.Close())
	}
	failed := make(chan error, len(hosts))
	for r := range hosts {
		go func() { failed <- rank(r) }()
	}
	for range hosts {
		err = errors.Join(err, <-failed)
	}
	require.NoError(t, err)
	assert.Zero(t, fakes.astray.Load(), "what was written to memory that was given back")
}

// lastFlags is a backend whose flags are made when all that is left is the memory's own vote.
type lastFlags struct {
	*Backend
	made func()
}

func (b *lastFlags) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	defer b.made()
	return b.Backend.NewFlags(ctx, count)
}

// TestSignalsOfARankThatIsNotTold: the same goes for the signals of a memory.
func TestSignalsOfARankThatIsNotTold(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := silenced(t, addr, &held)
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	fakes := &network{blind: true}
	rank := func(r int) error {
		o := &group.Options{Rank: r, WorldSize: 2, Addr: deaf, Timeout: 20 * time.Second}
		if r == 0 {
			o.Addr, o.Listener = addr, l
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		b, err := New(ctx, g, &Options{Opened: d, Islands: islandsOff, engine: fakes.engine})
		if err != nil {
			return err
		}
		m, mine := memory.New(b, g, nil), ctx
		if r == 1 {
			mine = within
			m = memory.New(&lastFlags{b, func() {
				held.Lock()
				time.AfterFunc(300*time.Millisecond, giveUp)
			}}, g, nil)
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		_, err = m.Rendezvous(mine, a, memory.Record{})
		if err == nil {
			return errors.New("a rank that was not told has a window")
		}
		if r == 1 {
			held.Unlock()
			err = g.Barrier(ctx, "next") // the other is still in the rendezvous
		}
		if !errors.Is(err, errs.ErrMismatch) {
			return err
		}
		err = nil
		if r == 0 {
			s, made := d.NewStream()
			if made != nil {
				return made
			}
			err = errors.Join(m.Signal(s, 1, 0), s.Synchronize(ctx), s.Close())
		}
		return errors.Join(err, g.Barrier(ctx, "signalled"), m.Close(ctx), g.Close(ctx), d.Close())
	}
	failed := make(chan error, 2)
	for r := range 2 {
		go func() { failed <- rank(r) }()
	}
	require.NoError(t, errors.Join(<-failed, <-failed))
	assert.Zero(t, fakes.astray.Load(), "what was written to memory that was given back")
}

// lastMapping is a backend whose mappings are made when all that is left is the memory's vote.
type lastMapping struct {
	*Backend
	made func()
}

func (b *lastMapping) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	defer b.made()
	return b.Backend.Rendezvous(ctx, a)
}

// TestMemoryOfARankThatIsNotTold: memory that others may have a window of, though this rank has none, is freed with the others only.
func TestMemoryOfARankThatIsNotTold(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := silenced(t, addr, &held)
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	fakes := &network{blind: true}
	gone := make(chan struct{})
	rank := func(r int) error {
		o := &group.Options{Rank: r, WorldSize: 2, Addr: deaf, Timeout: 20 * time.Second}
		if r == 0 {
			o.Addr, o.Listener = addr, l
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		b, err := New(ctx, g, &Options{Opened: d, Islands: islandsOff, engine: fakes.engine})
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		if r == 1 {
			m = memory.New(&lastMapping{b, func() {
				held.Lock()
				time.AfterFunc(300*time.Millisecond, giveUp)
			}}, g, nil)
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if r == 1 {
			_, err := m.Rendezvous(within, a, memory.Record{})
			held.Unlock()
			if err == nil {
				return errors.New("it was told")
			}
			soon, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if err := m.Free(soon, a); err == nil {
				return errors.New("what another rank has a window of was freed")
			}
			close(gone)
			return errors.Join(g.Barrier(ctx, "written"), m.Close(ctx), g.Close(ctx), d.Close())
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		select {
		case <-gone:
		case <-ctx.Done():
			return ctx.Err()
		}
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		err = errors.Join(m.PutSignal(s, 1, w, 0, a.Ptr(), 8, 0), s.Synchronize(ctx), s.Close())
		for _, step := range []string{"leaving the mapping", "freeing"} { // the other has given them up
			if g.Barrier(ctx, step) == nil {
				err = errors.Join(err, fmt.Errorf("%s: the other came", step))
			}
		}
		return errors.Join(err, g.Barrier(ctx, "written"), m.Close(ctx), g.Close(ctx), d.Close())
	}
	failed := make(chan error, 2)
	for r := range 2 {
		go func() { failed <- rank(r) }()
	}
	require.NoError(t, errors.Join(<-failed, <-failed))
	assert.Zero(t, fakes.astray.Load(), "what was written to memory that was given back")
}
