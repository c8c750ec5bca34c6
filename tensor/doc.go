// Package tensor gives symmetric memory a shape and a dtype.
//
// A [Tensor] is one rank's part of a symmetric tensor: every rank makes one of the same shape and dtype with [Zeros], and a
// collective [Tensor.Rendezvous] makes each rank's copy reachable by all. Then [Tensor.Remote] views another rank's copy,
// [Tensor.Put] and [Tensor.Get] move data, [Tensor.Signal] and [Tensor.Wait] order it, and package kernels reduces over all
// copies. [SymmetricTensor] is the interface of it that collectives and programs are written against, and [Tensor.Slice] and
// [Tensor.Sub] give parts of a tensor that have all of it too.
//
// Every address that a tensor gives has the tensor's own offset applied, for slices too. Tensors are contiguous and in row-
// major order. [Read], [Write] and [ReadAll] copy elements between a [View] and Go slices, on every device; [HostSlice] is the
// memory itself as a Go slice, where the CPU can address it.
//
// # What blocks
//
// What runs on a device is enqueued on a stream and returns at once; what says it is collective must be called by all ranks
// in the same order, and blocks until they have come or the context has ended. What says it is local does not wait for other
// ranks.
//
// # Errors
//
// The conditions are those of the module's root package: ErrClosed for what was closed, ErrInvalid for an argument outside of
// what is allowed, ErrNoRendezvous for what needs one before, and what the methods name. In collective calls every rank gets
// the same ones, ErrMismatch if the ranks did not ask for the same thing and ErrPeerLost if one has died.
//
// This package knows memory and device, and nothing of kernels.
package tensor
