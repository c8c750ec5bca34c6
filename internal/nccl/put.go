package nccl

import (
	"cmp"
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// Put is one write of a rank's memory into that of another: of Bytes at Local, which is in a symmetric window of the communicator, to the place at Offset
// of Peer's copy of Window.
type Put struct {
	Peer   int
	Window *Window // this rank's handle of it; it is symmetric too
	Offset int64   // bytes from the beginning of Peer's part
	Local  uint64
	Bytes  int64 // at least 1
}

// Where ncclCommProperties_t says whether the host can put: 2.29.2 says only how GPUs reach the network, one byte that is 0 where they do not, and from
// 2.29.7 on there is a word for it.
const (
	propertiesGinType  = 34
	propertiesHostRma  = 44
	putPropertiesBytes = 56
)

// putProperties is the first version with hostRmaSupport.
const putProperties Version = 22907

// putProperty returns where in how many bytes of the properties a version says whether there are puts, and the version to ask with; 0 bytes for a version
// that says nothing.
func putProperty(v Version) (at, bytes int, ask Version) {
	switch {
	case v >= putProperties:
		return propertiesHostRma, putPropertiesBytes, putProperties
	case v >= propertiesVersion:
		return propertiesGinType, propertiesBytes, propertiesVersion
	}
	return 0, 0, 0
}

// PutSupport reports whether NCCL can put between ranks of the communicator that have no addresses of each other. Local. ErrUnsupported if the library has
// no puts.
func (c *Comm) PutSupport() (bool, error) {
	if err := c.lib.Require("ncclPutSignal", groupStart, groupEnd, "ncclCommQueryProperties"); err != nil {
		return false, err
	}
	at, bytes, ask := putProperty(c.lib.version)
	if bytes == 0 {
		return false, fmt.Errorf("NCCL %s does not say whether it has puts: %w", c.lib.version, errs.ErrUnsupported)
	}
	props := make([]byte, propertiesRoom)
	binary.LittleEndian.PutUint64(props, uint64(bytes))
	binary.LittleEndian.PutUint32(props[8:], configMagic)
	binary.LittleEndian.PutUint32(props[12:], uint32(ask))
	err := c.quick("ncclCommQueryProperties", func(h CommHandle) Result { return c.lib.call.CommQueryProperties(h, &props[0]) })
	return err == nil && props[at] != 0, err
}

// Put enqueues puts on stream, a CUstream, as one group of calls. The GPU's context is current. When the stream has come past them, they are in the
// peers' memory. All puts of a communicator must be on one stream: NCCL counts those to a peer, and one on another stream may let them begin before their
// turn (rma_proxy.cc). It may wait for room in NCCL's queues. The puts are not recorded: the stream must not be capturing, because NCCL counts the signals of
// recorded puts and of others in different places.
func (c *Comm) Put(stream uintptr, puts ...Put) error {
	const call = "ncclPutSignal"
	if err := c.lib.Require(call, groupStart, groupEnd); err != nil {
		return err
	}
	for _, p := range puts {
		if p.Peer < 0 || p.Peer >= c.ranks || p.Window == nil || p.Window.comm != c || p.Offset < 0 || p.Bytes < 1 || p.Local == 0 {
			return errs.Invalid("Put", "put", fmt.Sprintf("%+v", p), "at least 1 byte to a window of a rank of the communicator")
		}
	}
	f := &c.lib.call
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone("Put")
	}
	r, of := c.lib.inGroup(func() (r Result) {
		for _, p := range puts {
			// The signal, the context and the flags are the only ones that all versions have.
			if r = f.PutSignal(p.Local, uintptr(p.Bytes), Int8, int32(p.Peer), p.Window.handle, uintptr(p.Offset), 0, 0, 0, handle, stream); r != Success && r != InProgress {
				break
			}
		}
		return r
	})
	if of == groupStart {
		return c.notPut(of, r)
	}
	if r = c.await(handle, r); r != Success {
		return c.notPut(cmp.Or(of, call), r)
	}
	return nil
}

// notPut is the error of a call of Put that was no success.
func (c *Comm) notPut(call string, r Result) error {
	if c.Handle() == 0 { // it was aborted meanwhile: the result says nothing
		return c.gone("Put")
	}
	return c.note(fmt.Errorf("putting: %w", c.lib.check(call, r)))
}
