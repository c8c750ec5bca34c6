package nixl

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := silenced(t, addr, &held)
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var armed atomic.Bool
	fakes := &network{blind: true, fail: func(engine, call string) error {
		if call == "Know" && strings.HasPrefix(engine, "world-1-") && armed.CompareAndSwap(true, false) {
			held.Lock() // all that is left is the vote
			time.AfterFunc(300*time.Millisecond, giveUp)
		}
		return nil
	}}
	gone := make(chan struct{})
	rank := func(r int) (err error) {
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
		if r == 1 {
			armed.Store(true)
		}
		if err := g.Barrier(ctx, "armed"); err != nil {
			return err
		}
		if r == 1 {
			_, err := b.newFlags(within, 2)
			if err == nil {
				err = errors.New("it was told")
			} else {
				err = nil
			}
			close(gone)
			held.Unlock()
			return errors.Join(err, g.Barrier(ctx, "written"), b.Close(ctx), g.Close(ctx), d.Close())
		}
		f, err := b.newFlags(ctx, 2)
		if err != nil {
			return err
		}
		<-gone
		w, err := f.PrepareStore(1, 0)
		if err != nil {
			return err
		}
		err = errors.Join(w.Post(7), await(ctx, []*flagStore{w.(*flagStore)}), w.Close())
		return errors.Join(err, g.Barrier(ctx, "written"), f.Close(), b.Close(ctx), g.Close(ctx), d.Close())
	}
	failed := make(chan error, 2)
	for r := range 2 {
		go func() { failed <- rank(r) }()
	}
	require.NoError(t, errors.Join(<-failed, <-failed))
	assert.Zero(t, fakes.astray.Load(), "what was written to memory that was given back")
}
