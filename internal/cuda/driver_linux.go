//go:build amd64 || arm64

package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"

	"github.com/symmem/symmem/internal/dl"
)

// search says where the driver library may be.
func search(opts *LoadOptions) dl.Search {
	s := dl.Search{
		Library: "the " + libraryName,
		Env:     LibraryEnv,
		Names:   []string{"libcuda.so.1"},
		// Where containers and WSL put it, which the loader does not search.
		Folders: []string{"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"},
		Hint: "install the NVIDIA driver, series 550 or newer; in a container, start it with the GPUs " +
			"(docker run --gpus all) and the capability compute (NVIDIA_DRIVER_CAPABILITIES)",
	}
	if opts != nil {
		s.Path, s.Logger = opts.Path, opts.Logger
	}
	return s
}

// Load loads the driver library and fills the table; nil options are the defaults. It starts nothing and needs no GPU. The error is ErrUnavailable if
// the library is not there or is not a CUDA driver.
//
// Unless the environment says otherwise it sets CUDA_DEVICE_MAX_CONNECTIONS=32 for this process, C's environment included.
func Load(opts *LoadOptions) (*Driver, error) {
	if err := manyQueues(); err != nil {
		return nil, err
	}
	s := search(opts)
	lib, err := dl.Open(s)
	if err != nil {
		return nil, err
	}
	d := &Driver{Path: lib.Path()}
	if err := bind(lib, d); err != nil {
		return nil, err
	}
	if lacking := missing(d, true); len(lacking) > 0 {
		// Without these functions no device could be opened, so the driver counts as not there.
		err := &dl.SymbolError{Library: lib.Path(), Symbols: lacking, Hint: needs}
		return nil, &unavailableError{err}
	}
	if file, err := lib.File("cuInit"); err == nil {
		d.Path = file
	}
	if at, err := lib.Symbol("cuInit"); err == nil {
		d.Origin = at
	}
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	s.Logger.Debug("CUDA driver loaded", "path", d.Path, "missing", d.Missing())
	bindFast(lib, d)
	d.MulticastSource = func() (*Multicast, error) {
		m := new(Multicast)
		if err := bind(lib, m); err != nil {
			return nil, err
		}
		return m, nil
	}
	return d, nil
}

// queuesEnv says how many queues of the hardware the streams of a context share, 1 to 32; the driver's default is 8 (CUDA C++
// Programming Guide, environment variables).
const queuesEnv = "CUDA_DEVICE_MAX_CONNECTIONS"

// manyQueues asks for as many queues as there can be. If a piece of work waits for another GPU, and that GPU waits for other work from here, the two
// pieces of work from here, on different streams, deadlock if they are in one queue in the wrong order. So does a stream that waits for a library
// whose own streams are behind it in the queue.
func manyQueues() error {
	if _, set := os.LookupEnv(queuesEnv); set {
		return nil
	}
	if err := os.Setenv(queuesEnv, "32"); err != nil {
		return fmt.Errorf("asking for more queues: %w", err)
	}
	return nil
}

// bind fills the table that p points to with those of its functions that the library has.
func bind(lib *dl.Library, p any) error {
	var failed error
	eachFunction(p, func(field reflect.Value, s symbolTag, _ bool) {
		err := lib.Bind(field.Addr().Interface(), s.name)
		var lacking *dl.SymbolError
		if err != nil && !errors.As(err, &lacking) && failed == nil {
			failed = fmt.Errorf("binding the %s: %w", libraryName, err)
		}
	})
	return failed
}
