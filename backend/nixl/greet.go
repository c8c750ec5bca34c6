package nixl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

const (
	// greetTimeout is how long it may take to reach a peer for the first time. UCX connects then, which takes some milliseconds between hosts.
	greetTimeout = 20 * time.Second
	// endTime is how long a rank waits after a failure, whatever its caller allows, until all have ended their writes: its own, and then the others.
	endTime = 5 * time.Second
	// greetPause is the time between two checks whether it was reached.
	greetPause = 50 * time.Microsecond
)

// greet makes every rank write a word of every other rank's memory through the library. Ranks that cannot reach each other then know it before
// anything depends on it, and the first transfer finds the connections made. Collective.
func (b *Backend) greet(ctx context.Context) error {
	size, me := b.group.Size(), b.group.Rank()
	f, err := b.newFlags(ctx, size)
	if err != nil {
		return err
	}
	within, cancel := context.WithTimeout(ctx, greetBound(ctx, b.patience))
	defer cancel()
	var writes []*flagStore
	for peer := range size {
		if peer == me {
			continue
		}
		w, prepared := f.PrepareStore(peer, me)
		if prepared == nil {
			prepared = w.Post(uint64(me) + 1)
			writes = append(writes, w.(*flagStore))
		}
		if err = prepared; err != nil {
			err = fmt.Errorf("reaching rank %d: %w", peer, err)
			break
		}
	}
	if err == nil {
		err = await(within, writes)
	}
	// No rank releases its words before all have written. The ranks vote when the time for reaching each other is over, too: that is what they are to hear.
	reached := b.group.Vote(ctx, "reaching each other", err)
	var own error
	for r := range f.Words() {
		if had := f.Words()[r].Load(); reached == nil && r != me && had != uint64(r)+1 {
			own = errors.Join(own, fmt.Errorf("rank %d wrote %d where %d was read: %w", r, r+1, had, errs.ErrUnsupported))
		}
	}
	for _, w := range writes {
		own = errors.Join(own, w.Close())
	}
	if reached == nil {
		own = errors.Join(own, f.Close())
	} else {
		b.node.keep(f) // this rank's writes from it, or peers' to it, may be under way
		var end context.CancelFunc
		ctx, end = context.WithTimeout(context.WithoutCancel(ctx), endTime) // it may have ended, and the others are to be waited for all the same
		defer end()
		_, failed := b.node.endStrays(ctx, strayTimeout)
		own = errors.Join(own, failed)
	}
	// What one rank finds now, the others must know: they would use a backend that it has not. After a failure no rank gives its words back before all have
	// ended their writes: between processes of one host UCX may write by addresses, and asks nobody whether anything is there.
	return errors.Join(reached, b.group.Vote(ctx, "having reached each other", own))
}

// greetBound returns how long greet may wait for the writes: less than the caller allows for all, because the ranks vote on it afterwards.
func greetBound(ctx context.Context, patience time.Duration) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(patience, time.Until(deadline)*3/4)
	}
	return patience
}

// await waits for the writes, all of which are under way.
func await(ctx context.Context, writes []*flagStore) error {
	for _, w := range writes {
		for {
			ended, err := w.Poll()
			if err == nil && !ended && ctx.Err() != nil {
				err = ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("rank %d was not reached; can its host be connected to, and do the UCX_ variables, if any is set, leave "+
					"a transport that goes there: %w", w.peer, err)
			}
			if ended {
				break
			}
			futex.Doze(greetPause)
		}
	}
	return nil
}
