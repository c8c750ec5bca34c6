package device

import "strconv"

// Ptr is an address in a device's memory (on the host device, an address in this process). The zero Ptr is nil.
type Ptr uint64

// Add returns the address n bytes further on; n may be negative.
func (p Ptr) Add(n int64) Ptr { return p + Ptr(n) }

// IsNil reports whether p is nil.
func (p Ptr) IsNil() bool { return p == 0 }

// String returns the address in hexadecimal, as debuggers print it.
func (p Ptr) String() string { return "0x" + strconv.FormatUint(uint64(p), 16) }
