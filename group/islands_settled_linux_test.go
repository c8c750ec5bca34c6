package group

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// deafToIslands never hears the answer of a round of looking for islands: its context ends when that is there, which the others hear.
type deafToIslands struct {
	transport
	round uint64
	end   func()
}

func (d deafToIslands) arrive(group string, seq uint64, a *arrival) {
	if a.op == islandsOp(d.round) {
		a.to = endingOutcome{make(outcomeChan, 1), d.end}
	}
	d.transport.arrive(group, seq, a)
}

// TestIslandsHeardBySome: a rank that has not heard the last answer learns from the next call what the others have found, who need not come again. All stay in step.
func TestIslandsHeardBySome(t *testing.T) {
	groups := newApart(t, 3)
	ctx := testContext(t)
	s := groups[2].session
	hearing := s.transport
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	s.transport = deafToIslands{hearing, islandsRounds - 1, cancel}
	all := make([]*Islands, len(groups))
	failed := onAll(groups, func(g *Group) (err error) {
		of := ctx
		if g.Rank() == 2 {
			of = short
		}
		all[g.Rank()], err = g.Islands(of)
		return err
	})
	require.NoError(t, failed[0])
	require.NoError(t, failed[1])
	require.ErrorIs(t, failed[2], context.Canceled)
	s.transport = hearing
	found, err := groups[2].Islands(ctx)
	require.NoError(t, err)
	require.Equal(t, all[0], found)
	require.Equal(t, all[0], all[1])
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
	require.Equal(t, found, islandsOn(t, groups))
}

// endingTransport ends a context just before it gives the answer of a round.
type endingTransport struct {
	transport
	round string
	end   func()
}

type endingOutcome struct {
	to  outcomeReceiver
	end func()
}

func (e endingOutcome) receiveOutcome(group string, seq uint64, o *outcome) {
	e.end()
	e.to.receiveOutcome(group, seq, o)
}

func (e endingTransport) arrive(group string, seq uint64, a *arrival) {
	if a.op == e.round {
		a.to = endingOutcome{a.to, e.end}
	}
	e.transport.arrive(group, seq, a)
}

// TestIslandsHeardInTheEnd: a rank whose context ends when it hears the last answer finds what the others have found.
func TestIslandsHeardInTheEnd(t *testing.T) {
	groups := newApart(t, 3)
	ctx := testContext(t)
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	s := groups[2].session
	s.transport = endingTransport{s.transport, islandsOp(islandsRounds - 1), cancel}
	requireNone(t, onAll(groups, func(g *Group) error {
		of := ctx
		if g.Rank() == 2 {
			of = short
		}
		_, err := g.Islands(of)
		return err
	}))
	require.ErrorIs(t, short.Err(), context.Canceled)
	require.Equal(t, 1, islandsOn(t, groups).Count())
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
}

// TestIslandsGivenUpHalfWay: where a rank has not heard how a round ended, the others do not wait for it in the next, and all look again.
func TestIslandsGivenUpHalfWay(t *testing.T) {
	jobs := make([][]*Group, islandsRounds-1)
	for round := range jobs {
		jobs[round] = newApart(t, 3)
	}
	ctx := testContext(t)
	var all sync.WaitGroup
	failed := make([][]error, len(jobs))
	for round, groups := range jobs {
		s := groups[2].session
		short, cancel := context.WithCancel(ctx)
		defer cancel()
		s.transport = deafToIslands{s.transport, uint64(round), cancel}
		all.Go(func() {
			failed[round] = onAll(groups, func(g *Group) error {
				of := ctx
				if g.Rank() == 2 {
					of = short
				}
				_, err := g.Islands(of)
				return err
			})
		})
	}
	all.Wait()
	for round, groups := range jobs {
		require.ErrorIs(t, failed[round][2], context.Canceled)
		for _, err := range failed[round][:2] {
			require.Error(t, err)
			require.NotErrorIs(t, err, context.DeadlineExceeded, "it has waited until the end")
			require.ErrorContains(t, err, "no answer from the rendezvous service")
		}
		groups[2].session.transport = groups[2].session.transport.(deafToIslands).transport
		require.Equal(t, 1, islandsOn(t, groups).Count())
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
	}
}

// TestIslandsHeardByNone: where a rank that has not heard the answer comes before any that has, none were found on any rank, and all look again.
func TestIslandsHeardByNone(t *testing.T) {
	groups := newApart(t, 3)
	ctx := testContext(t)
	seq := groups[0].seq.Load()
	require.NoError(t, groups[2].Store().Set(ctx, fmt.Sprintf("symmem: islands of call %d", seq), []byte("{}")))
	for _, err := range onAll(groups, func(g *Group) error { _, err := g.Islands(ctx); return err }) {
		require.ErrorAs(t, err, new(*AbandonedError))
		require.ErrorContains(t, err, "call again")
	}
	require.Equal(t, 1, islandsOn(t, groups).Count())
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
}

// TestIslandsMadeUp: what a rank puts into the store that no rank has found is taken by none, whether it has heard the answer or not.
func TestIslandsMadeUp(t *testing.T) {
	for _, made := range []string{`{"Of":[0,1,2]}`, `{"Of":[0,0,7]}`, `{"Of":[0,-1,0]}`, `{"Of":[0,0]}`, `{"Of":[]}`, `{"Of":[1,1,1]}`} {
		groups := newApart(t, 3)
		ctx := testContext(t)
		seq := groups[0].seq.Load()
		require.NoError(t, groups[2].Store().Set(ctx, fmt.Sprintf("symmem: islands of call %d", seq), []byte(made)))
		for _, err := range onAll(groups, func(g *Group) error { _, err := g.Islands(ctx); return err }) {
			require.ErrorIs(t, err, ErrMismatch, made)
		}
		require.Equal(t, 1, islandsOn(t, groups).Count(), "the next call looks again")
		if made == `{"Of":[0,1,2]}` { // which could be, so a rank that has heard nothing cannot tell
			continue
		}
		deaf := groups[1]
		deaf.islands.Store(nil)
		deaf.asked.Store(seq + 1)
		_, err := deaf.Islands(ctx)
		require.ErrorIs(t, err, ErrMismatch, made)
	}
}

// TestIslandsThatAreNotSettled: a rank whose question is not answered asks again before it looks again.
func TestIslandsThatAreNotSettled(t *testing.T) {
	groups := newApart(t, 2)
	ctx := testContext(t)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	seq := groups[0].seq.Load()
	all := islandsOn(t, groups)
	groups[1].islands.Store(nil)
	groups[1].asked.Store(seq + 1)
	_, err := groups[1].Islands(ended)
	require.ErrorIs(t, err, context.Canceled)
	found, err := groups[1].Islands(ctx)
	require.NoError(t, err)
	require.Equal(t, all, found)
	require.Zero(t, groups[1].asked.Load())
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
}

// TestIslandsOfSubHeardBySome: a sub-group that is made when a rank has not heard which islands the others have found knows them on all of its ranks.
func TestIslandsOfSubHeardBySome(t *testing.T) {
	groups := newApart(t, 3)
	ctx := testContext(t)
	s := groups[2].session
	hearing := s.transport
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	s.transport = deafToIslands{hearing, islandsRounds - 1, cancel}
	onAll(groups, func(g *Group) error {
		of := ctx
		if g.Rank() == 2 {
			of = short
		}
		_, err := g.Islands(of)
		return err
	})
	s.transport = hearing
	subs := make([]*Group, 2)
	requireNone(t, onAll(groups[1:], func(g *Group) (err error) {
		subs[g.Rank()-1], err = g.Sub(ctx, []int{1, 2})
		return err
	}))
	bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	requireNone(t, onAll(subs, func(g *Group) error {
		islands, err := g.Islands(bounded)
		if err == nil && islands.Count() != 1 {
			err = fmt.Errorf("islands %v", islands)
		}
		return err
	}))
	requireNone(t, onAll(subs, func(g *Group) error { return g.Barrier(bounded, "in step") }))
}
