package native

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
)

// creator is the rank that makes the multicast object.
const creator = 0

// multicastProp describes a multicast object.
func multicastProp(ranks int, bytes int64) *cuda.MulticastObjectProp {
	return &cuda.MulticastObjectProp{NumDevices: uint32(ranks), Size: uint64(bytes), HandleTypes: uint64(cuda.HandleFD)}
}

// addMulticast gives the mapping a multicast address if all ranks come through. Collective. If one does not, that is an error where
// multicast is a must; else the window has none on any rank, and the later ones neither.
func (m *mapping) addMulticast(ctx context.Context, a *allocation, offers []offer, x *backend.Agreement) error {
	b := m.backend
	for r, o := range offers {
		if o.Offset != offers[0].Offset || o.Span != offers[0].Span || o.Span%b.granularity != 0 {
			m.noMulticast = fmt.Sprintf("the adopted memory cannot be bound: rank 0 has it at offset %d of %d bytes, rank %d at %d of %d; the "+
				"same on all ranks and whole multiples of %d bytes are needed", offers[0].Offset, offers[0].Span, r, o.Offset, o.Span, b.granularity)
			return nil
		}
	}
	c := &cast{backend: b, mapping: m, alloc: a, offset: offers[0].Offset}
	err := c.make(ctx, x)
	if err == nil {
		m.undo = append(m.undo, c.undo...)
		return nil
	}
	undone := b.device.WithContext(func() error { return errors.Join(c.undo.run(), c.creation.run()) })
	var vote *group.VoteError
	if !errors.As(err, &vote) || undone != nil {
		return errors.Join(err, undone)
	}
	// Every rank has the same vote, so every rank decides the same.
	m.multicast = 0
	if b.mustCast {
		return fmt.Errorf("multicast is on, but it failed; set it to auto or off: %w", err)
	}
	m.noMulticast = "it was tried and failed: " + vote.Error()
	b.mu.Lock()
	b.noMulticast = m.noMulticast
	b.mu.Unlock()
	b.log.Warn("multicast does not work here and is not used", "error", err)
	return nil
}

// cast is a multicast object in the making.
type cast struct {
	backend *Backend
	mapping *mapping
	alloc   *allocation
	offset  int64
	file    *os.File // of the creator

	undo     undo // this rank's part
	creation undo // the creator's own reference
}

// make goes through the steps, with a vote before each that would block or break if a rank had failed the step before. The object
// vanishes when nobody holds it, and whoever imports it after that waits for an empty one in vain: so the creator holds it until the
// last vote.
func (c *cast) make(ctx context.Context, x *backend.Agreement) error {
	b := c.backend
	refusal := error(nil)
	if c.mapping.rank == creator {
		refusal = b.device.WithContext(c.create)
	}
	file, err := b.group.BroadcastFile(ctx, "multicast object", creator, c.file, refusal)
	if c.mapping.rank == creator {
		file = c.file
	}
	if err != nil {
		return errors.Join(err, closeFile(file))
	}
	var h cuda.MemHandle
	err = b.device.WithContext(func() error {
		var err error
		h, err = c.join(file)
		return err
	})
	err = errors.Join(err, closeFile(file))
	// Binding blocks until every device was added.
	if err := x.Vote(ctx, "adding devices to the multicast object", err); err != nil {
		return err
	}
	err = b.device.WithContext(func() error { return c.bind(h) })
	if err := x.Vote(ctx, "binding memory to the multicast object", err); err != nil {
		return err
	}
	return b.device.WithContext(c.creation.run)
}

// create makes the object and exports it.
func (c *cast) create() error {
	b := c.backend
	var h cuda.MemHandle
	r := b.multicast.Create(&h, multicastProp(b.group.Size(), c.alloc.span))
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
func (c *cast) join(file *os.File) (cuda.MemHandle, error) {
	b := c.backend
	h, err := importFile(b.drv, file)
	if err != nil {
		return 0, err
	}
	c.undo.add(func() error { return release(b.drv, h) })
	return h, b.drv.Check("cuMulticastAddDevice", b.multicast.AddDevice(h, b.device.Ordinal()))
}

// bind binds this rank's memory to the object and maps the object.
func (c *cast) bind(h cuda.MemHandle) error {
	b, bytes := c.backend, c.alloc.span
	r := b.multicast.BindMem(h, 0, c.alloc.handle, 0, uint64(bytes), 0)
	if err := b.drv.Check("cuMulticastBindMem", r); err != nil {
		return err
	}
	c.undo.add(func() error {
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
	c.mapping.multicast = p.Add(c.offset)
	return nil
}

// closeFile closes f if there is one.
func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}
