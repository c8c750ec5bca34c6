// Package tensor gives symmetric memory a shape and a dtype.
//
// A [Tensor] is one rank's part of a symmetric tensor: every rank makes one of the same shape and dtype with [Zeros], and a
// collective [Tensor.Rendezvous] makes each rank's copy reachable by all. Then [Tensor.Remote] views another rank's copy,
// [Tensor.Put] and [Tensor.Get] move data, [Tensor.Signal] and [Tensor.Wait] order it, and package kernels reduces over all
// copies. [SymmetricTensor] is the interface of it that kernels and programs are written against.
//
// Every address that a tensor gives has the tensor's own offset applied, for slices too. Tensors are contiguous and in row-
// major order.
//
// What runs on a device is enqueued on a stream and returns at once; what says it is collective must be called by all ranks
// in the same order, and blocks until they have come.
//
// This package knows memory and device, and nothing of kernels.
package tensor
