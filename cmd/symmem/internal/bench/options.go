package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// The values of --peer that are not the name of a peer. A peer that is named, measure.NCCL, measure.NVSHMEM, measure.SGLang or measure.PyTorch, is required.
const (
	PeerAuto = "auto" // NCCL if the backend works on CUDA devices and the library is there
	PeerNone = "none"
)

// The values of the flags --mode, --place and --peer.
var (
	Modes  = []string{"eager", "graph"}
	Places = []string{"in", "out"}
	Peers  = []string{PeerAuto, measure.NCCL, measure.NVSHMEM, measure.SGLang, measure.PyTorch, PeerNone}
)

// partial are the flags that some of measure.Kinds have, with those kinds.
var partial = []struct {
	flag  string
	kinds []string
}{
	{"op", []string{measure.AllReduce, measure.Reduce, measure.ReduceScatter, measure.AllReduceMany, measure.ReduceScatterMany, measure.AllReduceMatMul, measure.PlanRun}},
	{"place", []string{measure.AllReduce, measure.AllReduceMatMul, measure.PlanRun}},
	{"tensors", measure.Lists},
	{"exclusive", measure.Collectives},
}

// DTypes returns the values of --dtype.
func DTypes() []string { return texts(tensor.DTypes()) }

// Ops returns the values of --op.
func Ops() []string { return texts(kernels.Ops()) }

// Algorithms returns the values of --algorithm: the forms of all-reduce on every device and backend, and all.
func Algorithms() []string {
	names := []string{measure.AllAlgorithms}
	for a := kernels.Auto; ; a++ {
		if _, err := kernels.ParseAlgorithm(a.String()); err != nil {
			return names
		}
		names = append(names, a.String())
	}
}

func texts[T fmt.Stringer](all []T) []string {
	names := make([]string, len(all))
	for i, a := range all {
		names[i] = a.String()
	}
	return names
}

// Options are the flags of bench, except for the settings of the configuration.
type Options struct {
	Backends             string // names with commas between them, auto or all
	Sizes                string // as bytesize.ParseList reads them
	Kinds                string // of measure.Kinds, with commas between them
	DType, Op, Algorithm string // of all-reduce
	Mode, Place, Peer    string // of Modes, Places and Peers
	PeerLibrary          string // file or folder, of PyTorch the Python that has it; "" looks for it
	OutputFile, PlotFile string // "" writes none
	Ranks, Repetitions   int
	Tensors              int  // of measure.Lists
	Exclusive            bool // as kernels.Options has it
	JSON                 bool // print JSON instead of text
}

// spec checks the flags, of which given were set, and says what to measure. An error lists every mistake.
func (o *Options) spec(given func(flag string) bool) (measure.Spec, error) {
	var all []error
	s := measure.Spec{DType: o.DType, Op: o.Op, Repetitions: o.Repetitions, Tensors: o.Tensors, Graph: o.Mode == "graph", OutOfPlace: o.Place == "out", Exclusive: o.Exclusive}
	var err error
	if s.Sizes, err = bytesize.ParseList(o.Sizes); err != nil {
		all = append(all, fmt.Errorf("--sizes: %w", err))
	}
	known := true
	for kind := range strings.SplitSeq(o.Kinds, ",") {
		if !slices.Contains(measure.Kinds, kind) || slices.Contains(s.Kinds, kind) {
			all = append(all, fmt.Errorf("--kind is %q; allowed are %s, each once%s", o.Kinds, strings.Join(measure.Kinds, ", "), suggest.DidYouMean(kind, measure.Kinds)))
			known = false
			break
		}
		s.Kinds = append(s.Kinds, kind)
	}
	for _, p := range partial {
		if known && given(p.flag) && !slices.ContainsFunc(s.Kinds, func(kind string) bool { return slices.Contains(p.kinds, kind) }) {
			verb := "have"
			if len(p.kinds) == 1 {
				verb = "has"
			}
			all = append(all, fmt.Errorf("--%s was given, and --kind is %q; only %s %s it", p.flag, o.Kinds, strings.Join(p.kinds, ", "), verb))
		}
	}
	if _, err := tensor.ParseDType(o.DType); err != nil {
		all = append(all, fmt.Errorf("--dtype is %q; allowed are %s%s", o.DType, strings.Join(DTypes(), ", "), suggest.DidYouMean(o.DType, DTypes())))
	}
	if s.Peer, err = o.peerSpec(s.Kinds); err != nil {
		all = append(all, err)
	}
	if _, err := kernels.ParseOp(o.Op); err != nil {
		all = append(all, fmt.Errorf("--op is %q; allowed are %s%s", o.Op, strings.Join(Ops(), ", "), suggest.DidYouMean(o.Op, Ops())))
	}
	if o.Algorithm == measure.AllAlgorithms {
		s.Algorithms = []string{measure.AllAlgorithms}
	} else if _, err := kernels.ParseAlgorithm(o.Algorithm); err != nil {
		all = append(all, fmt.Errorf("--algorithm is %q; allowed are %s%s", o.Algorithm, strings.Join(Algorithms(), ", "), suggest.DidYouMean(o.Algorithm, Algorithms())))
	} else {
		s.Algorithms = []string{o.Algorithm}
	}
	if o.Place != "in" && o.Place != "out" {
		all = append(all, fmt.Errorf("--place is %q; allowed are in and out%s", o.Place, suggest.DidYouMean(o.Place, Places)))
	}
	if o.Mode != "eager" && o.Mode != "graph" {
		all = append(all, fmt.Errorf("--mode is %q; allowed are eager and graph%s", o.Mode, suggest.DidYouMean(o.Mode, Modes)))
	}
	if o.Repetitions < 1 || o.Repetitions > 10000 {
		all = append(all, fmt.Errorf("--reps is %d; 1 to 10000 are allowed", o.Repetitions))
	}
	if o.Tensors < 1 || o.Tensors > kernels.MaxPairs {
		all = append(all, fmt.Errorf("--tensors is %d; 1 to %d are allowed", o.Tensors, kernels.MaxPairs))
	}
	if o.Ranks < 1 || o.Ranks > launch.MaxRanks {
		all = append(all, fmt.Errorf("--ranks is %d; 1 to %d are allowed", o.Ranks, launch.MaxRanks))
	}
	if o.PlotFile != "" && !drawable(o.PlotFile) {
		all = append(all, fmt.Errorf("--plot is %q; a name that ends in .png or .svg is allowed", o.PlotFile))
	}
	if o.PlotFile != "" && len(s.Kinds) > 0 && !slices.ContainsFunc(s.Kinds, func(kind string) bool { return line(&measure.Row{Kind: kind}) != "" }) {
		all = append(all, fmt.Errorf("--plot is %q, and --kind is %q, which has nothing with sizes; add all_reduce, put or another", o.PlotFile, o.Kinds))
	}
	return s, exit.UsageError(errors.Join(all...))
}

// peerSpec checks the flags of the peer and returns what the ranks do about it, nil if nothing. It does not set multicast and timeout,
// which the configuration decides.
func (o *Options) peerSpec(kinds []string) (*measure.PeerSpec, error) {
	if !slices.Contains(Peers, o.Peer) {
		return nil, fmt.Errorf("--peer is %q; allowed are %s%s", o.Peer, strings.Join(Peers, ", "), suggest.DidYouMean(o.Peer, Peers))
	}
	if o.Peer == measure.NVSHMEM && slices.Contains(kinds, measure.AllReduce) {
		return o.nvshmemSpec()
	}
	if o.Peer == measure.SGLang && slices.Contains(kinds, measure.AllReduce) {
		return o.sglangSpec()
	}
	if o.Peer == measure.PyTorch && slices.Contains(kinds, measure.AllReduce) {
		return o.pytorchSpec()
	}
	p := &measure.PeerSpec{Required: o.Peer != PeerAuto && o.Peer != PeerNone, Library: o.PeerLibrary}
	dtype, err := tensor.ParseDType(o.DType)
	if err == nil && !measure.NCCLHas(dtype) && o.Peer == measure.NCCL {
		return nil, fmt.Errorf("--peer is %s, which has no %s; choose another --dtype", o.Peer, dtype)
	}
	measured, with := slices.Contains(kinds, measure.AllReduce), measure.AllReduce
	if o.Peer == PeerAuto || o.Peer == measure.NCCL {
		measured = slices.ContainsFunc(kinds, func(kind string) bool { return slices.Contains(measure.NCCLKinds, kind) })
		with = "one of " + strings.Join(measure.NCCLKinds, ", ")
	}
	if o.Peer == PeerNone || !measured {
		if p.Required && len(kinds) > 0 {
			return nil, fmt.Errorf("--peer is %s, which is measured with %s; add that to --kind", o.Peer, with)
		}
		if o.PeerLibrary != "" {
			return nil, fmt.Errorf("--peer-library is %q, and no peer is measured; leave it out, or give a --peer and a --kind that it has", o.PeerLibrary)
		}
		return nil, nil
	}
	return p, nil
}

// nvshmemSpec checks the flags of bench for the peer NVSHMEM.
func (o *Options) nvshmemSpec() (*measure.PeerSpec, error) {
	dtype, err := tensor.ParseDType(o.DType)
	op, opErr := kernels.ParseOp(o.Op)
	if err == nil && opErr == nil && !kernels.Supported(device.CUDA, kernels.NVSHMEM, dtype, op, 2) {
		return nil, fmt.Errorf("--peer is %s, which has no %s of %s; choose another --op", o.Peer, op, dtype)
	}
	if o.PeerLibrary != "" {
		return nil, fmt.Errorf("--peer-library is %q, and --peer is %s, whose library SYMMEM_NVSHMEM_LIBRARY names", o.PeerLibrary, o.Peer)
	}
	return &measure.PeerSpec{Required: true, NVSHMEM: true}, nil
}

// sglangSpec checks the flags of bench for the peer SGLang.
func (o *Options) sglangSpec() (*measure.PeerSpec, error) {
	dtype, err := tensor.ParseDType(o.DType)
	op, opErr := kernels.ParseOp(o.Op)
	if err == nil && opErr == nil && !measure.SGLangHas(dtype, op) {
		return nil, fmt.Errorf("--peer is %s, which has no %s of %s; choose the sum of bf16, f16 or f32", o.Peer, op, dtype)
	}
	if o.PeerLibrary == "" {
		return nil, fmt.Errorf("--peer is %s, and there is no --peer-library; give the cubin that bench/peers/sglang.sh makes", o.Peer)
	}
	return &measure.PeerSpec{Required: true, SGLang: true, Library: o.PeerLibrary}, nil
}

// pytorchSpec checks the flags of bench for the peer PyTorch.
func (o *Options) pytorchSpec() (*measure.PeerSpec, error) {
	dtype, err := tensor.ParseDType(o.DType)
	op, opErr := kernels.ParseOp(o.Op)
	if err == nil && opErr == nil && !measure.PyTorchHas(dtype, op) {
		return nil, fmt.Errorf("--peer is %s, which has no %s of %s; choose the sum of bf16 or f32", o.Peer, op, dtype)
	}
	return &measure.PeerSpec{Required: true, PyTorch: true, Library: o.PeerLibrary}, nil
}
