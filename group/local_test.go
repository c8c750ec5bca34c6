package group

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// testContext bounds everything that one test does.
func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newLocal returns n ranks in this process, closed when the test ends.
func newLocal(t testing.TB, n int, opts *LocalOptions) []*Group {
	t.Helper()
	groups, err := Local(n, opts)
	require.NoError(t, err)
	t.Cleanup(func() { closeAll(t, groups) })
	return groups
}

func closeAll(t testing.TB, groups []*Group) {
	for _, g := range groups {
		if err := g.Close(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, ErrClosed) {
			assert.NoError(t, err)
		}
	}
}

// onAll runs fn on every rank at once and returns the errors by rank.
func onAll(groups []*Group, fn func(g *Group) error) []error {
	failures := make([]error, len(groups))
	var wait sync.WaitGroup
	for i, g := range groups {
		wait.Go(func() { failures[i] = fn(g) })
	}
	wait.Wait()
	return failures
}

func requireNone(t testing.TB, failures []error) {
	t.Helper()
	for rank, err := range failures {
		require.NoErrorf(t, err, "rank %d", rank)
	}
}

func TestLocalAllGather(t *testing.T) {
	for _, n := range []int{1, 2, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ctx, groups := testContext(t), newLocal(t, n, nil)
			requireNone(t, onAll(groups, func(g *Group) error {
				for round := range 20 {
					own := []byte(strings.Repeat(fmt.Sprint(g.Rank()), g.Rank()*round))
					all, err := g.AllGather(ctx, "names", own)
					if err != nil {
						return err
					}
					for rank, b := range all {
						if want := strings.Repeat(fmt.Sprint(rank), rank*round); string(b) != want {
							return fmt.Errorf("round %d rank %d: %q, want %q", round, rank, b, want)
						}
						for i := range b { // the result is ours
							b[i] = 'x'
						}
						_ = append(b, "y"...)
					}
				}
				return g.Barrier(ctx, "end")
			}))
		})
	}
}

func BenchmarkLocalAllGather(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprintf("ranks=%d", n), func(b *testing.B) {
			ctx, groups := b.Context(), newLocal(b, n, nil)
			data := make([]byte, 256)
			b.ReportAllocs()
			b.ResetTimer()
			requireNone(b, onAll(groups, func(g *Group) error {
				for range b.N {
					if _, err := g.AllGather(ctx, "bench", data); err != nil {
						return err
					}
				}
				return nil
			}))
		})
	}
}
