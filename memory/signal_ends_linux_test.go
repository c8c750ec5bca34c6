package memory_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestSignalsThatAreRefused: a plan's signals are enqueued on streams of their device and on channels that there are, and not once they were closed, which
// they are once.
func TestSignalsThatAreRefused(t *testing.T) {
	nearAndFar(t, 2, func(ctx context.Context, g *group.Group, b backend.Backend) error {
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return signalsThatAreRefused(ctx, m) })
	})
}

func signalsThatAreRefused(ctx context.Context, m *memory.Memory) error {
	other, err := devhost.New(nil)
	if err != nil {
		return err
	}
	foreign, err := other.NewStream()
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	c, signals, err := planned(ctx, m)
	if err != nil {
		return err
	}
	send, err := signals.PrepareSend(0)
	if err != nil {
		return err
	}
	refused := func(want error, s device.Stream, channel int) (err error) {
		for call, got := range map[string]error{
			"SignalAll":     signals.SignalAll(s, channel),
			"WaitAll":       signals.WaitAll(s, channel),
			"WaitAllBeside": signals.WaitAllBeside(s, channel),
		} {
			if !errors.Is(got, want) {
				err = errors.Join(err, fmt.Errorf("%s on channel %d: %w, expected %w", call, channel, got, want))
			}
		}
		return err
	}
	err = errors.Join(refused(errs.ErrInvalid, s, -1), refused(errs.ErrInvalid, s, 1), refused(errs.ErrInvalid, nil, 0), refused(errs.ErrInvalid, foreign, 0))
	for _, stream := range []device.Stream{nil, foreign} {
		if got := send.Enqueue(stream); !errors.Is(got, errs.ErrInvalid) {
			err = errors.Join(err, fmt.Errorf("a send on another stream: %w", got))
		}
	}
	err = errors.Join(err, s.Synchronize(ctx), c.Close(ctx), signals.Close(), refused(errs.ErrClosed, s, 0))
	if got := send.Enqueue(s); !errors.Is(got, errs.ErrClosed) {
		err = errors.Join(err, fmt.Errorf("a send when the signals were closed: %w", got))
	}
	if _, got := signals.PrepareSend(0); !errors.Is(got, errs.ErrClosed) {
		err = errors.Join(err, fmt.Errorf("preparing a send when the signals were closed: %w", got))
	}
	if got := signals.Close(); !errors.Is(got, errs.ErrClosed) {
		err = errors.Join(err, fmt.Errorf("closing twice: %w", got))
	}
	return errors.Join(err, send.Close(), s.Close(), foreign.Close(), other.Close())
}

// TestChannelsThatDiffer: ranks with different settings of channels are told of that setting, with everybody's value.
func TestChannelsThatDiffer(t *testing.T) {
	nearAndFar(t, 2, func(ctx context.Context, g *group.Group, b backend.Backend) error {
		m := memory.New(b, g, &memory.Options{Channels: 7 + g.Rank()})
		err := backendtest.WithWindow(ctx, m, 100, nil)
		differ, ok := errors.AsType[*group.MismatchError](err)
		if !ok || !strings.Contains(err.Error(), "setting channels") || len(differ.Values) != 2 || !strings.Contains(differ.Values[0], "7") || !strings.Contains(differ.Values[1], "8") {
			err = fmt.Errorf("ranks with 7 and 8 channels: %w", err)
		} else {
			err = nil
		}
		return errors.Join(err, g.Barrier(ctx, "end"), m.Close(ctx))
	})
}
