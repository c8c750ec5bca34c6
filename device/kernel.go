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

// Function is one compiled kernel, with any number of parameters.
type Function interface {
	// MaxBlocks is how many blocks of that many threads, each with sharedBytes of dynamic shared memory, the whole device
	// runs at the same time: the largest grid whose blocks may wait for each other. Blocks that the kernel cannot have are
	// ErrInvalid, an *ArgumentError of package symmem; no other failure is one.
	MaxBlocks(threads, sharedBytes int) (int, error)
	// Prepare fixes everything about a launch, so that launching allocates nothing. A launch that the kernel cannot have is ErrInvalid:
	// also one with another number of parameters than it has, or with one of another size, where the device knows them.
	Prepare(l Launch) (PreparedLaunch, error)
}

// Clustered is implemented by functions whose blocks may come in clusters. A grid has whole clusters, and so has what MaxBlocks gives.
type Clustered interface {
	// ClusterBlocks is how many blocks a cluster has, for which the kernel was compiled: 1 if it was for none.
	ClusterBlocks() int
}

// Launch describes a launch.
type Launch struct {
	Grid, Block [3]uint32 // in blocks and threads; a 0 counts as 1
	SharedBytes uint32    // of dynamic shared memory a block
	// Params are the kernel's parameters, one entry for each, in the order in which the kernel declares them. An entry is the bytes of its
	// parameter as the kernel lays it out: a number or a pointer in little endian, a struct by value with its padding. It is as long as
	// the parameter, and is copied. Empty for a kernel without parameters.
	Params [][]byte
	// Overlap lets the kernel begin while the work before it in the stream still ends (programmatic stream serialization);
	// the kernel itself waits for that work before it reads what it wrote. Ignored where the device cannot.
	Overlap bool
	// Fault, unless nil, is the word that the kernel writes when it gives up. The next Synchronize of each stream that the kernel was
	// launched on, by itself or in a graph, returns the word's error if the word is not 0 then, whatever other streams have returned.
	Fault FaultWord
	// FaultCell, unless nil, is for a kernel that can give up and yet be launched again. One of Params then holds the address of a
	// [FaultCell] of the launch's own, which the device puts there.
	FaultCell *FaultCellParam
}

// FaultCellParam says where a kernel reports each launch that gave up.
type FaultCellParam struct {
	Word   FaultWord // makes errors of the values that the kernel writes; its own word is not used
	Param  int       // which of Params takes the cell's address
	Offset int       // in that parameter, of the 8 bytes that take it; a multiple of 8
}

// FaultCell is how a kernel reports launches that gave up, in memory that it shares with the host: one cell for a stream, and one for
// each launch that was recorded, so that no two launches write a cell at the same time. A launch that gives up writes
//
//	Fault   why, if GaveUp is Told
//	GaveUp  one more, behind that
//
// The next Synchronize of the stream that it ran on, or that the graph with it was launched on, returns the error for Fault, once.
type FaultCell struct {
	GaveUp uint32 // written by the device only
	Told   uint32 // written by the host only
	Fault  uint64
}

// PreparedLaunch is a launch that can be enqueued many times. It is safe for use by several goroutines.
type PreparedLaunch interface {
	// Launch enqueues the kernel on s, or records it, and returns at once. It allocates nothing.
	Launch(s Stream) error
	// Close releases it. Twice is ErrClosed.
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
	// NewFaultWord returns a 64-bit word, 0, that kernels of the device can write and that the host reads. When it is not 0, the
	// streams whose launches name it tell decode's error for its value, as [Launch] says. If no launch ever named it, the next
	// Synchronize of any stream of the device does, once. decode must not call anything of the device, and may be called by Close.
	NewFaultWord(decode func(word uint64) error) (FaultWord, error)
	// NewStopWord returns a 32-bit word, 0, that kernels of the device read while they wait.
	NewStopWord() (StopWord, error)
}

// FaultWord is a word that kernels write when they fail. The first value written counts; kernels must not overwrite it.
type FaultWord interface {
	// Ptr is the word's address on the device.
	Ptr() Ptr
	// Load reads the word, cheaply and without waiting for any stream.
	Load() uint64
	// Close releases the word; no kernel that may write it is queued. Streams still return errors of it that they have not returned. Twice
	// is ErrClosed.
	Close() error
}

// StopWord is a word by which the host ends the waiting of kernels.
type StopWord interface {
	// Ptr is the word's address on the device.
	Ptr() Ptr
	// Stop makes the word not 0, now and for ever. It does not wait for any stream, and may be called several times.
	Stop()
	// Close releases the word; no kernel that may read it is queued. Twice is ErrClosed.
	Close() error
}
