package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

//go:embed testdata/add_peers.ptx
var addPeers []byte // of testdata/add_peers.py, by Triton

// newAddPeers prepares y = scale * the sum of all ranks' x, of less than 2^31 elements. The kernel knows nothing of ranks: the signals before it say that every rank's
// x is there, and those behind it that nobody reads x any more.
func newAddPeers(ctx context.Context, x, y tensor.SymmetricTensor, scale float32) (*collective.Plan, error) {
	kernel := &collective.Kernel{
		Image: addPeers, Function: "add_peers", Threads: 4 * 32, // num_warps is 4
		Blocks: int((x.NumElements() + 1023) / 1024), // BLOCK is 1024
		Params: func(a *collective.Addresses) []any {
			none := device.Ptr(0) // Triton adds two pointers to scratch memory, of which this kernel has none
			return []any{y.Ptr(), a.Table(), int32(x.NumElements()), int32(a.WorldSize()), scale, none, none}
		},
	}
	return collective.New(ctx, x.Memory(), collective.Spec{
		Name: "add peers", Tensors: []tensor.SymmetricTensor{x}, Parameters: fmt.Sprintf("scale %v", scale),
		Program: &collective.Program{Signals: 2, Build: func(_ context.Context, b *collective.Builder) error {
			b.Signal(0)
			b.Finish(0)
			if x.Device().Kind() == device.CUDA {
				b.Kernel(kernel)
			} else {
				b.Host(func() error { return addOnHost(x, y, scale) })
			}
			b.Signal(1)
			b.Finish(1)
			return nil
		}},
	})
}

// addOnHost is the kernel for the CPU.
func addOnHost(x, y tensor.SymmetricTensor, scale float32) error {
	out, err := tensor.HostSlice[float32](y.Local())
	if err != nil {
		return err
	}
	clear(out)
	for r := range x.WorldSize() {
		v, err := x.Remote(r)
		if err != nil {
			return err
		}
		in, err := tensor.HostSlice[float32](v)
		if err != nil {
			return err
		}
		for i := range in {
			out[i] += in[i]
		}
	}
	for i := range out {
		out[i] *= scale
	}
	return nil
}

// TestTriton: a kernel that Triton has compiled runs between signals, with the addresses of all ranks' tensors.
func TestTriton(t *testing.T) {
	for _, backend := range []string{"host", "native"} {
		t.Run(backend, func(t *testing.T) {
			onRanks(t, backend, 2, func(ctx context.Context, r *symmem.Rank) error {
				const n = 100_003
				x, err := r.Zeros(ctx, tensor.Float32, n)
				if err != nil {
					return err
				}
				y, err := r.Zeros(ctx, tensor.Float32, n)
				if err != nil {
					return err
				}
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				plan, err := newAddPeers(ctx, x, y, 0.25)
				if err != nil {
					return err
				}
				s, err := r.NewStream()
				if err != nil {
					return err
				}
				in := make([]float32, n)
				for run := range 5 {
					for i := range in {
						in[i] = float32(i%100 + 1000*run*(r.Rank()+1))
					}
					if err := errors.Join(tensor.Write(x.Local(), in, 0), plan.Run(s), s.Synchronize(ctx)); err != nil {
						return err
					}
					got, err := tensor.ReadAll[float32](y.Local())
					if err != nil {
						return err
					}
					for i, v := range got {
						if want := 0.25 * float32(2*(i%100)+3000*run); v != want {
							return fmt.Errorf("run %d, element %d: %v instead of %v", run, i, v, want)
						}
					}
				}
				return errors.Join(plan.Close(ctx), s.Close())
			})
		})
	}
}

// TestTritonShown: the page shows the kernel that was compiled.
func TestTritonShown(t *testing.T) {
	page, err := os.ReadFile("../../docs/own-kernel.md")
	if errors.Is(err, fs.ErrNotExist) && !required("checkout") {
		t.Skip("checkout is missing: this is not run in one, and the page is not here")
	}
	require.NoError(t, err)
	source, err := os.ReadFile("testdata/add_peers.py")
	require.NoError(t, err)
	_, shown, ok := strings.Cut(string(page), "```python\n")
	require.True(t, ok, "the page shows the kernel")
	shown, _, _ = strings.Cut(shown, "```")
	require.Contains(t, string(source), shown)
}
