package nccl

import "fmt"

// Collective is one of NCCL's collectives.
type Collective uint8

// NCCL's collectives.
const (
	AllReduce Collective = iota
	Broadcast
	Reduce
	AllGather
	ReduceScatter
	AllToAll
)

var (
	collectiveNames   = [...]string{"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll"}
	collectiveSymbols = [...]string{"ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"}
)

// String is the name as NCCL has it: "AllReduce".
func (c Collective) String() string {
	if int(c) < len(collectiveNames) {
		return collectiveNames[c]
	}
	return fmt.Sprintf("Collective(%d)", c)
}

// Has returns ErrUnsupported if the library lacks a collective, and says which version has it.
func (l *Library) Has(c Collective) error {
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
