package native

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// onMessage is a logger's handler that calls then at each message that begins with text.
type onMessage struct {
	slog.Handler
	text string
	then func()
}

func (h onMessage) Enabled(context.Context, slog.Level) bool { return true }
func (h onMessage) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h onMessage) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, h.text) {
		h.then()
	}
	return nil
}

// TestMulticastGivenUp: that the creator's time was over while multicast was not ready says nothing about multicast: it may be asked for again.
func TestMulticastGivenUp(t *testing.T) {
	old := notReadyPauses
	notReadyPauses = []time.Duration{time.Millisecond, time.Millisecond}
	t.Cleanup(func() { notReadyPauses = old })
	m := newMachine(2)
	m.multicast = 1
	var unready atomic.Bool
	m.fail = func(c string, gpu, _ int) cu.Result {
		if c == "cuMulticastBindMem" && gpu == creator && unready.CompareAndSwap(true, false) {
			return cu.SystemNotReady
		}
		return cu.Success
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		var giveUp context.CancelFunc
		o := m.plain(g.Rank())
		o.Multicast = "auto"
		if g.Rank() == creator {
			o.Logger = slog.New(onMessage{slog.DiscardHandler, "multicast is not ready", func() {
				time.Sleep(10 * time.Millisecond) // the other rank is mostly waiting in the next step then
				giveUp()
			}})
		}
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, granule, func(w *memory.Window) error {
				for range 8 { // what of it the rank hears before it finds that its time is over is chance
					within, cancel := context.WithCancel(ctx)
					defer cancel()
					if giveUp = cancel; g.Rank() == creator {
						unready.Store(true)
					}
					if err := g.Barrier(ctx, "not ready"); err != nil {
						return err
					}
					err := mem.EnableMulticast(within, w, nil)
					if err == nil || errors.Is(err, errs.ErrUnsupported) || errors.Is(err, context.Canceled) != (g.Rank() == creator) {
						g.Abort("the test has failed") // the other may be waiting
						return fmt.Errorf("given up: %w", err)
					}
					if c := b.Capabilities(); !c.Multicast {
						return fmt.Errorf("the capabilities are %+v", c)
					}
				}
				return mem.EnableMulticast(ctx, w, nil)
			})
		})
	}))
	assert.Empty(t, m.left())
	assert.Zero(t, m.live, "multicast objects")
}
