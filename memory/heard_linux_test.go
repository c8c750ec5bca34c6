package memory_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// hooked is the host device, which calls a function whenever somebody asks for its memory. The ranks' signals are in that.
type hooked struct {
	*devhost.Device
	asked func()
}

func (d *hooked) Bytes(p device.Ptr, n int64) ([]byte, error) {
	d.asked()
	return d.Device.Bytes(p, n)
}

type hookedBackend struct {
	backend.Backend
	device device.Device
}

func (b hookedBackend) Device() device.Device { return b.device }

// TestSignalsHeardLate: a rank whose context ends before it hears that all have signal pads has them as the others have, and the next rendezvous works.
func TestSignalsHeardLate(t *testing.T) {
	const size = 2
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := backendtest.Silenced(t, addr, &held)
	heard := make(chan struct{}) // rank 0 has its pads
	ended := make([]error, size)
	rank := func(number int) (err error) {
		o := &group.Options{Rank: number, WorldSize: size, Addr: addr, Timeout: 20 * time.Second}
		if number == 0 {
			o.Listener = l
		} else {
			o.Addr = deaf
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		within, giveUp := context.WithCancel(ctx)
		defer giveUp()
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		var near backend.Backend
		near, err = host.New(g, &host.Options{Device: d})
		if err != nil {
			return err
		}
		if number == 1 {
			var once sync.Once
			near = hookedBackend{near, &hooked{d, func() {
				once.Do(func() { // all that is left of making the pads is the vote
					held.Lock()
					go func() {
						select {
						case <-heard:
						case <-ctx.Done():
						}
						giveUp()
						time.AfterFunc(1300*time.Millisecond, held.Unlock) // later than a rank that has given up waits for most answers
					}()
				})
			}}}
		}
		m := memory.New(near, g, nil)
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if number == 0 {
			s, err := d.NewStream()
			if err != nil {
				return err
			}
			go func() {
				defer close(heard)
				for ctx.Err() == nil && errors.Is(m.Signal(s, 0, 0), errs.ErrNoRendezvous) {
					time.Sleep(time.Millisecond)
				}
			}()
		}
		_, ended[number] = m.Rendezvous(within, a, memory.Record{})
		for range 2 { // of which the first may be told what the call before has left
			if _, err = m.Rendezvous(ctx, a, memory.Record{}); err == nil {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("the next rendezvous: %w", err)
		}
		return errors.Join(m.Close(ctx), g.Close(ctx))
	}
	failed := make(chan error, size)
	for number := range size {
		go func() { failed <- rank(number) }()
	}
	for range size {
		err = errors.Join(err, <-failed)
	}
	require.NoError(t, err)
	for number, err := range ended {
		assert.Error(t, err, "rank %d", number)
	}
}
