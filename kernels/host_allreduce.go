package kernels

import (
	"fmt"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

// flagStride is the distance in bytes between two flags: each has one writer, and two cache lines keep the writers apart on
// processors that fetch lines in pairs.
const flagStride = 128

// The exchanges of one run.
const (
	flagStart = iota // inputs are ready
	flagEnd          // outputs are complete
	flagKinds
)

// hostLayout is how a plan's channel is laid out, alike on every rank:
//
//	flags    [kind][writer] one futex.Word each, flagStride apart
//	buffers  [2] one message each, of one-shot only
type hostLayout struct {
	size   int   // ranks
	bytes  int64 // of a message
	staged bool
}

func (l hostLayout) flag(kind, writer int) int64 { return int64(kind*l.size+writer) * flagStride }

func (l hostLayout) buffer(parity int) int64 {
	slot := (l.bytes + flagStride - 1) / flagStride * flagStride
	return l.flag(flagKinds, 0) + int64(parity)*slot
}

func (l hostLayout) total() int64 {
	if !l.staged {
		return l.buffer(0)
	}
	return l.buffer(2)
}

// hostAllReduce is an all-reduce on the host device: all addresses resolved, so that a run only computes.
type hostAllReduce struct {
	name      string
	algorithm Algorithm
	rank      int
	size      int
	elements  int64
	width     int64 // bytes of an element
	reduce    reducer
	timeout   time.Duration
	peerErr   func() error // what ends a wait early
	patience  *futex.Patience

	in, out []byte
	ins     [][]byte    // every rank's input, by rank
	outs    [][]byte    // every rank's output, by rank
	buffers [2][][]byte // every rank's message buffer, by parity of the epoch and rank

	mine   [flagKinds][]*futex.Word // by writer: flags that the peers set here
	theirs [flagKinds][]*futex.Word // by owner: flags that this rank sets there
	epoch  uint32                   // of the last run; every run adds one
}

func newHostAllReduce(p *Plan, op Op, layout hostLayout, firstEpoch uint32) (*hostAllReduce, error) {
	t := p.in
	hm, ok := t.Device().(device.HostMemory)
	if !ok {
		return nil, fmt.Errorf("all-reduce kernels for %s: %w", t.Device().Name(), ErrUnsupported)
	}
	k := &hostAllReduce{
		name: p.name, algorithm: p.algorithm, rank: t.Rank(), size: t.WorldSize(), elements: t.NumElements(), width: t.DType().Bytes(),
		reduce: newReducer(t.DType(), op, t.WorldSize()), timeout: t.Memory().KernelTimeout(), peerErr: t.Memory().Group().Err,
		epoch: firstEpoch,
	}
	bytesAt := func(p device.Ptr, n int64) ([]byte, error) {
		if n == 0 {
			return nil, nil
		}
		return hm.Bytes(p, n)
	}
	for r := range k.size {
		in, err := p.in.Remote(r)
		if err != nil {
			return nil, err
		}
		out, err := p.out.Remote(r)
		if err != nil {
			return nil, err
		}
		base, err := p.channel.Peer(r)
		if err != nil {
			return nil, err
		}
		inBytes, err := bytesAt(in.Ptr(), in.Bytes())
		if err != nil {
			return nil, err
		}
		outBytes, err := bytesAt(out.Ptr(), out.Bytes())
		if err != nil {
			return nil, err
		}
		channel, err := bytesAt(base, layout.total())
		if err != nil {
			return nil, err
		}
		k.ins, k.outs = append(k.ins, inBytes), append(k.outs, outBytes)
		if layout.staged {
			for parity := range k.buffers {
				k.buffers[parity] = append(k.buffers[parity], channel[layout.buffer(parity):][:layout.bytes])
			}
		}
		for kind := range flagKinds {
			theirs, err := futex.At(channel[layout.flag(kind, k.rank):])
			if err != nil {
				return nil, err
			}
			k.theirs[kind] = append(k.theirs[kind], theirs)
			if r != k.rank {
				continue
			}
			for writer := range k.size {
				mine, err := futex.At(channel[layout.flag(kind, writer):])
				if err != nil {
					return nil, err
				}
				mine.Store(firstEpoch)
				k.mine[kind] = append(k.mine[kind], mine)
			}
		}
	}
	k.in, k.out = k.ins[k.rank], k.outs[k.rank]
	if !t.Memory().Oversubscribed() {
		k.patience = &futex.Patience{}
	}
	if k.reduce == nil {
		return nil, errs.Invalid("NewAllReduce", "dtype", t.DType(), "a dtype that has kernels")
	}
	return k, nil
}

// run is one all-reduce.
func (k *hostAllReduce) run() error {
	k.epoch++
	switch {
	case k.elements == 0:
		return nil
	case k.algorithm == OneShot:
		return k.oneShot()
	default:
		return k.twoShot()
	}
}

// oneShot: copy the input where the peers may read it, tell them, wait until all have, and reduce all buffers.
//
// Two buffers are enough without a second exchange. A buffer is written again two runs later, and between the two lies a run
// that this rank could end only because every peer had begun it, and so had read all it wanted of the run before.
func (k *hostAllReduce) oneShot() error {
	buffers := k.buffers[k.epoch&1]
	copy(buffers[k.rank], k.in)
	if err := k.exchange(flagStart); err != nil {
		return err
	}
	k.reduce(k.out, buffers, 0, k.elements)
	return nil
}

// twoShot: wait until all inputs are ready, reduce one part of all of them, write it to every output, and wait until all
// parts are there. In place is safe: nobody else reads or writes the inputs' part that this rank works on.
func (k *hostAllReduce) twoShot() error {
	if err := k.exchange(flagStart); err != nil {
		return err
	}
	lo, hi := k.part(k.rank)
	// In pieces, so that what was reduced is still in the cache when it is copied to the peers.
	const piece = 32 << 10
	step := piece / k.width
	for at := lo; at < hi; at += step {
		end := min(at+step, hi)
		k.reduce(k.out, k.ins, at, end)
		done := k.out[at*k.width : end*k.width]
		for i := 1; i < k.size; i++ {
			copy(k.outs[(k.rank+i)%k.size][at*k.width:end*k.width], done)
		}
	}
	return k.exchange(flagEnd)
}

// part is the range of elements that rank reduces: equal parts cut at cache lines, counted from the first element.
func (k *hostAllReduce) part(rank int) (lo, hi int64) {
	line := max(flagStride/k.width, 1)
	each := (k.elements + int64(k.size) - 1) / int64(k.size)
	each = (each + line - 1) / line * line
	return min(int64(rank)*each, k.elements), min(int64(rank+1)*each, k.elements)
}

// exchange tells every peer that this rank has come to the exchange of this run, and waits until all have.
func (k *hostAllReduce) exchange(kind int) error {
	for i := 1; i < k.size; i++ {
		k.theirs[kind][(k.rank+i)%k.size].Store(k.epoch)
	}
	for i := 1; i < k.size; i++ {
		peer := (k.rank + i) % k.size
		w := k.mine[kind][peer]
		if int32(w.Load()-k.epoch) >= 0 {
			continue
		}
		bound := futex.Bound{Deadline: time.Now().Add(k.timeout), Err: k.peerErr, Patience: k.patience}
		if err := w.WaitAtLeast(k.epoch, bound); err != nil {
			return &device.WaitError{Op: k.name, Channel: -1, Peer: peer, Err: err}
		}
	}
	return nil
}
