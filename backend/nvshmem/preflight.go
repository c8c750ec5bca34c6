package nvshmem

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/group"
)

// preflightBytes is what the preflight allocates.
const preflightBytes = 1 << 20

// Preflight starts NVSHMEM in this process as its only PE, on the GPU that the options name, allocates memory, and finalizes it. It is meant for a
// short-lived process: whatever goes wrong inside NVSHMEM may end it. It shows that the library, its plugin, the GPU and the sockets work; it cannot
// show that GPUs reach each other.
func Preflight(ctx context.Context, opts *Options) error {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.Preflight, o.Parent = nil, nil
	groups, err := group.Local(1, &group.LocalOptions{Timeout: o.KernelTimeout, Logger: o.Logger})
	if err != nil {
		return err
	}
	g := groups[0]
	b, err := New(ctx, g, &o)
	if err == nil {
		var a interface{ Release(context.Context) error }
		if a, err = b.Allocate(ctx, preflightBytes); err == nil {
			err = a.Release(ctx)
		}
		err = errors.Join(err, b.Close(ctx), b.home.usable())
	}
	if err := errors.Join(err, g.Close(ctx)); err != nil {
		return fmt.Errorf("preflight of NVSHMEM: %w", err)
	}
	return nil
}
