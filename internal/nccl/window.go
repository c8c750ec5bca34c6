package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// Window is memory that was registered with a communicator on all of its ranks.
type Window struct {
	comm   *Comm
	handle WindowHandle
}

// Register makes a window of bytes at p. Collective: every rank passes the same number of bytes, in the same order of calls. p is at a multiple of
// WindowAlignment in an allocation of virtual memory. It blocks until all ranks have come. If ctx ends first the communicator can only be aborted.
// The error is ErrUnsupported before NCCL 2.27.
//
// A library that cannot make windows here reports success all the same, and returns a handle that is 0 or not an address of the GPU's memory, so the
// caller has to check.
func (c *Comm) Register(ctx context.Context, p uint64, bytes int64, flags WindowFlags) (*Window, error) {
	if err := c.lib.Require("ncclCommWindowRegister", "ncclCommWindowDeregister"); err != nil {
		return nil, err
	}
	if p == 0 || bytes <= 0 {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %#x", bytes, p),
			"at least 1 byte at an address that is not nil")
	}
	handle := new(WindowHandle)
	discard := func() { c.deregisterLate(*handle) }
	err := c.note(c.doOne(ctx, "registering a window", "ncclCommWindowRegister", handle, discard, func(h CommHandle) Result {
		return c.lib.call.CommWindowRegister(h, p, uintptr(bytes), handle, flags)
	}))
	if err != nil {
		return nil, fmt.Errorf("registering a window of %d bytes at %#x: %w", bytes, p, err)
	}
	return &Window{comm: c, handle: *handle}, nil
}

// deregisterLate removes a window that was made after its rank had given it up, unless it is 0, and returns when NCCL does not use its memory any more.
func (c *Comm) deregisterLate(w WindowHandle) {
	if w == 0 {
		return
	}
	c.mu.Lock()
	h := c.Handle()
	var err error
	if h != 0 { // else the window is gone with the communicator
		err = c.note(c.scope(func() error {
			if r := c.lib.call.CommWindowDeregister(h, w); r != InProgress {
				return c.lib.check("ncclCommWindowDeregister", r)
			}
			return nil
		}))
	}
	c.mu.Unlock()
	if err != nil {
		<-c.ended
	} else if h != 0 {
		c.ends()
	}
}

// Handle returns the ncclWindow_t, which kernels written for NCCL's device interface take.
func (w *Window) Handle() WindowHandle { return w.handle }

// Deregister removes the window, and with it the peers' memory, from this process. Local. No work may use it any more. The windows of an aborted
// communicator are gone already. After an error NCCL has the window until the communicator ends.
func (w *Window) Deregister(ctx context.Context) error {
	if w.handle == 0 {
		return nil
	}
	handle := w.handle
	w.handle = 0
	err := w.comm.do(ctx, "deregistering a window", "ncclCommWindowDeregister", nil, func(h CommHandle) Result {
		return w.comm.lib.call.CommWindowDeregister(h, handle)
	})
	if err == nil || errors.Is(err, errs.ErrClosed) && w.comm.Handle() == 0 {
		return nil
	}
	w.comm.state.Lock()
	defer w.comm.state.Unlock()
	w.comm.window = true
	return err
}

// Lsa returns the team of ranks that reach each other's memory by load and store and that this rank is in: consecutive ranks of the communicator. The
// error is ErrUnsupported if the library cannot say.
func (c *Comm) Lsa() (Team, error) {
	if err := c.lib.Require("ncclTeamLsa"); err != nil {
		return Team{}, err
	}
	var team Team
	err := c.quick("ncclTeamLsa", func(h CommHandle) Result {
		team = c.lib.call.TeamLsa(h)
		return Success
	})
	if err == nil && team.Ranks <= 0 {
		err = fmt.Errorf("NCCL gives no team of ranks that reach each other: %w", errs.ErrUnsupported)
	}
	return team, err
}

// PeerPointers reports whether the library has a function that returns peer pointers. Without it they are computed from the window's structure.
func (l *Library) PeerPointers() bool { return l.call.GetPeerDevicePointer != nil }

// Peer returns the address of the byte at offset in rank's window, or 0 if it has none in this process.
func (w *Window) Peer(rank int, offset int64) (uint64, error) {
	if err := w.comm.lib.Require("ncclGetPeerDevicePointer"); err != nil {
		return 0, err
	}
	p := new(uint64)
	err := w.comm.quick("ncclGetPeerDevicePointer", func(CommHandle) Result {
		return w.comm.lib.call.GetPeerDevicePointer(w.handle, uintptr(offset), int32(rank), p)
	})
	return *p, err
}

// Multicast returns the address that reaches the byte at offset in every rank's window, or 0 if NCCL has none. It must not be called where multicast is to
// stay off: the first call of a communicator makes its multicast object, with the other ranks (symTeamObtain in dev_runtime.cc). So it is collective,
// and blocks until all ranks have come. If ctx ends first the communicator can only be aborted. The memory is bound on all ranks when the call has
// returned on all.
func (w *Window) Multicast(ctx context.Context, m *Multicast, offset int64) (uint64, error) {
	p := new(uint64)
	err := w.comm.do(ctx, "making the multicast address", "ncclGetLsaMultimemDevicePointer", p, func(CommHandle) Result {
		return m.GetLsaMultimemDevicePointer(w.handle, uintptr(offset), p)
	})
	if err != nil {
		return 0, err
	}
	return *p, nil
}

// The part of ncclCommProperties_t (nccl_device/host.h) that is read here, which has been the same from 2.29.2 to 2.32.3, and more room
// than any of these takes.
const (
	propertiesBytes           = 40
	propertiesVersion         = 22902
	propertiesMultimemSupport = 33
	propertiesRoom            = 256
)

// MulticastSupport reports whether NCCL has NVLink multicast for the communicator. It makes no multicast object. Local. ErrUnsupported
// before NCCL 2.29.2.
func (c *Comm) MulticastSupport() (bool, error) {
	if err := c.lib.Require("ncclCommQueryProperties"); err != nil {
		return false, err
	}
	props := make([]byte, propertiesRoom)
	binary.LittleEndian.PutUint64(props, propertiesBytes)
	binary.LittleEndian.PutUint32(props[8:], configMagic)
	binary.LittleEndian.PutUint32(props[12:], propertiesVersion)
	err := c.quick("ncclCommQueryProperties", func(h CommHandle) Result { return c.lib.call.CommQueryProperties(h, &props[0]) })
	return err == nil && props[propertiesMultimemSupport] != 0, err
}

// LayoutBytes is how much of a window's structure has been the same from NCCL 2.28.3 to 2.30.7: ncclWindow_vidmem in
// nccl_device/impl/core__types.h.
const LayoutBytes = 32

// WindowLayout is the beginning of the structure that a window's handle is the address of, in the GPU's memory.
type WindowLayout struct {
	FlatBase  uint64 // the window's first byte of the team's rank 0
	LsaRank   int    // this rank's number in the team
	WorldRank int    // and in the communicator
	Stride4G  uint32 // from one rank's copy to the next, in units of 4 GiB
}

// layoutVersions are the versions whose structure is known.
const (
	firstLayout Version = 22800
	lastLayout  Version = 23099
)

// DecodeWindow decodes the structure as it was copied from the GPU's memory. The error is ErrUnsupported if the version's structure is not known, or
// if its values make no sense.
func DecodeWindow(v Version, b []byte) (WindowLayout, error) {
	if v < firstLayout || v > lastLayout {
		return WindowLayout{}, fmt.Errorf("the window structure of NCCL %s is not known (that of %s to %s is), and the library has no "+
			"ncclGetPeerDevicePointer: %w", v, firstLayout, lastLayout, errs.ErrUnsupported)
	}
	if len(b) < LayoutBytes {
		return WindowLayout{}, errs.Invalid("DecodeWindow", "bytes", len(b), fmt.Sprintf("%d and more", LayoutBytes))
	}
	l := WindowLayout{
		FlatBase:  binary.LittleEndian.Uint64(b[8:]),
		LsaRank:   int(int32(binary.LittleEndian.Uint32(b[16:]))),
		WorldRank: int(int32(binary.LittleEndian.Uint32(b[20:]))),
		Stride4G:  binary.LittleEndian.Uint32(b[24:]),
	}
	if l.FlatBase == 0 || l.Stride4G == 0 || l.LsaRank < 0 || l.WorldRank < l.LsaRank {
		return l, fmt.Errorf("the window structure of NCCL %s is not as it is known: %+v: %w", v, l, errs.ErrUnsupported)
	}
	return l, nil
}

// Stride returns the distance in bytes from one rank's copy to the next one's.
func (l WindowLayout) Stride() int64 { return int64(l.Stride4G) << 32 }

// Peer returns the address of the window's first byte of the communicator's rank, which is in the team.
func (l WindowLayout) Peer(rank int) uint64 {
	return l.FlatBase + uint64(int64(l.LsaRank+rank-l.WorldRank)*l.Stride())
}
