package backend

import (
	"context"

	"github.com/symmem/symmem/group"
)

// Agreement is the means to agree on more, for a backend that maps what the ranks have agreed to map.
type Agreement struct {
	Group *group.Group
}

// Vote tells every rank whether this one has failed at the step; if any has, every rank gets an error that names it.
// Collective.
func (x *Agreement) Vote(ctx context.Context, step string, failure error) error {
	return x.Group.Vote(ctx, step, failure)
}
