package measure

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// sglangPeer is SGLang's push all-reduce kernels in a rank of bench, from a cubin that bench/peers/sglang.sh makes of SGLang's package. They
// are launched on the tensors' memory and stream as ours are, with programmatic dependent launch.
type sglangPeer struct {
	image  []byte
	names  map[bool]string // of the one-shot kernel (false) and the two-shot kernel (true)
	shapes []sglangShape
}

// sglangShape is one way to launch them. SGLang itself has one block for each multiprocessor, or as many as its tables say, and chooses
// the threads by the size.
type sglangShape struct {
	twoShot         bool
	blocks, threads int
}

func (s sglangShape) String() string {
	form := "1shot_push"
	if s.twoShot {
		form = "2shot_push"
	}
	return fmt.Sprintf("%s %dx%d", form, s.blocks, s.threads)
}

// sglangTypes are the dtypes that SGLang's kernels have, by their names in the symbols of the cubin.
var sglangTypes = map[tensor.DType]string{tensor.BFloat16: "13__nv_bfloat16", tensor.Float16: "6__half", tensor.Float32: "f"}

// SGLangHas reports whether SGLang's kernels can reduce a dtype by an operation.
func SGLangHas(dtype tensor.DType, op kernels.Op) bool {
	_, known := sglangTypes[dtype]
	return known && op == kernels.Sum
}

// openSGLang finds the kernels in the cubin on all ranks. Collective.
func (b *bencher) openSGLang(ctx context.Context) (refused bool, err error) {
	p, failure := b.loadSGLang()
	reason, err := b.agree(ctx, "loading the peer", failure)
	if err != nil {
		return false, err
	}
	if reason != "" {
		return b.refusePeer(reason)
	}
	b.sglang = p
	return false, nil
}

// loadSGLang finds the kernels on this rank.
func (b *bencher) loadSGLang() (*sglangPeer, error) {
	d, ok := b.r.Device().(interface{ Multiprocessors() int })
	switch {
	case !ok:
		return nil, fmt.Errorf("SGLang's kernels are for CUDA devices, and this backend is on a %s device", b.r.Device().Kind())
	case !b.r.Capabilities().PeerPointers:
		return nil, errors.New("SGLang's kernels store to peers' memory, which has no addresses in this process")
	case b.r.WorldSize() < 2:
		return nil, errors.New("SGLang's kernels are for 2 ranks or more")
	}
	image, err := os.ReadFile(b.spec.Peer.Library)
	if err != nil {
		return nil, err
	}
	p := &sglangPeer{image: image, names: map[bool]string{}}
	for twoShot, form := range map[bool]string{false: "all_reduce_1shot_push_kernel", true: "all_reduce_2shot_push_kernel"} {
		// The template's arguments in a mangled name: the dtype, the world size, with dependent launch.
		if p.names[twoShot], err = symbol(image, fmt.Sprintf("%sI%sLj%dELb1EE", form, sglangTypes[b.dtype], b.r.WorldSize())); err != nil {
			return nil, fmt.Errorf("%s: %w", b.spec.Peer.Library, err)
		}
	}
	p.shapes = sglangShapes(d.Multiprocessors())
	return p, nil
}

// sglangShapes are those that are tried on GPUs with so many multiprocessors.
func sglangShapes(most int) (all []sglangShape) {
	for _, blocks := range []int{8, 32, 64, most} {
		for _, threads := range []int{128, 256, 512, 1024} {
			for _, twoShot := range []bool{false, true} {
				all = append(all, sglangShape{twoShot, blocks, threads})
			}
		}
	}
	return all
}

// symbol finds the function of a cubin, which is an ELF file, whose mangled name has part in it.
func symbol(image []byte, part string) (string, error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return "", fmt.Errorf("reading the cubin: %w", err)
	}
	all, err := f.Symbols()
	if err != nil {
		return "", fmt.Errorf("reading the cubin: %w", err)
	}
	for _, s := range all {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC && strings.Contains(s.Name, part) {
			return s.Name, nil
		}
	}
	return "", fmt.Errorf("no function with %q in its name", part)
}

// fits reports whether a shape is worth trying for so many vectors of 16 bytes: one-shot or two-shot where either may win, and not far more
// threads than vectors, nor so few that each has very many.
func (s sglangShape) fits(vectors int64, world int) bool {
	threads := int64(s.blocks * s.threads)
	if s.twoShot && vectors*16 < 64<<10 || !s.twoShot && vectors*16*int64(world-1) > 8<<20 {
		return false
	}
	if s.threads > 512 && vectors < 1<<16 {
		return false
	}
	return threads <= max(8*vectors, 1024) && (threads*8 >= vectors || s.blocks > 64)
}

// sglangAllReduce measures SGLang's all-reduce of the bytes, mode, place and iterations of the row like, in each shape, and reports the
// fastest. Collective.
func (b *bencher) sglangAllReduce(ctx context.Context, like Row) error {
	row := like
	row.Backend, row.Beside, row.Algorithm, row.Chosen = SGLang, b.r.Backend(), "", ""
	if like.Bytes%16 != 0 || like.Bytes > 256<<20 {
		if b.r.Rank() != 0 {
			return nil
		}
		return b.rep.Row(Row{Kind: AllReduce, Backend: SGLang, Beside: b.r.Backend(), Note: fmt.Sprintf("SGLang's kernels are measured for multiples of 16 bytes up to 256 MiB, not for %d", like.Bytes)})
	}
	in, err := b.tensorOf(ctx, b.dtype, like.Bytes)
	if err != nil {
		return err
	}
	out := in
	if b.spec.OutOfPlace {
		if out, err = b.tensorOf(ctx, b.dtype, like.Bytes); err != nil {
			return err
		}
	}
	// Each shape once, with few iterations, and then those that come near the fastest. All ranks see the same times, so they choose the same.
	var shapes []sglangShape
	var tries []float64
	short := max(like.Iterations/10, min(like.Iterations, graphRuns))
	for _, shape := range b.sglang.shapes {
		if !shape.fits(like.Bytes/16, b.r.WorldSize()) {
			continue
		}
		slowest, err := b.sglangShape(ctx, shape, in, out, 1, short)
		if err != nil {
			return fmt.Errorf("%s: %w", shape, err)
		}
		shapes, tries = append(shapes, shape), append(tries, slowest[0])
	}
	var best []float64 // of the slowest rank, by repetition
	for _, i := range nearFastest(tries) {
		slowest, err := b.sglangShape(ctx, shapes[i], in, out, b.spec.Repetitions, like.Iterations)
		if err != nil {
			return fmt.Errorf("%s: %w", shapes[i], err)
		}
		if best == nil || median(slowest) < median(best) {
			best, row.Chosen = slowest, shapes[i].String()
		}
	}
	row.Note = "SGLang's push kernels on our memory, the fastest of several launches"
	if best != nil {
		err = b.tellRow(row, best)
	} else if b.r.Rank() == 0 { // a GPU with few multiprocessors
		err = b.rep.Row(Row{Kind: AllReduce, Backend: SGLang, Beside: b.r.Backend(), Note: fmt.Sprintf("no launch of SGLang's kernels that is tried suits %d bytes here", like.Bytes)})
	}
	if err != nil {
		return err
	}
	if out != in {
		err = out.Close(ctx)
	}
	return errors.Join(err, in.Close(ctx))
}

// nearFastest is which of some times may be the fastest if they are measured for longer: the least five, of those that are within a tenth of the least.
func nearFastest(times []float64) []int {
	order := make([]int, len(times))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(times[i], times[j]) })
	n := 0
	for n < min(len(order), 5) && times[order[n]] <= 1.1*times[order[0]] {
		n++
	}
	return order[:n]
}

// sglangShape measures one shape, so many repetitions of so many iterations, and returns the times of the slowest rank. Collective.
func (b *bencher) sglangShape(ctx context.Context, shape sglangShape, in, out tensor.SymmetricTensor, repetitions, iterations int) ([]float64, error) {
	// Two buffers, each with a slot for every rank, and behind them one counter for each block. They begin as zeros.
	world, size := int64(b.r.WorldSize()), in.Bytes()
	slot := size
	if shape.twoShot {
		slot = 2 * 16 * ((size/16 + world - 1) / world)
	}
	buffers := 2 * world * slot
	if buffers > 1<<32-1 {
		return nil, fmt.Errorf("%d bytes of buffers are more than the kernels can address", buffers)
	}
	workspace, err := b.tensorOf(ctx, tensor.Uint8, (buffers+int64(shape.blocks)*4+15)/16*16)
	if err != nil {
		return nil, err
	}
	// AllReducePushParams: input, output, num_vecs, rank, and PushWorkSpace: workspaces, counter, mc_workspace, slot_bytes.
	le := binary.LittleEndian
	params := le.AppendUint64(nil, uint64(in.Ptr()))
	params = le.AppendUint64(params, uint64(out.Ptr()))
	params = le.AppendUint32(params, uint32(size/16))
	params = le.AppendUint32(params, uint32(b.r.Rank()))
	for r := range b.r.WorldSize() {
		peer, err := workspace.Remote(r)
		if err != nil {
			return nil, err
		}
		params = le.AppendUint64(params, uint64(peer.Ptr()))
	}
	params = le.AppendUint64(params, uint64(workspace.Ptr().Add(buffers)))
	params = le.AppendUint64(params, 0)
	params = le.AppendUint64(params, uint64(slot)) // and 4 bytes of padding
	function, err := b.r.Memory().Function(b.sglang.image, b.sglang.names[shape.twoShot])
	if err != nil {
		return nil, err
	}
	launch, err := function.Prepare(device.Launch{
		Grid: [3]uint32{uint32(shape.blocks)}, Block: [3]uint32{uint32(shape.threads)}, Params: [][]byte{params}, Overlap: true,
	})
	if err != nil {
		return nil, err
	}
	enqueue := func() error { return launch.Launch(b.s) }
	err = b.checkResult(ctx, reduction{name: shape.String(), dtype: in.DType(), elements: in.NumElements(), op: b.op, in: in.Ptr(), out: out.Ptr(), enqueue: enqueue})
	if err != nil {
		return nil, err
	}
	n, each := iterations, 1
	var graph device.Graph
	if b.spec.Graph {
		each = min(graphRuns, n)
		if graph, err = b.capture(repeated(each, enqueue)); err != nil {
			return nil, err
		}
		enqueue = func() error { return graph.Launch(b.s) }
	}
	times, err := b.measureTimes(ctx, repetitions, n, each, enqueue)
	if err != nil {
		return nil, err
	}
	slowest, err := b.slowest(ctx, times.total)
	if err != nil {
		return nil, err
	}
	if graph != nil {
		if err := graph.Close(); err != nil {
			return nil, err
		}
	}
	return slowest, errors.Join(launch.Close(), workspace.Close(ctx))
}
