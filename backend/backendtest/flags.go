package backendtest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
)

// flagger returns the backend's flags, if it has any. A backend that reaches no peer by pointers must.
func (r *rank) flagger(h Harness) (backend.Flagger, error) {
	f, ok := backend.FlaggerOf(r.Backend)
	if !ok && h.Unreachable {
		return nil, errors.New("no peer can be reached, by pointers or by flags")
	}
	if !ok {
		return nil, nil
	}
	return f, nil
}

// flagSet is flags with a store to each peer's word of this rank.
type flagSet struct {
	backend.Flags
	stores []backend.FlagStore // by rank; nil of the own
}

// flagSet makes flags with a word for each rank, and some more. Collective.
func (r *rank) flagSet(ctx context.Context, f backend.Flagger, count int) (*flagSet, error) {
	flags, err := f.NewFlags(ctx, count)
	if err != nil {
		return nil, err
	}
	s := &flagSet{Flags: flags, stores: make([]backend.FlagStore, r.group.Size())}
	if n := len(s.Words()); n != count {
		return nil, fmt.Errorf("%d flags were made, and there are %d", count, n)
	}
	for i := range s.Words() {
		if v := s.Words()[i].Load(); v != 0 {
			return nil, fmt.Errorf("word %d of new flags is %#x", i, v)
		}
	}
	// Before anybody writes, all have looked.
	if err := r.group.Barrier(ctx, "flags"); err != nil {
		return nil, err
	}
	for peer := range s.stores {
		if peer == r.group.Rank() {
			continue
		}
		if s.stores[peer], err = flags.PrepareStore(peer, r.group.Rank()); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// post writes a value to all peers, one write after the other.
func (s *flagSet) post(ctx context.Context, h Harness, value uint64) error {
	for _, store := range s.stores {
		if store == nil {
			continue
		}
		if err := store.Post(value); err != nil {
			return err
		}
		if err := h.await(ctx, "the end of a store", store.Poll); err != nil {
			return err
		}
	}
	return nil
}

// arrived waits until a value of a peer's has come.
func (s *flagSet) arrived(ctx context.Context, h Harness, peer int, value uint64) error {
	err := h.await(ctx, fmt.Sprintf("the value %#x", value), func() (bool, error) {
		s.Progress()
		return s.Words()[peer].Load() == value, nil
	})
	if err != nil {
		return fmt.Errorf("rank %d's word is %#x: %w", peer, s.Words()[peer].Load(), err)
	}
	return nil
}

// gone closes the stores and the flags, when all have come so far.
func (s *flagSet) gone(ctx context.Context, r *rank) error {
	err := r.group.Barrier(ctx, "flags are done")
	for _, store := range s.stores {
		if store != nil {
			err = errors.Join(err, store.Close())
		}
	}
	return errors.Join(err, r.group.Barrier(ctx, "stores are closed"), s.Close())
}

// flags: every rank's word arrives whole at all others', value after value, and nobody else's changes, in several sets at once.
func flags(ctx context.Context, h Harness, r *rank) error {
	f, err := r.flagger(h)
	if err != nil || f == nil {
		return err
	}
	size, me := r.group.Size(), r.group.Rank()
	var sets []*flagSet
	for i := range 4 {
		s, err := r.flagSet(ctx, f, size+100*i)
		if err != nil {
			return err
		}
		sets = append(sets, s)
	}
	value := func(set, rank, round int) uint64 {
		return 0x1122334400000000*uint64(round%3) + uint64(1000*set+100*rank+round+1)
	}
	for round := range 20 {
		for i, s := range sets {
			if err := s.post(ctx, h, value(i, me, round)); err != nil {
				return fmt.Errorf("set %d, round %d: %w", i, round, err)
			}
		}
		for i, s := range sets {
			for peer := range size {
				if peer == me {
					continue
				}
				if err := s.arrived(ctx, h, peer, value(i, peer, round)); err != nil {
					return fmt.Errorf("set %d, round %d: %w", i, round, err)
				}
			}
			for w := range s.Words() {
				if v := s.Words()[w].Load(); (w == me || w >= size) && v != 0 {
					return fmt.Errorf("set %d, round %d: word %d, which nobody writes, is %#x", i, round, w, v)
				}
			}
		}
		if err := r.group.Barrier(ctx, "round"); err != nil {
			return err
		}
	}
	for i, s := range slices.Backward(sets) {
		if err := s.gone(ctx, r); err != nil {
			return fmt.Errorf("closing set %d: %w", i, err)
		}
	}
	return nil
}

// flagsFollowData: who sees the value of a flag sees what was moved before it was posted.
func flagsFollowData(ctx context.Context, h Harness, r *rank) error {
	f, err := r.flagger(h)
	mover, moverErr := r.transferrer(h)
	size, me := r.group.Size(), r.group.Rank()
	if err := errors.Join(err, moverErr); err != nil || f == nil || mover == nil || size == 1 {
		return err
	}
	s, err := r.flagSet(ctx, f, size)
	if err != nil {
		return err
	}
	x, err := r.exchange(ctx, halfBytes)
	if err != nil {
		return err
	}
	next, before := (me+1)%size, (me+size-1)%size
	move, err := mover.PrepareTransfer(backend.Write, next, x.blocks(0, halfBytes))
	if err != nil {
		return err
	}
	for round := range 20 {
		if err := errors.Join(x.fill(round), r.group.Barrier(ctx, "filled")); err != nil {
			return err
		}
		if err := errors.Join(h.runTransfer(ctx, move), s.post(ctx, h, uint64(round+1))); err != nil {
			return err
		}
		if err := s.arrived(ctx, h, before, uint64(round+1)); err != nil {
			return err
		}
		if err := x.check(before, round); err != nil {
			return fmt.Errorf("behind a flag: %w", err)
		}
		if err := r.group.Barrier(ctx, "looked"); err != nil {
			return err
		}
	}
	return errors.Join(move.Close(), s.gone(ctx, r), x.done(ctx))
}
