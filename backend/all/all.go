// Package all makes every backend of the module known: import it for its side effect, and "auto" and each backend's name can
// be chosen.
//
//	import _ "github.com/symmem/symmem/backend/all"
//
// Importing it registers names and does nothing else: no library is loaded before a backend is probed or opened. It knows the
// backends' packages and has no code of its own. A program that wants only some of them imports those instead.
package all

import (
	_ "github.com/symmem/symmem/backend/host"    // shared memory of one host, without any device
	_ "github.com/symmem/symmem/backend/native"  // CUDA memory, mapped by every rank of one host
	_ "github.com/symmem/symmem/backend/nccl"    // windows of an NCCL communicator
	_ "github.com/symmem/symmem/backend/nixl"    // one-sided transfers between hosts, or on one
	_ "github.com/symmem/symmem/backend/nvshmem" // NVSHMEM's symmetric heap, of one host
)
