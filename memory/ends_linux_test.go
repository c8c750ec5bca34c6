package memory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// soon is how long calls last that cannot end, and patience how long those may last that have to.
const (
	soon     = 50 * time.Millisecond
	patience = 10 * time.Second
)

// within gives the error of a call, or one that says that it does not end.
func within(call func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		return errors.New("it does not end")
	}
}

// stopping makes one call stop until it is let go on.
type stopping struct {
	armed       atomic.Bool
	inside, let chan struct{}
}

func newStopping() *stopping {
	return &stopping{inside: make(chan struct{}), let: make(chan struct{})}
}

// here is where the call stops.
func (s *stopping) here() {
	if s.armed.CompareAndSwap(true, false) {
		close(s.inside)
		<-s.let
	}
}

// begin begins a call in which it stops, and gives what lets it go on, and waits for its error.
func (s *stopping) begin(call func() error) (end func() error) {
	s.armed.Store(true)
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	select {
	case <-s.inside:
	case <-time.After(patience):
	}
	return func() error {
		close(s.let)
		return <-ended
	}
}

// slow is a backend of the host whose calls can be stopped in the middle, and those of its device.
type slow struct {
	backend.Backend
	device *slowDevice

	allocating, closing *stopping
	closed              atomic.Int32
}

type slowDevice struct {
	*devhost.Device
	launching *stopping
	idle      func() // unless nil, called when Synchronize has ended
	noBytes   atomic.Bool
	panics    atomic.Bool // Bytes does
}

type slowStream struct {
	*devhost.Stream
	device *slowDevice
}

func newSlow(g *group.Group) (*slow, error) {
	d, err := devhost.New(&devhost.Options{Err: g.Err})
	if err != nil {
		return nil, err
	}
	b, err := host.New(g, &host.Options{Device: d})
	if err != nil {
		return nil, err
	}
	return &slow{Backend: b, device: &slowDevice{Device: d, launching: newStopping()}, allocating: newStopping(), closing: newStopping()}, nil
}

func (b *slow) Device() device.Device { return b.device }

func (b *slow) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	b.allocating.here()
	return b.Backend.Allocate(ctx, bytes)
}

func (b *slow) Close(ctx context.Context) error {
	b.closing.here()
	b.closed.Add(1)
	return errors.Join(b.Backend.Close(ctx), b.device.Device.Close())
}

func (d *slowDevice) Synchronize(ctx context.Context) error {
	err := d.Device.Synchronize(ctx)
	if d.idle != nil {
		d.idle()
	}
	return err
}

func (d *slowDevice) Bytes(p device.Ptr, n int64) ([]byte, error) {
	if d.panics.Load() {
		panic("a test")
	}
	if d.noBytes.Load() {
		return nil, errBroken
	}
	return d.Device.Bytes(p, n)
}

func (d *slowDevice) NewStream() (device.Stream, error) {
	s, err := d.Device.NewStream()
	if err != nil {
		return nil, err
	}
	return &slowStream{s.(*devhost.Stream), d}, nil
}

func (s *slowStream) Device() device.Device { return s.device }

func (s *slowStream) Launch(k device.HostKernel) error {
	s.device.launching.here()
	return s.Stream.Launch(k)
}

// onSlow runs f on two ranks. It closes the memory.
func onSlow(t *testing.T, f func(ctx context.Context, b *slow, m *memory.Memory) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSlow(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: 300 * time.Millisecond})
		if err = backendtest.TryWindow(ctx, m, 100); err == nil {
			err = f(ctx, b, m)
		}
		if err != nil {
			g.Abort("the test has failed") // the other rank may be waiting
			return errors.Join(err, m.Close(ctx))
		}
		if n := b.closed.Load(); n != 1 {
			return fmt.Errorf("the backend was closed %d times", n)
		}
		return nil
	}))
}

// givingUp is a context that ends when a close waits for a local call, and so has come to all that it does with the others.
func givingUp(ctx context.Context, m *memory.Memory) (context.Context, context.CancelFunc) {
	short, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for !m.AwaitsLocals() && short.Err() == nil {
			time.Sleep(100 * time.Microsecond)
		}
	}()
	return short, cancel
}

// keptBy closes the memory, on rank 0 while something is under way that the close has to wait for and does not end in time: there the memory is kept.
func keptBy(ctx context.Context, m *memory.Memory, b *slow) error {
	if m.Group().Rank() != 0 {
		_ = m.Close(ctx) // which may tell of rank 0
		return nil
	}
	short, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	return keptAt(short, m, b)
}

// keptAt is keptBy on rank 0, with the context that ends.
func keptAt(short context.Context, m *memory.Memory, b *slow) error {
	err := within(func() error { return m.Close(short) })
	if short.Err() == nil || !errors.Is(err, short.Err()) || !m.Busy() || b.closed.Load() != 0 {
		return fmt.Errorf("a close that cannot end in time (kept: %t): %w", m.Busy(), err)
	}
	return nil
}

// TestCloseWaitsForLocalCalls: a close waits for a local call that is under way as long as its context lasts. Then the memory is kept, though the other
// ranks have given theirs back, and can be closed again. New local calls begin no more.
func TestCloseWaitsForLocalCalls(t *testing.T) {
	onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
		if m.Group().Rank() != 0 {
			return m.Close(ctx)
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		end := b.allocating.begin(func() error { _, err := m.Allocate(ctx, 100, ""); return err })
		short, cancel := givingUp(ctx, m)
		defer cancel()
		if err := errors.Join(keptAt(short, m, b), keptBy(ctx, m, b)); err != nil { // the others come to the first only
			return errors.Join(err, end())
		}
		_, late := m.Allocate(ctx, 100, "")
		freed := within(func() error { return m.Free(ctx, a) })
		if err := end(); err != nil || freed != nil || !errors.Is(late, errs.ErrClosed) {
			return fmt.Errorf("what was under way: %w; freeing: %w; allocating: %w", err, freed, late)
		}
		return errors.Join(m.Close(ctx), closedTwice(m.Close(ctx)))
	})
}

// behindSlow is a sickly backend, which may move data behind the device's back, and can be stopped while it allocates.
type behindSlow struct {
	*sickly
	allocating *stopping
}

func (b *behindSlow) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	b.allocating.here()
	return b.sickly.Allocate(ctx, bytes)
}

// TestCloseAgainAlone: over a backend that moves data behind the device's back, too, a close that was only waiting for a local call is repeated without the
// other ranks, which have closed.
func TestCloseAgainAlone(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		far, err := newSickly(g)
		if err != nil {
			return err
		}
		b := &behindSlow{far, newStopping()}
		m := memory.New(b, g, nil)
		if err := backendtest.WithWindow(ctx, m, 100, nil); err != nil || g.Rank() != 0 {
			return errors.Join(err, m.Close(ctx))
		}
		end := b.allocating.begin(func() error { _, err := m.Allocate(ctx, 100, ""); return err })
		short, cancel := givingUp(ctx, m)
		defer cancel()
		kept := m.Close(short)
		if err := end(); err != nil || !errors.Is(kept, context.Canceled) || !m.Busy() {
			return fmt.Errorf("closing: %w; allocating: %w", kept, err)
		}
		return within(func() error { return m.Close(ctx) })
	}))
}

// TestAtRelease: what is handed over to a memory is given back once, by the Close that releases it and not by one that keeps everything, while the memory's backend is still open; later at once.
func TestAtRelease(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(near, g, nil)
		s, err := near.Device().NewStream()
		if err != nil {
			return err
		}
		given := 0
		var early error
		giveBack := func() error {
			if given++; given == 1 {
				_, early = near.Device().Alloc(1) // which goes with the device
			}
			return os.ErrProcessDone
		}
		let := make(chan struct{})
		if err := errors.Join(m.AtRelease(giveBack), s.HostFunc(func() { <-let })); err != nil {
			return err
		}
		short, cancel := context.WithTimeout(ctx, soon)
		defer cancel()
		kept, before := m.Close(short), given
		close(let)
		if err := s.Synchronize(ctx); err != nil || !errors.Is(kept, context.DeadlineExceeded) || before != 0 {
			return fmt.Errorf("given back %d times by %w; %w", before, kept, err)
		}
		closed := m.Close(ctx)
		if !errors.Is(closed, os.ErrProcessDone) || given != 1 || early != nil {
			return fmt.Errorf("given back %d times by %w, when the device said %w", given, closed, early)
		}
		if late := m.AtRelease(giveBack); !errors.Is(late, os.ErrProcessDone) || given != 2 {
			return fmt.Errorf("given back %d times, the last by %w", given, late)
		}
		return closedTwice(m.Close(ctx))
	}))
}

func closedTwice(err error) error {
	if errors.Is(err, errs.ErrClosed) {
		return nil
	}
	return fmt.Errorf("closing twice: %w", err)
}

// TestLocalCallsDuringClose: a local call that begins while the backend is being closed is refused, and does not wait for that.
func TestLocalCallsDuringClose(t *testing.T) {
	onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		end := b.closing.begin(func() error { return m.Close(ctx) })
		for name, call := range map[string]func() error{
			"Allocate": func() error { _, err := m.Allocate(ctx, 100, ""); return err },
			"Register": func() error { _, err := m.Register(ctx, 1<<20, 100, ""); return err },
			"Free":     func() error { return m.Free(ctx, a) },
		} {
			if got := within(call); !errors.Is(got, errs.ErrClosed) {
				err = errors.Join(err, fmt.Errorf("%s while the backend is being closed: %w", name, got))
			}
		}
		return errors.Join(err, end())
	})
}

// TestCloseWaitsForSignalsBeingEnqueued: no signal is enqueued behind the last look at the device, whose memory would be gone when it runs.
func TestCloseWaitsForSignalsBeingEnqueued(t *testing.T) {
	for name, enqueue := range map[string]func(m *memory.Memory, w *memory.Window, s device.Stream) error{
		"Signal":  func(m *memory.Memory, _ *memory.Window, s device.Stream) error { return m.Signal(s, 0, 0) },
		"Wait":    func(m *memory.Memory, _ *memory.Window, s device.Stream) error { return m.Wait(s, 0, 0) },
		"Barrier": func(m *memory.Memory, _ *memory.Window, s device.Stream) error { return m.Barrier(s, 0) },
		"PutSignal": func(m *memory.Memory, w *memory.Window, s device.Stream) error {
			return m.PutSignal(s, 0, w, 0, 0, 0, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
				a, err := m.Allocate(ctx, 100, "")
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
				if m.Group().Rank() != 0 {
					return errors.Join(keptBy(ctx, m, b), closedOrDone(s))
				}
				end := b.device.launching.begin(func() error { return enqueue(m, w, s) })
				err = keptBy(ctx, m, b)
				if late := m.Signal(s, 0, 0); !errors.Is(late, errs.ErrClosed) {
					err = errors.Join(err, fmt.Errorf("a signal after closing: %w", late))
				}
				if err := errors.Join(err, end()); err != nil {
					return err
				}
				_ = s.Synchronize(ctx) // nobody comes to what a wait or a barrier waits for
				return errors.Join(m.Close(ctx), closedOrDone(s))
			})
		})
	}
}

// closedOrDone closes a stream, unless its device has.
func closedOrDone(s device.Stream) error {
	if err := s.Close(); !errors.Is(err, errs.ErrClosed) {
		return err
	}
	return nil
}

// TestFreeAfterKeptClose: the other ranks have closed their memory, and come to no call of it any more. So what has a window is not freed alone.
func TestFreeAfterKeptClose(t *testing.T) {
	onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		if m.Group().Rank() != 0 {
			return m.Close(ctx)
		}
		end := b.allocating.begin(func() error { _, err := m.Allocate(ctx, 100, ""); return err })
		short, cancel := givingUp(ctx, m)
		defer cancel()
		err = keptAt(short, m, b)
		if freed := within(func() error { return m.Free(ctx, a) }); !errors.Is(freed, errs.ErrClosed) {
			err = errors.Join(err, fmt.Errorf("freeing what the others have closed: %w", freed))
		}
		return errors.Join(err, end(), m.Close(ctx))
	})
}

// TestPiecesOfClosingHeap: when a heap is closed, or the memory is, nothing is enqueued for one of its allocations behind the last look at the device. If
// the heap is kept then, its allocations can be used again.
func TestPiecesOfClosingHeap(t *testing.T) {
	onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		a, err := h.Allocate(ctx, 256, "u8", nil)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		peer := 1 - m.Group().Rank()
		local := a.Allocation().Ptr().Add(a.Offset())
		put := func() error { return m.Copy(s, backend.Write, peer, a.Window(), a.Offset(), local, 256) }
		x, err := m.PrepareTransfer(backend.Write, peer, []memory.TransferBlock{{Local: local, Window: a.Window(), Offset: a.Offset(), Bytes: 256}})
		if err != nil {
			return err
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		hold := make(chan struct{})
		if err := s.HostFunc(func() { <-hold }); err != nil {
			return err
		}
		kept := h.Close(over)
		close(hold)
		if !errors.Is(kept, context.Canceled) {
			return fmt.Errorf("closing while the device works: %w", kept)
		}
		if err := errors.Join(put(), x.Post(s), x.Wait(ctx)); err != nil {
			return fmt.Errorf("of a heap that was kept: %w", err)
		}
		if err := errors.Join(s.Synchronize(ctx), m.Group().Barrier(ctx, "kept")); err != nil {
			return err
		}
		var copied, posted error
		b.device.idle = func() { copied, posted = put(), x.Post(s) }
		err = h.Close(ctx)
		b.device.idle = nil
		refused := errors.Is(copied, errs.ErrClosed) || errors.Is(copied, errs.ErrNotSymmetric)
		if err != nil || !refused || !errors.Is(posted, errs.ErrClosed) {
			return fmt.Errorf("closing the heap: %w; a copy meanwhile: %w; a transfer: %w", err, copied, posted)
		}
		return errors.Join(x.Close(), s.Close(), m.Close(ctx))
	})
}

// preparing is a sickly backend that can be stopped while it prepares a transfer.
type preparing struct {
	*sickly
	in *stopping
}

func (b *preparing) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.Block) (backend.PreparedTransfer, error) {
	b.in.here()
	return b.sickly.PrepareTransfer(op, peer, blocks)
}

// TestFreeWhilePreparing: memory of which the backend prepares a transfer is not given back meanwhile, and afterwards none is prepared.
func TestFreeWhilePreparing(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := newSickly(g)
		if err != nil {
			return err
		}
		b := &preparing{near, newStopping()}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			return backendtest.WithWindow(ctx, m, 100, func(w *memory.Window) error {
				src, err := m.Allocate(ctx, 100, "")
				if err != nil {
					return err
				}
				var x *memory.Transfer
				end := b.in.begin(func() error {
					var err error
					x, err = m.PrepareTransfer(backend.Write, 1-g.Rank(), []memory.TransferBlock{{Local: src.Ptr(), Window: w, Bytes: 100}})
					return err
				})
				short, cancel := context.WithTimeout(ctx, soon)
				defer cancel()
				freed := within(func() error { return m.Free(short, src) })
				if err := end(); err != nil {
					return err
				}
				if !errors.Is(freed, context.DeadlineExceeded) || !m.Holds(src) {
					return fmt.Errorf("freeing memory of which a transfer is being prepared: %w", freed)
				}
				return errors.Join(x.Close(), m.Free(ctx, src))
			})
		})
	}))
}

// TestSendThatCannotCopy: a send on the host device whose copy fails, or panics, makes the plan fail, and its peer gets no signal.
func TestSendThatCannotCopy(t *testing.T) {
	for i := range 4 {
		late, panics := i&1 != 0, i&2 != 0
		t.Run(fmt.Sprintf("computed=%t,panics=%t", late, panics), func(t *testing.T) {
			onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
				c, signals, err := planned(ctx, m)
				if err != nil {
					return err
				}
				g := m.Group()
				own, err := c.Peer(g.Rank())
				if err != nil {
					return err
				}
				put := memory.SendPut{Peer: 1 - g.Rank(), Offset: 2048, Local: own, Bytes: 8}
				send, err := signals.PrepareSend(0, put)
				if late {
					send, err = signals.PrepareComputedSend(0, nil, func() ([]memory.SendPut, error) { return []memory.SendPut{put}, nil })
				}
				if err != nil {
					return err
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				if g.Rank() == 0 {
					b.device.noBytes.Store(!panics)
					b.device.panics.Store(panics)
					err := errors.Join(send.Enqueue(s), s.Synchronize(ctx))
					b.device.noBytes.Store(false)
					b.device.panics.Store(false)
					if _, told := errors.AsType[*device.PanicError](err); told != panics || err != nil && !panics {
						return fmt.Errorf("the stream of the send: %w", err)
					}
				}
				err = errors.Join(signals.WaitAll(s, 0), s.Synchronize(ctx))
				if g.Rank() == 0 && !(panics && err != nil && strings.Contains(err.Error(), "panicked") || !panics && errors.Is(err, errBroken)) || g.Rank() != 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
					return fmt.Errorf("the plan's wait behind a send that could not copy: %w", err)
				}
				return errors.Join(g.Barrier(ctx, "told"), send.Close(), c.Close(ctx), signals.Close(), s.Close(), m.Close(ctx))
			})
		})
	}
}

// TestPreparingNothingClosed: the library is asked for nothing once the memory was closed, nor for memory that was freed while the call waited for its
// turn.
func TestPreparingNothingClosed(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &reducing{Backend: near}
		m := memory.New(b, g, nil)
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		let, end := underWay(ctx, m, "ends: freed while it waits", func() error { return m.Free(ctx, a) })
		prepared := make(chan error, 1)
		prepare := func() {
			_, err := m.PrepareAllReduce(ctx, "theirs", memory.Place{Window: w}, memory.Place{Window: w}, 25, 100, "f32", "sum")
			prepared <- err
		}
		if g.Rank() == 0 {
			go prepare()
			time.Sleep(soon) // it comes to where it waits
		}
		err = errors.Join(let(), end())
		if g.Rank() != 0 {
			prepare()
		}
		if late := <-prepared; !errors.Is(late, errs.ErrClosed) {
			err = errors.Join(err, fmt.Errorf("preparing with memory that was freed: %w", late))
		}
		err = errors.Join(err, m.Close(ctx))
		_, barrier := m.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, memory.LibraryCollective{Name: "theirs", Collective: "barrier"})
		if !errors.Is(barrier, errs.ErrClosed) || len(b.asked) != 0 {
			err = errors.Join(err, fmt.Errorf("preparing after closing, when the library was asked %d times: %w", len(b.asked), barrier))
		}
		return err
	}))
}

// TestLeakCalledWorkspace: what a program calls as the memory calls its own is the program's, and told of.
func TestLeakCalledWorkspace(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		var log bytes.Buffer
		m := memory.New(b, g, &memory.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		if _, err := m.Allocate(ctx, 100, "workspace"); err != nil {
			return err
		}
		if n := m.Allocations(); n != 1 {
			return fmt.Errorf("%d allocations", n)
		}
		if err := m.Close(ctx); err != nil {
			return err
		}
		if n := strings.Count(log.String(), "was not freed before close"); n != 1 {
			return fmt.Errorf("%d of 1 leaks are logged: %s", n, log.String())
		}
		return nil
	}))
}
