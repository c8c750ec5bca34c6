package main

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/tensor"
)

//go:generate python3 ../../kernels/gen/gen.py --compile rmsnorm.cu

//go:embed rmsnorm.ptx
var image []byte

// newNorm prepares an all-reduce, a residual and an RMSNorm in one: hidden += the sum of all ranks' x, and y = RMSNorm(hidden) * weight. All
// are float32: x, hidden and y of [rows columns], weight of [columns]. It runs where the tensors are, on GPUs or on the CPU. Collective.
func newNorm(ctx context.Context, x, hidden, y, weight tensor.SymmetricTensor, epsilon float32) (*collective.Plan, error) {
	var rows, columns int64
	matrix := len(x.Shape()) == 2
	if matrix {
		rows, columns = x.Shape()[0], x.Shape()[1]
	}
	tensors := []tensor.SymmetricTensor{x, hidden, y, weight}
	spec := collective.Spec{
		Name:       "all-reduce and RMSNorm",
		Tensors:    tensors,
		Parameters: fmt.Sprintf("epsilon %v", epsilon),
		Workspace:  2 * x.Bytes(),
		CUDA: &collective.Kernel{
			Image: image, Function: "allreduce_rmsnorm", Blocks: int(rows), Threads: 512,
			Params: func(a *collective.Addresses) []any {
				return []any{a.Comm(), x.Ptr(), hidden.Ptr(), weight.Ptr(), y.Ptr(), uint32(rows), uint32(columns), epsilon}
			},
		},
		Host: func(a *collective.Addresses) (collective.HostKernel, error) { return onHost(a, tensors, epsilon), nil },
	}
	for i, shape := range []tensor.Shape{x.Shape(), x.Shape(), x.Shape(), {columns}} {
		if t := tensors[i]; t.DType() != tensor.Float32 || columns%4 != 0 || !slices.Equal(t.Shape(), shape) {
			spec.Failure = fmt.Errorf("%s; allowed: f32%v, and columns in multiples of 4", t, shape)
		}
	}
	if !matrix {
		spec.Failure = fmt.Errorf("%s; allowed: f32[rows columns]", x) // the others would wait for a rank that ends here
	}
	return collective.New(ctx, x.Memory(), spec)
}

// onHost is rmsnorm.cu for the CPU.
func onHost(a *collective.Addresses, tensors []tensor.SymmetricTensor, epsilon float32) collective.HostKernel {
	var s, workspaces [][]float32
	for _, t := range tensors {
		s = append(s, collective.Slice[float32](a, t.Ptr(), t.NumElements()))
	}
	x, hidden, y, weight := s[0], s[1], s[2], s[3]
	for r := range a.WorldSize() {
		workspaces = append(workspaces, collective.Slice[float32](a, a.Workspace(r), 2*tensors[0].NumElements()))
	}
	return func(r *collective.HostRun) error {
		turn := int(r.Epoch()&1) * len(x)
		copy(workspaces[r.Rank()][turn:], x)
		if err := r.Barrier(0); err != nil {
			return err // a peer is lost, or did not come in time
		}
		for _, w := range workspaces {
			for i, v := range w[turn : turn+len(x)] {
				hidden[i] += v
			}
		}
		for at := 0; at < len(x); at += len(weight) {
			var squares float32
			for _, h := range hidden[at : at+len(weight)] {
				squares += h * h
			}
			scale := 1 / float32(math.Sqrt(float64(squares/float32(len(weight))+epsilon)))
			for i, w := range weight {
				y[at+i] = hidden[at+i] * scale * w
			}
		}
		return nil
	}
}
