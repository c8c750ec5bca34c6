package memory

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// TestWorkspaceBlock takes and gives at random: spans never overlap, and all given back is one span again.
func TestWorkspaceBlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 1 << 16
		b := &workspaceBlk{free: []span{{0, size}}}
		var held []span
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				n := rapid.Int64Range(1, 8).Draw(t, "pages") * workspaceAlign
				s, ok := b.take(n)
				if !ok {
					return
				}
				require.Equal(t, n, s.bytes)
				require.Zero(t, s.start%workspaceAlign)
				for _, h := range held {
					require.True(t, s.start >= h.start+h.bytes || h.start >= s.start+s.bytes, "%v overlaps %v", s, h)
				}
				held = append(held, s)
			},
			"give": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing is held")
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				b.give(held[i])
				held = append(held[:i], held[i+1:]...)
			},
			"": func(t *rapid.T) {
				total, end := int64(0), int64(-1)
				for _, f := range b.free {
					require.Greater(t, f.start, end, "free spans are sorted and never adjacent")
					total, end = total+f.bytes, f.start+f.bytes
				}
				for _, h := range held {
					total += h.bytes
				}
				require.Equal(t, int64(size), total)
			},
		})
		for _, h := range held {
			b.give(h)
		}
		require.Equal(t, []span{{0, size}}, b.free)
	})
}

// TestInUse: memory that is kept because of other ranks, which are at work, have not come or make another call, is not said to be in use by the device.
func TestInUse(t *testing.T) {
	require.Equal(t, "other ranks may still write it", inUse(fmt.Errorf("a vote: %w", errs.ErrMismatch)))
	for _, err := range []error{&group.VoteError{}, &group.AbandonedError{}, &group.MissingRanksError{}} {
		require.Equal(t, "other ranks may still write it", inUse(fmt.Errorf("a vote: %w", err)), "%T", err)
	}
	require.Equal(t, "the device still works on it", inUse(context.DeadlineExceeded))
}
