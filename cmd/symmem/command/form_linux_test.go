package command

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
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

// TestFormsOfOthers: an all-reduce that somebody else has registered is checked by verify and measured by bench, by its name.
func TestFormsOfOthers(t *testing.T) {
	r := call(t, "", environ(), "verify", "--json", "--backend", "host", "--ranks", "3", "--short", "--filter", "/own_sum/")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	var v verify.Verification
	require.NoError(t, json.Unmarshal([]byte(r.out), &v))
	assert.Greater(t, v.Summary.Passed, 15, "cases of the form")
	assert.Zero(t, v.Summary.Failed+v.Summary.Skipped)

	r = call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--kind", "all_reduce", "--algorithm", "own_sum", "--sizes", "1K", "--reps", "2")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	assert.Contains(t, r.out, "own_sum")

	r = call(t, "", environ(), "bench", "--algorithm", "own_summ")
	assert.Equal(t, exit.Usage, r.status)
	assert.Contains(t, r.err, "own_sum", "what was meant")
}
