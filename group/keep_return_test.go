package group

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestReturnFromDeadHost: ranks that have connected to a host that does not answer, and does not say that it is gone either, are with the next service in time.
func TestReturnFromDeadHost(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for name, tt := range map[string]struct {
		greets   bool // it does so before it dies
		attempts int  // of each rank, before the next service is there
	}{
		"before the greeting": {false, 4},
		"before the welcome":  {true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			lim := defaultLimits
			lim.attempt = 500 * time.Millisecond
			s := newKeptService(t, 2, Options{
				Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Timeout: 20 * time.Second, LivenessTimeout: 500 * time.Millisecond, limits: &lim,
			})
			groups := s.join()
			require.Error(t, s.end())
			var dead net.Listener
			var err error
			require.Eventually(t, func() bool {
				dead, err = net.Listen("tcp", s.addr)
				return err == nil
			}, 10*time.Second, 5*time.Millisecond, "listening again: %v", err)
			var greeting sync.WaitGroup
			for range len(groups) * tt.attempts {
				conn, err := dead.Accept()
				require.NoError(t, err)
				defer conn.Close()
				if tt.greets {
					greeting.Go(func() {
						if _, err := io.ReadFull(conn, make([]byte, prologueLength)); err == nil {
							_, _ = conn.Write(prologue(modePlain))
						}
					})
				}
			}
			greeting.Wait()
			require.NoError(t, dead.Close())
			s.start(nil)
			requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all are back") }))
			s.finish(ctx, groups)
		})
	}
}
