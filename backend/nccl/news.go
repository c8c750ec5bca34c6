package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// A call of NCCL's that takes all ranks does not end on the others when it fails on one. So the rank on which it fails leaves word in the group's
// store. The others look there when the call takes longer than such calls do, and give it up.

// newsAfter is how long a call may take before a rank looks whether it has failed on another one.
const newsAfter = 100 * time.Millisecond

// news is the word that a rank leaves.
type news struct {
	Rank       int
	Text       string   // of its error
	Conditions []uint32 // what the error is, in the codes of package errs
}

// failure is the error of a call that was given up because it has failed on another rank, with the same conditions as the error there.
func (n news) failure(what string) error {
	return &group.VoteError{Op: what, Failures: []group.RankFailure{{Rank: n.Rank, Text: n.Text, Conditions: errs.Conditions(n.Conditions)}}}
}

// together returns a context for one call of NCCL's that takes all ranks: it ends as that of bounded does, and when the call has failed on another
// rank. end must be called with what has come of the call here. It tells the others if the call has failed on this rank first, or its caller waits no longer, and returns the error
// with the reason, if that is known. All ranks make these calls in the same order.
func (b *Backend) together(ctx context.Context, what string) (within context.Context, end func(error) error) {
	b.lending.begin(ctx)
	key := b.key(what)
	if key == "" {
		within, cancel := b.bounded(ctx)
		return within, func(err error) error { cancel(); b.lending.end(); return b.explain(ctx, err) }
	}
	within, fail, release := b.bound(ctx)
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		wait := time.NewTimer(newsAfter)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-within.Done():
			return
		}
		if word, ok := b.listen(within, key); ok {
			fail(word.failure(what))
		}
	}()
	return within, func(err error) error {
		first := err != nil && (within.Err() == nil || ctx.Err() != nil) // or the caller waits no longer, whom the others do not know of
		release()
		b.lending.end()
		<-heard
		if peer, ok := errors.AsType[*group.VoteError](err); ok {
			b.log.Debug("a call of NCCL's was given up", "error", err)
			err = peer
		}
		if err = b.explain(ctx, err); first {
			b.spread(ctx, key, err)
		}
		return err
	}
}

// key returns where a rank leaves word of the next thing that takes all ranks, which all count in the same order; "" in a group of one rank.
func (b *Backend) key(what string) string {
	n := b.calls.Add(1)
	if b.group.Size() == 1 {
		return ""
	}
	return fmt.Sprintf("%s/%s/%d/%s", Name, b.topic, n, what)
}

// listen waits for the word under key.
func (b *Backend) listen(ctx context.Context, key string) (word news, ok bool) {
	for {
		raw, err := b.group.Store().Get(ctx, key)
		if err == nil {
			err = json.Unmarshal(raw, &word)
			return word, err == nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) { // the latter is the store's own
			return word, false
		}
	}
}

// spread leaves word that a call has failed, unless another rank has.
func (b *Backend) spread(ctx context.Context, key string, failure error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(b.timeout, awaitTime))
	defer cancel()
	raw, err := json.Marshal(news{b.group.Rank(), errs.Text(failure), errs.Codes(failure)})
	if err == nil {
		_, _, err = b.group.Store().CompareAndSwap(ctx, key, nil, raw)
	}
	b.mu.Lock()
	b.spreads = append(b.spreads, key)
	b.mu.Unlock()
	if err != nil {
		b.log.Warn("telling the other ranks of a failure failed, and they wait for their own deadline", "failure", failure, "error", err)
	}
}

// closeNews takes back the words that this rank has left. Whoever has not heard them by now waits for this rank elsewhere.
func (b *Backend) closeNews(ctx context.Context) {
	b.mu.Lock()
	keys := b.spreads
	b.spreads = nil
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(b.timeout, awaitTime))
	defer cancel()
	for _, key := range keys {
		if _, err := b.group.Store().Delete(ctx, key); err != nil {
			b.log.Debug("taking back what was told", "error", err)
			return // the group takes it along
		}
	}
}
