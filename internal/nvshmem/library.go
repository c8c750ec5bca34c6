package nvshmem

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// LibraryEnv names the environment variable with the library's path, which [Load] reads if it is given none.
const LibraryEnv = "SYMMEM_NVSHMEM_LIBRARY"

const (
	libraryName = "NVSHMEM"
	fileName    = "libnvshmem_host.so.3"
	needs       = "NVSHMEM 3.4.5 or newer is needed"

	bootstrapName = "nvshmem_bootstrap_uid.so.3"   // the plugin by which the PEs meet
	bootstrapEnv  = "NVSHMEM_BOOTSTRAP_UID_PLUGIN" // its file
	hint          = "install NVSHMEM (the Python package nvidia-nvshmem-cu13), or name its file in " + LibraryEnv
	wheelFolder   = "lib/python3*/*-packages/nvidia/nvshmem/lib" // below a Python package manager's root
)

// DefaultGranularity is the unit, in bytes, in which memory is added to the heap, unless the options or the user say
// otherwise. It is what the driver recommends; NVSHMEM's own 512 MiB would refuse to register memory that is not a multiple
// of that.
const DefaultGranularity = 2 << 20

// Options are the options of Load. Nil or zero values are the defaults.
type Options struct {
	// Path is the library's file, or the folder it is in; "" looks at the variable LibraryEnv, then where the loader looks,
	// then where Python's package managers put it.
	Path string
	// Multicast leaves it to NVSHMEM and its environment whether NVLink multicast is used. Otherwise Load switches it off for
	// this process, and looks up no function for it.
	Multicast bool
	// Look loads the library only to see whether it is there: of the environment nothing but multicast is changed. Load it again
	// before it is started.
	Look bool
	// Granularity is the unit in which memory is added to the heap, in bytes: a power of two; default DefaultGranularity.
	Granularity int64
	// Logger receives what was loaded, at debug level. Nil logs nothing.
	Logger *slog.Logger
}

// Library is a loaded NVSHMEM, which is never unloaded. See the package comment for what its methods need.
type Library struct {
	path      string
	version   Version
	settings  []Setting
	bootstrap string
	call      functions

	started atomic.Bool
	attr    atomic.Pointer[initAttr] // of the last start, whose id the library keeps the address of
}

// functions are the library's functions. Each has the type that NVSHMEM's headers declare, with addresses as numbers.
type functions struct {
	getVersion   func(major, minor, patch *int32)
	getUniqueID  func(id *UniqueID) result
	setUniqueID  func(rank, ranks int32, id *UniqueID, attr *initAttr) result
	initAttr     func(flags uint32, attr *initAttr) result
	initStatus   func() Status
	finalize     func()
	myPE         func() int32
	pes          func() int32
	align        func(alignment, bytes uintptr) uint64
	ptr          func(p uint64, pe int32) uint64
	register     func(p uint64, bytes uintptr, flags int32) uint64
	unregister   func(p uint64, bytes uintptr) result
	teamSplit    func(parent Team, start, stride, size int32, config uintptr, mask int64, team *Team) result
	barrier      func(team Team, stream uintptr) result
	put          func(dst, src uint64, bytes uintptr, pe int32, stream uintptr)
	get          func(dst, src uint64, bytes uintptr, pe int32, stream uintptr)
	multicastPtr func(team Team, p uint64) uint64 // nil unless multicast is allowed
	// collective and broadcast look up one of those.
	collective func(symbol string) (collective, error)
	broadcast  func(symbol string) (broadcast, error)
}

// collective is one of the nvshmemx_<type>_<op>_reduce_on_stream, or another collective without a root.
type collective func(team Team, dst, src uint64, count, stream uintptr) result

// broadcast is one of the nvshmemx_<type>_broadcast_on_stream.
type broadcast func(team Team, dst, src uint64, count uintptr, root int32, stream uintptr) result

// entry is a function of the library and the variable that calls it.
type entry struct {
	symbol string
	fn     any
}

// table lists the symbols with their places.
func (f *functions) table(multicast bool) []entry {
	table := []entry{
		{"nvshmemx_vendor_get_version_info", &f.getVersion},
		{"nvshmemx_get_uniqueid", &f.getUniqueID},
		{"nvshmemx_set_attr_uniqueid_args", &f.setUniqueID},
		{"nvshmemx_hostlib_init_attr", &f.initAttr},
		{"nvshmemx_init_status", &f.initStatus},
		{"nvshmemx_hostlib_finalize", &f.finalize},
		{"nvshmem_my_pe", &f.myPE},
		{"nvshmem_n_pes", &f.pes},
		{"nvshmem_align", &f.align},
		{"nvshmem_ptr", &f.ptr},
		{"nvshmemx_buffer_register_symmetric", &f.register},
		{"nvshmemx_buffer_unregister_symmetric", &f.unregister},
		{"nvshmem_team_split_strided", &f.teamSplit},
		{"nvshmemx_barrier_on_stream", &f.barrier},
		{"nvshmemx_putmem_on_stream", &f.put},
		{"nvshmemx_getmem_on_stream", &f.get},
	}
	if multicast {
		table = append(table, entry{"nvshmemx_mc_ptr", &f.multicastPtr})
	}
	return table
}

// bind fills the table, or says what the library lacks.
func (f *functions) bind(lib *dl.Library, multicast bool) error {
	lacking := &dl.SymbolError{Library: libraryName + " (" + lib.Path() + ")", Hint: needs}
	for _, one := range f.table(multicast) {
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
	f.collective = func(symbol string) (fn collective, err error) { err = lib.Bind(&fn, symbol); return fn, err }
	f.broadcast = func(symbol string) (fn broadcast, err error) { err = lib.Bind(&fn, symbol); return fn, err }
	return nil
}

// search says where the library may be.
func search(opts *Options) dl.Search {
	s := dl.Search{
		Library: libraryName, Path: opts.Path, Env: LibraryEnv, Names: []string{fileName}, Hint: hint, Logger: opts.Logger,
	}
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		s.Folders = append(s.Folders, filepath.Join(venv, wheelFolder))
	}
	for _, root := range []string{"/usr/local", "/usr", "~/.local", "/opt/*/.venv", "/opt/*"} {
		s.Folders = append(s.Folders, root+"/"+wheelFolder)
	}
	return s
}

// loading serialises Load, which changes the environment.
var loading sync.Mutex

// Load finds and loads the library; nil options are the defaults. It starts nothing and touches no GPU. First it sets the
// environment of this process as [Environment] says. A library that is not there is ErrUnavailable, with all places where it
// was looked for; one that is too old is ErrUnsupported; one whose bootstrap plugin is missing, without which nothing can
// start, is ErrUnavailable.
func Load(opts *Options) (*Library, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.Granularity = cmp.Or(o.Granularity, DefaultGranularity)
	if o.Granularity < 0 || o.Granularity&(o.Granularity-1) != 0 {
		return nil, errs.Invalid("loading NVSHMEM", "granularity", o.Granularity, "a power of two, in bytes")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	loading.Lock()
	defer loading.Unlock()
	// The environment is changed before the library is loaded, so that none of its threads reads it meanwhile.
	var settings []Setting
	var err error
	if !o.Look {
		settings, err = Environment(o.Multicast, o.Granularity)
	} else if !o.Multicast {
		err = ForbidMulticast()
	}
	if err != nil {
		return nil, err
	}
	lib, err := dl.Open(search(&o))
	if err != nil {
		return nil, err
	}
	l := &Library{path: lib.Path(), settings: settings}
	if err := l.call.bind(lib, o.Multicast); err != nil {
		return nil, err
	}
	if file, err := lib.File("nvshmemx_get_uniqueid"); err == nil {
		l.path = file
	}
	l.call.getVersion(&l.version.Major, &l.version.Minor, &l.version.Patch)
	if l.version.Major != 3 {
		return nil, fmt.Errorf("%s at %s is version %s: %s, of major version 3: %w", libraryName, l.path, l.version, needs, errs.ErrUnsupported)
	}
	if l.bootstrap, err = findBootstrap(l.path, os.Getenv(bootstrapEnv)); err != nil {
		return l, err
	}
	o.Logger.Debug("NVSHMEM loaded", "version", l.version.String(), "path", l.path, "bootstrap", l.bootstrap, "multicast", o.Multicast)
	return l, nil
}

// findBootstrap finds the plugin by which the PEs meet: what the user names, or the file beside the library. A bare name is
// left to the loader.
func findBootstrap(library, named string) (string, error) {
	path := cmp.Or(named, filepath.Join(filepath.Dir(library), bootstrapName))
	if !filepath.IsAbs(path) {
		return path, nil
	}
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		why := "it is no file"
		if err != nil {
			why = err.Error()
		}
		return "", fmt.Errorf("%s at %s has no bootstrap plugin %s (%s): install the whole of NVSHMEM, or name the plugin's file in %s: %w",
			libraryName, library, path, why, bootstrapEnv, errs.ErrUnavailable)
	}
	return path, nil
}

// Version returns the library's version.
func (l *Library) Version() Version { return l.version }

// Path returns the library's file.
func (l *Library) Path() string { return l.path }

// Bootstrap returns the file of the plugin by which the PEs meet.
func (l *Library) Bootstrap() string { return l.bootstrap }

// Settings returns NVSHMEM's variables in the environment as it was when the library was loaded.
func (l *Library) Settings() []Setting { return l.settings }

// check makes an error of a result, a *dl.Error.
func check(call string, r result) error {
	if r == 0 {
		return nil
	}
	e := &dl.Error{Library: libraryName, Call: call, Code: int(r), Name: r.String(),
		Hint: "NVSHMEM_DEBUG=WARN in the environment makes it say more, on the standard output"}
	if r == 2 {
		e.Err = errs.ErrNoMemory
	}
	return e
}
