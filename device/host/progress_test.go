package host

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestProgress: each waiter is let go when its own target is reached and not before, whoever else waits or has given up.
func TestProgress(t *testing.T) {
	var p progress
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	const most = 6
	went := make([]chan error, most+1)
	begin := func(ctx context.Context, target uint64) {
		went[target] = make(chan error, 1)
		before := p.parked()
		go func() { went[target] <- p.wait(ctx, target) }()
		require.Eventually(t, func() bool { return p.parked() > before }, 10*time.Second, time.Millisecond)
	}
	gaveUp, giveUp := context.WithCancel(ctx)
	begin(gaveUp, 1)
	for _, target := range []uint64{5, 3, 6, 2, 4} {
		begin(ctx, target)
	}
	giveUp()
	require.ErrorIs(t, <-went[1], context.Canceled)
	for v := uint64(1); v <= most; v++ {
		p.advance(v)
		if v > 1 {
			require.NoError(t, <-went[v])
		}
		for later := v + 1; later <= most; later++ {
			require.Empty(t, went[later], "target %d at %d", later, v)
		}
	}
	assert.Zero(t, p.soonest.Load())
	assert.NoError(t, p.wait(ctx, most))
}

// parked is how many wait.
func (p *progress) parked() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiters)
}
