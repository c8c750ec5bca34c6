package memory_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

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

// hooked is the host backend, which calls a function when it has mapped memory, and its device another one whenever somebody asks for memory. The ranks' signals are in that.
type hooked struct {
	backend.Backend
	device        *hookedDevice
	mapped, asked func()
	idle          func() // the device is
}

func (b *hooked) Device() device.Device { return b.device }

func (b *hooked) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.Backend.Rendezvous(ctx, a)
	b.mapped()
	return m, err
}

type hookedDevice struct {
	*devhost.Device
	backend *hooked
}

func (d *hookedDevice) Bytes(p device.Ptr, n int64) ([]byte, error) {
	d.backend.asked()
	return d.Device.Bytes(p, n)
}

func (d *hookedDevice) Synchronize(ctx context.Context) error {
	err := d.Device.Synchronize(ctx)
	d.backend.idle()
	return err
}

// deafRank is a rank of a job in which rank 1 does not hear the service's answers from last on.
type deafRank struct {
	*group.Group
	m      *memory.Memory
	near   *hooked         // of rank 1
	last   func()          // nothing is heard behind it until long after rank 0 was told and said so
	told   func()          // rank 0 was
	within context.Context // of rank 1 it ends when rank 0 was told
}

// withDeafRank runs two ranks, each on the host's memory, which is far from that of the other if the test says so.
func withDeafRank(t *testing.T, far bool, run func(ctx context.Context, r *deafRank) error) {
	const size = 2
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := backendtest.Silenced(t, addr, &held)
	told := make(chan struct{})
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var once sync.Once
	rank := func(number int) (err error) {
		o := &group.Options{Rank: number, WorldSize: size, Addr: addr, Timeout: 20 * time.Second}
		r := &deafRank{within: ctx, told: func() {}}
		if number == 0 {
			o.Listener, r.told = l, sync.OnceFunc(func() { close(told) })
		} else {
			o.Addr, r.within = deaf, within
		}
		if r.Group, err = group.Join(ctx, o); err != nil {
			return err
		}
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		near, err := host.New(r.Group, &host.Options{Device: d})
		if err != nil {
			return err
		}
		b := backend.Backend(near)
		if number == 1 {
			r.last = func() {
				once.Do(func() {
					held.Lock()
					go func() {
						select {
						case <-told:
						case <-ctx.Done():
						}
						giveUp()
						time.AfterFunc(1300*time.Millisecond, held.Unlock) // later than a rank that has given up waits for most answers
					}()
				})
			}
			nothing := func() {}
			r.near = &hooked{Backend: near, mapped: nothing, asked: nothing, idle: nothing}
			r.near.device = &hookedDevice{d, r.near}
			b = r.near
		}
		if far {
			b = backendtest.Far(b, r.Group, nil)
		}
		r.m = memory.New(b, r.Group, nil)
		return errors.Join(run(ctx, r), r.m.Close(ctx), r.Close(ctx))
	}
	failed := make(chan error, size)
	for number := range size {
		go func() { failed <- rank(number) }()
	}
	for range size {
		err = errors.Join(err, <-failed)
	}
	require.NoError(t, err)
}

// TestSignalsHeardLate: a rank whose context ends before it hears that all have signal pads has them as the others have, and the next rendezvous works.
func TestSignalsHeardLate(t *testing.T) {
	withDeafRank(t, false, func(ctx context.Context, r *deafRank) error {
		a, err := r.m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if r.Rank() == 1 {
			r.near.asked = r.last // all that is left of making the pads is the vote
		} else {
			s, err := r.m.Device().NewStream()
			if err != nil {
				return err
			}
			go func() {
				defer r.told()
				for ctx.Err() == nil && errors.Is(r.m.Signal(s, 0, 0), errs.ErrNoRendezvous) {
					time.Sleep(time.Millisecond)
				}
			}()
		}
		if _, err := r.m.Rendezvous(r.within, a, memory.Record{}); err == nil {
			return errors.New("rank 1 has given up, and nobody was told")
		}
		if _, err = r.m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return fmt.Errorf("the next rendezvous: %w", err)
		}
		return r.m.Free(ctx, a)
	})
}

// TestRendezvousHeardLate: a rank whose context ends before it hears that all have mapped has its window as the others have, and they free it together.
func TestRendezvousHeardLate(t *testing.T) {
	withDeafRank(t, false, func(ctx context.Context, r *deafRank) error {
		first, err := r.m.Allocate(ctx, 64, "")
		if err == nil {
			_, err = r.m.Rendezvous(ctx, first, memory.Record{})
		}
		if err != nil {
			return err
		}
		a, err := r.m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if r.Rank() == 1 {
			r.near.mapped = r.last // all that is left is the vote
		}
		_, err = r.m.Rendezvous(r.within, a, memory.Record{})
		r.told()
		if err != nil {
			return fmt.Errorf("all have mapped: %w", err)
		}
		return errors.Join(r.m.Free(ctx, a), r.m.Free(ctx, first))
	})
}

// TestFreeHeardLate: a rank whose context ends before it hears that nobody works on memory any more, gives that back as the others do: alone it never could.
func TestFreeHeardLate(t *testing.T) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			withDeafRank(t, far, func(ctx context.Context, r *deafRank) error {
				a, err := r.m.Allocate(ctx, 64, "")
				if err == nil {
					_, err = r.m.Rendezvous(ctx, a, memory.Record{})
				}
				if err != nil {
					return err
				}
				r.misses()
				err = r.m.Free(r.within, a)
				r.told()
				return err
			})
		})
	}
}

// TestWorkspaceClosedHeardLate: it is the same with a workspace, which the ranks then have for the next plan.
func TestWorkspaceClosedHeardLate(t *testing.T) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			withDeafRank(t, far, func(ctx context.Context, r *deafRank) error {
				w, err := r.m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
				if err != nil {
					return err
				}
				r.misses()
				time.AfterFunc(aMoment, r.told) // it waits for rank 1 once more
				if err := w.Close(r.within); err != nil {
					return err
				}
				if w, err = r.m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "next", Bytes: 4096}); err != nil {
					return err
				}
				return w.Close(ctx)
			})
		})
	}
}

// TestReclaimHeardLate: it is the same with the freed memory of a heap.
func TestReclaimHeardLate(t *testing.T) {
	withDeafRank(t, false, func(ctx context.Context, r *deafRank) error {
		h, err := r.m.NewHeap(ctx, memory.HeapAlign)
		if err != nil {
			return err
		}
		a, err := h.Allocate(ctx, memory.HeapAlign, "", nil)
		if err != nil {
			return err
		}
		r.misses()
		time.AfterFunc(aMoment, r.told) // it waits for rank 1 once more
		if err := errors.Join(a.Free(), h.Reclaim(r.within)); err != nil {
			return err
		}
		_, err = h.Allocate(ctx, memory.HeapAlign, "", nil)
		return errors.Join(err, h.Close(ctx))
	})
}

// aMoment is how long an answer takes that nothing holds up, with much to spare.
const aMoment = 300 * time.Millisecond

// misses makes rank 1 miss the vote about whether all devices are idle.
func (r *deafRank) misses() {
	if r.Rank() == 1 {
		r.near.idle = r.last // all that is left is to say so
	}
}
