package simcuda

import (
	"cmp"

	"github.com/symmem/symmem/internal/ptxvm"
)

// Config is what a machine has. Zero values are the defaults.
type Config struct {
	// GPUs is how many there are; default 1.
	GPUs int
	// Each changes single GPUs, by ordinal; GPUs behind its end are all alike.
	Each []GPU
	// Seed decides what is left to chance: which thread goes on, which GPU, in which order a switch adds. When calls of the driver come is up
	// to the goroutines of the program, so a run with the same seed is alike, not the same.
	Seed uint64
	// Weak makes memory as weak as PTX's memory consistency model has it, for kernels, copies and all else that streams do: a race is a failure of the kernel. It is of one
	// process, slow, and takes much memory.
	Weak bool
	// Multicast says that the GPUs have it.
	Multicast bool
	// MulticastObjects is how many multicast objects there can be at the same time; default 128.
	MulticastObjects int
	// Peers says which GPUs reach which others; nil: all do.
	Peers func(gpu, peer int) bool
	// Trace, unless nil, is called before each instruction of a kernel that others may see the effect of, or that may see theirs. It must not call the
	// driver. The thread's Device is its GPU's ordinal.
	Trace func(ptxvm.Thread, ptxvm.Place)
}

// GPU is what makes one GPU different from others.
type GPU struct {
	Name            string // default "Simulated GPU"
	Memory          uint64 // bytes; default 1 GiB
	Capability      int    // compute capability, 90 for 9.0, which is the default
	Multiprocessors int    // default 8: plans take few blocks then, and still as much of the GPU as of a real one
}

const defaultObjects = 128

func (c Config) complete() Config {
	c.GPUs = max(c.GPUs, 1)
	c.MulticastObjects = cmp.Or(c.MulticastObjects, defaultObjects)
	each := make([]GPU, c.GPUs)
	copy(each, c.Each)
	for i := range each {
		g := &each[i]
		g.Name = cmp.Or(g.Name, "Simulated GPU")
		g.Memory = cmp.Or(g.Memory, 1<<30)
		g.Capability = cmp.Or(g.Capability, 90)
		g.Multiprocessors = cmp.Or(g.Multiprocessors, 8)
	}
	c.Each = each
	return c
}
