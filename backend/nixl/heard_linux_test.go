package nixl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/memory"
)

// TestRendezvousHeardLate: a rank whose context ends before it hears of a step, behind which the ranks of its island meet in a group of theirs, comes to the end that all come to, and the
// next rendezvous works.
func TestRendezvousHeardLate(t *testing.T) {
	fakes := &network{}
	var armed atomic.Pointer[func()]
	fakes.fail = func(engine, call string) error {
		if call == "MetadataOf" && strings.HasPrefix(engine, "world-1-") {
			if last := armed.Swap(nil); last != nil {
				(*last)() // all that is left of the step is the exchange
			}
		}
		return nil
	}
	ended := make([]error, 3)
	withDeafRank(t, fakes, []string{"a", "b", "b"}, Options{NetDevices: []string{"lo"}}, func(ctx context.Context, r *deafRank) error {
		m := memory.New(r.Backend, r.group, nil)
		first, err := m.Allocate(ctx, 64, "")
		if err == nil {
			_, err = m.Rendezvous(ctx, first, memory.Record{})
		}
		if err != nil {
			return err
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if r.number == 1 {
			late := func() {
				r.last()
				time.AfterFunc(deafFor+1300*time.Millisecond, r.hear) // later than a rank that has given up waits for most answers
			}
			armed.Store(&late)
		}
		if err := r.group.Barrier(ctx, "armed"); err != nil {
			return err
		}
		_, ended[r.number] = m.Rendezvous(r.within, a, memory.Record{})
		if err := r.group.Barrier(ctx, "ended"); err != nil {
			return fmt.Errorf("the ranks are not in step: %w", errors.Join(err, ended[r.number]))
		}
		if _, err = m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return fmt.Errorf("the next rendezvous: %w", err)
		}
		return errors.Join(m.Close(ctx), r.group.Close(ctx), r.device.Close())
	})
	for rank, err := range ended {
		if (err == nil) != (ended[0] == nil) {
			t.Errorf("rank 0 has %v, and rank %d %v", ended[0], rank, err)
		}
	}
}
