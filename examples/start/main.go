// Program start is the one that the README begins with.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all" // without it: only the host backend, and with CGO_ENABLED=0 a static binary
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func main() {
	ctx := context.Background()
	cfg, err := config.Load(nil) // SYMMEM_* variables and symmem.yaml
	check(err)
	r, err := symmem.Open(ctx, cfg, nil) // collective: joins the group, opens a device and a backend
	check(err)
	defer r.Close(ctx)

	t, err := r.Zeros(ctx, tensor.BFloat16, 4096, 1024) // every rank allocates alike
	check(err)
	defer t.Close(ctx)
	check(t.Rendezvous(ctx)) // collective: now every rank reaches every other's copy

	if r.Capabilities().PeerPointers { // between hosts there are none: nixl moves memory by put and get
		remote, err := t.Remote(r.WorldSize() - 1)
		check(err)
		fmt.Println("the last rank's copy is at", remote.Ptr())
	}

	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil) // collective, once
	check(err)
	defer plan.Close(ctx)
	stream, err := r.NewStream()
	check(err)
	defer stream.Close()
	check(plan.Run(stream)) // one launch: no allocation, no exchange; may be captured in a graph
	check(stream.Synchronize(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
