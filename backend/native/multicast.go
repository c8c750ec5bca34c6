package native

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// creator is the rank that makes the multicast object.
const creator = 0

// multicastProp describes a multicast object.
func multicastProp(ranks int, bytes int64) *cu.MulticastObjectProp {
	return &cu.MulticastObjectProp{NumDevices: uint32(ranks), Size: uint64(bytes), HandleTypes: uint64(cu.HandleFD)}
}

// notAlike says why the memory of these offers cannot be bound to one multicast object; "" if it can.
func (b *Backend) notAlike(offers []offer) string {
	for r, o := range offers {
		if o.Offset != offers[0].Offset || o.Span != offers[0].Span || o.Span%b.granularity != 0 {
			return fmt.Sprintf("the adopted memory cannot be bound: rank 0 has it at offset %d of %d bytes, rank %d at %d of %d; the "+
				"same on all ranks and whole multiples of %d bytes are needed", offers[0].Offset, offers[0].Span, r, o.Offset, o.Span, b.granularity)
		}
	}
	return ""
}

// notReadyPauses are the pauses before each further attempt after the driver has returned CUDA_ERROR_SYSTEM_NOT_READY, as it does when many objects
// are made and freed at the same time.
var notReadyPauses = []time.Duration{50 * time.Millisecond, 150 * time.Millisecond, 400 * time.Millisecond, time.Second}

// EnableMulticast makes a multicast object, binds all ranks' memory to it and maps it. Collective.
func (m *mapping) EnableMulticast(ctx context.Context) (device.Ptr, error) {
	b := m.backend
	if why := cmp.Or(b.whyNoMulticast(), m.noMulticast); why != "" { // every rank knows it
		return 0, fmt.Errorf("%s: %w", why, errs.ErrUnsupported)
	}
	for attempt := 0; ; attempt++ {
		c := &cast{backend: b, mapping: m}
		err := c.make(ctx)
		if err == nil {
			m.undo.add(c.undo.run) // as a whole: what of it cannot be undone keeps nothing else
			return c.at, nil
		}
		undone := b.device.WithContext(func() error { return errors.Join(c.undo.run(), c.creation.run()) })
		var vote *group.VoteError
		if !errors.As(err, &vote) {
			return 0, errors.Join(err, undone)
		}
		// All ranks know the result of the vote, and now agree on what it means.
		why, told := b.judge(ctx, vote, undone)
		switch {
		case told != nil:
			return 0, errors.Join(err, told)
		case why == notReady && attempt < len(notReadyPauses):
			b.log.Debug("multicast is not ready, and is tried again", "attempt", attempt+1, "error", err)
			select {
			case <-time.After(notReadyPauses[attempt]):
			case <-ctx.Done(): // the next call of the group tells the others
			}
		case why == notReady:
			return 0, fmt.Errorf("multicast was not ready at %d attempts: %w: %w", attempt+1, errs.ErrUnavailable, err)
		case why == gaveUp:
			return 0, err
		case why == exhausted:
			return 0, fmt.Errorf("there is no multicast object to be had; close tensors and plans that use multicast: %w: %w", errs.ErrNoMemory, err)
		default:
			b.mu.Lock()
			b.noMulticast = "it was tried and failed: " + vote.Error()
			b.mu.Unlock()
			b.log.Warn("multicast does not work here", "error", err)
			return 0, fmt.Errorf("multicast does not work here: %w: %w", errs.ErrUnsupported, err)
		}
	}
}

// refusal is what a rank's failure to make a multicast object means. The largest value of all ranks counts.
type refusal int

const (
	noRefusal refusal = iota
	notReady          // it may work in a moment
	gaveUp            // a rank's time was over, which says nothing about multicast
	exhausted         // it may work when something was given back
	refused           // it will not work
)

// judge finds out, with the other ranks, what the vote means. The error is that of a rank that could not undo what it had done.
func (b *Backend) judge(ctx context.Context, vote *group.VoteError, undone error) (refusal, error) {
	mine := noRefusal
	var failed *cuda.Error
	var files *group.FileLimitError
	switch local := vote.Local; {
	case local == nil:
	case errors.As(local, &failed) && cu.Result(failed.Code) == cu.SystemNotReady:
		mine = notReady
	case errors.Is(local, context.Canceled), errors.Is(local, context.DeadlineExceeded):
		mine = gaveUp
	case errors.Is(local, errs.ErrNoMemory), errors.As(local, &files), failed != nil && cu.Result(failed.Code) == cu.OperatingSystem:
		mine = exhausted
	default:
		mine = refused
	}
	all, err := backend.Tell(ctx, b.group, "giving up a multicast object", mine, undone)
	if err != nil {
		return refused, err
	}
	return slices.Max(all), nil
}

// cast is a multicast object that is being made.
type cast struct {
	backend *Backend
	mapping *mapping
	at      device.Ptr // the address of the memory's first byte
	file    *os.File   // of the creator

	undo     undo // this rank's part
	creation undo // the creator's own reference
}

// make goes through the steps, with a vote before each that would block or break if a rank had failed the step before. The object is gone when no rank
// holds it. Who imports it after that gets, without an error, another one that has no devices (PyTorch #195596), and binding memory to that would block
// for ever. So the creator holds the object until the last vote. It lets go before only when a vote has failed for it, or its time is over; a rank that
// imports too late then learns of it from the vote on devices, and binds nothing.
func (c *cast) make(ctx context.Context) error {
	b := c.backend
	var failure error
	if c.mapping.rank == creator {
		if failure = ctx.Err(); failure == nil {
			failure = b.device.WithContext(c.create)
		}
	}
	file, err := b.group.BroadcastFile(ctx, "multicast object", creator, c.file, failure)
	if c.mapping.rank == creator {
		file = c.file
	}
	if err != nil {
		return errors.Join(err, closeFile(file))
	}
	var h cu.MemHandle
	err = b.device.WithContext(func() error {
		var err error
		h, err = c.join(file)
		return err
	})
	err = errors.Join(err, closeFile(file))
	// Binding blocks until every device was added.
	if err := b.group.Vote(ctx, "adding devices to the multicast object", err); err != nil {
		return err
	}
	err = b.device.WithContext(func() error { return c.bind(h) })
	if err := b.group.Vote(ctx, "binding memory to the multicast object", err); err != nil {
		return err
	}
	if c.mapping.rank == creator {
		c.letGo()
	}
	return nil
}

// letGo releases the creator's own reference, which nobody needs any more. The address works on all ranks, so what fails here is no error of theirs: the
// object stays until the mapping is undone.
func (c *cast) letGo() {
	if err := c.backend.device.WithContext(c.creation.run); err != nil {
		c.undo.add(c.creation.run) // which has nothing to do if it was tried already
		c.backend.log.Warn("the creator's handle of a multicast object could not be released", "error", err)
	}
}

// create makes the object and exports it.
func (c *cast) create() error {
	b := c.backend
	var h cu.MemHandle
	r := b.multicast.Create(&h, multicastProp(b.group.Size(), c.mapping.alloc.span))
	if err := b.drv.Check("cuMulticastCreate", r); err != nil {
		return err
	}
	c.creation.add(func() error { return release(b.drv, h) })
	var err error
	c.file, err = exportFile(b.drv, h)
	return err
}

// join imports the object and adds this rank's device. The creator imports it too: its own handle would make the driver run
// multicast copies on the engines that serve the host.
func (c *cast) join(file *os.File) (cu.MemHandle, error) {
	b := c.backend
	h, err := importFile(b.drv, file)
	if err != nil {
		return 0, err
	}
	c.undo.add(func() error { return release(b.drv, h) })
	return h, b.drv.Check("cuMulticastAddDevice", b.multicast.AddDevice(h, b.device.Ordinal()))
}

// bind binds this rank's memory to the object and maps the object.
func (c *cast) bind(h cu.MemHandle) error {
	b, a := c.backend, c.mapping.alloc
	bytes := a.span
	r := b.multicast.BindMem(h, 0, a.handle, 0, uint64(bytes), 0)
	if err := b.drv.Check("cuMulticastBindMem", r); err != nil {
		return err
	}
	c.undo.addUnmapped(fmt.Sprintf("%d bytes of memory stay bound to a multicast object", bytes), func() error {
		return b.drv.Check("cuMulticastUnbind", b.multicast.Unbind(h, b.device.Ordinal(), 0, uint64(bytes)))
	})
	p, err := reserve(b.drv, bytes, b.granularity, &c.undo)
	if err != nil {
		return err
	}
	if err := mapAt(b.drv, p, bytes, h, &c.undo); err != nil {
		return err
	}
	if err := allow(b.device, p, bytes); err != nil {
		return err
	}
	c.at = p.Add(a.offset)
	return nil
}

// closeFile closes f if there is one.
func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}
