package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// DevComm is an ncclDevComm: what a kernel that was compiled with the headers of the running library takes by value, to use
// NCCL's barriers between the ranks.
type DevComm struct {
	comm  *Comm
	bytes []byte
	size  int
}

// devCommRoom is more than any version's ncclDevComm takes.
const devCommRoom = 1024

// devCommLayout has the offsets of the fields of ncclDevCommRequirements that are used here, and the sizes of both structures (nccl_device/core.h and
// nccl_device/impl/comm__types.h). Each entry holds from its version on, until the next.
var devCommLayouts = []struct {
	from               Version
	requirements, comm int
	lsaBarriers        int // offset of lsaBarrierCount
	header             bool
	contexts           int // offset of ginContextCount, where the initialiser sets it; 0 if it does not
}{
	{22803, 24, 88, 20, false, 0},
	{22807, 56, 200, 24, false, 0},
	{22902, 72, 200, 40, true, 60},
	{22907, 88, 224, 40, true, 60},
	{23007, 96, 240, 40, true, 60},
}

// defaultContexts is the value of ginContextCount in NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER.
const defaultContexts = 4

// devCommRequirements makes an ncclDevCommRequirements and returns the size of the ncclDevComm. It never asks for multicast.
func devCommRequirements(v Version, lsaBarriers int) (requirements []byte, size int, err error) {
	if v < devCommLayouts[0].from || v > lastLayout {
		return nil, 0, fmt.Errorf("the device communicator of NCCL %s is not known (that of %s to %s is): %w", v,
			devCommLayouts[0].from,
			lastLayout, errs.ErrUnsupported)
	}
	layout := devCommLayouts[0]
	for _, l := range devCommLayouts {
		if v >= l.from {
			layout = l
		}
	}
	b := make([]byte, layout.requirements)
	if layout.header {
		binary.LittleEndian.PutUint64(b, uint64(layout.requirements))
		binary.LittleEndian.PutUint32(b[8:], configMagic)
		binary.LittleEndian.PutUint32(b[12:], uint32(v))
	}
	if layout.contexts > 0 {
		binary.LittleEndian.PutUint32(b[layout.contexts:], defaultContexts)
	}
	binary.LittleEndian.PutUint32(b[layout.lsaBarriers:], uint32(lsaBarriers))
	return b, layout.comm, nil
}

// NewDevComm makes a device communicator with lsaBarriers barriers of the ranks that reach each other by load and store,
// without multicast. Collective, and bounded as Register is. ErrUnsupported before NCCL 2.28.
func (c *Comm) NewDevComm(ctx context.Context, lsaBarriers int) (*DevComm, error) {
	if err := c.lib.Require("ncclDevCommCreate", "ncclDevCommDestroy"); err != nil {
		return nil, err
	}
	if lsaBarriers < 0 || lsaBarriers > 1<<16 {
		return nil, errs.Invalid("NewDevComm", "lsaBarriers", lsaBarriers, "0 to 65536")
	}
	requirements, size, err := devCommRequirements(c.lib.version, lsaBarriers)
	if err != nil {
		return nil, err
	}
	room := make([]byte, devCommRoom)
	err = c.do(ctx, "making a device communicator", "ncclDevCommCreate", &room[0], func(h CommHandle) Result {
		return c.lib.call.DevCommCreate(h, &requirements[0], &room[0])
	})
	if err != nil {
		return nil, fmt.Errorf("making a device communicator: %w", err)
	}
	return &DevComm{comm: c, bytes: room, size: size}, nil
}

// Bytes returns the structure, which a kernel takes by value. The slice must not be changed.
func (d *DevComm) Bytes() []byte { return d.bytes[:d.size] }

// Close releases it. Local. No kernel uses it any more.
func (d *DevComm) Close(ctx context.Context) error {
	err := d.comm.do(ctx, "destroying a device communicator", "ncclDevCommDestroy", nil, func(h CommHandle) Result {
		return d.comm.lib.call.DevCommDestroy(h, &d.bytes[0])
	})
	if errors.Is(err, errs.ErrClosed) && d.comm.Handle() == 0 {
		return nil
	}
	return err
}
