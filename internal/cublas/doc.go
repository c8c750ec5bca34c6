// Package cublas calls the few functions of NVIDIA's cuBLAS that bench needs to multiply matrices beside a collective. The library,
// libcublas.so.12 or libcublas.so.13, is found and loaded when [Load] is called: building needs no headers and no library. The numbers are
// those of cublas_api.h and library_types.h of CUDA 12 and 13, in which they are the same.
//
// cuBLAS takes the GPU from the context that is current on the calling OS thread: (*cuda.Device).WithContext makes one current. It returns before
// the GPU is done.
package cublas
