package dl

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Search says where to look for a library.
type Search struct {
	// Library is what the library is called in errors and logs: "the CUDA driver".
	Library string

	// Path, unless empty, is the only file to load, or the only folder to look in; nothing else is tried.
	Path string
	// Env, unless empty, names an environment variable that is read when Open is called. When it is set to something, it means the same as Path,
	// which takes precedence.
	Env string
	// Names are the names of the library's file, in order of preference: "libcuda.so.1", "libcuda.so". The loader looks for
	// each where the system keeps libraries, first of all in LD_LIBRARY_PATH as it was when the process started.
	Names []string
	// Folders are looked in for each of Names when the loader has not found any. They may hold the patterns of
	// filepath.Glob, such as ".../site-packages/nvidia/nccl/lib"; of several matches, the last in the alphabet comes first,
	// which is most often the newest. One that begins with "~/" is in the user's home.
	Folders []string
	// FoldersFirst looks in Folders before it asks the loader.
	FoldersFirst bool

	// Global makes the library's symbols visible to libraries that are loaded later, which some plugins need.
	Global bool
	// Hint is what to do when the library is not found.
	Hint string
	// Logger receives what was loaded, at debug level, and a warning if the library replaced signal handlers of this process. Nil logs nothing.
	Logger *slog.Logger
}

// Library is a loaded library. It may be used by several goroutines at once and is never unloaded.
type Library struct {
	name   string
	path   string
	handle uintptr
}

// Open loads the library, running its initialisers, or returns a [*LoadError] with everything that was tried. It blocks for as
// long as reading the library from disk takes.
func Open(s Search) (*Library, error) {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	var failed []Attempt
	for _, c := range s.candidates() {
		if c.Text != "" {
			failed = append(failed, c)
			continue
		}
		path := c.Path
		before := signalHandlers()
		handle, err := open(path, s.Global)
		if err != nil {
			failed = append(failed, Attempt{Path: path, Text: err.Error()})
			continue
		}
		l := &Library{name: s.Library, path: path, handle: handle}
		s.Logger.Debug("library loaded", "library", s.Library, "path", path)
		for _, change := range changedHandlers(before, signalHandlers()) {
			s.Logger.Warn("library replaced a signal handler of this process", "library", s.Library, "path", path,
				"signal", change.signal, "on_alternate_stack", change.onAltStack)
		}
		return l, nil
	}
	return nil, &LoadError{Library: s.Library, Attempts: failed, Hint: s.Hint}
}

// candidates returns what to ask the loader for, in order. Those with a text have failed already: they are patterns that no file matches.
func (s *Search) candidates() []Attempt {
	named := s.Path
	if named == "" && s.Env != "" {
		named = os.Getenv(s.Env)
	}
	var byLoader []Attempt
	for _, name := range s.Names {
		byLoader = append(byLoader, Attempt{Path: name})
	}
	if named != "" {
		// If a library was named, it is that one or an error, never another in its place.
		if info, err := os.Stat(named); err != nil || !info.IsDir() {
			return []Attempt{{Path: named}}
		}
		for i := range byLoader {
			byLoader[i].Path = filepath.Join(named, byLoader[i].Path)
		}
		return byLoader
	}
	var inFolders []Attempt
	for _, folder := range s.Folders {
		if rest, ok := strings.CutPrefix(folder, "~/"); ok {
			home, err := os.UserHomeDir()
			if err != nil {
				inFolders = append(inFolders, Attempt{Path: folder, Text: err.Error()})
				continue
			}
			folder = filepath.Join(home, rest)
		}
		for _, name := range s.Names {
			pattern := filepath.Join(folder, name)
			found, err := filepath.Glob(pattern)
			switch {
			case err != nil:
				inFolders = append(inFolders, Attempt{Path: pattern, Text: err.Error()})
			case len(found) == 0:
				inFolders = append(inFolders, Attempt{Path: pattern, Text: errs.NoFile})
			}
			slices.Sort(found)
			for _, path := range slices.Backward(found) {
				inFolders = append(inFolders, Attempt{Path: path})
			}
		}
	}
	if s.FoldersFirst {
		return append(inFolders, byLoader...)
	}
	return append(byLoader, inFolders...)
}

// Name returns what the library is called.
func (l *Library) Name() string { return l.name }

// Path returns what the loader was asked for: a path, or a bare name that the loader found by itself (see [Library.File]).
func (l *Library) Path() string { return l.path }

// Symbol returns the address of a function or variable, or a [*SymbolError] if the library has none of that name. Names with a
// version in them ("cuMemAlloc_v2") are names like any other.
func (l *Library) Symbol(name string) (uintptr, error) {
	p, err := symbol(l.handle, name)
	if err != nil {
		return 0, &SymbolError{Library: l.name + " (" + l.path + ")", Symbols: []string{name}}
	}
	return p, nil
}

// Has reports whether the library has all of the symbols.
func (l *Library) Has(names ...string) bool {
	for _, name := range names {
		if _, err := symbol(l.handle, name); err != nil {
			return false
		}
	}
	return true
}

// Bind makes *fn, a variable of a function type, call the named function. The type must agree with the C declaration, which cannot be checked. If the
// library lacks the function, *fn stays as it is and the error is a [*SymbolError].
func (l *Library) Bind(fn any, name string) error {
	v := reflect.ValueOf(fn)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Func {
		return errs.Invalid("Bind", "fn", fmt.Sprintf("%T", fn), "a pointer to a variable of a function type")
	}
	p, err := l.Symbol(name)
	if err != nil {
		return err
	}
	return register(fn, p, name)
}

// File returns the path of the file that holds the symbol, as the system has mapped it: the answer to which of several installed
// versions was loaded.
func (l *Library) File(name string) (string, error) {
	p, err := l.Symbol(name)
	if err != nil {
		return "", err
	}
	return mappedFile(p)
}
