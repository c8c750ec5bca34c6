package nccl

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// LibraryEnv names the environment variable with the library's path, which [Load] reads if it is given none.
const LibraryEnv = "SYMMEM_NCCL_LIBRARY"

// ShareGPUEnv names NCCL's own variable that allows several ranks on one GPU, unless it is 0.
const ShareGPUEnv = "NCCL_MULTI_RANK_GPU_ENABLE"

// SharesGPUs reports whether the library can have several ranks on one GPU (ncclCheckMultiRank in graph/topo.cc), if its environment allows
// it. They have no NVLink multicast.
func (l *Library) SharesGPUs() bool { return l.version >= firstSharing }

// firstSharing is the first version for which SharesGPUs is true.
const firstSharing Version = 23003

const (
	libraryName = "NCCL"
	fileName    = "libnccl.so.2"
	needs       = "NCCL 2.23.4 or newer is needed"

	multicastEnv = "NCCL_NVLS_ENABLE" // 0 switches multicast off
)

// Options are the options of Load. Nil or zero values are the defaults.
type Options struct {
	// Path is the library's file, or the folder it is in; "" looks at the variable LibraryEnv, then where the loader looks,
	// then where Python's package managers put it.
	Path string
	// Multicast leaves it to NCCL and its environment whether NVLink multicast is used. Otherwise Load switches it off for this
	// process.
	Multicast bool
	// ShareGPU allows several ranks on one GPU, which NCCL can do from 2.30 on. Load sets NCCL_MULTI_RANK_GPU_ENABLE to 1 for this process
	// unless the variable is set.
	ShareGPU bool
	// Look leaves the environment alone. To use more of the library than its version and its symbols, load it again without Look first.
	Look bool
	// Logger receives what was loaded, at debug level. Nil logs nothing.
	Logger *slog.Logger
}

// Library is a loaded NCCL. It may be used by several goroutines at once and is never unloaded.
type Library struct {
	path    string
	version Version
	call    Functions
	log     *debugLog
}

// search says where the library may be.
func search(opts *Options) dl.Search {
	s := dl.Search{
		Library: libraryName, Path: opts.Path, Env: LibraryEnv, Names: []string{fileName}, Logger: opts.Logger,
		Hint: "install NCCL (Debian's libnccl2, or the Python package nvidia-nccl-cu13), or name its file in " + LibraryEnv,
	}
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		s.Folders = append(s.Folders, filepath.Join(venv, wheelFolder))
	}
	for _, root := range []string{"/usr/local", "/usr", "~/.local", "/opt/*/.venv", "/opt/*"} {
		s.Folders = append(s.Folders, root+"/"+wheelFolder)
	}
	return s
}

// wheelFolder is where a Python package manager puts the library, below its root; "*-packages" is site-packages, or
// dist-packages on Debian.
const wheelFolder = "lib/python3*/*-packages/nvidia/nccl/lib"

// Load finds and loads the library; nil options are the defaults. It starts nothing and touches no GPU. Unless the options say
// otherwise it first sets NCCL_NVLS_ENABLE=0 in the environment of this process, C's included. A library that is not there is
// ErrUnavailable, with all places where it was looked for; one that is too old is ErrUnsupported.
func Load(opts *Options) (*Library, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	// The environment is changed before the library is loaded, so that none of its threads reads it meanwhile.
	if !o.Multicast && !o.Look && os.Getenv(multicastEnv) != "0" {
		if err := os.Setenv(multicastEnv, "0"); err != nil {
			return nil, fmt.Errorf("switching NCCL's multicast off: %w", err)
		}
	}
	if o.ShareGPU && !o.Look && os.Getenv(ShareGPUEnv) == "" {
		if err := os.Setenv(ShareGPUEnv, "1"); err != nil {
			return nil, fmt.Errorf("allowing several ranks on one GPU: %w", err)
		}
	}
	lib, err := dl.Open(search(&o))
	if err != nil {
		return nil, err
	}
	path := lib.Path()
	if file, err := lib.File("ncclGetVersion"); err == nil {
		path = file
	}
	var f Functions
	if err := bind(lib, &f); err != nil {
		return nil, err
	}
	f.MulticastSource = func() (*Multicast, error) {
		m := new(Multicast)
		if err := bind(lib, m); err != nil {
			return nil, err
		}
		if lacking := missing(m, true); len(lacking) > 0 {
			return nil, &dl.SymbolError{Library: libraryName + " (" + path + ")", Symbols: lacking,
				Hint: "NCCL 2.29.2 or newer has them"}
		}
		return m, nil
	}
	bindFast(lib, &f)
	l, err := New(path, f)
	if err != nil {
		return nil, err
	}
	if !o.Look {
		l.log = openDebugLog(o.Logger)
	}
	o.Logger.Debug("NCCL loaded", "version", l.version.String(), "path", l.path, "multicast", o.Multicast, "missing", l.Missing())
	return l, nil
}

// New makes a Library of a table of functions: the one that Load has filled, or a test's. The error is ErrUnsupported if the table lacks what every
// version since 2.23.4 has.
func New(path string, f Functions) (*Library, error) {
	l := &Library{path: path, call: f}
	var failed error
	if f.GetVersion != nil { // the version is read first, so that errors can tell it
		var version int32
		if r := f.GetVersion(&version); r == Success {
			l.version = Version(version)
		} else {
			failed = l.check("ncclGetVersion", r)
		}
	}
	if lacking := missing(&l.call, true); len(lacking) > 0 {
		name := fmt.Sprintf("%s (%s)", libraryName, path)
		if l.version > 0 {
			name = fmt.Sprintf("%s %s (%s)", libraryName, l.version, path)
		}
		return nil, &dl.SymbolError{Library: name, Symbols: lacking, Hint: needs}
	}
	if failed != nil {
		return nil, failed
	}
	return l, nil
}

// Version returns the library's version.
func (l *Library) Version() Version { return l.version }

// Functions returns the table. It must not be changed.
func (l *Library) Functions() *Functions { return &l.call }

// Path returns the library's file.
func (l *Library) Path() string { return l.path }

// check returns the *dl.Error of a result, or nil. It must be called right after the call, on the same thread.
func (l *Library) check(call string, r Result) error {
	if r == Success {
		return nil
	}
	e := &dl.Error{Library: libraryName, Call: call, Code: int(r), Name: r.String(), Text: l.call.GetErrorString(r)}
	if r == RemoteError {
		e.Err = errs.ErrPeerLost
	}
	// The text of the latest warning of the whole process, which is most often the cause, but not always.
	if last := strings.TrimSpace(l.call.GetLastError(0)); last != "" {
		e.Hint = "its last warning was: " + last
	} else {
		e.Hint = "NCCL_DEBUG=WARN in the environment makes it say more"
	}
	return e
}
