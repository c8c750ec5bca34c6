package command

import (
	"encoding/binary"
	"math"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// ownForm is an all-reduce as somebody else registers it: sums of f32 on the host, by every rank for itself from copies in the workspace.
var ownForm = kernels.AllReduceForm{
	Name: "own_sum", NeedsPeerPointers: true,
	Supports: func(kind device.Kind, dtype tensor.DType, op kernels.Op, _ int) bool {
		return kind == device.Host && dtype == tensor.Float32 && op == kernels.Sum
	},
	Spec: func(in, out tensor.SymmetricTensor, _ kernels.Op, _ *kernels.AllReduceOptions) (collective.Spec, error) {
		n := in.Bytes()
		return collective.Spec{
			Workspace: 2 * n,
			Host: func(a *collective.Addresses) (collective.HostKernel, error) {
				from, to := a.Bytes(a.Tensor(0, a.Rank()), n), a.Bytes(a.Tensor(1, a.Rank()), n)
				var copies [2][][]byte
				for r := range a.WorldSize() {
					for turn := range copies {
						copies[turn] = append(copies[turn], a.Bytes(a.Workspace(r).Add(int64(turn)*n), n))
					}
				}
				return func(r *collective.HostRun) error {
					all := copies[r.Epoch()&1]
					copy(all[r.Rank()], from)
					if err := r.Barrier(0); err != nil {
						return err
					}
					for at := 0; at < len(to); at += 4 {
						sum := math.Float32frombits(binary.NativeEndian.Uint32(all[0][at:]))
						for _, c := range all[1:] {
							sum += math.Float32frombits(binary.NativeEndian.Uint32(c[at:]))
						}
						binary.NativeEndian.PutUint32(to[at:], math.Float32bits(sum))
					}
					return nil
				}, nil
			},
		}, nil
	},
}
