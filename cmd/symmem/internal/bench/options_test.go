package bench

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

func TestPeerFlags(t *testing.T) {
	all := []string{measure.AllReduce, measure.Put}
	many := []string{measure.AllReduceMany}
	for name, tt := range map[string]struct {
		o     Options
		kinds []string
		want  *measure.PeerSpec
		says  string // of the error
	}{
		"auto":             {Options{Peer: PeerAuto, DType: "f32"}, all, &measure.PeerSpec{}, ""},
		"nccl":             {Options{Peer: measure.NCCL, DType: "bf16", PeerLibrary: "/l"}, all, &measure.PeerSpec{Required: true, Library: "/l"}, ""},
		"none":             {Options{Peer: PeerNone, DType: "f32"}, all, nil, ""},
		"auto, put only":   {Options{Peer: PeerAuto, DType: "f32"}, all[1:], nil, ""},
		"auto, i16":        {Options{Peer: PeerAuto, DType: "i16"}, all, &measure.PeerSpec{}, ""}, // the ranks tell
		"nccl, put only":   {Options{Peer: measure.NCCL, DType: "f32"}, all[1:], nil, "all_reduce"},
		"nccl, i16":        {Options{Peer: measure.NCCL, DType: "i16"}, all, nil, "has no i16"},
		"nccl, many":       {Options{Peer: measure.NCCL, DType: "f32"}, many, &measure.PeerSpec{Required: true}, ""},
		"auto, many":       {Options{Peer: PeerAuto, DType: "f32"}, many, &measure.PeerSpec{}, ""},
		"nccl, all_gather": {Options{Peer: measure.NCCL, DType: "f32"}, []string{measure.AllGather}, &measure.PeerSpec{Required: true}, ""},
		"auto, all_to_all": {Options{Peer: PeerAuto, DType: "f32"}, []string{measure.AllToAll}, &measure.PeerSpec{}, ""},
		"nccl, barrier":    {Options{Peer: measure.NCCL, DType: "f32"}, []string{measure.Barrier, measure.AllToAllV}, nil, "one of all_reduce, broadcast, "},
		"nvshmem, many":    {Options{Peer: measure.NVSHMEM, DType: "f32", Op: "sum"}, many, nil, "all_reduce; add"}, // it has no groups of calls
		"another":          {Options{Peer: "mpi", DType: "f32"}, all, nil, "auto, nccl, nvshmem, sglang, pytorch, none"},
		"nvshmem":          {Options{Peer: measure.NVSHMEM, DType: "i16", Op: "max"}, all, &measure.PeerSpec{Required: true, NVSHMEM: true}, ""},
		"nvshmem, avg":     {Options{Peer: measure.NVSHMEM, DType: "f32", Op: "avg"}, all, nil, "no avg of f32"},
		"nvshmem, library": {Options{Peer: measure.NVSHMEM, DType: "f32", Op: "sum", PeerLibrary: "/l"}, all, nil, "SYMMEM_NVSHMEM_LIBRARY"},
		"nvshmem, put":     {Options{Peer: measure.NVSHMEM, DType: "i16", Op: "sum"}, all[1:], nil, "all_reduce"},
		"sglang":           {Options{Peer: measure.SGLang, DType: "bf16", Op: "sum", PeerLibrary: "/c"}, all, &measure.PeerSpec{Required: true, SGLang: true, Library: "/c"}, ""},
		"sglang, max":      {Options{Peer: measure.SGLang, DType: "bf16", Op: "max", PeerLibrary: "/c"}, all, nil, "no max of bf16"},
		"sglang, no cubin": {Options{Peer: measure.SGLang, DType: "bf16", Op: "sum"}, all, nil, "bench/peers/sglang.sh"},
		"sglang, put":      {Options{Peer: measure.SGLang, DType: "bf16", Op: "sum", PeerLibrary: "/c"}, all[1:], nil, "all_reduce"},
		"pytorch":          {Options{Peer: measure.PyTorch, DType: "bf16", Op: "sum"}, all, &measure.PeerSpec{Required: true, PyTorch: true}, ""},
		"pytorch, python":  {Options{Peer: measure.PyTorch, DType: "f32", Op: "sum", PeerLibrary: "/p"}, all, &measure.PeerSpec{Required: true, PyTorch: true, Library: "/p"}, ""},
		"pytorch, f16":     {Options{Peer: measure.PyTorch, DType: "f16", Op: "sum"}, all, nil, "no sum of f16"},
		"pytorch, max":     {Options{Peer: measure.PyTorch, DType: "f32", Op: "max"}, all, nil, "no max of f32"},
		"pytorch, gather":  {Options{Peer: measure.PyTorch, DType: "f32", Op: "sum"}, []string{measure.AllGather}, nil, "all_reduce; add"},
		"none, library":    {Options{Peer: PeerNone, DType: "f32", PeerLibrary: "/l"}, all, nil, "no peer is measured"},
		"put, library":     {Options{Peer: PeerAuto, DType: "f32", PeerLibrary: "/l"}, all[1:], nil, "no peer is measured"},
		"none, bad dtype":  {Options{Peer: PeerNone, DType: "f8"}, all, nil, ""},
		"nccl, no kind ok": {Options{Peer: measure.NCCL, DType: "f32"}, nil, nil, ""}, // that is an error of its own
	} {
		got, err := tt.o.peerSpec(tt.kinds)
		if tt.says != "" {
			require.ErrorContains(t, err, tt.says, name)
			continue
		}
		require.NoError(t, err, name)
		assert.Equal(t, tt.want, got, name)
	}
}
