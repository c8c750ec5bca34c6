package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// movement is a collective that moves elements and changes none: in each phase every rank has at most one piece from each other. What a rank
// has got in one phase it may pass on in the next.
type movement struct {
	*maker
	phases  []phase
	pattern ptx.Pattern // of the one phase, or of both together
	root    int         // of a broadcast
	shares  int64       // elements that are shared out between the ranks; 0 if none are
	// passesOn says that what is root's in the first phase goes on in the second chunk by chunk. Both are stores. inLines, beside it, says that it goes in lines, in one phase.
	passesOn, inLines bool
}

// phase says what rank to has from rank from.
type phase func(from, to int) piece

// piece is bytes of one rank's input that come to another one's output.
type piece struct {
	src, dst int64 // where in the input and in the output, in bytes
	bytes    int64 // 0 is nothing
	turn     int   // pieces of one phase that have the same length have the same turn on all ranks only if they are the same bytes
}

// move is a piece that this rank loads or stores, with its addresses.
type move struct {
	from, to device.Ptr
	peer     int // that has or gets the piece, or this rank
	piece
}

// stores reports whether the kernel stores pieces to the ranks that are to have them, and does not load what its own is to have.
func (v *movement) stores() bool { return v.algorithm == OneShotPush || v.algorithm == TwoShotPush }

func (v *movement) spec(s *collective.Spec) {
	switch {
	case v.algorithm == Transfers:
		v.byTransfers(s)
	case v.algorithm == OneShotLL, v.inLines:
		v.byLines(s)
	case v.algorithm == OneShotMultimem:
		v.byCast(s)
	case v.algorithm.Backend() != "": // bytes: NCCL has not every dtype
		count := v.in.Bytes()
		if v.shares > 0 {
			count = v.evenly(s, v.shares) * v.in.DType().Bytes()
		}
		if s.Failure == nil {
			v.byLibrary(s, count, tensor.Uint8, 0, v.root)
		}
	case v.in.Device().Kind() == device.CUDA:
		v.onCUDA(s)
	default:
		v.onHost(s)
	}
}

// peers gives the ranks that this one loads from in a phase, and those that load from it, in the order in which it turns to them: all
// others, each rank with another one first.
func (v *movement) peers(p phase) (sources, readers []int) {
	rank, size := v.in.Rank(), v.in.WorldSize()
	for k := 1; k < size; k++ {
		r := (rank + k) % size
		if p(r, rank).bytes > 0 {
			sources = append(sources, r)
		}
		if p(rank, r).bytes > 0 {
			readers = append(readers, r)
		}
	}
	return sources, readers
}

// copies is what this rank copies in a phase: it loads from its peers, or stores to them, and last has what it has from itself.
func (v *movement) copies(at *collective.Addresses, p phase) []move {
	var all []move
	rank := v.in.Rank()
	others, readers := v.peers(p)
	if v.stores() {
		others = readers
	}
	for _, r := range append(others, rank) {
		from, to := r, rank
		if v.stores() {
			from, to = rank, r
		}
		if c := p(from, to); c.bytes > 0 {
			all = append(all, move{at.Tensor(specIn, from).Add(c.src), at.Tensor(v.specOut(), to).Add(c.dst), r, c})
		}
	}
	return all
}

// copied is bytes that are copied on the host device.
type copied struct{ dst, src []byte }

// onHost makes the spec that of a kernel on the host device, in one phase. Small messages go through slots.
func (v *movement) onHost(s *collective.Spec) {
	s.Program = nil
	slots := hostSlotsOf(s, v.mostLoaded(v.phases[0]))
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		if slots == nil {
			return v.inParts(at), nil
		}
		return v.throughSlots(at, slots), nil
	}
}

// throughSlots is the kernel for small messages on the host device.
func (v *movement) throughSlots(at *collective.Addresses, slots *slots) collective.HostKernel {
	sources, readers := v.peers(v.phases[0])
	var copies []copied
	loads := v.copies(at, v.phases[0])
	for _, m := range loads {
		copies = append(copies, copied{at.Bytes(m.to, m.bytes), at.Bytes(m.from, m.bytes)})
	}
	slots.prepare(at, v.loaded(v.phases[0], at.Rank()), sources, readers)
	return func(r *collective.HostRun) error {
		slot, err := slots.exchange(r)
		if err != nil {
			return err
		}
		for i, c := range copies {
			if i < len(sources) {
				c.src = slots.ranks[sources[i]][slot][loads[i].src:]
			}
			copy(c.dst, c.src)
		}
		slots.release(r)
		return nil
	}
}

// inParts is the kernel for larger messages on the host device: each rank waits for those that it loads from to be ready, and for those that
// load from it to have done so, since whatever is behind the run may write to the input. What a rank has from itself it copies before it
// waits. Where one rank has something for all (a broadcast), it stores a part of that to each, so that it works as long as they do: all of them
// load W-1 parts of W, and so it stores the first of W to W-1 ranks. Then both sides wait for each other, before and after.
func (v *movement) inParts(at *collective.Addresses) collective.HostKernel {
	rank, size, p := at.Rank(), at.WorldSize(), v.phases[0]
	sources, readers := v.peers(p)
	out := v.specOut()
	stored := func(c piece) int64 {
		if v.pattern != ptx.Broadcast {
			return 0
		}
		return c.bytes / int64(size) / cacheLine * cacheLine
	}
	var own, copies []copied
	add := func(to *[]copied, c piece, owner, reader int) {
		*to = append(*to, copied{at.Bytes(at.Tensor(out, reader).Add(c.dst), c.bytes), at.Bytes(at.Tensor(specIn, owner).Add(c.src), c.bytes)})
	}
	for _, reader := range readers {
		if c := p(rank, reader); stored(c) > 0 {
			c.bytes = stored(c)
			add(&copies, c, rank, reader)
		}
	}
	for _, source := range sources {
		c := p(source, rank)
		n := stored(c)
		c.src, c.dst, c.bytes = c.src+n, c.dst+n, c.bytes-n
		add(&copies, c, source, rank)
	}
	if c := p(rank, rank); c.bytes > 0 {
		add(&own, c, rank, rank)
	}
	tell, await := readers, sources
	if v.pattern == ptx.Broadcast {
		tell = slices.Concat(sources, readers)
		await = tell
	}
	return func(r *collective.HostRun) error {
		for _, peer := range tell {
			r.Signal(peer, flagStart, r.Epoch())
		}
		for _, c := range own {
			copy(c.dst, c.src)
		}
		if err := meet(r, flagStart, nil, await); err != nil {
			return err
		}
		for _, c := range copies {
			copy(c.dst, c.src)
		}
		return meet(r, flagEnd, await, tell)
	}
}

// loaded is how much of a rank's input, from its beginning, others load in a phase, in bytes.
func (v *movement) loaded(p phase, from int) int64 {
	var most int64
	for to := range v.in.WorldSize() {
		if c := p(from, to); from != to && c.bytes > 0 {
			most = max(most, c.src+c.bytes)
		}
	}
	return most
}

// mostLoaded is the most that is loaded of any rank.
func (v *movement) mostLoaded(p phase) int64 {
	var most int64
	for from := range v.in.WorldSize() {
		most = max(most, v.loaded(p, from))
	}
	return most
}

// hasKernels reports whether a GPU is one that this module has kernels for; copies it can do whatever it is.
func hasKernels(d device.Device) bool {
	g, ok := d.(interface{ ComputeCapability() int })
	return !ok || g.ComputeCapability() >= 80
}

// besides reports whether ranks copy what they have from themselves beside what they put to others: where any of them has much, on all.
func (v *movement) besides() bool {
	if v.in.WorldSize() == 1 || v.in.Device().Kind() != device.CUDA {
		return false
	}
	var most int64
	for _, p := range v.phases {
		for rank := range v.in.WorldSize() {
			most = max(most, p(rank, rank).bytes)
		}
	}
	return most >= ownBesideBytes
}

// meet tells some ranks that this one has come here, and waits for others.
func meet(r *collective.HostRun, flag int, tell, await []int) error {
	for _, rank := range tell {
		r.Signal(rank, flag, r.Epoch())
	}
	for _, rank := range await {
		if err := r.Wait(rank, flag, r.Epoch()); err != nil {
			return err
		}
	}
	return nil
}

// The signals of a movement by transfers. Behind signalPieces comes one for each further phase.
const (
	signalReady  = iota // the peer's output may be written
	signalPieces        // the pieces of a phase have come
)

// ownBesideBytes is how much a rank has from itself, at least, so that a CUDA device copies it beside what it puts to others, and not behind that: to begin
// and end work beside the plan's stream takes some microseconds, and such a copy as long.
var ownBesideBytes = int64(2 << 20)

// byTransfers makes the spec that of a program. Every rank says that its output may be written, since its stream has come to the run, and puts
// when all have said so. All take the same steps, and each step waits only for what a step before it sends: so nobody waits in a circle.
func (v *movement) byTransfers(s *collective.Spec) {
	rank, size := v.in.Rank(), v.in.WorldSize()
	s.Parameters += fmt.Sprintf(", in %d phases", len(v.phases))
	s.Program = &collective.Program{Lane: v.besides(), Build: func(_ context.Context, b *collective.Builder) error {
		if size > 1 {
			b.Signal(signalReady)
			b.Wait(signalReady)
		}
		for i, p := range v.phases {
			if size > 1 {
				var puts []collective.Put
				_, readers := v.peers(p)
				for _, to := range readers {
					c := p(rank, to)
					puts = append(puts, collective.Put{Peer: to, Tensor: v.specOut(), Offset: c.dst, Local: b.Tensor(specIn, rank).Add(c.src), Bytes: c.bytes})
				}
				b.Send(signalPieces+i, puts...)
			}
			if c := p(rank, rank); c.bytes > 0 {
				if err := v.copyOwn(b, c); err != nil {
					return err
				}
			}
			switch {
			case size == 1:
			case i+1 < len(v.phases):
				b.Wait(signalPieces + i)
			default:
				b.Join()
				b.Finish(signalPieces + i)
			}
		}
		return nil
	}}
	if size > 1 {
		s.Program.Signals = signalPieces + len(v.phases)
	}
}

// copyOwn adds the step that copies what this rank has itself. Beside puts a kernel does it, if there is one for vectors on both sides: a copy engine would have both to do.
func (v *movement) copyOwn(b *collective.Builder, c piece) error {
	src, dst := b.Tensor(specIn, v.in.Rank()).Add(c.src), b.Tensor(v.specOut(), v.in.Rank()).Add(c.dst)
	switch d := v.in.Device(); {
	case d.Kind() != device.Host && v.besides() && (uint64(src)|uint64(c.bytes))%8 == 0 && (src-dst)%16 == 0 && hasKernels(d):
		k := cudaReduce{dtype: tensor.Uint64, op: Sum, size: 1, dead: b.Upload(make([]byte, 4)), maxBlocks: v.maxBlocks} // a sum of one is a copy
		launch, err := k.prepare(b, d)
		if err != nil {
			return err
		}
		launch([]device.Ptr{src}, dst, c.bytes)
	case d.Kind() != device.Host:
		b.Launch(copyLaunch{dst, src, c.bytes})
	default:
		to, from := b.Bytes(dst, c.bytes), b.Bytes(src, c.bytes)
		b.Host(func() error {
			copy(to, from)
			return nil
		})
	}
	return nil
}

// copyLaunch is a copy on the device as a launch.
type copyLaunch struct {
	dst, src device.Ptr
	bytes    int64
}

func (c copyLaunch) Launch(s device.Stream) error { return s.Copy(c.dst, c.src, c.bytes) }
func (c copyLaunch) Close() error                 { return nil }
