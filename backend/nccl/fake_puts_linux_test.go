package nccl

import (
	"encoding/binary"
	"time"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
)

// fakeWindow is a rank's side of a window, as puts look at it.
type fakeWindow struct {
	comm      *fakeComm
	step      *step // the registration, the same on all ranks
	at        device.Ptr
	piece     *piece
	symmetric bool
}

// flight is the puts of a stream, which arrive one after the other.
type flight struct {
	of          *fakeComm
	sent, ended int
	queue       []flyingPut
}

// flyingPut is a put on its way: it reads its memory when it arrives.
type flyingPut struct {
	from, to *fakeWindow
	peer     int
	send     device.Ptr
	offset   uint64
	bytes    uint64
}

// putMark is how far a stream's puts were when an event was recorded.
type putMark struct {
	flight *flight
	sent   int
}

// canPut reports whether the communicator's ranks can put to those of other teams; the machine is locked.
func (m *machine) canPut(c *fakeComm) bool {
	return m.version >= 22902 && (m.gin || m.team(c.world) == c.world.size)
}

// rmaProperties fills in what 2.29.7 has more.
func (m *machine) rmaProperties(c *fakeComm, b []byte) nccl.Result {
	if binary.LittleEndian.Uint32(b[8:]) != 0xcafebeef || binary.LittleEndian.Uint32(b[12:]) != 22907 {
		m.Violation("the properties' header is % x", b[:16])
	}
	if m.canPut(c) {
		b[44] = 1
	}
	return nccl.Success
}

// putSignal is as strict as NCCL, and where NCCL would do something else in silence, stricter.
func (m *machine) putSignal(send uint64, count uintptr, t nccl.DataType, peer int32, w nccl.WindowHandle, offset uintptr, signal, context int32, flags uint32,
	h nccl.CommHandle, stream uintptr,
) nccl.Result {
	return m.comm(h, func(c *fakeComm) nccl.Result {
		if r := m.refuse("ncclPutSignal", c.rank); r != nccl.Success {
			return r
		}
		s, bytes := cu.StreamHandle(stream), uint64(int64(count)*t.Bytes())
		if m.groups < 1 {
			m.Violation("a put outside of a group")
		}
		if _, ok := m.Streams[s]; !ok || m.recording[s] != nil {
			m.Violation("a put on no stream, or on one that is capturing")
		}
		if c.pending != nil {
			m.Violation("a put while another call is under way")
		}
		if !m.canPut(c) || signal != 0 || context != 0 || flags != 0 || peer < 0 || int(peer) >= c.world.size || bytes == 0 {
			return nccl.InvalidArgument
		}
		to := m.wins[w]
		var from *fakeWindow
		for _, x := range m.wins {
			if x.comm == c && send >= uint64(x.at) && send+bytes <= uint64(x.at)+uint64(len(x.piece.bytes)) {
				from = x
			}
		}
		if to == nil || to.comm != c || !to.symmetric || from == nil || !from.symmetric {
			return nccl.InvalidArgument
		}
		if uint64(offset)+bytes > uint64(len(to.piece.bytes)) {
			m.Violation("a put of %d bytes at %d of a window of %d", bytes, offset, len(to.piece.bytes))
			return nccl.InvalidArgument
		}
		for other, f := range m.flights {
			if f.of == c && other != s && f.busy(f.sent) {
				m.Violation("the puts of a communicator are on two streams")
			}
		}
		f := m.flights[s]
		if f == nil || f.of != c {
			f = &flight{of: c}
			m.flights[s] = f
		}
		f.sent++
		if f.queue = append(f.queue, flyingPut{from, to, int(peer), device.Ptr(send), uint64(offset), bytes}); len(f.queue) == 1 {
			go m.fly(f)
		}
		return nccl.Success
	})
}

// fly lets puts arrive until there are none.
func (m *machine) fly(f *flight) {
	for {
		m.Mu.Lock()
		delay := m.putDelay
		m.Mu.Unlock()
		select {
		case <-f.of.aborted:
			return
		case <-time.After(delay):
		}
		m.Mu.Lock()
		p := f.queue[0]
		if m.unputtable != nil && m.unputtable(p.peer) { // until it is aborted
			m.Mu.Unlock()
			continue
		}
		m.arrive(f, p)
		f.queue = f.queue[1:]
		more := len(f.queue) > 0
		m.Mu.Unlock()
		if !more {
			return
		}
	}
}

// arrive writes a put's bytes; the machine is locked.
func (m *machine) arrive(f *flight, p flyingPut) {
	select {
	case <-f.of.aborted: // nothing moves any more
		return
	default:
	}
	f.ended++
	m.puts++
	var there *fakeWindow
	for _, x := range m.wins {
		if x.step == p.to.step && x.comm.rank == p.peer {
			there = x
		}
	}
	mine := false
	for _, x := range m.wins {
		mine = mine || x == p.from
	}
	if there == nil || !mine {
		m.Violation("a put to rank %d arrives, and the window is gone", p.peer)
		return
	}
	copy(there.piece.bytes[p.offset:][:p.bytes], p.from.piece.bytes[p.send-p.from.at:][:p.bytes])
}

// markPuts notes how far the puts of a stream are; the machine is locked.
func (m *machine) markPuts(e cu.EventHandle, s cu.StreamHandle) {
	delete(m.marked, e)
	if f := m.flights[s]; f != nil {
		m.marked[e] = putMark{f, f.sent}
	}
}

// flying reports whether puts of a stream are under way. An abort ends them.
func (m *machine) flying(s cu.StreamHandle) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	f := m.flights[s]
	return f != nil && f.busy(f.sent)
}

// flyingBefore reports whether puts before an event are.
func (m *machine) flyingBefore(e cu.EventHandle) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	at, ok := m.marked[e]
	return ok && at.flight.busy(at.sent)
}

func (f *flight) busy(sent int) bool {
	select {
	case <-f.of.aborted:
		return false
	default:
		return f.ended < sent
	}
}
