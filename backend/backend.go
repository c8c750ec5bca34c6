package backend

import (
	"context"
	"log/slog"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
)

// Backend is one rank's side of a backend: it allocates symmetric memory and maps it. Package memory is the only caller. It makes the collective
// calls one at a time and in the same order on every rank; calls that allocate may run at the same time as others. The contexts of collective calls are
// those of [group.Heard]: exchanges made with them end alike on all ranks, unless the rendezvous service is lost. So a rank whose context has ended comes to each step that
// the others come to, and tells them there.
type Backend interface {
	// Name returns the name that the backend is registered under.
	Name() string
	// Device returns the device whose memory the backend allocates. The backend owns it and closes it in Close.
	Device() device.Device
	// Capabilities says what works here, found out by trying.
	Capabilities() Capabilities

	// Allocate returns bytes (> 0) of this rank's memory, filled with zeros, that Rendezvous can map. It is local unless
	// Capabilities().CollectiveAllocate.
	Allocate(ctx context.Context, bytes int64) (Allocation, error)
	// Register adopts bytes (> 0) of memory at p that the caller owns and keeps until the allocation is released. The error lists all reasons why
	// memory cannot be adopted. Local.
	Register(ctx context.Context, p device.Ptr, bytes int64) (Allocation, error)
	// Rendezvous maps a on every rank. Collective: all ranks of the group call it with allocations that agree. It either returns a mapping that is
	// complete on this rank, or undoes all that it did. A rank that fails while others may wait for it tells them, in the step that they are in, of the
	// group that the backend was opened for: by its failure in a vote, or without a file in an exchange of files.
	Rendezvous(ctx context.Context, a Allocation) (Mapping, error)
	// Close releases everything. All mappings and allocations have been released before.
	Close(ctx context.Context) error
}

// Allocation is one rank's piece of memory before anybody else can reach it.
type Allocation interface {
	// Ptr returns the address of the first byte.
	Ptr() device.Ptr
	// Bytes returns the size that was asked for.
	Bytes() int64
	// RoundedBytes returns the size that is really taken, a multiple of the backend's granularity.
	RoundedBytes() int64
	// Release frees the memory; adopted memory stays the caller's. Its mapping has been unmapped before.
	Release(ctx context.Context) error
}

// Mapping is an allocation after rendezvous, as one rank sees it.
type Mapping interface {
	// Peer returns the address in this process of the first byte of rank's allocation; for this rank it is the allocation's own address. The error is
	// ErrNotReachable where there can be none.
	Peer(rank int) (device.Ptr, error)
	// Unmap removes the peers' memory from this process. Every rank that is not lost has agreed that nobody uses it any more.
	Unmap(ctx context.Context) error
}

// Multicaster is a Mapping that can have one address for all ranks' copies.
type Multicaster interface {
	// EnableMulticast makes the address whose stores reach every rank's copy and whose loads can reduce over them; Unmap removes it. Collective: all
	// ranks call it on their mappings of one window, which has no such address yet. It succeeds on all ranks, or undoes what it did on all and
	// returns the same condition on each: ErrUnsupported if there can be no address, and the capability is cleared if that holds for every window;
	// ErrNoMemory or ErrUnavailable if there may be one later.
	EnableMulticast(ctx context.Context) (device.Ptr, error)
}

// ContiguousViewer is a Mapping that lies in one address range, rank after rank.
type ContiguousViewer interface {
	// Contiguous returns the address of rank 0's first byte and the distance in bytes from one rank's copy to the next.
	Contiguous() (base device.Ptr, stride int64, err error)
}

// WindowHandler is a Mapping for which the library below the backend has a handle, which kernels written for its device interface take.
type WindowHandler interface {
	// WindowHandle returns that handle (ncclWindow_t), as 64 bits, and the offset of the mapping's first byte in it, in bytes.
	WindowHandle() (handle uint64, offset int64, err error)
}

// Islander is a Backend of which some ranks have addresses of each other's memory, and others have not.
type Islander interface {
	// Islands returns, by rank, the lowest rank of the island that it is in; nil if every rank is alone. Ranks of one island have addresses of each
	// other's memory, unless it was adopted. All ranks get the same, at any time.
	Islands() []int
}

// Quiescer is a Backend that may still move data when its device is idle, for example after a transfer was given up.
type Quiescer interface {
	// Quiesce waits until no data is moved any more, or until ctx ends. Memory is unmapped and released only after it has returned nil on all ranks
	// that are not lost.
	Quiesce(ctx context.Context) error
}

// Env holds what a backend is opened with.
type Env struct {
	// Group holds the ranks that take part. Probe gets none.
	Group *group.Group
	// LocalRank counts the ranks on this host, from 0; backends choose the device by it when Device is empty.
	LocalRank int
	// Device names the device: "" by LocalRank, or an index, or a UUID.
	Device string
	// Opened, unless nil, is a device that is already open and that the backend uses without owning it: a sub-group uses its
	// parent's, so that their work can share streams.
	Opened device.Device
	// Parent, unless nil, is the backend of the group that this one is a part of, open and used by other goroutines too: a
	// backend may share what it holds.
	Parent Backend
	// ShareDevice allows several ranks on one device.
	ShareDevice bool
	// Multicast is "auto", "on" or "off".
	Multicast string
	// NetDevices names the network devices that data may go over between hosts; empty takes the one that leads to Rendezvous, and
	// "all" every one.
	NetDevices []string
	// UnprotectedNetwork is "warn", "allow" or "refuse": what to do where data would go over a network without authentication and
	// encryption; "" is "warn".
	UnprotectedNetwork string
	// Rendezvous is the host:port of the rendezvous service; "" if there is none, as among ranks of one process.
	Rendezvous string
	// LivenessTimeout is how long a rank may be silent before it counts as lost; 0 is the group's default.
	LivenessTimeout time.Duration
	// KernelTimeout bounds every wait of device work.
	KernelTimeout time.Duration
	// Options are the backends' own options that were set, by key: "nccl-window". [Env.Option] reads them.
	Options map[string]string
	// Given, unless nil, is what the program gives the backend itself, of a type that it [Configurable.Takes]. What is set in it takes precedence
	// over the other fields, except Group, Opened and Parent.
	Given any
	// Getenv reads the environment that native libraries see.
	Getenv func(string) string
	// Logger takes events; never nil when a Factory sees it.
	Logger *slog.Logger
}
