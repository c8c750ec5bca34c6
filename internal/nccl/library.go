package nccl

import (
	"errors"
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

const (
	libraryName = "NCCL"
	fileName    = "libnccl.so.2"
	needs       = "NCCL 2.23.4 or newer is needed"

	multicastEnv = "NCCL_NVLS_ENABLE"   // 0 switches multicast off
	blockingEnv  = "NCCL_COMM_BLOCKING" // 0 makes communicators that do not block, whatever the call says
)

// Options is what Load can be told. Nil or zero values are the defaults.
type Options struct {
	// Path is the library's file, or the folder it is in; "" looks at the variable LibraryEnv, then where the loader looks,
	// then where Python's package managers put it.
	Path string
	// Multicast leaves it to NCCL and its environment whether NVLink multicast is used. Otherwise Load switches it off for this
	// process.
	Multicast bool
	// Logger gets what was loaded, at debug level. Nil is silence.
	Logger *slog.Logger
}

// Library is a loaded NCCL. It may be used by several goroutines at once and is never unloaded.
type Library struct {
	path    string
	version Version
	call    functions
}

// functions are the library's functions. Each has the type that nccl.h declares, with addresses and handles as numbers.
type functions struct {
	getVersion     func(version *int32) Result
	getUniqueID    func(id *UniqueID) Result
	getErrorString func(r Result) string
	getLastError   func(comm commHandle) string
	// The function that takes the id by its address. ncclCommInitRank takes its 128 bytes by value.
	commInitRankScalable func(comm *commHandle, ranks, rank, ids int32, id *UniqueID, config uintptr) Result
	commDestroy          func(comm commHandle) Result
	commAbort            func(comm commHandle) Result
	allReduce            func(send, recv uint64, count uintptr, t DataType, op Op, comm commHandle, stream uintptr) Result
}

// bind fills the table, or says what the library lacks.
func (f *functions) bind(lib *dl.Library) error {
	lacking := &dl.SymbolError{Library: libraryName + " (" + lib.Path() + ")", Hint: needs}
	for _, one := range []struct {
		symbol string
		fn     any
	}{
		{"ncclGetVersion", &f.getVersion},
		{"ncclGetUniqueId", &f.getUniqueID},
		{"ncclGetErrorString", &f.getErrorString},
		{"ncclGetLastError", &f.getLastError},
		{"ncclCommInitRankScalable", &f.commInitRankScalable},
		{"ncclCommDestroy", &f.commDestroy},
		{"ncclCommAbort", &f.commAbort},
		{"ncclAllReduce", &f.allReduce},
	} {
		err := lib.Bind(one.fn, one.symbol)
		if _, ok := errors.AsType[*dl.SymbolError](err); ok {
			lacking.Symbols = append(lacking.Symbols, one.symbol)
		} else if err != nil {
			return fmt.Errorf("binding %s: %w", libraryName, err)
		}
	}
	if len(lacking.Symbols) > 0 {
		return lacking
	}
	return nil
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
	if v := os.Getenv(blockingEnv); v == "0" {
		return nil, errs.Invalid("loading NCCL", "environment variable "+blockingEnv, v,
			"unset or 1, because the communicators that are made here block; unset it")
	}
	// Before the library is there, so that none of its threads reads the environment meanwhile.
	if !o.Multicast && os.Getenv(multicastEnv) != "0" {
		if err := os.Setenv(multicastEnv, "0"); err != nil {
			return nil, fmt.Errorf("switching NCCL's multicast off: %w", err)
		}
	}
	lib, err := dl.Open(search(&o))
	if err != nil {
		return nil, err
	}
	l := &Library{path: lib.Path()}
	if err := l.call.bind(lib); err != nil {
		return nil, err
	}
	if file, err := lib.File("ncclGetVersion"); err == nil {
		l.path = file
	}
	var version int32
	if err := l.check("ncclGetVersion", l.call.getVersion(&version)); err != nil {
		return nil, err
	}
	l.version = Version(version)
	o.Logger.Debug("NCCL loaded", "version", l.version.String(), "path", l.path, "multicast", o.Multicast)
	return l, nil
}

// Version is the library's version.
func (l *Library) Version() Version { return l.version }

// Path is the library's file.
func (l *Library) Path() string { return l.path }

// check makes an error of a result, a *dl.Error. It must be called right after the call, on the same thread.
func (l *Library) check(call string, r Result) error {
	if r == Success {
		return nil
	}
	e := &dl.Error{Library: libraryName, Call: call, Code: int(r), Name: r.String(), Text: l.call.getErrorString(r)}
	switch r {
	case RemoteError:
		e.Err = errs.ErrPeerLost
	case InProgress:
		e.Hint = "the communicators that are made here block; remove " + blockingEnv + "=0 from NCCL's configuration file"
		return e
	}
	// The text of the latest warning of the whole process: most often the cause, but nobody can be sure.
	if last := strings.TrimSpace(l.call.getLastError(0)); last != "" {
		e.Hint = "its last warning was: " + last
	} else {
		e.Hint = "NCCL_DEBUG=WARN in the environment makes it say more"
	}
	return e
}
