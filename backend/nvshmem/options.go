package nvshmem

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/fromenv"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

// arenaEnv is the environment variable of Options.Arena, for backends that are opened by name: a number of bytes, perhaps with a K, M or G
// right after it.
const arenaEnv = "SYMMEM_NVSHMEM_ARENA"

const (
	// defaultArena is the size in bytes of the memory for groups of only some PEs.
	defaultArena = 64 << 20
	// defaultChunk is the least size in bytes by which the heap grows.
	defaultChunk = 512 << 20
	// defaultTimeout is the KernelTimeout unless the options say otherwise.
	defaultTimeout = 2 * time.Minute
	// maxBytes is the most that Arena and Chunk may be.
	maxBytes = 1 << 40
)

// Options sets what New makes. Nil or zero values mean the defaults.
type Options struct {
	// Device says which GPU: an index among those this process sees, or a UUID. "" takes the one whose index is LocalRank.
	Device string
	// LocalRank is the number of this rank on its host, from 0. It only counts when Device is "".
	LocalRank int
	// Opened, unless nil, is an open device to use instead; it stays open when the backend closes.
	Opened *cuda.Device
	// Driver is the table of driver functions; nil loads the driver. It does not count when Opened or Parent is set.
	Driver *cu.Driver
	// Parent, unless nil, is the open backend of a group that all ranks of this one are in.
	Parent *Backend
	// Calls, unless nil, gives an NVSHMEM of this rank's own, which is used instead of the one that the process has: several ranks may then be
	// in one process.
	Calls func(*nvshmem.Options) (nvshmem.Calls, error)
	// Library is NVSHMEM's file or folder; "" looks at SYMMEM_NVSHMEM_LIBRARY, then where the loader and Python's package
	// managers look.
	Library string
	// Arena is the size in bytes of the memory for groups of only some PEs, in all; default 64 MiB, none if negative. Backends that
	// are opened by name take it from SYMMEM_NVSHMEM_ARENA.
	Arena int64
	// Chunk is the least size in bytes by which the heap grows; default 512 MiB.
	Chunk int64
	// Preflight, unless nil, is called before the library is started in this process; an error of it, on any rank, is the
	// error of New. It is meant to start a short-lived copy of this program, which calls the package's Preflight.
	Preflight func(ctx context.Context) error
	// Multicast is "auto", "on" or "off"; "" is "auto".
	Multicast string
	// KernelTimeout bounds every call of NVSHMEM, and what streams of the device wait for by themselves; default 2 minutes. Signals and plans wait for as long as
	// KernelTimeout of [github.com/symmem/symmem/memory.Options] says, which Open of package symmem takes from the setting kernel-timeout.
	KernelTimeout time.Duration
	// Getenv reads the environment for switches of other libraries that forbid multicast; default os.Getenv.
	Getenv func(string) string
	// Logger takes events; default: none are logged.
	Logger *slog.Logger

	home *home                                     // where the library's state is; nil is that of the process
	load func(o *nvshmem.Options) (library, error) // loads the library; nil is the real one
}

// withDefaults fills in the defaults, and refuses what is not allowed.
func (o *Options) withDefaults() (Options, error) {
	var all Options
	if o != nil {
		all = *o
	}
	all.KernelTimeout = cmp.Or(all.KernelTimeout, defaultTimeout)
	all.Arena = cmp.Or(all.Arena, defaultArena)
	all.Chunk = cmp.Or(all.Chunk, defaultChunk)
	if all.Getenv == nil {
		all.Getenv = os.Getenv
	}
	if all.Logger == nil {
		all.Logger = slog.New(slog.DiscardHandler)
	}
	if all.home == nil {
		if all.home = &process; all.Calls != nil {
			all.home = &home{own: true}
		}
	}
	switch {
	case all.load != nil:
	case all.Calls != nil:
		all.load = all.Calls
	default:
		all.load = loadLibrary
	}
	const op = "nvshmem.New"
	if all.Arena > maxBytes {
		return all, errs.Invalid(op, "Arena", all.Arena, fmt.Sprintf("at most %d bytes", int64(maxBytes)))
	}
	if all.Chunk < 1 || all.Chunk > maxBytes {
		return all, errs.Invalid(op, "Chunk", all.Chunk, fmt.Sprintf("1 to %d bytes", int64(maxBytes)))
	}
	all.Arena = max(all.Arena, 0)
	return all, nil
}

// loadLibrary loads the library.
func loadLibrary(o *nvshmem.Options) (library, error) {
	l, err := nvshmem.Load(o)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// options returns the Options for env.
func options(env *backend.Env) (*Options, error) {
	o, err := fromenv.Options[Options](Name, env)
	if err != nil {
		return nil, err
	}
	if err := fromenv.Text(&o.Library, Name, env, "library"); err != nil {
		return nil, err
	}
	if o.Arena != 0 {
		return o, nil
	}
	text, err := env.Option(Name, "arena")
	if err != nil {
		return nil, err
	}
	if bytes, ok := nvshmem.ParseSize(text); ok {
		if o.Arena = bytes; bytes == 0 {
			o.Arena = -1
		}
	}
	return o, nil
}

// arenaOption is the option of that name.
var arenaOption = backend.Option{
	Name: "arena", Default: fmt.Sprintf("%dM", defaultArena>>20), Form: fmt.Sprintf("a number of bytes, as 64M, at most %dG", maxBytes>>30),
	Check: func(value string) bool { bytes, ok := nvshmem.ParseSize(value); return ok && bytes <= maxBytes },
	Usage: "memory for groups of only some of the ranks, in bytes; 0 is none",
}
