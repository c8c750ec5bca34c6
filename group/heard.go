package group

import (
	"context"

	"github.com/symmem/symmem/internal/errs"
)

// heardKey is the key of what Heard adds to a context.
type heardKey struct{}

// Heard returns ctx for collective calls of which a rank has to hear how they ended, because the others go on from there to steps that need all ranks, and would wait for
// it. A rank that gives such a call up waits for the answer of the service for as long as the service is not lost, at most for [Options].Timeout, where
// it otherwise waits for a second. Then it has failed with all others, or goes on with them to the next step, where its context tells them that it has given up. Steps
// of backends get such contexts from package memory.
func Heard(ctx context.Context) context.Context {
	if errs.IsNil(ctx) || hears(ctx) {
		return ctx
	}
	return context.WithValue(ctx, heardKey{}, true)
}

func hears(ctx context.Context) bool { return ctx.Value(heardKey{}) != nil }
