package ptxvm

import (
	"fmt"
	"slices"
	"unsafe"
)

// Memory is an address space: what global addresses mean to every device of a machine. It is not safe for concurrent use, with a machine that
// runs either; the bytes themselves are the caller's.
type Memory struct {
	regions []*region // by address
}

// region is memory at consecutive addresses, or, with copies, a multicast address of several pieces of it.
type region struct {
	base, size uint64
	data       unsafe.Pointer
	keep       []byte
	copies     []uint64
	words      []*word // with weak memory: those that were accessed
	spans      []span  // of an allocation, in no order
	age        uint64  // of the machine, when its words and spans were noted
	of         *region // of an allocation that is mapped here
	shift      uint64  // from where
	host       bool    // the host uses it too
	block      *block  // whose shared memory it is; nil: nobody's
	private    bool    // to tests: nobody else looks there, so accesses are no events
}

// NewMemory is an empty address space.
func NewMemory() *Memory { return &Memory{} }

const mapAlignment = 16

// Map puts bytes at an address, a multiple of 16 as the bytes' own is. ErrAddress if they are not aligned or something is there already.
func (m *Memory) Map(address uint64, b []byte) error {
	if len(b) == 0 || address%mapAlignment != 0 || uintptr(unsafe.Pointer(&b[0]))%mapAlignment != 0 {
		return fmt.Errorf("mapping %d bytes to %#x: not a multiple of %d, or nothing: %w", len(b), address, mapAlignment, ErrAddress)
	}
	return m.insert(&region{base: address, size: uint64(len(b)), data: unsafe.Pointer(&b[0]), keep: b})
}

// Multicast makes an address of several: a store there goes to each of them, and multimem.ld_reduce combines what they have, in some order.
// All are mapped; size is that of each. ErrAddress if something is there already, or nothing at one of the copies.
func (m *Memory) Multicast(address, size uint64, copies ...uint64) error {
	for _, c := range copies {
		if r := m.find(c); r == nil || r.copies != nil || size > r.size-(c-r.base) || c%mapAlignment != 0 {
			return fmt.Errorf("%d bytes at %#x for a multicast address: %w", size, c, ErrAddress)
		}
	}
	if len(copies) == 0 || size == 0 || address%mapAlignment != 0 {
		return fmt.Errorf("a multicast address of nothing, or one that is no multiple of %d: %w", mapAlignment, ErrAddress)
	}
	return m.insert(&region{base: address, size: size, copies: slices.Clone(copies)})
}

func (m *Memory) insert(r *region) error {
	i, there := slices.BinarySearchFunc(m.regions, r.base, func(a *region, base uint64) int {
		switch {
		case a.base+a.size <= base:
			return -1
		case a.base > base:
			return 1
		}
		return 0
	})
	if there || r.base+r.size < r.base || i < len(m.regions) && m.regions[i].base < r.base+r.size {
		return fmt.Errorf("%d bytes at %#x are taken: %w", r.size, r.base, ErrAddress)
	}
	m.regions = slices.Insert(m.regions, i, r)
	return nil
}

// Unmap takes away what begins at an address. ErrAddress if nothing does.
func (m *Memory) Unmap(address uint64) error {
	for i, r := range m.regions {
		if r.base == address {
			m.regions = slices.Delete(m.regions, i, i+1)
			return nil
		}
	}
	return fmt.Errorf("unmapping %#x: %w", address, ErrAddress)
}

// find is the region that an address is in, nil if there is none.
func (m *Memory) find(address uint64) *region {
	low, high := 0, len(m.regions)
	for low < high {
		mid := (low + high) / 2
		switch r := m.regions[mid]; {
		case address < r.base:
			high = mid
		case address-r.base >= r.size:
			low = mid + 1
		default:
			return r
		}
	}
	return nil
}

// load and store are elements of 1, 2, 4 or 8 bytes, whose alignment was checked.
func load(p unsafe.Pointer, size uint8) uint64 {
	switch size {
	case 1:
		return uint64(*(*uint8)(p))
	case 2:
		return uint64(*(*uint16)(p))
	case 4:
		return uint64(*(*uint32)(p))
	}
	return *(*uint64)(p)
}

func store(p unsafe.Pointer, size uint8, v uint64) {
	switch size {
	case 1:
		*(*uint8)(p) = uint8(v)
	case 2:
		*(*uint16)(p) = uint16(v)
	case 4:
		*(*uint32)(p) = uint32(v)
	default:
		*(*uint64)(p) = v
	}
}
