package ptx

import "structs"

// Cast stores what each rank has to all ranks, by multicast addresses. It takes Comm and CastParams, has as many blocks as are of use, and needs
// compute capability 9.0.
var Cast = Kernel{File: "multimem.ptx", Name: "symmem_cast"}

// CastParams is the parameter of Cast beside Comm, by value. Addresses are of the device.
type CastParams struct {
	_ structs.HostLayout

	From  uint64         // of the first byte, on this rank
	To    uint64         // multicast address of where it goes
	Bytes uint64         // 0: this rank has nothing for the others
	Table uint64         // World > Inline: address of [World]uint64 in this device's memory, in place of Own
	Own   [Inline]uint64 // where it goes on each rank, by rank, by its plain address: alike modulo 16, as To is
}
