package group

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// slowTransport gives answers of rounds later than a rank waits for after its context has ended.
type slowTransport struct {
	transport
	round string // what its op ends with
	late  time.Duration
}

type slowOutcome struct {
	to   outcomeReceiver
	late time.Duration
}

func (s slowOutcome) receiveOutcome(group string, seq uint64, o *outcome) {
	time.AfterFunc(s.late, func() { s.to.receiveOutcome(group, seq, o) })
}

func (s slowTransport) arrive(group string, seq uint64, a *arrival) {
	if strings.HasSuffix(a.op, s.round) {
		a.to = slowOutcome{a.to, s.late}
	}
	s.transport.arrive(group, seq, a)
}

// TestFilesHeardLate: a rank whose context ends before it has heard how an exchange of files went comes to the same end as the others, and all stay in step.
func TestFilesHeardLate(t *testing.T) {
	for _, round := range []string{"late", "late: sending", "late: receiving"} {
		t.Run(round, func(t *testing.T) {
			eachKind(t, 3, func(t *testing.T, groups []*Group) {
				ctx := testContext(t)
				requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
				before := openFiles(t)
				s := groups[2].session
				hearing := s.transport
				s.transport = slowTransport{hearing, round, graceTimeout + time.Second}
				short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
				defer cancel()
				began := time.Now()
				failures := onAll(groups, func(g *Group) error {
					of := ctx
					if g.Rank() == 2 {
						of = short
					}
					files, err := g.ExchangeFile(of, "late", os.Stdin)
					require.NoError(t, closeFiles(files))
					return err
				})
				for rank, err := range failures {
					require.Equalf(t, failures[0] == nil, err == nil, "rank 0: %v; rank %d: %v", failures[0], rank, err)
				}
				require.Less(t, time.Since(began), 10*time.Second)
				s.transport = hearing
				requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
				requireOpenFiles(t, before)
			})
		})
	}
}
