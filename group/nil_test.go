package group

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// TestNilContext: a nil context is an argument that is refused. In a collective call the others are told at once, and the next one is in step.
func TestNilContext(t *testing.T) {
	var none context.Context
	refused := func(what string, err error) error {
		if a, ok := errors.AsType[*errs.ArgumentError](err); !ok || a.Arg != "ctx" {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	_, err := Join(none, nil)
	require.NoError(t, refused("Join", err))
	require.NoError(t, refused("Serve", Serve(none, &Options{WorldSize: 1, Addr: "127.0.0.1:0"})))
	eachKind(t, 2, func(t *testing.T, groups []*Group) {
		requireNone(t, onAll(groups, func(g *Group) error {
			ctx := testContext(t)
			for name, call := range map[string]func(ctx context.Context) error{
				"Set":     func(ctx context.Context) error { return g.Store().Set(ctx, "k", nil) },
				"Get":     func(ctx context.Context) error { _, err := g.Store().Get(ctx, "k"); return err },
				"Close":   g.Close,
				"Islands": func(ctx context.Context) error { _, err := g.Islands(ctx); return err },
			} {
				if err := refused(name, call(none)); err != nil {
					return err
				}
			}
			for _, c := range []struct {
				name string
				call func(ctx context.Context) error
			}{
				{"Barrier", func(ctx context.Context) error { return g.Barrier(ctx, "b") }},
				{"Vote", func(ctx context.Context) error { return g.Vote(ctx, "v", nil) }},
				{"AllGather", func(ctx context.Context) error { _, err := g.AllGather(ctx, "a", nil); return err }},
				{"Sub", func(ctx context.Context) error {
					s, err := g.Sub(ctx, []int{0, 1})
					if err == nil {
						err = errors.Join(s.Barrier(ctx, "s"), s.Close(ctx))
					}
					return err
				}},
				{"Broadcast", func(ctx context.Context) error { _, err := g.Broadcast(ctx, "c", 0, nil); return err }},
				{"BroadcastFile", func(ctx context.Context) error {
					f, err := g.BroadcastFile(ctx, "f", 0, os.Stdin, nil)
					if f != nil {
						err = errors.Join(err, f.Close())
					}
					return err
				}},
			} {
				use := ctx
				if g.Rank() == 1 {
					use = none
				}
				err := c.call(use)
				if vote, ok := errors.AsType[*VoteError](err); !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 1 || !errors.Is(err, ErrInvalid) {
					return fmt.Errorf("%s: %w", c.name, err)
				}
				if g.Rank() == 1 {
					if err := refused(c.name, err); err != nil {
						return err
					}
				}
				if err := c.call(ctx); err != nil {
					return fmt.Errorf("%s behind it: %w", c.name, err)
				}
			}
			return nil
		}))
	})
}
