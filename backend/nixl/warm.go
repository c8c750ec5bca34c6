package nixl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/futex"
	"github.com/symmem/symmem/internal/nixl"
)

// On a GPU, UCX maps a peer's memory when it is first moved, and unmaps what was at the same address before. Closing such a mapping waits for all
// work of the GPU. A transfer that a stream waits for must therefore never be the first of its memory: the GPU would wait for the CPU, and the CPU
// for the GPU. So at rendezvous, when no stream waits for a transfer of the new memory, every rank moves some bytes to or from every other rank's:
// into a pad behind the memory, which nobody else uses, or out of the memory where the caller owns it and there is no pad. Streams may wait for
// transfers of other memory, such as another group's, so this is done at a moment when none does, and none begins meanwhile.

const (
	// padBytes is the size of the pad.
	padBytes = 256
	// warmBytes is how much is moved.
	warmBytes = 8
	// betweenWork is how long the ranks wait for a moment at which no stream waits for a transfer. There may be none: what the streams wait for may
	// come only after a peer has returned from this rendezvous. The bytes are then moved anyway, because most often nothing has to be unmapped.
	betweenWork = time.Second
)

// scratch is this rank's side of these transfers: memory of the device without content.
type scratch struct {
	ptr    device.Ptr
	region nixl.Block
}

// makeScratch allocates and registers the scratch, where the memory needs warming.
func (n *node) makeScratch() error {
	if !n.pads {
		return nil
	}
	p, err := n.device.Alloc(padBytes)
	if err != nil {
		return err
	}
	region, err := n.register(n.memory, p, padBytes)
	if err != nil {
		return errors.Join(err, n.device.Free(p))
	}
	n.scratch = scratch{ptr: p, region: region}
	return nil
}

// dropScratch frees it.
func (n *node) dropScratch() error {
	if n.scratch.ptr.IsNil() {
		return nil
	}
	err := errors.Join(n.deregister(n.memory, n.scratch.region), n.device.Free(n.scratch.ptr))
	n.scratch = scratch{}
	return err
}

// warm moves some bytes between this rank and every other one, but for those whose memory is mapped: the library moves nothing there.
func (b *Backend) warm(ctx context.Context, offers []offer, mapped bool) error {
	if !b.node.pads {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	return between(b.device, func() error { return b.warmEach(ctx, offers, mapped) })
}

// warmEach moves the bytes.
func (b *Backend) warmEach(ctx context.Context, offers []offer, mapped bool) error {
	for peer, o := range offers {
		if peer == b.group.Rank() || mapped && b.isle.number(peer) >= 0 {
			continue
		}
		there := o.Block
		t := &transfer{backend: b, op: nixl.Read, memory: b.node.memory, peer: peer}
		there.Bytes = min(warmBytes, there.Bytes)
		if o.Pad > 0 {
			t.op = nixl.Write
			there.Addr += uint64(o.Pad)
		}
		mine := b.node.scratch.region
		mine.Bytes = there.Bytes
		t.local, t.remote = []nixl.Block{mine}, []nixl.Block{there}
		if err := t.wait(ctx); err != nil {
			return fmt.Errorf("moving the first bytes to or from memory of rank %d: %w", peer, err)
		}
	}
	return nil
}

// wait runs the transfer and waits for its end.
func (t *transfer) wait(ctx context.Context) error {
	run, err := t.Start()
	for ended := false; !ended && err == nil; {
		if ended, err = run.Poll(); !ended && err == nil {
			err = ctx.Err()
			futex.Doze(greetPause)
		}
	}
	if err != nil {
		t.outlive()
	}
	return errors.Join(err, t.Close())
}

// outlive waits until a run that nobody waits for any more has ended, for as long as a closing node waits for strays: a peer that is told of the failure may give its
// memory back, which nobody else knows to be in use.
func (t *transfer) outlive() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for began := time.Now(); t.running && t.request != nil && t.backend.group.Err() == nil && time.Since(began) < strayTimeout; futex.Doze(greetPause) {
		if ended, err := t.request.Status(); ended || err != nil {
			t.running = false
		}
	}
}
