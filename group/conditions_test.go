package group

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
)

// requireConditions fails the test unless err is each of want and no other condition of the module.
func requireConditions(t *testing.T, rank int, err error, want ...error) {
	t.Helper()
	for _, c := range errs.All() {
		wanted := false
		for _, w := range want {
			wanted = wanted || w == c
		}
		require.Equalf(t, wanted, errors.Is(err, c), "rank %d: is it %q? %v", rank, c, err)
	}
}

// TestConditionsOnEveryRank: errors.Is gives the same answer on the ranks that failed and on those that were told, for every condition of
// the module, of one rank or of several.
func TestConditionsOnEveryRank(t *testing.T) {
	all := errs.All()
	require.Greater(t, len(all), 10)
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for i, c := range all {
			other, third := all[(i+1)%len(all)], all[(i+5)%len(all)]
			one := map[int]error{2: c}
			several := map[int]error{0: c, 2: errors.Join(other, errors.New("and more")), 3: fmt.Errorf("twice: %w, %w", c, third)}
			for rank, err := range onAll(groups, func(g *Group) error { return g.Vote(ctx, "one", wrap(one[g.Rank()])) }) {
				requireConditions(t, rank, err, c)
			}
			for rank, err := range onAll(groups, func(g *Group) error { return g.Vote(ctx, "several", wrap(several[g.Rank()])) }) {
				requireConditions(t, rank, err, c, other, third)
				vote, ok := errors.AsType[*VoteError](err)
				require.True(t, ok)
				require.Equal(t, []error{c}, vote.Failures[0].Conditions)
				require.Len(t, vote.Failures, 3)
			}
			// Where a rank left what the others went on with, they are told what it was.
			for rank, err := range onAll(groups, func(g *Group) error {
				if g.Rank() != 1 {
					_, err := g.AllGather(ctx, "going on", nil)
					return err
				}
				g.Excuse(wrap(c))
				return g.Barrier(ctx, "leaving")
			}) {
				requireConditions(t, rank, err, c)
			}
			groups[1].Excuse(nil)
		}
		// What failed earlier is not what fails now.
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() == 1 {
				g.Excuse(errs.ErrNoMemory)
				return g.Vote(ctx, "now", errs.ErrUnsupported)
			}
			return g.Vote(ctx, "now", nil)
		}) {
			requireConditions(t, rank, err, errs.ErrUnsupported)
		}
		// An error without a text is one too, and one that is no condition stays without.
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() == 1 {
				return g.Vote(ctx, "now", errors.New(""))
			}
			return g.Vote(ctx, "now", nil)
		}) {
			require.ErrorContains(t, err, "rank 1: *errors.errorString")
			requireConditions(t, rank, err)
		}
	})
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("a step: %w", err)
}

// TestConditionsThroughGroups: what a vote in a sub-group has told a rank is the same condition where that rank tells it in the parent.
func TestConditionsThroughGroups(t *testing.T) {
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		subs := make([]*Group, len(groups))
		requireNone(t, onAll(groups[1:], func(g *Group) (err error) {
			subs[g.Rank()], err = g.Sub(ctx, []int{1, 2, 3})
			return err
		}))
		for _, c := range errs.All() {
			for rank, err := range onAll(groups, func(g *Group) error {
				var failure error
				if g.Rank() > 0 {
					var own error
					if g.Rank() == 3 {
						own = wrap(c)
					}
					failure = subs[g.Rank()].Vote(ctx, "below", own)
				}
				if g.Rank() == 3 { // of the two that tell of it, one was only told
					failure = nil
				}
				return g.Vote(ctx, "above", failure)
			}) {
				requireConditions(t, rank, err, c)
				require.ErrorContains(t, err, `vote "above" failed: ranks 1, 2: vote "below" failed: rank 2: a step: `)
			}
		}
	})
}

// TestConditionsOfNewerRelease: codes that this release does not know are left out, and passed on to ranks that may know them.
func TestConditionsOfNewerRelease(t *testing.T) {
	const unknown = math.MaxUint32
	codes := []uint32{unknown, 0, 1 << 31, 1}
	require.Equal(t, []error{errs.ErrNoMemory}, errs.Conditions(codes))
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() != 1 {
				return g.Vote(ctx, "v", nil)
			}
			result := make(outcomeChan, 1)
			g.session.transport.arrive(g.name, g.take(1), &arrival{kind: kindVote, op: "v", refused: true, refusal: "of a newer kind", conditions: codes, to: result})
			o := <-result
			if got := o.failure.failures[0].conditions; len(got) != len(codes) || got[0] != unknown {
				return fmt.Errorf("the codes %v came back as %v", codes, got)
			}
			return &VoteError{Failures: told(o.failure.failures)}
		}) {
			requireConditions(t, rank, err, errs.ErrNoMemory)
			require.ErrorContains(t, err, "rank 1: of a newer kind")
		}
	})
}

// TestTooManyConditions: no rank makes the service keep more than a rank may tell of.
func TestTooManyConditions(t *testing.T) {
	for n, ok := range map[int]bool{errs.MaxCodes: true, errs.MaxCodes + 1: false} {
		for _, a := range []*pb.Arrival{{Conditions: make([]uint32, n)}, {ExcuseConditions: make([]uint32, n)}} {
			err := oversized(&pb.ClientMessage{Body: &pb.ClientMessage_Arrival{Arrival: a}}, 2)
			require.Equal(t, ok, err == nil, "%d: %v", n, err)
		}
	}
	require.LessOrEqual(t, len(errs.Codes(errors.Join(errs.All()...))), errs.MaxCodes)
}

// TestLaterExcuseStays: what a rank notes while a call is under way that does not bring it stays for the next one, also where that call has brought an earlier note.
func TestLaterExcuseStays(t *testing.T) {
	ctx := testContext(t)
	groups, err := Local(2, nil)
	require.NoError(t, err)
	defer leaveAll(t, groups)
	h := groups[0].session.transport.(*localTransport).hub
	groups[0].Excuse(errors.New("the first"))
	ended := make(chan error, 1)
	go func() { ended <- groups[0].Barrier(ctx, "b") }()
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.groups[worldName].rounds) == 1
	}, 30*time.Second, time.Millisecond)
	groups[0].Excuse(errors.New("the second"))
	require.NoError(t, groups[1].Barrier(ctx, "b"))
	require.NoError(t, <-ended)
	for rank, err := range onAll(groups, func(g *Group) error { return g.Barrier(ctx, fmt.Sprint("of rank ", g.Rank())) }) {
		var told *VoteError
		require.ErrorAsf(t, err, &told, "rank %d", rank)
		require.Equal(t, "the second", told.Failures[0].Text)
	}
}
