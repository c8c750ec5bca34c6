package tensor_test

import (
	"context"
	"fmt"
	"log"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

// A world of one rank: whoever started the program started no other.
func Example() {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Default(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close(ctx)
	t, err := r.Zeros(ctx, tensor.Float32, 2, 3)
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close(ctx)
	if err := t.Rendezvous(ctx); err != nil {
		log.Fatal(err)
	}
	row, err := t.Slice(1, 2)
	if err != nil {
		log.Fatal(err)
	}
	if err := tensor.Write(row.Local(), []float32{4, 5, 6}, 0); err != nil {
		log.Fatal(err)
	}
	copyOfRank0, err := t.Remote(0)
	if err != nil {
		log.Fatal(err)
	}
	all, err := tensor.ReadAll[float32](copyOfRank0)
	fmt.Println(copyOfRank0.Shape(), all, err)
	// Output: [2 3] [0 0 0 4 5 6] <nil>
}
