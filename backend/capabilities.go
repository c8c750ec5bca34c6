package backend

import (
	"fmt"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Capabilities says what a backend can do here. The bits are separate and found by trying: none follows from another.
type Capabilities struct {
	PeerPointers       bool `json:"peer_pointers"`        // every peer has an address in this process; the same on every rank
	Contiguous         bool `json:"contiguous"`           // all ranks' copies side by side in one address range
	Multicast          bool `json:"multicast"`            // one address for all ranks' copies
	Register           bool `json:"register"`             // adopts memory that the caller allocated
	Transfers          bool `json:"transfers"`            // put, get and prepared transfers
	Graphs             bool `json:"graphs"`               // all stream-ordered work can be captured and replayed
	CollectiveAllocate bool `json:"collective_allocate"`  // Allocate is collective
	RanksInOneProcess  bool `json:"ranks_in_one_process"` // several ranks may share a process
	SeveralHosts       bool `json:"several_hosts"`        // ranks may be on different hosts, or on one and not share memory ([group.Islands])

	// OnHost says that the memory is the CPU's. It is not a capability and not in List.
	OnHost bool `json:"on_host"`

	// PointerPeers is how many of the other ranks have an address in this process: all where there are PeerPointers, and otherwise those of this
	// rank's island, if the backend can do that. It may differ from rank to rank, and is 0 in what Probe returns.
	PointerPeers int `json:"pointer_peers,omitempty"`

	// OnRequest says that the backend serves SeveralHosts only for a program that asks for it by name or by its options: what it cannot do between hosts,
	// another backend may. [Choose] does not take it for them of itself. It is not a capability and not in List.
	OnRequest bool `json:"-"`

	// Why holds the reason for each bit that is false, by the bit's JSON name.
	Why map[string]string `json:"why,omitempty"`
}

// Capability is one bit with its name and, when it is missing, the reason.
type Capability struct {
	Name string
	Have bool
	Why  string
}

// List returns the capabilities in a fixed order, for printing.
func (c Capabilities) List() []Capability {
	bits := []Capability{
		{Name: "peer_pointers", Have: c.PeerPointers},
		{Name: "contiguous", Have: c.Contiguous},
		{Name: "multicast", Have: c.Multicast},
		{Name: "register", Have: c.Register},
		{Name: "transfers", Have: c.Transfers},
		{Name: "graphs", Have: c.Graphs},
		{Name: "collective_allocate", Have: c.CollectiveAllocate},
		{Name: "ranks_in_one_process", Have: c.RanksInOneProcess},
		{Name: "several_hosts", Have: c.SeveralHosts},
	}
	for i := range bits {
		if !bits[i].Have {
			bits[i].Why = c.Why[bits[i].Name]
		}
	}
	return bits
}

// String lists the names of the bits that are set.
func (c Capabilities) String() string {
	var have []string
	for _, b := range c.List() {
		if b.Have {
			have = append(have, b.Name)
		}
	}
	return strings.Join(have, ",")
}

// Missing returns the ErrUnsupported for the named bit, with the reason if the backend gave one.
func (c Capabilities) Missing(backend, name string) error {
	if why := c.Why[name]; why != "" {
		return fmt.Errorf("backend %s has no %s: %s: %w", backend, name, why, errs.ErrUnsupported)
	}
	return fmt.Errorf("backend %s has no %s: %w", backend, name, errs.ErrUnsupported)
}
