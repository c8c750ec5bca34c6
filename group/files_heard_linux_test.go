package group

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// slowTransport gives answers of rounds later than a rank waits for after its context has ended, and ends that context when the answer is there: no sooner,
// so that the round is over, however slow the machine is.
type slowTransport struct {
	transport
	round string // what its op ends with
	late  time.Duration
	end   func()
}

type slowOutcome struct {
	to   outcomeReceiver
	late time.Duration
	end  func()
}

func (s slowOutcome) receiveOutcome(group string, seq uint64, o *outcome) {
	s.end()
	time.AfterFunc(s.late, func() { s.to.receiveOutcome(group, seq, o) })
}

func (s slowTransport) arrive(group string, seq uint64, a *arrival) {
	if strings.HasSuffix(a.op, s.round) {
		a.to = slowOutcome{a.to, s.late, s.end}
	}
	s.transport.arrive(group, seq, a)
}

// TestHeard: with a context of Heard a rank hears how a call ended that it has given up, however slow the service is.
func TestHeard(t *testing.T) {
	groups := newLocal(t, 2, nil)
	ctx := testContext(t)
	g, s := groups[0], groups[1].session
	s.transport = slowTransport{s.transport, "late", graceTimeout + 500*time.Millisecond, func() {}}
	g.session.transport.arrive(g.name, g.take(1), &arrival{kind: kindVote, op: "late", to: make(outcomeChan, 1)}) // so that the other completes the round
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.NoError(t, groups[1].Vote(Heard(Heard(ended)), "late", nil))
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
	require.ErrorIs(t, groups[1].Vote(Heard(ended), "alone", nil), context.Canceled, "what nobody has come to is given up")
	require.ErrorContains(t, g.Vote(ctx, "alone", nil), "gave up")
	var none context.Context
	require.Nil(t, Heard(none))
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
				short, cancel := context.WithCancel(ctx)
				defer cancel()
				s.transport = slowTransport{hearing, round, graceTimeout + time.Second, cancel}
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
