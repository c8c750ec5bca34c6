package nixl

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"unsafe"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// LibraryEnv names the environment variable with the library's path, which [Load] reads if it is given none.
const LibraryEnv = "SYMMEM_NIXL_LIBRARY"

const (
	libraryName = "NIXL"
	needs       = "NIXL 1.0 or newer is needed"
	install     = "install NIXL (pip install nixl-cu13, or nixl-cu12 for a driver of CUDA 12), or name its file, or the folder " +
		"that pip installed it into, in " + LibraryEnv
)

// fileNames are the names of the file, the later interface's last.
var fileNames = []string{"libnixl_capi.so", "libnixl_capi.so.0"}

// Options are the options of Load. Nil or zero values are the defaults.
type Options struct {
	// Path is the library's file, or the folder it is in, or the folder of Python packages that it was installed into; "" looks at
	// the variable LibraryEnv, then where Python's package managers put it, then where the loader looks.
	Path string
	// CUDA is the major version of CUDA that the driver speaks; 0 without a driver. A library for a later one is refused.
	CUDA int
	// Logger receives what was loaded, at debug level. Nil logs nothing.
	Logger *slog.Logger
}

// Library is a loaded NIXL. It may be used by several goroutines at once and is never unloaded.
type Library struct {
	path    string
	cuda    int
	modules string
	call    functions
}

// handle is any of the library's opaque pointers.
type handle uintptr

// functions are the library's functions. Each has the type that the header declares, with addresses and handles as numbers.
type functions struct {
	isStub func() bool
	free   func(p unsafe.Pointer) // of the C library that the library uses

	createAgent    func(name string, config *agentConfig, agent *handle) Status
	destroyAgent   func(agent handle) Status
	plugins        func(agent handle, list *handle) Status
	listSize       func(list handle, n *uintptr) Status
	listGet        func(list handle, i uintptr, s *unsafe.Pointer) Status
	destroyList    func(list handle) Status
	createParams   func(params *handle) Status
	addParam       func(params handle, key, value string) Status
	destroyParams  func(params handle) Status
	createBackend  func(agent handle, plugin string, params handle, backend *handle) Status
	destroyBackend func(backend handle) Status

	createRegs   func(m Memory, regs *handle) Status
	addReg       func(regs handle, addr, bytes uintptr, device uint64, meta unsafe.Pointer, metaBytes uintptr) Status
	destroyRegs  func(regs handle) Status
	register     func(agent, regs, args handle) Status
	deregister   func(agent, regs, args handle) Status
	metadata     func(agent handle, data *unsafe.Pointer, n *uintptr) Status
	metadataOf   func(agent, regs handle, data *unsafe.Pointer, n *uintptr, args handle) Status
	loadMetadata func(agent handle, data unsafe.Pointer, n uintptr, name *unsafe.Pointer) Status
	invalidate   func(agent handle, name string) Status

	createNotes  func(notes *handle) Status
	getNotes     func(agent, notes, args handle) Status
	destroyNotes func(notes handle) Status

	createBlocks   func(m Memory, blocks *handle) Status
	addBlock       func(blocks handle, addr, bytes uintptr, device uint64) Status
	destroyBlocks  func(blocks handle) Status
	createRequest  func(agent handle, op Op, local, remote handle, name string, request *handle, args handle) Status
	post           func(agent, request, args handle) Status
	status         func(agent, request handle) Status
	releaseRequest func(agent, request handle) Status
	destroyRequest func(request handle) Status
}

// table lists the symbols with their places.
func (f *functions) table() []symbol {
	return []symbol{
		{"nixl_capi_is_stub", &f.isStub},
		{"free", &f.free},
		{"nixl_capi_create_configured_agent", &f.createAgent},
		{"nixl_capi_destroy_agent", &f.destroyAgent},
		{"nixl_capi_get_available_plugins", &f.plugins},
		{"nixl_capi_string_list_size", &f.listSize},
		{"nixl_capi_string_list_get", &f.listGet},
		{"nixl_capi_destroy_string_list", &f.destroyList},
		{"nixl_capi_create_params", &f.createParams},
		{"nixl_capi_params_add", &f.addParam},
		{"nixl_capi_destroy_params", &f.destroyParams},
		{"nixl_capi_create_backend", &f.createBackend},
		{"nixl_capi_destroy_backend", &f.destroyBackend},
		{"nixl_capi_create_reg_dlist", &f.createRegs},
		{"nixl_capi_reg_dlist_add_desc", &f.addReg},
		{"nixl_capi_destroy_reg_dlist", &f.destroyRegs},
		{"nixl_capi_register_mem", &f.register},
		{"nixl_capi_deregister_mem", &f.deregister},
		{"nixl_capi_get_local_md", &f.metadata},
		{"nixl_capi_get_local_partial_md", &f.metadataOf},
		{"nixl_capi_load_remote_md", &f.loadMetadata},
		{"nixl_capi_invalidate_remote_md", &f.invalidate},
		{"nixl_capi_create_notif_map", &f.createNotes},
		{"nixl_capi_get_notifs", &f.getNotes},
		{"nixl_capi_destroy_notif_map", &f.destroyNotes},
		{"nixl_capi_create_xfer_dlist", &f.createBlocks},
		{"nixl_capi_xfer_dlist_add_desc", &f.addBlock},
		{"nixl_capi_destroy_xfer_dlist", &f.destroyBlocks},
		{"nixl_capi_create_xfer_req", &f.createRequest},
		{"nixl_capi_post_xfer_req", &f.post},
		{"nixl_capi_get_xfer_status", &f.status},
		{"nixl_capi_release_xfer_req", &f.releaseRequest},
		{"nixl_capi_destroy_xfer_req", &f.destroyRequest},
	}
}

// symbol is a function of the library and the variable that calls it.
type symbol struct {
	name string
	fn   any
}

// bind fills the table, or says what the library lacks.
func (f *functions) bind(lib *dl.Library) error {
	lacking := &dl.SymbolError{Library: libraryName + " (" + lib.Path() + ")", Hint: needs}
	for _, one := range f.table() {
		err := lib.Bind(one.fn, one.name)
		if _, ok := errors.AsType[*dl.SymbolError](err); ok {
			lacking.Symbols = append(lacking.Symbols, one.name)
		} else if err != nil {
			return fmt.Errorf("binding %s: %w", libraryName, err)
		}
	}
	if len(lacking.Symbols) > 0 {
		return lacking
	}
	bindFast(lib, f)
	return nil
}

// wheel matches the folder of the Python package for a major version of CUDA.
var wheel = regexp.MustCompile(`(^|/)\.nixl_cu([0-9]+)\.mesonpy\.libs(/|$)`)

// packageFolder returns the folder of the library in that package, below the folder of all packages.
func packageFolder(cuda int) string { return fmt.Sprintf(".nixl_cu%d.mesonpy.libs", cuda) }

// cudaVersions returns the major versions that there are packages for, in the order in which they are tried.
func cudaVersions(driver int) []int {
	if driver > 0 && driver < 13 {
		return []int{12}
	}
	return []int{13, 12}
}

// search says where the library may be.
func search(opts *Options) dl.Search {
	s := dl.Search{
		Library: libraryName, Path: opts.Path, Env: LibraryEnv, Names: fileNames, FoldersFirst: true,
		Hint: install, Logger: opts.Logger,
	}
	if s.Path == "" {
		s.Path = os.Getenv(LibraryEnv)
	}
	s.Path = inPackages(s.Path, opts.CUDA)
	var roots []string
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		roots = append(roots, venv)
	}
	for _, root := range append(roots, "/usr/local", "/usr", "~/.local", "/opt/*/.venv", "/opt/*") {
		for _, cuda := range cudaVersions(opts.CUDA) {
			s.Folders = append(s.Folders, root+"/lib/python3*/*-packages/"+packageFolder(cuda))
		}
	}
	s.Folders = append(s.Folders, "/opt/nvidia/nvda_nixl/lib*", "/opt/nvidia/nvda_nixl/lib/*-linux-gnu")
	return s
}

// inPackages returns the folder of the library if path is one of Python packages, and path otherwise.
func inPackages(path string, cuda int) string {
	if path == "" {
		return ""
	}
	for _, version := range cudaVersions(cuda) {
		folder := filepath.Join(path, packageFolder(version))
		if info, err := os.Stat(folder); err == nil && info.IsDir() {
			return folder
		}
	}
	return path
}

// Load finds and loads the library; nil options are the defaults. It starts nothing and touches no GPU. It first sets, in the
// environment of this process, C's included, what UCX must know before it is loaded, unless it is set. A library that is not
// there is ErrUnavailable, with all places where it was looked for; one that is too old, a stub, or for a later CUDA is
// ErrUnsupported.
func Load(opts *Options) (*Library, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := prepareEnvironment(o.CUDA); err != nil {
		return nil, err
	}
	lib, err := dl.Open(search(&o))
	if err != nil {
		return nil, err
	}
	l := &Library{path: lib.Path()}
	if err := l.call.bind(lib); err != nil {
		return nil, err
	}
	if file, err := lib.File("nixl_capi_create_configured_agent"); err == nil {
		l.path = file
	}
	if l.call.isStub() {
		return nil, fmt.Errorf("%s (%s) is a stub that does nothing, for building programs only; %s: %w", libraryName, l.path,
			install, errs.ErrUnsupported)
	}
	if err := l.place(o.CUDA); err != nil {
		return nil, err
	}
	o.Logger.Debug("NIXL loaded", "path", l.path, "cuda", l.cuda, "ucx_modules", l.modules)
	return l, nil
}

// place finds out what is beside the library, and sets UCX up for it.
func (l *Library) place(driver int) error {
	folder := filepath.Dir(l.path)
	if m := wheel.FindStringSubmatch(folder); m != nil {
		l.cuda, _ = strconv.Atoi(m[2]) // digits by the pattern
		beside := filepath.Join(filepath.Dir(folder), fmt.Sprintf("nixl_cu%d.libs", l.cuda), "ucx")
		if info, err := os.Stat(beside); err == nil && info.IsDir() {
			l.modules = beside
		}
	}
	if driver > 0 && l.cuda > driver {
		return fmt.Errorf("%s (%s) is for CUDA %d, and the driver speaks CUDA %d; install nixl-cu%d, or a newer driver: %w",
			libraryName, l.path, l.cuda, driver, driver, errs.ErrUnsupported)
	}
	if l.modules == "" {
		return nil
	}
	return setDefault("UCX_MODULE_DIR", l.modules)
}

// prepareEnvironment sets what UCX must know before it is loaded.
func prepareEnvironment(cuda int) error {
	// UCX up to 1.19 would otherwise catch SIGSEGV, by which Go recognizes a nil pointer.
	err := setDefault("UCX_HANDLE_ERRORS", "none")
	if cuda > 0 {
		// Reading a peer's GPU is otherwise left out where NVML does not report NVLink, as in virtual machines.
		err = errors.Join(err, setDefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on"))
	}
	// Freed memory would otherwise stay in UCX's cache of registrations for ever.
	return errors.Join(err, setDefault("UCX_RCACHE_MAX_UNRELEASED", "1024"))
}

// setDefault sets an environment variable of this process, C's included, unless it is set.
func setDefault(name, value string) error {
	if _, set := os.LookupEnv(name); set {
		return nil
	}
	if err := os.Setenv(name, value); err != nil {
		return fmt.Errorf("setting %s for UCX: %w", name, err)
	}
	return nil
}

// Path returns the library's file.
func (l *Library) Path() string { return l.path }

// CUDA returns the major version of CUDA that the library is for; 0 if its path does not say.
func (l *Library) CUDA() int { return l.cuda }

// Modules returns the folder of UCX's modules beside the library; "" if there is none.
func (l *Library) Modules() string { return l.modules }

// Version returns the version of the Python package that the library is in; "" if it is in none. The library itself does not report one.
func (l *Library) Version() string {
	if l.cuda == 0 {
		return ""
	}
	name := fmt.Sprintf("nixl_cu%d-", l.cuda)
	found, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(l.path)), name+"*.dist-info"))
	if err != nil || len(found) != 1 {
		return ""
	}
	return strings.TrimSuffix(strings.TrimPrefix(filepath.Base(found[0]), name), ".dist-info")
}

// UCX returns the version and the file of the UCX beside the library, which it loads. The error says that there is none, as when the system's UCX is
// used.
func (l *Library) UCX() (version, path string, err error) {
	if l.modules == "" {
		return "", "", fmt.Errorf("no UCX is beside %s: %w", l.path, errs.ErrUnavailable)
	}
	found, err := filepath.Glob(filepath.Join(filepath.Dir(l.modules), "libucp-*.so*"))
	if err != nil || len(found) == 0 {
		return "", "", fmt.Errorf("no UCX is in %s: %w", filepath.Dir(l.modules), errs.ErrUnavailable)
	}
	lib, err := dl.Open(dl.Search{Library: "UCX", Path: found[0]})
	if err != nil {
		return "", "", err
	}
	var get func(major, minor, release *uint32)
	if err := lib.Bind(&get, "ucp_get_version"); err != nil {
		return "", "", err
	}
	var v [3]uint32
	get(&v[0], &v[1], &v[2])
	return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]), found[0], nil
}

// check makes an error of a status, a *dl.Error.
func (l *Library) check(call string, s Status) error {
	if s == Success {
		return nil
	}
	e := &dl.Error{Library: libraryName, Call: "nixl_capi_" + call, Code: int(s), Name: s.String()}
	switch s {
	case RemoteDisconnect:
		e.Err = errs.ErrPeerLost
	case InvalidParam:
		e.Err = errs.ErrInvalid
	}
	e.Hint = "NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info in the environment make it say more"
	return e
}

// cString copies a string of C.
func cString(p unsafe.Pointer) string {
	if p == nil {
		return ""
	}
	var b strings.Builder
	for c := (*byte)(p); *c != 0; c = (*byte)(unsafe.Add(unsafe.Pointer(c), 1)) {
		b.WriteByte(*c)
	}
	return b.String()
}
