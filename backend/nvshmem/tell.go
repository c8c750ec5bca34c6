package nvshmem

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/symmem/symmem/group"
)

// tell gives every rank what each rank brought, by rank. Collective. The failure of one rank is an error on all.
func tell[T any](ctx context.Context, g *group.Group, op string, mine T, failure error) ([]T, error) {
	type message struct {
		Failure string `json:",omitempty"`
		What    T
	}
	sent := message{What: mine}
	if failure != nil {
		sent = message{Failure: failure.Error()}
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
			vote.Failures = append(vote.Failures, group.RankFailure{Rank: r, Text: came.Failure})
		}
		all[r] = came.What
	}
	if len(vote.Failures) > 0 {
		return nil, vote
	}
	return all, nil
}

// alike is ErrMismatch with everybody's value, unless all ranks brought the same.
func alike[T any, V comparable](what string, all []T, of func(*T) V) error {
	values := make([]string, len(all))
	differ := false
	for r := range all {
		values[r] = fmt.Sprint(of(&all[r]))
		differ = differ || of(&all[r]) != of(&all[0])
	}
	if differ {
		return &group.MismatchError{What: what, Values: values}
	}
	return nil
}
