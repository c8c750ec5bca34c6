// Package symmem is symmetric memory for Go: memory that every rank of a group allocates alike, so that each rank can name,
// read and write the same place on every other rank.
//
// [Open] joins this process to its group, picks a backend that all ranks have and gives a [Rank]. The same program runs on a
// machine without any GPU, over shared memory, and on GPUs:
//
//	r, err := symmem.Open(ctx, config.Default(), nil)              // collective: group, device, backend
//	t, err := r.Empty(ctx, tensor.BFloat16, 4096, 1024)            // allocate
//	err = t.Rendezvous(ctx)                                        // collective: every rank can now reach every other's copy
//	p, err := t.Remote(3)                                          // a view on rank 3's memory
//	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)    // collective, once
//	err = plan.Run(stream)                                         // one launch; may be captured in a graph
//
// Ranks are processes, started by `symmem run`, torchrun, mpirun or srun, or goroutines of one process ([OpenLocal]).
//
// # Collective calls
//
// What is said to be collective must be called by all ranks of the group in the same order. It blocks until all have come,
// and ends at the latest with its context or after the timeout of the configuration, with an error that names the ranks that
// did not come. When a rank dies, the others' calls end with ErrPeerLost as soon as its connection breaks, and at the latest after
// the liveness timeout of the configuration.
//
// # Rooms
//
// Package tensor has the tensors, kernels the collectives on them, backend what a backend is, device what a device is, group
// the ranks and how they agree, and config the settings. docs/architecture.md describes how they work together.
package symmem
