package group

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/symmem/symmem/internal/errs"
)

// exchangePipes gives every rank the writing end of every other rank's pipe, writes through all of them and reads its own.
func exchangePipes(ctx context.Context, g *Group) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	files, err := g.ExchangeFile(ctx, "pipes", w)
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	for rank, f := range files {
		if (f == nil) != (rank == g.Rank()) {
			return fmt.Errorf("file of rank %d: %v", rank, f)
		}
		if f != nil {
			if _, err := fmt.Fprintf(f, "%d>%d ", g.Rank(), rank); err != nil {
				return err
			}
			if err := f.Close(); err != nil {
				return err
			}
		}
	}
	text, err := io.ReadAll(r) // it ends when all writing ends are closed
	if err != nil {
		return err
	}
	if want := (g.Size() - 1) * len("0>0 "); len(text) != want {
		return fmt.Errorf("read %q, which is not %d bytes", text, want)
	}
	return nil
}

func TestExchangeFile(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for range 3 {
			requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
		}
		for rank, err := range onAll(groups, func(g *Group) error {
			var f *os.File
			if g.Rank() != 1 {
				f = os.Stdin
			}
			_, err := g.ExchangeFile(ctx, "one has none", f)
			return err
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, 1, vote.Failures[0].Rank)
			require.ErrorIs(t, err, ErrInvalid)
			require.Equal(t, rank == 1, errors.As(err, new(*errs.ArgumentError)))
		}
		for rank, err := range onAll(groups, func(g *Group) error {
			f, err := os.Open(os.DevNull)
			if err == nil && g.Rank() == 2 {
				err = f.Close()
			} else {
				defer f.Close()
			}
			if err != nil {
				return err
			}
			_, err = g.ExchangeFile(ctx, "one is closed", f)
			return err
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, 2, vote.Failures[0].Rank)
			require.Equal(t, rank == 2, errors.Is(err, os.ErrClosed))
		}
	})
}

func TestBroadcastFile(t *testing.T) {
	refusal := errors.New("no memory to share")
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		requireNone(t, onAll(groups, func(g *Group) error {
			var own *os.File
			if g.Rank() == 1 {
				var err error
				if own, err = os.CreateTemp(t.TempDir(), "shared"); err != nil {
					return err
				}
				defer own.Close()
				if _, err := own.WriteString("hello"); err != nil {
					return err
				}
			}
			f, err := g.BroadcastFile(ctx, "file", 1, own, nil)
			if err != nil {
				return err
			}
			if (f == nil) != (g.Rank() == 1) {
				return fmt.Errorf("rank %d got %v", g.Rank(), f)
			}
			if f != nil {
				defer f.Close()
				b := make([]byte, 5)
				if _, err := f.ReadAt(b, 0); err != nil || string(b) != "hello" {
					return fmt.Errorf("read %q: %w", b, err)
				}
			}
			return nil
		}))
		for rank, err := range onAll(groups, func(g *Group) error {
			_, err := g.BroadcastFile(ctx, "refused", 2, nil, refusal)
			return err
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, []RankFailure{{Rank: 2, Text: refusal.Error()}}, vote.Failures)
			require.Equal(t, rank == 2, errors.Is(err, refusal))
		}
		for _, err := range onAll(groups, func(g *Group) error {
			_, err := g.BroadcastFile(ctx, "who", g.Rank()%2, os.Stdin, nil)
			return err
		}) {
			require.ErrorIs(t, err, ErrMismatch)
		}
		for _, err := range onAll(groups, func(g *Group) error {
			_, err := g.BroadcastFile(ctx, "outside", 3, os.Stdin, nil)
			return err
		}) {
			require.ErrorIs(t, err, ErrInvalid)
		}
		requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
	})
}

func TestFilesBetweenHosts(t *testing.T) {
	groups := newLocal(t, 3, &LocalOptions{BootIDs: []string{"a", "a", "b"}})
	ctx := testContext(t)
	for _, err := range onAll(groups, func(g *Group) error {
		_, err := g.ExchangeFile(ctx, "far", os.Stdin)
		return err
	}) {
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "rank 0: rank 2:")
	}
	requireNone(t, onAll(groups[:2], func(g *Group) error {
		near, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		return errors.Join(exchangePipes(ctx, near), near.Close(ctx))
	}))
}
