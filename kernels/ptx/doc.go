// Package ptx says how the compiled CUDA kernels want to be launched: which file and function do an all-reduce, what their one
// parameter looks like, and how much workspace they use. It mirrors kernels/cuda/params.cuh, where each thing is explained. The
// kernels themselves are in kernels/ptx/images, which a program imports through its backends: one without CUDA devices carries none.
package ptx
