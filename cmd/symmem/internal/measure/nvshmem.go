package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// nvshmemPeer is NVSHMEM in a rank of bench: memory on its heap, on the same device as that of the backend that is measured.
type nvshmemPeer struct {
	memory *memory.Memory
	group  *group.Group // of a memory that was opened for this; nil if the backend is nvshmem itself
}

// openNVSHMEM opens NVSHMEM beside the backend, or takes the backend if it is NVSHMEM. Collective.
func (b *bencher) openNVSHMEM(ctx context.Context) (refused bool, err error) {
	if b.r.Backend() == NVSHMEM {
		b.nvshmem = &nvshmemPeer{memory: b.r.Memory()}
		return false, nil
	}
	if kind := b.r.Device().Kind(); kind != device.CUDA {
		return b.refusePeer(fmt.Sprintf("NVSHMEM works on CUDA devices, and this backend is on a %s device", kind))
	}
	all := make([]int, b.r.WorldSize())
	for i := range all {
		all[i] = i
	}
	g, err := b.r.Group().Sub(ctx, all)
	if err != nil {
		return false, err
	}
	env := backend.Env{
		Group: g, Opened: b.r.Device(), Multicast: "off", KernelTimeout: b.r.Memory().KernelTimeout(), Getenv: os.Getenv,
		Logger: b.r.Memory().Logger(),
	}
	if b.spec.Peer.Multicast {
		env.Multicast = "on"
	}
	m, err := memory.Open(ctx, NVSHMEM, &env, &memory.Options{Channels: 1, KernelTimeout: env.KernelTimeout, Logger: env.Logger})
	if err != nil {
		// Opening fails on all ranks or on none.
		refused, refuseErr := b.refusePeer(err.Error())
		return refused, errors.Join(refuseErr, g.Close(ctx))
	}
	b.nvshmem = &nvshmemPeer{memory: m, group: g}
	return false, nil
}

// closeNVSHMEM closes what openNVSHMEM opened. Collective.
func (b *bencher) closeNVSHMEM(ctx context.Context) error {
	p := b.nvshmem
	b.nvshmem = nil
	if p == nil || p.group == nil {
		return nil
	}
	return errors.Join(p.memory.Close(ctx), p.group.Close(ctx))
}

// nvshmemAllReduce measures NVSHMEM's reduction of the bytes, dtype, operation, mode, place and iterations of the row like,
// on the same stream. Collective.
func (b *bencher) nvshmemAllReduce(ctx context.Context, like Row) error {
	mapped := func() (*tensor.Tensor, error) {
		t, err := tensor.Zeros(ctx, b.nvshmem.memory, b.dtype, like.Bytes/b.dtype.Bytes())
		if err != nil {
			return nil, err
		}
		return t, t.Rendezvous(ctx)
	}
	in, err := mapped()
	if err != nil {
		return err
	}
	out, opts := in, &kernels.AllReduceOptions{Algorithm: kernels.NVSHMEM}
	if b.spec.OutOfPlace {
		if out, err = mapped(); err != nil {
			return err
		}
		opts.Out = out
	}
	plan, err := kernels.NewAllReduce(ctx, in, b.op, opts)
	if err != nil {
		return err
	}
	once := func() error { return plan.Run(b.s) }
	err = b.checkResult(ctx, reduction{name: plan.String(), dtype: b.dtype, elements: in.NumElements(), op: b.op, in: in.Ptr(), out: out.Ptr(),
		enqueue: once})
	if err != nil {
		return err
	}
	n, err := b.affordable(ctx, like.Iterations, once)
	if err != nil {
		return err
	}
	row := Row{Kind: AllReduce, Backend: NVSHMEM, Beside: b.r.Backend(), Bytes: like.Bytes, DType: like.DType, Op: like.Op,
		Mode: like.Mode, Place: like.Place, Note: "NVSHMEM's own reduction, on its heap", Iterations: n}
	each, enqueue := 1, once
	var graph device.Graph
	if b.spec.Graph {
		each = min(graphRuns, n)
		if graph, err = b.capture(repeated(each, once)); err != nil {
			return err
		}
		enqueue = func() error { return graph.Launch(b.s) }
	}
	times, err := b.measure(ctx, n, each, enqueue)
	if err != nil {
		return err
	}
	if err := b.report(ctx, row, times.total); err != nil {
		return err
	}
	if graph != nil {
		err = graph.Close()
	}
	err = errors.Join(err, plan.Close(ctx))
	if out != in {
		err = errors.Join(err, out.Close(ctx))
	}
	return errors.Join(err, in.Close(ctx))
}

// affordable returns how many of n iterations fit into a quarter of a second on the slowest rank, in whole graphs. Without multicast
// NVSHMEM reduces in one block of threads, whatever the size. Collective.
func (b *bencher) affordable(ctx context.Context, n int, once func() error) (int, error) {
	const tries, repetition = 4, 250 * time.Millisecond
	began := time.Now()
	for range tries {
		if err := once(); err != nil {
			return 0, err
		}
	}
	if err := b.s.Synchronize(ctx); err != nil {
		return 0, err
	}
	mine, err := json.Marshal(time.Since(began))
	if err != nil {
		return 0, err
	}
	all, err := b.r.Group().AllGather(ctx, "how long NVSHMEM takes", mine)
	if err != nil {
		return 0, err
	}
	for rank, text := range all {
		var took time.Duration
		if err := json.Unmarshal(text, &took); err != nil {
			return 0, fmt.Errorf("reading how long rank %d took: %w", rank, err)
		}
		n = min(n, int(repetition*tries/max(took, 1)))
	}
	return max(n-n%graphRuns, graphRuns), nil
}
