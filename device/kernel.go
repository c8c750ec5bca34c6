package device

// KernelLoader is implemented by devices that run compiled kernels.
type KernelLoader interface {
	// LoadModule loads kernels from PTX or machine code. It may block for as long as compiling for the device takes.
	LoadModule(image []byte) (Module, error)
}

// Module is loaded kernels.
type Module interface {
	// Function finds a kernel by its name in the image.
	Function(name string) (Function, error)
	// Close unloads the kernels. No work that uses them may be queued. Twice is ErrClosed.
	Close() error
}

// Function is one compiled kernel. It takes one parameter, a struct by value.
type Function interface {
	// MaxBlocks is how many blocks of that many threads, each with sharedBytes of dynamic shared memory, the whole device
	// runs at the same time: the largest grid whose blocks may wait for each other.
	MaxBlocks(threads, sharedBytes int) (int, error)
	// Prepare fixes everything about a launch, so that launching allocates nothing.
	Prepare(l Launch) (PreparedLaunch, error)
}

// Launch describes a launch.
type Launch struct {
	Grid, Block [3]uint32 // in blocks and threads; a 0 counts as 1
	SharedBytes uint32    // of dynamic shared memory a block
	Params      []byte    // the kernel's parameter, laid out as the kernel declares it; copied
	// Overlap lets the kernel begin while the work before it in the stream still ends (programmatic stream serialization);
	// the kernel itself waits for that work before it reads what it wrote. Ignored where the device cannot.
	Overlap bool
}

// PreparedLaunch is a launch that can be enqueued many times. It is safe for use by several goroutines.
type PreparedLaunch interface {
	// Launch enqueues the kernel on s, or records it, and returns at once. It allocates nothing.
	Launch(s Stream) error
	// Close gives it back. Twice is ErrClosed.
	Close() error
}

// PeerAtomics is implemented by devices that know what their links to other devices carry.
type PeerAtomics interface {
	// PeerAtomics reports whether kernels of this device can do atomic operations on the memory of the device with that UUID, itself
	// included, as they can on their own. It is false, too, where that cannot be found out from here.
	PeerAtomics(uuid string) bool
}

// FaultReporter is implemented by devices whose kernels report failures by writing a word of memory, since they cannot
// return an error.
type FaultReporter interface {
	// NewFaultWord gives a 64-bit word, 0, that kernels of the device can write and that the host reads. When it is not 0, the
	// next Synchronize of any stream of the device returns decode's error for its value, once.
	NewFaultWord(decode func(word uint64) error) (FaultWord, error)
	// NewStopWord gives a 32-bit word, 0, that kernels of the device read while they wait.
	NewStopWord() (StopWord, error)
}

// FaultWord is a word that kernels write when they fail. The first value written counts; kernels must not overwrite it.
type FaultWord interface {
	// Ptr is the word's address on the device.
	Ptr() Ptr
	// Load reads the word, cheaply and without waiting for any stream.
	Load() uint64
	// Close gives the word back; no kernel that may write it is queued. Twice is ErrClosed.
	Close() error
}

// StopWord is a word by which the host ends the waiting of kernels.
type StopWord interface {
	// Ptr is the word's address on the device.
	Ptr() Ptr
	// Stop makes the word not 0, now and for ever. It does not wait for any stream, and may be called several times.
	Stop()
	// Close gives the word back; no kernel that may read it is queued. Twice is ErrClosed.
	Close() error
}
