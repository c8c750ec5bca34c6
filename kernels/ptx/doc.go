// Package ptx holds the compiled CUDA kernels and says how they want to be launched: which file and function do an all-reduce,
// what their one parameter looks like, and how much of a channel they use. It mirrors kernels/cuda/params.cuh, where each
// thing is explained, and knows nothing else of this module.
//
// The .ptx files are made from kernels/cuda by kernels/gen, which `go generate ./kernels/...` runs. The files are for compute
// capability 8.0 and any later, those whose names end in _sm90 and multimem.ptx for 9.0 and later; PTX ISA 8.4 needs a
// driver of the 550 series or later.
package ptx

//go:generate python3 ../gen/gen.py
