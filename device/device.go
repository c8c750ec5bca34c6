package device

import (
	"context"
	"fmt"
)

// Kind is a family of devices.
type Kind int

// The kinds of device.
const (
	Host Kind = iota + 1 // the CPU and its memory
	CUDA                 // an NVIDIA GPU
)

// String returns the name that logs and tables print.
func (k Kind) String() string {
	switch k {
	case Host:
		return "host"
	case CUDA:
		return "cuda"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Device is one device as one rank uses it. All methods may be called from several goroutines at once.
type Device interface {
	// Kind returns the family the device belongs to.
	Kind() Kind
	// Index returns the ordinal among the devices this process sees; 0 for the host device.
	Index() int
	// Name returns what the vendor calls the device.
	Name() string
	// UUID identifies the device among all devices of all hosts.
	UUID() string

	// Alloc returns bytes (> 0) of memory that only this rank uses, filled with zeros and aligned to 256 bytes. It may block for as long as the
	// system takes to find the memory. Free releases it. The error is ErrInvalid if bytes is not positive, and ErrNoMemory if there is not that much
	// left.
	Alloc(bytes int64) (Ptr, error)
	// Free releases memory that Alloc returned; any other address is ErrInvalid. No queued work may still use it.
	Free(p Ptr) error

	// CopyFromHost copies src to dst and returns when dst holds it. It is not ordered with any stream: synchronize first. The error is ErrInvalid if
	// the device knows that the memory is not there.
	CopyFromHost(dst Ptr, src []byte) error
	// CopyToHost copies len(dst) bytes at src to dst and returns when they are there. It is not ordered with any stream: synchronize first.
	CopyToHost(dst []byte, src Ptr) error

	// NewStream returns a new stream. Close it when it is no longer needed.
	NewStream() (Stream, error)
	// NewEvent returns a new event, not yet recorded.
	NewEvent() (Event, error)

	// Synchronize waits until the work that was enqueued on all streams of the device before the call has ended, or until ctx ends. Errors of that
	// work stay with their streams.
	Synchronize(ctx context.Context) error

	// Close synchronizes, for a bounded time, and releases all that the device holds: streams, events and memory that were not closed or
	// freed. It returns errors of work that no Synchronize has returned. A closed device answers every call with ErrClosed.
	Close() error
}

// HostMemory is implemented by devices whose memory this process can address.
type HostMemory interface {
	// Bytes returns the n bytes at p as a slice of the memory itself. It is an error if they are not wholly inside one
	// mapping that the device knows. The slice must not be used after that memory is freed or unmapped.
	Bytes(p Ptr, n int64) ([]byte, error)
}
