package nccl

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
)

// fakeMessage is one side of a message, as a thread has called it in a group.
type fakeMessage struct {
	of    nccl.CommHandle
	sends bool
	peer  int
	at    device.Ptr
	data  []byte // what is sent
	bytes uint64
}

func (m *machine) groupStart() nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.groups++
	return nccl.Success
}

// groupEnd waits for all ranks of the communicator that has messages in the group: each has some.
func (m *machine) groupEnd() nccl.Result {
	m.Mu.Lock()
	if m.groups--; m.groups < 0 {
		m.Violation("a group ends that was not begun")
	}
	mine := m.messages[unix.Gettid()]
	delete(m.messages, unix.Gettid())
	m.Mu.Unlock()
	if len(mine) == 0 {
		return nccl.Success
	}
	return m.together(mine[0].of, "ncclGroupEnd", mine, func(s *step) {
		c := m.comms[mine[0].of]
		if c == nil {
			return
		}
		taken := map[int]int{}
		for _, x := range mine {
			theirs, _ := s.args[x.peer].([]fakeMessage)
			sent := slices.DeleteFunc(slices.Clone(theirs), func(o fakeMessage) bool { return o.peer != c.rank || o.sends == x.sends })
			n := taken[x.peer]
			if !x.sends {
				taken[x.peer]++
			}
			switch {
			case x.sends:
			case n >= len(sent):
				m.Violation("rank %d receives what rank %d does not send", c.rank, x.peer)
			case sent[n].bytes != x.bytes:
				m.Violation("rank %d receives %d bytes of rank %d, which sends %d", c.rank, x.bytes, x.peer, sent[n].bytes)
			default:
				copy(m.span(x.at, x.bytes), sent[n].data)
			}
		}
	})
}

// message is ncclSend, or ncclRecv.
func (m *machine) message(sends bool) func(p uint64, count uintptr, t nccl.DataType, peer int32, h nccl.CommHandle, stream uintptr) nccl.Result {
	call := map[bool]string{true: "ncclSend", false: "ncclRecv"}[sends]
	return func(p uint64, count uintptr, t nccl.DataType, peer int32, h nccl.CommHandle, stream uintptr) nccl.Result {
		return m.comm(h, func(c *fakeComm) nccl.Result {
			if r := m.refuse(call, c.rank); r != nccl.Success {
				return r
			}
			if _, ok := m.Streams[cu.StreamHandle(stream)]; !ok || m.groups < 1 {
				m.Violation("%s on no stream, or outside of a group", call)
			}
			if peer < 0 || int(peer) >= c.world.size || int(peer) == c.rank {
				return nccl.InvalidArgument
			}
			x := fakeMessage{of: h, sends: sends, peer: int(peer), at: device.Ptr(p), bytes: uint64(int64(count) * t.Bytes())}
			if x.data = m.span(x.at, x.bytes); sends {
				x.data = slices.Clone(x.data)
			}
			m.messages[unix.Gettid()] = append(m.messages[unix.Gettid()], x)
			return nccl.Success
		})
	}
}
