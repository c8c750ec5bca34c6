package backend

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Tell sends mine to every rank and returns the values of all ranks, by rank. It is for backends that have to agree on more than the arguments of a
// call. If any rank passes a failure, or a value that JSON has no form for, all get a [group.VoteError], in which errors.Is finds the conditions of all failures. Collective.
func Tell[T any](ctx context.Context, g *group.Group, op string, mine T, failure error) ([]T, error) {
	type message struct {
		Failure    string   `json:",omitempty"`
		Conditions []uint32 `json:",omitempty"` // what the failure is, in the codes of package errs
		What       T
	}
	blob, err := json.Marshal(message{What: mine})
	if failure == nil {
		failure = err // the others come all the same, and would wait for this rank
	}
	if failure != nil {
		if blob, err = json.Marshal(message{Failure: errs.Text(failure), Conditions: errs.Codes(failure)}); err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
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

// Alike compares what the ranks have told. It returns a [group.MismatchError], in which every rank's value is, unless value is the same of all. what
// names the value in the error, and may say in parentheses what sets it: "version of NCCL".
func Alike[T any, V comparable](what string, all []T, value func(*T) V) error {
	values := make([]string, len(all))
	differ := false
	for r := range all {
		v := value(&all[r])
		values[r] = fmt.Sprint(v)
		differ = differ || v != value(&all[0])
	}
	if differ {
		return &group.MismatchError{What: what, Values: values}
	}
	return nil
}
