package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// streamsOf returns n streams, and what closes them.
func streamsOf(d device.Device, n int) (streams []device.Stream, closeAll func() error, err error) {
	for range n {
		s, e := d.NewStream()
		if e != nil {
			err = errors.Join(err, e)
			continue
		}
		streams = append(streams, s)
	}
	return streams, func() error {
		var err error
		for _, s := range streams {
			err = errors.Join(err, s.Close())
		}
		return err
	}, err
}

// record records one run.
func record(s device.Stream, p backend.PreparedAllReduce) (device.Graph, error) {
	if err := s.BeginCapture(); err != nil {
		return nil, err
	}
	err := p.Enqueue(s)
	g, e := s.EndCapture()
	return g, errors.Join(err, e)
}

// tells wants the next Synchronize of a stream to say text, and the one after that nothing.
func tells(ctx context.Context, what string, s device.Stream, text string) error {
	if err := s.Synchronize(ctx); err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "all-reduce was ended") {
		return fmt.Errorf("%s: said %w", what, err)
	}
	if err := s.Synchronize(ctx); err != nil {
		return fmt.Errorf("%s, once more: %w", what, err)
	}
	return nil
}

// silent wants a stream to say nothing.
func silent(ctx context.Context, what string, s device.Stream) error {
	if err := s.Synchronize(ctx); err != nil {
		return fmt.Errorf("%s: said %w", what, err)
	}
	return nil
}

// onOne runs f with a prepared all-reduce of the form on a machine of one rank.
func onOne(t *testing.T, form string, f func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error) {
	t.Helper()
	m := newMachine(1)
	m.version = endableKernels
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				in := memory.Place{Window: w}
				return f(ctx, m, b, func() (backend.PreparedAllReduce, error) {
					return mem.PrepareAllReduce(ctx, form, in, in, 10, 40, "f32", "sum")
				})
			})
		})
	}))
	m.requireClean(t)
}

// reports lets NCCL report an error of the form's communicator, and waits until it is given up.
func reports(ctx context.Context, m *machine, red *reducer, r nccl.Result) error {
	m.set(func() { m.comms[red.comm.Handle()].result = r })
	for red.comm.Handle() != 0 {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("nobody gave it up: %w", err)
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// TestLostRankIsNamed: NCCL learns from its sockets that some rank is gone before the group knows which. The stream that waits for it names that rank all the same.
func TestLostRankIsNamed(t *testing.T) {
	m := newMachine(2)
	m.version = endableKernels
	var reported atomic.Bool
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				in := memory.Place{Window: w}
				p, err := mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
				if err != nil {
					return err
				}
				if err := g.Barrier(ctx, "prepared"); err != nil {
					return err
				}
				if g.Rank() == 1 {
					for !reported.Load() && ctx.Err() == nil {
						time.Sleep(time.Millisecond)
					}
					time.Sleep(checkEvery + 150*time.Millisecond) // NCCL has been asked meanwhile
					g.Abort("the test takes it away")
					return nil
				}
				s, err := b.device.NewStream()
				if err != nil {
					return err
				}
				m.set(func() { m.holds = true })
				if err := p.Enqueue(s); err != nil {
					return err
				}
				m.set(func() { m.comms[b.reducers[plainForm].comm.Handle()].result = nccl.RemoteError })
				reported.Store(true)
				ended := s.Synchronize(ctx)
				m.set(func() { m.holds = false })
				if lost, ok := errors.AsType[*group.PeerLostError](ended); !ok || lost.Rank != 1 {
					return fmt.Errorf("the stream does not name the rank: %w", ended)
				}
				return s.Close()
			})
		})
	})
	for rank, err := range failed {
		if rank == 0 && err != nil {
			require.ErrorIs(t, err, errs.ErrPeerLost) // of closing
			require.NotContains(t, err.Error(), "does not name")
		}
	}
}

// TestEveryStreamTells: when a communicator is given up, every stream says so that had a run on it, eager or in a graph, once, and no
// other; and all goes on with the next plan, whose end they tell as well.
func TestEveryStreamTells(t *testing.T) {
	for _, form := range []string{plainForm, symmetricForm} {
		t.Run(form, func(t *testing.T) {
			onOne(t, form, func(ctx context.Context, m *machine, b *Backend,
				prepare func() (backend.PreparedAllReduce, error)) error {
				s, closeAll, err := streamsOf(b.device, 6)
				if err != nil {
					return err
				}
				for _, fault := range []nccl.Result{nccl.SystemError, nccl.RemoteError} {
					p, err := prepare()
					if err != nil {
						return err
					}
					// 0 and 1 have runs; 2 and 3 launch a graph that 4 has recorded; 5 had a run that ended.
					if err := errors.Join(p.Enqueue(s[5]), s[5].Synchronize(ctx)); err != nil {
						return err
					}
					m.set(func() { m.holds = true })
					graph, err := record(s[4], p)
					if err = errors.Join(err, p.Enqueue(s[0]), p.Enqueue(s[1]), p.Enqueue(s[1]), graph.Launch(s[2]), graph.Launch(s[3])); err != nil {
						return err
					}
					if idle, err := s[1].Query(); idle || err != nil {
						return fmt.Errorf("the run has ended: %w", err)
					}
					if err := reports(ctx, m, b.reducers[form], fault); err != nil {
						return err
					}
					text := fault.String()
					if err := errors.Join(
						tells(ctx, "eager", s[0], text), tells(ctx, "eager, twice", s[1], text), tells(ctx, "graph", s[2], text),
						tells(ctx, "graph on another stream", s[3], text),
						silent(ctx, "the stream that only recorded", s[4]), silent(ctx, "the stream whose run had ended", s[5]),
					); err != nil {
						return err
					}
					// What is launched of it afterwards is given up as well; what is enqueued is refused.
					if err := errors.Join(graph.Launch(s[2]), tells(ctx, "graph, launched again", s[2], text)); err != nil {
						return err
					}
					if err := p.Enqueue(s[5]); !errors.Is(err, errs.ErrClosed) || !strings.Contains(err.Error(), text) {
						return fmt.Errorf("a run afterwards: %w", err)
					}
					m.set(func() { m.holds = false })
					next, err := prepare()
					if err != nil {
						return fmt.Errorf("the next plan: %w", err)
					}
					for i, one := range s {
						if err := errors.Join(next.Enqueue(one), silent(ctx, fmt.Sprint("a new run on stream ", i), one)); err != nil {
							return err
						}
					}
					if err := graph.Close(); err != nil {
						return err
					}
				}
				return closeAll()
			})
		})
	}
}

// TestCloseTells: a stream that is closed says what it was not asked for, also behind the backend's end.
func TestCloseTells(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, _, err := streamsOf(b.device, 2)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err != nil {
			return err
		}
		m.set(func() { m.holds = true })
		if err := errors.Join(p.Enqueue(s[0]), p.Enqueue(s[1]), reports(ctx, m, b.reducers[plainForm], nccl.SystemError)); err != nil {
			return err
		}
		if err := s[0].Close(); err == nil || !strings.Contains(err.Error(), "ncclSystemError") {
			return fmt.Errorf("closing the stream: %w", err)
		}
		if err := b.closeReducers(ctx); err != nil {
			return err
		}
		return errors.Join(tells(ctx, "behind the end of the words", s[1], "ncclSystemError"), s[1].Close())
	})
}

// TestOnlyThisForm: the end of one form's communicator is nothing to the streams of the other.
func TestOnlyThisForm(t *testing.T) {
	m := newMachine(1)
	m.version = endableKernels
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				in := memory.Place{Window: w}
				plain, err := mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
				if err != nil {
					return err
				}
				symmetric, err := mem.PrepareAllReduce(ctx, symmetricForm, in, in, 10, 40, "f32", "sum")
				if err != nil {
					return err
				}
				s, closeAll, err := streamsOf(b.device, 2)
				if err != nil {
					return err
				}
				if err := errors.Join(plain.Enqueue(s[0]), symmetric.Enqueue(s[1]),
					reports(ctx, m, b.reducers[plainForm], nccl.SystemError)); err != nil {
					return err
				}
				return errors.Join(tells(ctx, "plain", s[0], "ncclSystemError"), silent(ctx, "symmetric", s[1]),
					symmetric.Enqueue(s[1]), silent(ctx, "symmetric, afterwards", s[1]), closeAll())
			})
		})
	}))
	m.requireClean(t)
}

// TestNobodyToTell: the end of a communicator that had no run is no stream's news.
func TestNobodyToTell(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, closeAll, err := streamsOf(b.device, 1)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err != nil {
			return err
		}
		if err := reports(ctx, m, b.reducers[plainForm], nccl.SystemError); err != nil {
			return err
		}
		if err := p.Enqueue(s[0]); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a run of what was given up: %w", err)
		}
		_, err = prepare()
		return errors.Join(err, silent(ctx, "a stream without a run", s[0]), closeAll())
	})
}

// TestSynchronizeMeanwhile: a Synchronize that comes while a run is being enqueued, and finds the stream idle, does not make the stream
// forget that run.
func TestSynchronizeMeanwhile(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, closeAll, err := streamsOf(b.device, 1)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err != nil {
			return err
		}
		meanwhile := errors.New("not called")
		m.set(func() {
			m.holds = true
			m.inReduce = func() {
				done := make(chan error)
				go func() { done <- s[0].Synchronize(ctx) }()
				meanwhile = <-done
			}
		})
		if err := errors.Join(p.Enqueue(s[0]), meanwhile); err != nil {
			return err
		}
		return errors.Join(reports(ctx, m, b.reducers[plainForm], nccl.SystemError), tells(ctx, "the run", s[0], "ncclSystemError"), closeAll())
	})
}

// TestToldBeforeItEnds: a stream that finds its run ended, because the communicator is being aborted, knows why already.
func TestToldBeforeItEnds(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, closeAll, err := streamsOf(b.device, 1)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err != nil {
			return err
		}
		said := make(chan error, 1)
		m.set(func() {
			m.holds = true
			m.afterAbort = func() { said <- tells(ctx, "the run", s[0], "ncclSystemError") }
		})
		if err := errors.Join(p.Enqueue(s[0]), reports(ctx, m, b.reducers[plainForm], nccl.SystemError)); err != nil {
			return err
		}
		err = <-said
		m.set(func() { m.afterAbort = nil })
		return errors.Join(err, closeAll())
	})
}

// TestClosedStream: a stream that was closed is not NCCL's default one.
func TestClosedStream(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, closeAll, err := streamsOf(b.device, 1)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err := errors.Join(err, closeAll()); err != nil {
			return err
		}
		if err := p.Enqueue(s[0]); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("on a closed stream: %w", err)
		}
		return nil
	})
}

// TestGivenUpMeanwhile: a run that is given up while it is being enqueued is told, whether it came onto the stream or not, and also if it
// is asked for before the call returns.
func TestGivenUpMeanwhile(t *testing.T) {
	onOne(t, plainForm, func(ctx context.Context, m *machine, b *Backend, prepare func() (backend.PreparedAllReduce, error)) error {
		s, closeAll, err := streamsOf(b.device, 2)
		if err != nil {
			return err
		}
		p, err := prepare()
		if err := errors.Join(err, p.Enqueue(s[1]), s[1].Synchronize(ctx)); err != nil {
			return err
		}
		red := b.reducers[plainForm]
		var asked error
		m.set(func() {
			m.inReduce = func() {
				red.tell(errors.New("a fault"))
				done := make(chan error)
				go func() { done <- s[0].Synchronize(ctx) }()
				asked = <-done
			}
		})
		if err := p.Enqueue(s[0]); err != nil {
			return err
		}
		if asked == nil || !strings.Contains(asked.Error(), "a fault") {
			return fmt.Errorf("asked meanwhile: %w", asked)
		}
		return errors.Join(tells(ctx, "the run", s[0], "a fault"), silent(ctx, "the run that had ended", s[1]), closeAll())
	})
}

// TestAbortsDoNotWaitForEachOther: NCCL's abort waits until the GPU has no work left, so also for kernels of other communicators. Where two of them wait for a rank that
// is gone both are aborted at once, whether the group or NCCL says so, and both streams tell.
func TestAbortsDoNotWaitForEachOther(t *testing.T) {
	for _, teller := range []string{"group", "NCCL"} {
		t.Run(teller, func(t *testing.T) {
			m := newMachine(2)
			m.version = endableKernels
			var inTime atomic.Bool
			inTime.Store(true)
			failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
					return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
						in := memory.Place{Window: w}
						forms := []string{plainForm, symmetricForm}
						var plans []backend.PreparedAllReduce
						for _, form := range forms {
							p, err := mem.PrepareAllReduce(ctx, form, in, in, 10, 40, "f32", "sum")
							if err != nil {
								return err
							}
							plans = append(plans, p)
						}
						if err := g.Barrier(ctx, "prepared"); err != nil {
							return err
						}
						if g.Rank() == 1 {
							select {
							case <-g.Lost():
							case <-ctx.Done():
							}
							return nil
						}
						streams, closeAll, err := streamsOf(b.device, len(plans))
						if err != nil {
							return err
						}
						began := m.aborted
						m.set(func() {
							m.holds = true
							m.afterAbort = func() {
								for stop := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
									both := false
									m.set(func() { both = m.aborted-began >= 2*len(plans) }) // on both ranks
									if both {
										return
									}
									if time.Now().After(stop) {
										inTime.Store(false)
										return
									}
								}
							}
						})
						for i, p := range plans {
							if err := p.Enqueue(streams[i]); err != nil {
								return err
							}
						}
						if teller == "group" {
							g.Abort("the test takes a rank away")
						} else {
							m.set(func() {
								for _, form := range forms {
									m.comms[b.reducers[form].comm.Handle()].result = nccl.SystemError
								}
							})
						}
						for i, s := range streams {
							if s.Synchronize(ctx) == nil {
								err = errors.Join(err, fmt.Errorf("the stream of %s tells nothing", forms[i]))
							}
						}
						m.set(func() { m.holds, m.afterAbort = false, nil })
						g.Abort("the end")
						return errors.Join(err, closeAll())
					})
				})
			})
			require.True(t, inTime.Load(), "one abort waited for another")
			require.NotContains(t, fmt.Sprint(failed), "tells nothing")
		})
	}
}

// TestEveryStreamTellsOfALoss on each rank that remains: of the rank that was lost.
func TestEveryStreamTellsOfALoss(t *testing.T) {
	for _, form := range []string{plainForm, symmetricForm} {
		for _, version := range []nccl.Version{22809, endableKernels} {
			if form == symmetricForm && version < endableKernels {
				continue // its kernels go on waiting
			}
			m := newMachine(3)
			m.version = version
			failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
				b, err := New(ctx, g, m.plain(g.Rank()))
				if err != nil {
					return err
				}
				mem := memory.New(b, g, &memory.Options{Channels: 2})
				err = backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
					in := memory.Place{Window: w}
					p, err := mem.PrepareAllReduce(ctx, form, in, in, 10, 40, "f32", "sum")
					if err := g.Vote(ctx, "plan", err); err != nil {
						return err
					}
					s, closeAll, err := streamsOf(b.device, 4)
					if err != nil {
						return err
					}
					m.set(func() { m.holds = true })
					graph, err := record(s[0], p)
					if err := errors.Join(err, p.Enqueue(s[1]), p.Enqueue(s[2]), graph.Launch(s[3]), g.Barrier(ctx, "enqueued")); err != nil {
						return err
					}
					if g.Rank() == 1 {
						g.Abort("it had enough")
					}
					for i := 1; i < 4; i++ {
						if e := s[i].Synchronize(ctx); !errors.Is(e, errs.ErrPeerLost) {
							err = errors.Join(err, fmt.Errorf("stream %d: %w", i, e))
						}
						err = errors.Join(err, s[i].Synchronize(ctx))
					}
					return errors.Join(err, graph.Close(), closeAll())
				})
				if e := mem.Close(ctx); e != nil && !errors.Is(e, errs.ErrPeerLost) {
					err = errors.Join(err, e)
				}
				return err
			})
			for r, err := range failed {
				if err != nil { // freeing the window among the others, who are told of the loss
					require.ErrorIs(t, err, errs.ErrPeerLost, "rank %d", r)
				}
				require.NotContains(t, fmt.Sprint(err), "stream ", "rank %d", r)
			}
		}
	}
}
