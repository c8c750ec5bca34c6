package backend

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Tell tells every rank what each rank brought, by rank, for backends that have more to agree on than that they bring the same. The
// failure of any rank is a [group.VoteError] on all, which is what each of the failures is. Collective.
func Tell[T any](ctx context.Context, g *group.Group, op string, mine T, failure error) ([]T, error) {
	type message struct {
		Failure    string   `json:",omitempty"`
		Conditions []uint32 `json:",omitempty"` // what the failure is, in the codes of package errs
		What       T
	}
	sent := message{What: mine}
	if failure != nil {
		sent = message{Failure: errs.Text(failure), Conditions: errs.Codes(failure)}
	}
	blob, err := json.Marshal(sent)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	blobs, err := g.AllGather(ctx, op, blob)
	if err != nil {
		return nil, err
	}
	all := make([]T, len(blobs))
	vote := &group.VoteError{Op: op, Local: failure}
	for r, blob := range blobs {
		var came message
		if err := json.Unmarshal(blob, &came); err != nil {
			return nil, fmt.Errorf("%s: reading what rank %d brought: %w", op, r, err)
		}
		if came.Failure != "" {
			vote.Failures = append(vote.Failures, group.RankFailure{Rank: r, Text: came.Failure, Conditions: errs.Conditions(came.Conditions)})
		}
		all[r] = came.What
	}
	if len(vote.Failures) > 0 {
		return nil, vote
	}
	return all, nil
}
