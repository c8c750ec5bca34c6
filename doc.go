// Package symmem provides symmetric memory: memory that every rank of a group allocates alike, so that each rank can address, read and write the same
// place on every other rank.
//
// [Open] joins this process to its group, picks a backend that all ranks can use, and returns a [Rank]. The same program runs on a machine without
// any GPU, over shared memory, and on GPUs:
//
//	r, err := symmem.Open(ctx, config.Config{}, nil)               // collective: group, device, backend; settings as config.Load finds them
//	t, err := r.Zeros(ctx, tensor.BFloat16, 4096, 1024)            // allocate
//	err = t.Rendezvous(ctx)                                        // collective: every rank can now reach every other's copy
//	p, err := t.Remote(3)                                          // a view on rank 3's memory
//	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)    // collective, once
//	err = plan.Run(stream)                                         // one launch; may be captured in a graph
//
// Ranks are processes, started by `symmem run`, torchrun, mpirun or srun, or goroutines of one process ([OpenLocal]).
//
// # Collective calls
//
// A call that is documented as collective must be made by all ranks of the group, in the same order. It blocks until all ranks have called it. It
// ends at the latest with its context, or after the timeout of the configuration, with an error that names the ranks that did not come. When a rank
// dies, the others' calls end with ErrPeerLost as soon as its connection breaks, and at the latest after the liveness timeout of the configuration.
//
// # Errors
//
// Conditions are values for errors.Is: [ErrUnavailable] and the others below it. In a collective call in which some ranks fail, every rank gets an
// error, and errors.Is finds the conditions of all of them on every rank, on those that failed and on those that were told. (Errors from outside this
// module, such as a context's, are found only on the rank that had them.)
//
// Errors with values are types for errors.As:
//
//   - group.VoteError: some ranks failed in a step that all had to pass; group.MismatchError: the ranks did not ask for the same thing
//   - group.PeerLostError: a rank is gone; group.MissingRanksError, group.AbandonedError: ranks did not come in time
//   - group.ConnectError, group.RefusedError: there is no rendezvous service, or it will not have this rank
//   - group.QuotaError, group.FileLimitError: more was asked for than the service keeps, or than files that may be open
//   - durable.StoreError: the store of a rendezvous service is full, does not answer, or is not its own any more
//   - symmem.ArgumentError: a refused argument or setting
//   - backend.RefusedError: no backend can be used; symmem.LoadError, symmem.SymbolError, symmem.CallError, symmem.StuckError: what
//     a native library lacks, has answered, or has not done in time
//   - memory.HeapFullError: a symmetric heap has no room; memory.TurnError: a call gave up before an earlier one of the same rank had ended
//   - memory.WorkspaceError: there is no memory for what a plan needs; collective.RoomError: there is no room on the device for a plan
//   - kernels.CountsError: the counts of an all-to-all, which it read when it ran, are none or do not fit
//   - device.WorkError, device.WaitError, device.PanicError, device.CaptureError: device work that failed, waited in vain or
//     panicked, and calls that do not go with a capture
//   - cuda.Error, cuda.MemoryError: the driver's answer, and memory that a backend cannot adopt
//
// # Packages
//
// Package tensor has the tensors, kernels the collectives on them, collective what a kernel of one's own needs to be one, memory what all are built on,
// backend what a backend implements, device what a device is, group the ranks and how they agree, and config the settings. docs/architecture.md describes how they work together.
package symmem
