package group

import (
	"context"
	"fmt"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// Store is a group's map from keys to values, shared by its ranks. Every group has its own, which is gone when all ranks have closed the
// group. Keys are 1 to 4096 bytes, values at most [MaxBlob] bytes. Every call is atomic, blocks for one exchange with the rendezvous
// service, and is bounded by its context and by [Options].Timeout. None is collective. A Store is safe for use by several goroutines.
//
// Every call may fail with ErrInvalid (the size of a key or value), ErrClosed (the group was closed), a [*QuotaError] (the job stores too
// much, or this rank has too many requests under way), a [*PeerLostError] (the service is lost), or the error of the context that ended.
// After another member was lost the store still answers, but a Get that would have to wait ends with a [*PeerLostError].
type Store struct{ g *Group }

// Store returns the group's store.
func (g *Group) Store() *Store { return &Store{g: g} }

// Set stores value under key, and replaces any value that was there.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.do(ctx, &storeRequest{verb: verbSet, key: key, value: value})
	return err
}

// Get blocks until there is a value under key, and returns it. The result is the caller's.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbGet, key: key})
	if err != nil {
		return nil, err
	}
	return append([]byte{}, r.value...), nil
}

// TryGet returns the value under key and whether there is one. The result is the caller's.
func (s *Store) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	r, err := s.do(ctx, &storeRequest{verb: verbTryGet, key: key})
	if err != nil || !r.found {
		return nil, false, err
	}
	return append([]byte{}, r.value...), true, nil
}

// Add adds delta to the decimal number under key and returns the sum; an absent key is 0. If the value is no number, or the sum does not
// fit into 64 bits, it returns ErrInvalid and leaves the value as it was.
func (s *Store) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbAdd, key: key, delta: delta})
	if err != nil {
		return 0, err
	}
	return r.number, nil
}

// CompareAndSwap stores value under key if what is there equals old; a nil old means that nothing is there. It returns what is there after
// the call, nil if nothing is, and whether it swapped. The result is the caller's.
func (s *Store) CompareAndSwap(ctx context.Context, key string, old, value []byte) (current []byte, swapped bool, err error) {
	r, err := s.do(ctx, &storeRequest{verb: verbCompareAndSwap, key: key, old: old, hasOld: old != nil, value: value})
	if err != nil {
		return nil, false, err
	}
	if r.found {
		current = append([]byte{}, r.value...)
	}
	return current, r.swapped, nil
}

// Delete removes key from the store and reports whether it was there.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbDelete, key: key})
	if err != nil {
		return false, err
	}
	return r.found, nil
}

func (s *Store) do(ctx context.Context, req *storeRequest) (*storeReply, error) {
	if s == nil || s.g.made("Store") != nil {
		return nil, invalid(fmt.Sprint(req.verb), "store", "the zero Store", "one that Group.Store gave")
	}
	g, op := s.g, fmt.Sprintf("%v %q in the store of group %s", req.verb, clip(req.key), s.g.name)
	if err := errs.Given(op, "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	switch {
	case req.key == "" || len(req.key) > maxText:
		return nil, invalid(op, "len(key)", len(req.key), fmt.Sprintf("1 to %d bytes", maxText))
	case len(req.value) > MaxBlob || len(req.old) > MaxBlob:
		return nil, invalid(op, "len(value)", max(len(req.value), len(req.old)), fmt.Sprintf("at most %d bytes", MaxBlob))
	}
	if g.isEnded() {
		return nil, fmt.Errorf("%s: %w", op, g.Err())
	}
	ctx, cancel := context.WithTimeout(ctx, g.session.timeout)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	select {
	case <-g.session.done: // the request would be queued for nobody
		return nil, fmt.Errorf("%s: %w", op, g.Err())
	default:
	}
	started := time.Now()
	req.id = g.session.requests.Add(1)
	reply := make(replyChan, 1)
	req.replyTo = reply
	g.session.transport.request(g.name, req)
	var r *storeReply
	select {
	case r = <-reply:
	case <-g.session.done:
	case <-g.over: // the service drops a Get of a rank that has left, and answers nothing
		g.session.transport.cancelGet(g.name, req.key, req.id)
	case <-ctx.Done():
		g.session.transport.cancelGet(g.name, req.key, req.id)
	}
	if r == nil {
		select { // an answer that has come is better than the news that none will
		case r = <-reply:
		default:
		}
	}
	switch {
	case r == nil && ctx.Err() != nil:
		waited := time.Since(started).Round(time.Millisecond)
		if req.verb == verbGet {
			return nil, fmt.Errorf("%s: nobody has set it after %v: %w", op, waited, ctx.Err())
		}
		return nil, fmt.Errorf("%s: no answer from the rendezvous service after %v: %w", op, waited, ctx.Err())
	case r == nil:
		return nil, fmt.Errorf("%s: %w", op, g.Err())
	case r.failure != nil:
		if err := g.failureError(op, r.failure); r.failure.kind == failQuota {
			return nil, err
		}
		return nil, fmt.Errorf("%s: %w", op, g.failureError(op, r.failure))
	}
	return r, nil
}
