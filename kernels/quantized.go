package kernels

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// QuantizedBytes is how many bytes n elements are as the form QuantizedInt8 sends them: 68 for each 64, whatever their dtype. In an all-reduce
// each rank sends 2 * (world size - 1) / world size as much.
//
// QuantizedInt8 is an all-reduce in two halves, of sums and averages of f16, bf16 and f32, for large messages where links are the limit and
// exact results are not needed. Nothing chooses it but the caller. The message is taken as blocks of 64 elements, counted from its first. A
// block has a scale, max(m / 127, 2^-126) for its largest magnitude m, and each element goes as the 8-bit integer nearest to its
// quotient by that. The owner of a block adds what has come, in float32 and in rank order, its own input quantised like the others, and
// sends the sum, or the average, quantised again. Everybody rounds that to the dtype, the owner too: so every rank has the same bits, and
// they are the same on every kind of device, between any number of blocks and streams, and over transfers. A tensor that is split elsewhere
// than at multiples of 64 elements has other blocks, and other bits.
//
// Of a sum, an element is at most S/126 + W * 2^-126 away from the exact one, and what rounding to the dtype adds, where S is the sum over the
// W ranks of the largest magnitude that each has in the element's block; of an average, that by W. A block of zeros gives zeros, and -0 is
// sent as 0. So elements that are much smaller than others of their block lose all that they have. Infinities and NaN make their whole
// block NaN, and so may magnitudes and sums beyond 2^127. A world of one is exact.
func QuantizedBytes(n int64) int64 {
	return (n + ptx.QuantizedBlock - 1) / ptx.QuantizedBlock * ptx.QuantizedBytes
}

// quantizedForm is how the message is cut, alike on every rank. An image of a shard is as kernels/cuda/quantized.cu has it.
type quantizedForm struct {
	*allReduce
	rank, size int
	count      int64
	shard      int64 // blocks
	span       int64 // bytes of an image
}

func (a *allReduce) newQuantizedForm() quantizedForm {
	f := quantizedForm{allReduce: a, rank: a.in.Rank(), size: a.in.WorldSize(), count: a.in.NumElements()}
	f.shard = ptx.QuantizedShard(f.count, f.size)
	f.span = ptx.QuantizedSpan(f.shard)
	return f
}

// elements is the range of elements of owner's shard.
func (f quantizedForm) elements(owner int) (lo, hi int64) {
	each := f.shard * ptx.QuantizedBlock
	return min(int64(owner)*each, f.count), min(int64(owner+1)*each, f.count)
}

// quantized makes the spec that of QuantizedInt8.
func (a *allReduce) quantized(s *collective.Spec) {
	f := a.newQuantizedForm()
	switch {
	case f.size == 1:
		a.byTransfers(s) // to nobody
	case a.far():
		f.byTransfers(s)
	case a.in.Device().Kind() == device.CUDA:
		f.onCUDA(s)
	default:
		f.onHost(s)
	}
}

// far reports whether peers have no addresses in this process.
func (a *allReduce) far() bool {
	return !a.in.Memory().Backend().Capabilities().PeerPointers || !reachable(a.in, a.out)
}

// fit is the launch of a kernel for so many blocks of elements: four threads each.
func (f quantizedForm) fit(blocks int64) func(multiprocessors int) (grid, threads int) {
	return func(multiprocessors int) (grid, threads int) {
		const threadsOf = 256
		g := launchGeometry{blocks: int(min(max((4*blocks+threadsOf-1)/threadsOf, 1), 2*int64(multiprocessors))), threads: threadsOf}.atMost(f.maxBlocks)
		return g.blocks, g.threads
	}
}

// params is the kernel's parameter.
func (f quantizedForm) params() ptx.Quantized {
	return ptx.Quantized{
		In: uint64(f.in.Ptr()), Out: uint64(f.out.Ptr()), Count: uint64(f.count), Shard: uint64(f.shard), Span: uint64(f.span), Op: uint32(f.op), World: uint32(f.size),
	}
}

func (f quantizedForm) onCUDA(s *collective.Spec) {
	s.Program = nil
	kernel, _ := ptx.QuantizedAllReduce(f.in.DType().String()) // check has found the dtype
	image, err := ptx.Image(kernel.File)
	if err != nil {
		s.Failure = err
		return
	}
	s.Workspace = 2 * 2 * int64(f.size) * f.span
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Fit: f.fit(f.shard),
		Params: func(at *collective.Addresses) []any { return []any{at.Comm(), f.params()} },
	}
}

// The signals of a plan by transfers. The last one begins granted.
const (
	signalImages = iota
	signalSums
	signalImageRoom // the peer is done with the images that it was sent
	imageSignals
)

// byTransfers makes the spec that of a program. The workspace is, of images,
//
//	own    [world] of this rank's input, by owner
//	come   [world] of this rank's shard, by writer; this rank's own stays empty
//	sums   [world] by owner
func (f quantizedForm) byTransfers(s *collective.Spec) {
	s.Parameters += fmt.Sprintf(", shards of %d blocks", f.shard)
	images := int64(f.size) * f.span
	s.Workspace = 3 * images
	s.Program = &collective.Program{Signals: imageSignals, Granted: 1, Build: func(_ context.Context, b *collective.Builder) error {
		own := b.Workspace(f.rank)
		at := make([]device.Ptr, f.size) // where each rank's image of this rank's shard is
		var parts, sums []collective.Put
		for k := range f.size {
			peer := (f.rank + k) % f.size
			if k == 0 {
				at[peer] = own.Add(int64(peer) * f.span)
				continue
			}
			at[peer] = own.Add(images + int64(peer)*f.span)
			parts = append(parts, f.put(peer, peer, images+int64(f.rank)*f.span, own.Add(int64(peer)*f.span)))
			to := 2*images + int64(f.rank)*f.span
			sums = append(sums, f.put(peer, f.rank, to, own.Add(to)))
		}
		steps := f.hostSteps
		if f.in.Device().Kind() == device.CUDA {
			steps = f.cudaSteps
		}
		quantize, sum, dequantize, err := steps(b, own, at, own.Add(2*images))
		if err != nil {
			return err
		}
		quantize()
		b.Wait(signalImageRoom)
		b.Send(signalImages, parts...)
		b.Wait(signalImages)
		sum()
		b.Send(signalSums, sums...)
		b.Finish(signalSums)
		dequantize()
		b.Signal(signalImageRoom)
		return nil
	}}
}

// put is one image of owner's shard, none if that is empty.
func (f quantizedForm) put(peer, owner int, to int64, from device.Ptr) collective.Put {
	p := collective.Put{Peer: peer, Tensor: collective.ToWorkspace, Offset: to, Local: from}
	if lo, hi := f.elements(owner); hi > lo {
		p.Bytes = f.span
	}
	return p
}

// cudaSteps gives functions that add the kernels: this rank's input to the images at own, those at `at` to the one of this rank's shard in
// sums, and these to the output.
func (f quantizedForm) cudaSteps(b *collective.Builder, own device.Ptr, at []device.Ptr, sums device.Ptr) (quantize, sum, dequantize func(), err error) {
	dtype := f.in.DType().String()
	blocks := (f.count + ptx.QuantizedBlock - 1) / ptx.QuantizedBlock
	var image []byte
	add := func(find func(string) (ptx.Kernel, bool), blocks int64, set func(p *ptx.Quantized)) func() {
		kernel, _ := find(dtype)
		if image == nil && err == nil {
			image, err = ptx.Image(kernel.File)
		}
		p := f.params()
		set(&p)
		return func() {
			if blocks == 0 {
				return
			}
			b.Kernel(&collective.Kernel{
				Image: image, Function: kernel.Name, Fit: f.fit(blocks), Params: func(*collective.Addresses) []any { return []any{p} },
			})
		}
	}
	quantize = add(ptx.Quantize, blocks, func(p *ptx.Quantized) { p.Images = uint64(own) })
	lo, hi := f.elements(f.rank)
	sum = add(ptx.QuantizedSum, (hi-lo+ptx.QuantizedBlock-1)/ptx.QuantizedBlock, func(p *ptx.Quantized) {
		table, tableErr := binary.Append(nil, binary.LittleEndian, at)
		if tableErr != nil {
			err = tableErr
		}
		p.Count, p.Images, p.Sum = uint64(hi-lo), uint64(b.Upload(table)), uint64(sums.Add(int64(f.rank)*f.span))
	})
	dequantize = add(ptx.Dequantize, blocks, func(p *ptx.Quantized) { p.Images = uint64(sums) })
	return quantize, sum, dequantize, err
}

// hostSteps is the same for the host device.
func (f quantizedForm) hostSteps(b *collective.Builder, own device.Ptr, at []device.Ptr, sums device.Ptr) (quantize, sum, dequantize func(), err error) {
	k := f.newHost(b.Addresses)
	k.images, k.sums = f.imagesAt(b.Addresses, own), f.imagesAt(b.Addresses, sums)
	for _, p := range at {
		k.parts = append(k.parts, b.Bytes(p, f.span))
	}
	step := func(run func()) func() {
		return func() {
			b.Host(func() error {
				run()
				return nil
			})
		}
	}
	return step(k.quantize), step(func() { k.sum(k.sums[f.rank]) }), step(k.dequantize), nil
}

// imagesAt is as many images as there are ranks.
func (f quantizedForm) imagesAt(at *collective.Addresses, p device.Ptr) [][]byte {
	var all [][]byte
	for r := range f.size {
		all = append(all, at.Bytes(p.Add(int64(r)*f.span), f.span))
	}
	return all
}

// onHost makes the spec that of a kernel on the host device: each rank has the images of its input in its own workspace, where their owners
// read them, and that of its sums. A rank writes the images of the next run when everybody has come to the second meeting of this one, and
// sums behind the first of the next, to which everybody comes who is done with this one.
func (f quantizedForm) onHost(s *collective.Spec) {
	s.Program = nil
	s.Workspace = int64(f.size+1) * f.span
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		k := f.newHost(at)
		k.images = f.imagesAt(at, at.Workspace(f.rank))
		for r := range f.size {
			k.parts = append(k.parts, at.Bytes(at.Workspace(r).Add(int64(f.rank)*f.span), f.span))
			k.sums = append(k.sums, at.Bytes(at.Workspace(r).Add(int64(f.size)*f.span), f.span))
		}
		return func(r *collective.HostRun) error {
			k.quantize()
			if err := r.Barrier(flagStart); err != nil {
				return err
			}
			k.sum(k.sums[f.rank])
			if err := r.Barrier(flagEnd); err != nil {
				return err
			}
			k.dequantize()
			return nil
		}, nil
	}
}

// hostQuantized is the work of one rank on the host. It is used by one goroutine at a time.
type hostQuantized struct {
	quantizedForm
	load    func(dst []float32, src []byte)
	store   func(dst []byte, src []float32)
	src     []byte // the input
	dst     []byte // the output
	images  [][]byte
	parts   [][]byte // of this rank's shard, by writer
	sums    [][]byte
	x, next [ptx.QuantizedBlock]float32
}

func (f quantizedForm) newHost(at *collective.Addresses) *hostQuantized {
	k := &hostQuantized{quantizedForm: f, src: at.Bytes(f.in.Ptr(), f.in.Bytes()), dst: at.Bytes(f.out.Ptr(), f.out.Bytes())}
	k.load, k.store = float32Of(f.in.DType())
	return k
}

// float32Of gives conversions of elements, which are aligned, from and to float32, for f16, bf16 and f32.
func float32Of(dtype tensor.DType) (load func(dst []float32, src []byte), store func(dst []byte, src []float32)) {
	switch dtype {
	case tensor.Float16:
		return with16(f16To32, f16From32)
	case tensor.BFloat16:
		return with16(bf16To32, bf16From32)
	}
	return func(dst []float32, src []byte) { copy(dst, slice[float32](src)) },
		func(dst []byte, src []float32) { copy(slice[float32](dst), src) }
}

// with16 is load and store for 16-bit floats.
func with16(to32 func([]float32, []uint16), from32 func([]uint16, []float32)) (load func([]float32, []byte), store func([]byte, []float32)) {
	return func(dst []float32, src []byte) { to32(dst, slice[uint16](src)) },
		func(dst []byte, src []float32) { from32(slice[uint16](dst), src) }
}

// blocks calls f for each block of owner's shard: its number there, and its elements in the message, in bytes.
func (k *hostQuantized) blocks(owner int, f func(block, lo, hi int64)) {
	lo, hi := k.elements(owner)
	width := k.in.DType().Bytes()
	for at := lo; at < hi; at += ptx.QuantizedBlock {
		f((at-lo)/ptx.QuantizedBlock, at*width, min(at+ptx.QuantizedBlock, hi)*width)
	}
}

func (k *hostQuantized) quantize() {
	for owner, image := range k.images {
		k.blocks(owner, func(block, lo, hi int64) {
			n := (hi - lo) / k.in.DType().Bytes()
			k.load(k.x[:n], k.src[lo:hi])
			clear(k.x[n:])
			k.pack(image, block, &k.x)
		})
	}
}

func (k *hostQuantized) sum(image []byte) {
	k.blocks(k.rank, func(block, _, _ int64) {
		k.unpack(&k.x, k.parts[0], block)
		for _, part := range k.parts[1:] {
			k.unpack(&k.next, part, block)
			for i, v := range k.next {
				k.x[i] += v
			}
		}
		if k.op == Avg {
			average(k.x[:], k.size)
		}
		k.pack(image, block, &k.x)
	})
}

func (k *hostQuantized) dequantize() {
	for owner, image := range k.sums {
		k.blocks(owner, func(block, lo, hi int64) {
			k.unpack(&k.x, image, block)
			k.store(k.dst[lo:hi], k.x[:(hi-lo)/k.in.DType().Bytes()])
		})
	}
}

// pack and unpack are one block of an image.
func (k *hostQuantized) pack(image []byte, block int64, x *[ptx.QuantizedBlock]float32) {
	scale := quantizeBlock((*[ptx.QuantizedBlock]byte)(image[block*ptx.QuantizedBlock:]), x)
	binary.LittleEndian.PutUint32(image[k.shard*ptx.QuantizedBlock+block*4:], scale)
}

func (k *hostQuantized) unpack(x *[ptx.QuantizedBlock]float32, image []byte, block int64) {
	scale := binary.LittleEndian.Uint32(image[k.shard*ptx.QuantizedBlock+block*4:])
	dequantizeBlock(x, (*[ptx.QuantizedBlock]byte)(image[block*ptx.QuantizedBlock:]), scale)
}
