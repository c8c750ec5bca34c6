package main

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"unsafe"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/tensor"
)

//go:generate python3 ../../kernels/gen/gen.py --compile rmsnorm.cu

//go:embed rmsnorm.ptx
var image []byte

// norm is an all-reduce, a residual and an RMSNorm in one: hidden += the sum of all ranks' x, and y = RMSNorm(hidden) * weight. All
// tensors are float32.
type norm struct {
	x, hidden, y *tensor.Tensor // rows, columns
	weight       *tensor.Tensor // columns
	epsilon      float32
}

func (n *norm) tensors() []tensor.SymmetricTensor {
	return []tensor.SymmetricTensor{n.x, n.hidden, n.y, n.weight}
}

// plan prepares it for the device that the tensors are on. Collective.
func (n *norm) plan(ctx context.Context) (*collective.Plan, error) {
	rows, columns := n.x.Shape()[0], n.x.Shape()[1]
	spec := collective.Spec{
		Name:       "all-reduce and RMSNorm",
		Tensors:    n.tensors(),
		Parameters: fmt.Sprintf("epsilon %v", n.epsilon),
		Workspace:  2 * n.x.Bytes(),
		CUDA: &collective.Kernel{
			Image: image, Function: "allreduce_rmsnorm", Blocks: int(rows), Threads: 512,
			Params: func(a *collective.Addresses) []any {
				return []any{a.Comm(), n.x.Ptr(), n.hidden.Ptr(), n.weight.Ptr(), n.y.Ptr(), uint32(rows), uint32(columns), n.epsilon}
			},
		},
		Host: n.host,
	}
	if columns%4 != 0 {
		spec.Failure = fmt.Errorf("%d columns; allowed: multiples of 4", columns)
	}
	return collective.New(ctx, n.x.Memory(), spec)
}

// host is rmsnorm.cu for the CPU.
func (n *norm) host(a *collective.Addresses) (collective.HostKernel, error) {
	var s [4][]float32
	for i, t := range n.tensors() {
		var err error
		if s[i], err = tensor.HostSlice[float32](t.Local()); err != nil {
			return nil, err
		}
	}
	x, hidden, y, weight := s[0], s[1], s[2], s[3]
	workspaces := make([][]float32, a.WorldSize())
	for rank := range workspaces {
		if b := a.Bytes(a.Workspace(rank), 2*n.x.Bytes()); b != nil {
			workspaces[rank] = unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), 2*len(x))
		}
	}
	return func(r *collective.HostRun) error {
		turn := int(r.Epoch()&1) * len(x)
		copy(workspaces[r.Rank()][turn:], x)
		if err := r.Barrier(0); err != nil {
			return err // a peer is lost, or did not come in time
		}
		for _, all := range workspaces {
			for i, v := range all[turn : turn+len(x)] {
				hidden[i] += v
			}
		}
		for at := 0; at < len(x); at += len(weight) {
			var squares float32
			for _, h := range hidden[at : at+len(weight)] {
				squares += h * h
			}
			scale := 1 / float32(math.Sqrt(float64(squares/float32(len(weight))+n.epsilon)))
			for i, w := range weight {
				y[at+i] = hidden[at+i] * scale * w
			}
		}
		return nil
	}, nil
}
