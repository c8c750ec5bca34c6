// Package options holds the options that backends have declared: package backend collects them when a backend is registered, and package
// config reads them, so that neither has to know the other. All functions may be called from several goroutines at once.
package options

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/symmem/symmem/internal/errs"
)

// Prefix begins every variable of this module.
const Prefix = "SYMMEM_"

// Option is an option as its backend has declared it. Package backend says what the fields mean.
type Option struct {
	Name    string
	Default string
	Values  []string
	Form    string
	Check   func(value string) bool
	Usage   string
}

// Declared is an option with its backend.
type Declared struct {
	Backend string
	Option
}

// Key returns the option's name in files, in flags and in Config: "nccl-window".
func (d *Declared) Key() string { return d.Backend + "-" + d.Name }

// Env returns the option's environment variable: "SYMMEM_NCCL_WINDOW".
func (d *Declared) Env() string { return Env(d.Key()) }

// Env returns the environment variable of a key.
func Env(key string) string { return Prefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_")) }

// Allowed says in words which values there may be.
func (d *Declared) Allowed() string {
	switch {
	case len(d.Values) > 0:
		return strings.Join(d.Values, ", ")
	case d.Form != "":
		return d.Form
	}
	return "a text of at most 4096 bytes, all of them printable"
}

// maxValue is the length in bytes of a value, at most.
const maxValue = 4096

// Problem returns an error for a value that is not allowed, or nil. op is the operation that refuses it, and arg what the value is for.
func (d *Declared) Problem(op, arg, value string) error {
	shown := value
	if len(shown) > 80 {
		shown = fmt.Sprintf("%s… (%d bytes)", strings.ToValidUTF8(shown[:80], ""), len(value))
	}
	refused := len(value) > maxValue || !utf8.ValidString(value) || strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) ||
		len(d.Values) > 0 && !slices.Contains(d.Values, value) || d.Check != nil && !d.Check(value)
	if refused {
		return errs.Invalid(op, arg, fmt.Sprintf("%q", shown), d.Allowed())
	}
	return nil
}

var declared struct {
	sync.RWMutex
	all      []*Declared // by key
	backends []string    // those that have declared something, if only that they have no options
}

// Reserved are the keys of package config, and variables that look like one in the environment: no option may have such a name. A test of package
// config compares the list with the keys.
var Reserved = []string{
	"backend", "rank", "world-size", "local-rank", "local-world-size", "launcher", "rendezvous-addr", "rendezvous-fd", "rendezvous-served", "rendezvous-store", "job", "restart", "token",
	"timeout", "kernel-timeout", "liveness-timeout", "device", "share-device", "multicast", "net-devices", "unprotected-network", "channels", "max-blocks", "rank-order", "tuning",
	"log-level", "config", "cuda-library",
}

// NameForm says in words what the name of a backend or of an option is.
const NameForm = "a small letter, then at most 31 small letters, digits and single hyphens, the last of which is no hyphen"

var nameForm = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)

// GoodName reports whether a backend or an option may have the name.
func GoodName(name string) bool { return len(name) <= 32 && nameForm.MatchString(name) }

// Declare registers the options of a backend, all or none. The error says what is wrong with the first that is refused.
func Declare(backend string, list []Option) error {
	const op = "backend.Register"
	declared.Lock()
	defer declared.Unlock()
	all := slices.Clone(declared.all)
	for _, o := range list {
		d := &Declared{Backend: backend, Option: o}
		arg := "option of backend " + backend
		if !GoodName(o.Name) {
			return errs.Invalid(op, arg, fmt.Sprintf("%q", o.Name), NameForm)
		}
		if slices.Contains(Reserved, d.Key()) {
			return errs.Invalid(op, arg, fmt.Sprintf("%q", o.Name), "one whose key is not "+d.Key()+", which is a setting of symmem itself")
		}
		for _, other := range all {
			if other.Env() == d.Env() {
				return errs.Invalid(op, arg, fmt.Sprintf("%q", o.Name), fmt.Sprintf("one whose variable is not %s, which is that of option %q of backend %s",
					d.Env(), other.Name, other.Backend))
			}
		}
		if d.Default != "" {
			if err := d.Problem(op, "default of "+d.Key(), d.Default); err != nil {
				return err
			}
		}
		d.Values = slices.Clone(o.Values)
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b *Declared) int { return strings.Compare(a.Key(), b.Key()) })
	declared.all = all
	declared.backends = append(slices.Clone(declared.backends), backend)
	return nil
}

// CUDALibraryEnv names the file of the CUDA driver. It is not an option, because it belongs to no single backend: package device/cuda reads it.
const CUDALibraryEnv = Prefix + "CUDA_LIBRARY"

// Library is the name of the option that names the file of a backend's native library, or the folder it is in.
const Library = "library"

// LibraryVariables returns the environment variables that name the files of native libraries: of the CUDA driver, and of the libraries
// of all registered backends.
func LibraryVariables() []string {
	names := []string{CUDALibraryEnv}
	for _, d := range All() {
		if d.Name == Library {
			names = append(names, d.Env())
		}
	}
	return names
}

// Owner returns the backend whose option a key would be by its beginning, or "" if that is no registered backend.
func Owner(key string) string {
	declared.RLock()
	defer declared.RUnlock()
	owner := ""
	for _, b := range declared.backends {
		if strings.HasPrefix(key, b+"-") && len(b) > len(owner) {
			owner = b
		}
	}
	return owner
}

// All lists the options of all backends by key. The caller must not change them.
func All() []*Declared {
	declared.RLock()
	defer declared.RUnlock()
	return declared.all
}

// Lookup returns the option with this key, or nil.
func Lookup(key string) *Declared {
	for _, d := range All() {
		if d.Key() == key {
			return d
		}
	}
	return nil
}

// Of lists the options of one backend by key.
func Of(backend string) []*Declared {
	return slices.DeleteFunc(slices.Clone(All()), func(d *Declared) bool { return d.Backend != backend })
}

// Forget removes the options of a backend, for tests.
func Forget(backend string) {
	declared.Lock()
	defer declared.Unlock()
	declared.all = slices.DeleteFunc(slices.Clone(declared.all), func(d *Declared) bool { return d.Backend == backend })
	declared.backends = slices.DeleteFunc(slices.Clone(declared.backends), func(b string) bool { return b == backend })
}
