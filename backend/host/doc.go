// Package host is the backend for machines without a GPU, and the reference for all others: symmetric memory is shared memory
// of one Linux host.
//
// Each allocation is one memfd, sealed so that no rank can make it smaller and crash the others. At rendezvous the ranks pass
// each other the descriptors and map all of them side by side in one reserved range, so that the contiguous view costs
// nothing. The received descriptors are closed at once, and each allocation keeps its own until it is freed. It works alike between
// processes and between goroutines of one process. There is no multicast: a CPU has no store that reaches several places.
//
// On systems other than Linux the package compiles, and opening the backend returns ErrUnsupported.
//
// The package imports backend, device/host and group.
package host
