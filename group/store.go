package group

import (
	"context"
	"fmt"
	"time"
)

// Store is a group's map from keys to values, shared by its ranks. Every group has its own; it is gone when all ranks have
// closed the group. Keys are 1 to 4096 bytes, values at most [MaxBlob] bytes. Every call is atomic, blocks for one exchange
// with the rendezvous service, and is bounded by its context and by [Options].Timeout. None is collective. After a member was
// lost the store still answers, except that a Get that would have to wait ends with a [*PeerLostError].
type Store struct{ g *Group }

// Store gives the group's store.
func (g *Group) Store() *Store { return &Store{g: g} }

// Set stores value under key, over any value that was there.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.do(ctx, &storeRequest{verb: verbSet, key: key, value: value})
	return err
}

// Get gives the value under key, and blocks until there is one. The result is the caller's.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbGet, key: key})
	if err != nil {
		return nil, err
	}
	return append([]byte{}, r.value...), nil
}

// TryGet gives the value under key and whether there is one. The result is the caller's.
func (s *Store) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	r, err := s.do(ctx, &storeRequest{verb: verbTryGet, key: key})
	if err != nil || !r.found {
		return nil, false, err
	}
	return append([]byte{}, r.value...), true, nil
}

// Add adds delta to the decimal number under key and gives the sum; an absent key is 0. A value that is no number, or a sum
// that does not fit, is ErrInvalid and leaves the value as it was.
func (s *Store) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbAdd, key: key, delta: delta})
	if err != nil {
		return 0, err
	}
	return r.number, nil
}

// CompareAndSwap stores value under key if what is there equals old; a nil old means that nothing is there. It gives what is
// there after the call (nil if nothing) and whether it was swapped. The result is the caller's.
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

// Delete takes key out of the store and reports whether it was there.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.do(ctx, &storeRequest{verb: verbDelete, key: key})
	if err != nil {
		return false, err
	}
	return r.found, nil
}

func (s *Store) do(ctx context.Context, req *storeRequest) (*storeReply, error) {
	g, op := s.g, fmt.Sprintf("%v %q in the store of group %s", req.verb, clip(req.key), s.g.name)
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
	started := time.Now()
	req.id = g.session.requests.Add(1)
	reply := make(replyChan, 1)
	req.replyTo = reply
	g.session.transport.request(g.name, req)
	var r *storeReply
	select {
	case r = <-reply:
	case <-g.session.done:
	case <-g.over:
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
