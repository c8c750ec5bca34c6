package nccl

import "fmt"

// Collective is one of NCCL's collectives, or one side of what a rank sends to another.
type Collective uint8

// NCCL's collectives, and the two sides of a message.
const (
	AllReduce Collective = iota
	Broadcast
	Reduce
	AllGather
	ReduceScatter
	AllToAll
	Send
	Recv
)

var (
	collectiveNames   = [...]string{"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Send", "Recv"}
	collectiveSymbols = [...]string{"ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclSend", "ncclRecv"}
)

// String is the name as NCCL has it: "AllReduce".
func (c Collective) String() string {
	if int(c) < len(collectiveNames) {
		return collectiveNames[c]
	}
	return fmt.Sprintf("Collective(%d)", c)
}

// IsMessage reports whether it is one side of a message, which only its two ranks call, and not a collective.
func (c Collective) IsMessage() bool { return c == Send || c == Recv }

// Has returns ErrUnsupported if the library lacks a collective, and says which version has it. It has messages if it has groups: ranks that send each other something would
// wait for each other without.
func (l *Library) Has(c Collective) error {
	if c.IsMessage() {
		if f := &l.call; f.Send == nil || f.Recv == nil || f.GroupStart == nil || f.GroupEnd == nil {
			return l.Require(collectiveSymbols[Send], collectiveSymbols[Recv], groupStart, groupEnd)
		}
		return nil
	}
	there := true
	switch f := &l.call; c {
	case AllReduce:
		there = f.AllReduce != nil
	case Broadcast:
		there = f.Broadcast != nil
	case Reduce:
		there = f.Reduce != nil
	case AllGather:
		there = f.AllGather != nil
	case ReduceScatter:
		there = f.ReduceScatter != nil
	case AllToAll:
		there = f.AllToAll != nil
	}
	if there {
		return nil
	}
	return l.Require(collectiveSymbols[c])
}
