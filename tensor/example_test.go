package tensor_test

import (
	"context"
	"errors"
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

// On the host device, and wherever else the CPU can address the memory, a tensor is a Go slice.
func ExampleHostSlice() {
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
	row, err := t.Slice(1, 2)
	if err != nil {
		log.Fatal(err)
	}
	elements, err := tensor.HostSlice[float32](row.Local())
	if errors.Is(err, symmem.ErrUnsupported) { // a GPU's: copy with tensor.Read and tensor.Write
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	for i := range elements {
		elements[i] = float32(i) + 0.5
	}
	all, err := tensor.ReadAll[float32](t.Local())
	fmt.Println(all, err)
	// Output: [0 0 0 0.5 1.5 2.5] <nil>
}

// Tensors that come and go are taken from a heap: one rendezvous for all of them.
func ExampleHeap() {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Default(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close(ctx)
	h, err := r.NewHeap(ctx, 1<<20) // collective, once
	if err != nil {
		log.Fatal(err)
	}
	defer h.Close(ctx)
	for step := range 3 {
		t, err := h.Zeros(ctx, tensor.Float32, 1000) // no exchange: every rank does the same, in the same order
		if err != nil {
			log.Fatal(err)
		}
		copyOfRank0, err := t.Remote(0) // it has had its rendezvous
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("step", step, "at", t.Offset(), copyOfRank0.Shape(), h.Usage().Waiting, "bytes wait")
		if err := t.Close(ctx); err != nil { // local: the memory waits, as a peer may still use it
			log.Fatal(err)
		}
		if step == 1 {
			if err := h.Reclaim(ctx); err != nil { // collective: now it may be given out again
				log.Fatal(err)
			}
		}
	}
	// Output:
	// step 0 at 0 [1000] 0 bytes wait
	// step 1 at 4096 [1000] 4096 bytes wait
	// step 2 at 0 [1000] 0 bytes wait
}
