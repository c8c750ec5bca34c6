package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// ncclTypes are the dtypes that NCCL has.
var ncclTypes = map[tensor.DType]nccl.DataType{
	tensor.Float16: nccl.Float16, tensor.BFloat16: nccl.BFloat16, tensor.Float32: nccl.Float32, tensor.Float64: nccl.Float64,
	tensor.Int8: nccl.Int8, tensor.Int32: nccl.Int32, tensor.Int64: nccl.Int64,
	tensor.Uint8: nccl.Uint8, tensor.Uint32: nccl.Uint32, tensor.Uint64: nccl.Uint64,
}

// NCCLKinds are the kinds that NCCL is measured beside.
var NCCLKinds = []string{AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, AllReduceMany, AllGatherMany, ReduceScatterMany, BroadcastMany, AllReduceMatMul}

// NCCLHas reports whether NCCL can reduce a dtype.
func NCCLHas(dtype tensor.DType) bool {
	_, known := ncclTypes[dtype]
	return known
}

// ncclOps are the operations in NCCL's numbers.
var ncclOps = map[kernels.Op]nccl.Op{
	kernels.Sum: nccl.Sum, kernels.Prod: nccl.Prod, kernels.Min: nccl.Min, kernels.Max: nccl.Max, kernels.Avg: nccl.Avg,
}

// averageTolerance is for NCCL's averages, which multiply each input by a rounded 1/W before they add.
const averageTolerance = 1.0 / 16

// ncclPeer is NCCL in a rank of bench, measured in the same run and on the same stream. Its buffers are plain device memory, not the
// tensors. That is what a program without symmetric memory has, and NCCL treats memory that it could map on its peers differently.
type ncclPeer struct {
	lib       *nccl.Library
	comm      *nccl.Comm
	device    *cuda.Device
	about     string          // the library and how it is used, for the rows
	symmetric []symmetricComm // for symmetric windows; none if there are none
	lacking   []string        // kinds that the library lacks, which was said
}

// peerFailure is the reason why one rank does not have the peer.
type peerFailure struct {
	Text  string `json:"text,omitempty"`  // "" if it has it
	Stuck bool   `json:"stuck,omitempty"` // a thread hangs in the library: the process cannot end in good order
}

// agree returns on every rank the reason why the ranks cannot use the peer, "" if all can. An error must end the bench. Collective.
func (b *bencher) agree(ctx context.Context, op string, failure error) (reason string, err error) {
	var mine peerFailure
	if failure != nil {
		mine.Text = failure.Error()
		_, mine.Stuck = errors.AsType[*nccl.StuckError](failure)
	}
	data, err := json.Marshal(mine)
	if err != nil {
		return "", err
	}
	all, err := b.r.Group().AllGather(ctx, op, data)
	if err != nil {
		return "", errors.Join(failure, err)
	}
	theirs := make([]peerFailure, len(all))
	for rank, text := range all {
		if err := json.Unmarshal(text, &theirs[rank]); err != nil {
			return "", fmt.Errorf("%s: reading what rank %d says: %w", op, rank, err)
		}
	}
	reason, stuck := whyNoPeer(theirs)
	if stuck {
		return "", errors.New(reason)
	}
	return reason, nil
}

// whyNoPeer combines the reasons of all ranks into one: the first one, with the number of its rank unless all are the same. It is "" if there is
// none.
func whyNoPeer(all []peerFailure) (reason string, stuck bool) {
	same := true
	for rank, f := range all {
		same = same && f.Text == all[0].Text
		stuck = stuck || f.Stuck
		if reason == "" && f.Text != "" {
			reason = fmt.Sprintf("rank %d: %s", rank, f.Text)
		}
	}
	if same {
		return all[0].Text, stuck
	}
	return reason, stuck
}

// refusePeer goes on without the peer, for a reason that all ranks know. If the peer is required, refused is true and the bench ends.
// Rank 0 reports the reason.
func (b *bencher) refusePeer(reason string) (refused bool, err error) {
	refused = b.spec.Peer.Required
	if b.r.Rank() != 0 {
		return refused, nil
	}
	if refused {
		return true, b.rep.Refuse(fmt.Sprintf("the peer %s cannot be measured beside backend %s: %s; "+
			"put that right, or leave it out by --peer=none", b.spec.Peer.name(), b.r.Backend(), reason))
	}
	return false, b.rep.Row(Row{Kind: AllReduce, Backend: b.spec.Peer.name(), Beside: b.r.Backend(), Note: reason})
}

// loadPeer loads the library of the peer on all ranks. It is nil if the peer is not to be measured. If refused is true the bench ends,
// and nothing is left to do. Collective.
func (b *bencher) loadPeer(ctx context.Context) (lib *nccl.Library, refused bool, err error) {
	spec := b.spec.Peer
	if spec == nil {
		return nil, false, nil
	}
	if spec.NVSHMEM {
		refused, err = b.openNVSHMEM(ctx)
		return nil, refused, err
	}
	if spec.SGLang {
		refused, err = b.openSGLang(ctx)
		return nil, refused, err
	}
	if spec.PyTorch {
		refused, err = b.openPyTorch(ctx)
		return nil, refused, err
	}
	if kind := b.r.Device().Kind(); kind != device.CUDA {
		if !spec.Required {
			return nil, false, nil // nobody expects it there
		}
		refused, err = b.refusePeer(fmt.Sprintf("NCCL works on CUDA devices, and this backend is on a %s device", kind))
		return nil, refused, err
	}
	lib, failure := b.loadNCCL()
	reason, err := b.agree(ctx, "loading the peer", failure)
	if err != nil || reason == "" {
		return lib, false, err
	}
	refused, err = b.refusePeer(reason)
	return nil, refused, err
}

// loadNCCL loads the library on this rank.
func (b *bencher) loadNCCL() (*nccl.Library, error) {
	if _, ok := ncclTypes[b.dtype]; !ok {
		return nil, fmt.Errorf("NCCL has no %s", b.dtype)
	}
	if _, ok := b.r.Device().(*cuda.Device); !ok {
		return nil, fmt.Errorf("the device is a %T, whose context cannot be shared with NCCL", b.r.Device())
	}
	return b.openNCCL(&nccl.Options{Path: b.spec.Peer.Library, Multicast: b.spec.Peer.Multicast})
}

// connectPeer makes the peer's communicator. Collective.
func (b *bencher) connectPeer(ctx context.Context, lib *nccl.Library) (refused bool, err error) {
	d := b.r.Device().(*cuda.Device) // loadNCCL has made sure
	// Half of the time, so that the ranks that came are still there when it turns out that another did not.
	within, cancel := context.WithTimeout(ctx, b.spec.Peer.Timeout/2)
	defer cancel()
	var id []byte
	var failure error
	if b.r.Rank() == 0 {
		id, failure = bounded(within, d, "making a unique id", func() ([]byte, error) {
			id, err := lib.NewUniqueID()
			return id[:], err
		})
		if failure != nil {
			id = nil
		}
	}
	if id, err = b.r.Group().Broadcast(ctx, "the peer's unique id", 0, id); err != nil {
		return false, errors.Join(failure, err)
	}
	var comm *nccl.Comm
	switch {
	case failure != nil:
	case len(id) != nccl.UniqueIDBytes:
		failure = errors.New("rank 0 has made no unique id")
	default:
		comm, failure = lib.NewComm(within, &nccl.CommOptions{
			Ranks: b.r.WorldSize(), Rank: b.r.Rank(), ID: nccl.UniqueID(id), Scope: d.WithContext,
			Config: &nccl.Config{NoMulticast: !b.spec.Peer.Multicast},
		})
	}
	reason, err := b.agree(ctx, "connecting the peer", failure)
	if err != nil {
		return false, err
	}
	if reason != "" {
		if comm != nil {
			if err := comm.Abort(ctx, errors.New(reason)); err != nil {
				return false, err
			}
		}
		return b.refusePeer(reason)
	}
	b.peer = &ncclPeer{lib: lib, comm: comm, device: d, about: aboutNCCL(lib, b.spec.Peer.Multicast)}
	return false, b.connectSymmetric(ctx)
}

// aboutNCCL describes what is measured, for people who compare.
func aboutNCCL(lib *nccl.Library, multicast bool) string {
	text := fmt.Sprintf("NCCL %s (%s), plain device memory", lib.Version(), lib.Path())
	if !multicast {
		text += ", NCCL_NVLS_ENABLE=0"
	}
	return text
}

// bounded calls NCCL with the context of the device current, and waits no longer than ctx.
func bounded[T any](ctx context.Context, d *cuda.Device, what string, call func() (T, error)) (T, error) {
	return nccl.Bound(ctx, what, func() (value T, err error) {
		err = d.WithContext(func() error {
			var err error
			value, err = call()
			return err
		})
		return value, err
	})
}

// peerEnd is how long NCCL gets to end what waits for a rank that is gone.
const peerEnd = 5 * time.Second

// untilLost returns a context that ends when a rank is lost, since work of NCCL's that waits for it does not. end is called with the error of what was done within, and returns it with
// the loss; after an error it ends the communicators without the other ranks, so that the stream has nothing left to wait for.
func (b *bencher) untilLost(ctx context.Context) (_ context.Context, end func(error) error) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-b.r.Group().Lost():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func(err error) error {
		cancel()
		if err == nil {
			return nil
		}
		if lost := b.r.Group().Err(); errors.Is(lost, symmem.ErrPeerLost) && !errors.Is(err, symmem.ErrPeerLost) {
			err = fmt.Errorf("%w: %w", lost, err)
		}
		b.abandonPeer(err)
		return err
	}
}

// abandonPeer aborts the communicators, all at once, as one may wait for the kernels of another. What cannot be ended ends with the process.
func (b *bencher) abandonPeer(cause error) {
	if b.peer == nil {
		return
	}
	within, cancel := context.WithTimeout(context.Background(), peerEnd)
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range append([]symmetricComm{{comm: b.peer.comm}}, b.peer.symmetric...) {
		wg.Go(func() { _ = c.comm.Abort(within, cause) })
	}
	wg.Wait()
	b.peer = nil
}

// closePeer destroys the communicator, if there is one. Collective.
func (b *bencher) closePeer(ctx context.Context) error {
	if b.peer == nil {
		return nil
	}
	if err := b.r.Barrier(ctx); err != nil {
		return err
	}
	within, cancel := context.WithTimeout(ctx, b.spec.Peer.Timeout)
	defer cancel()
	err := errors.Join(b.closeSymmetric(within), b.peer.comm.Destroy(within))
	b.peer = nil
	return err
}

// ncclCollectives are the kinds that NCCL has, but for those that are several calls.
var ncclCollectives = map[string]nccl.Collective{
	AllReduce: nccl.AllReduce, Broadcast: nccl.Broadcast, Reduce: nccl.Reduce, AllGather: nccl.AllGather, ReduceScatter: nccl.ReduceScatter, AllToAll: nccl.AllToAll,
}

// ncclCollective measures NCCL's collective of the kind, bytes, dtype, operation, mode, place and iterations of the row like, on the same stream: on plain device memory,
// and again over symmetric windows. Where the library lacks it, rank 0 says so, once. Collective.
func (b *bencher) ncclCollective(ctx context.Context, like Row) error {
	what, known := ncclCollectives[like.Kind]
	if !known {
		return nil
	}
	if slices.Contains(b.peer.lacking, like.Kind) {
		return nil
	}
	reason, err := b.agree(ctx, "looking for the peer's "+like.Kind, b.peer.lib.Has(what))
	if err != nil {
		return err
	}
	if reason != "" {
		b.peer.lacking = append(b.peer.lacking, like.Kind)
		if b.r.Rank() != 0 {
			return nil
		}
		return b.rep.Row(Row{Kind: like.Kind, Backend: NCCL, Beside: b.r.Backend(), Note: like.Kind + " is not measured: " + reason})
	}
	if err := b.plainCollective(ctx, like); err != nil {
		return fmt.Errorf("measuring NCCL's %s of %s: %w", like.Kind, bytesize.Text(like.Bytes), err)
	}
	if err := b.symmetricCollective(ctx, like); err != nil {
		return fmt.Errorf("measuring NCCL's %s of %s over symmetric windows: %w", like.Kind, bytesize.Text(like.Bytes), err)
	}
	return nil
}

// plainCollective is ncclCollective on plain device memory.
func (b *bencher) plainCollective(ctx context.Context, like Row) error {
	in, out, free, err := b.agreedBuffers(ctx, like)
	if err != nil {
		return err
	}
	times, err := b.measureNCCL(ctx, like, b.peer.comm, in, out)
	if err != nil {
		return err
	}
	row := like
	row.Backend, row.Beside, row.Algorithm, row.Chosen, row.Note = NCCL, b.r.Backend(), "", "", b.peer.about
	if err := b.report(ctx, row, times); err != nil {
		return err
	}
	return free()
}

// inPlace is what a row says of a collective whose input and output are one.
const inPlace = "in place"

// sides returns how many bytes the input and the output have of the collective of a row.
func (b *bencher) sides(like Row) (in, out int64) {
	in, out = like.Bytes, like.Bytes
	switch w := int64(b.r.WorldSize()); like.Kind {
	case AllGather:
		in /= w
	case ReduceScatter:
		out /= w
	}
	return in, out
}

// agreedBuffers is peerBuffers on all ranks, or on none: one that has no memory would leave the others in NCCL's call for good. Collective.
func (b *bencher) agreedBuffers(ctx context.Context, like Row) (in, out device.Ptr, free func() error, err error) {
	in, out, free, err = b.peerBuffers(like)
	if voted := b.r.Group().Vote(ctx, "memory for the peer", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, free())
		}
		return 0, 0, nil, voted
	}
	return in, out, free, nil
}

// peerBuffers allocates what the peer reads in the collective of a row, and where to it writes, which is the same in place.
func (b *bencher) peerBuffers(like Row) (in, out device.Ptr, free func() error, err error) {
	d := b.peer.device
	ins, outs := b.sides(like)
	if in, err = d.Alloc(ins); err != nil {
		return 0, 0, nil, err
	}
	if like.Place == inPlace {
		return in, in, func() error { return d.Free(in) }, nil
	}
	if out, err = d.Alloc(outs); err != nil {
		return 0, 0, nil, errors.Join(err, d.Free(in))
	}
	return in, out, func() error { return errors.Join(d.Free(out), d.Free(in)) }, nil
}

// ncclCalls checks a result of NCCL's collective of a row, and returns what enqueues so many of it. Collective.
func (b *bencher) ncclCalls(ctx context.Context, like Row, comm *nccl.Comm, in, out device.Ptr) (enqueue func(n int) error, err error) {
	stream, ok := b.s.(*cuda.Stream)
	if !ok {
		return nil, fmt.Errorf("the stream is a %T, which NCCL cannot work on", b.s)
	}
	what, ok := ncclCollectives[like.Kind]
	if !ok { // of those that are measured otherwise
		what = nccl.AllReduce
	}
	elements, handle := like.Bytes/b.dtype.Bytes(), uintptr(stream.Handle())
	count := elements
	if what == nccl.AllGather || what == nccl.ReduceScatter || what == nccl.AllToAll {
		count /= int64(b.r.WorldSize())
	}
	const root = 0
	once := func() error {
		return comm.Enqueue(what, handle, uint64(in), uint64(out), count, ncclTypes[b.dtype], ncclOps[b.op], root)
	}
	// The context is made current once for all runs of a repetition, so that NCCL does not pay for it each time.
	enqueue = func(n int) error { return b.peer.device.WithContext(repeated(n, once)) }
	check := reduction{kind: like.Kind, name: "NCCL's " + what.String(), dtype: b.dtype, elements: elements, op: b.op, in: in, out: out,
		enqueue: func() error { return enqueue(1) }, ends: true}
	if b.op == kernels.Avg && like.Op != "" {
		check.tolerance = averageTolerance
	}
	// This also makes the connections that NCCL makes on first use, outside of any capture.
	return enqueue, b.checkResult(ctx, check)
}

// measureNCCL checks a result of NCCL's collective of a row, measures it and returns the times of this rank. Collective.
func (b *bencher) measureNCCL(ctx context.Context, like Row, comm *nccl.Comm, in, out device.Ptr) ([]float64, error) {
	several, err := b.ncclCalls(ctx, like, comm, in, out)
	if err != nil {
		return nil, err
	}
	each := like.Iterations
	enqueue := func() error { return several(each) }
	var graph device.Graph
	if b.spec.Graph {
		each = min(graphRuns, like.Iterations)
		var err error
		if graph, err = b.capture(func() error { return several(each) }); err != nil {
			return nil, err
		}
		enqueue = func() error { return graph.Launch(b.s) }
	}
	times, err := b.measure(ctx, like.Iterations, each, enqueue)
	if graph != nil { // before the communicator, which waits for it
		err = errors.Join(err, graph.Close())
	}
	return times.total, err
}
