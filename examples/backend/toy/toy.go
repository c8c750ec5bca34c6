//go:build linux

// Package toy is a backend for symmem that is no part of it: symmetric memory of the CPU as files without a name, in a directory that its
// one option names (SYMMEM_TOY_DIRECTORY, toy-directory in the file, --toy-directory). Import it for its side effect, and choose it by its name:
//
//	import _ "example.com/toybackend/toy"
//
// It shows all that a backend has to have. Ranks are processes of one host, or goroutines.
package toy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
)

// Name is the name that the backend is registered under.
const Name = "toy"

func init() { backend.Register(Name, factory{}) }

// Options are the backend's, for programs: symmem.Options{Backend: &toy.Options{…}}. What users set is in factory.Options.
type Options struct {
	Directory string // where the files are; "" is the option directory
}

// toy is one rank's side of the backend.
type toy struct {
	group     *group.Group
	device    *host.Device
	owned     bool // the device is closed with the backend
	directory string
}

func (b *toy) Name() string                       { return Name }
func (b *toy) Device() device.Device              { return b.device }
func (b *toy) Capabilities() backend.Capabilities { return capabilities }

var capabilities = backend.Capabilities{
	PeerPointers: true, Transfers: true, Graphs: true, RanksInOneProcess: true, OnHost: true,
	Why: map[string]string{
		"contiguous":    "each rank's memory is mapped by itself",
		"multicast":     "a CPU has no store that reaches several ranks' memory at once",
		"register":      "memory of a process cannot become a file",
		"several_hosts": "a file is mapped on one host",
	},
}

// allocation is a file, mapped by this rank.
type allocation struct {
	toy   *toy
	file  *os.File
	mem   []byte
	ptr   device.Ptr
	bytes int64
}

func (b *toy) Allocate(_ context.Context, bytes int64) (backend.Allocation, error) {
	page := int64(os.Getpagesize())
	if most := int64(1)<<62 - page; bytes < 1 || bytes > most {
		return nil, &symmem.ArgumentError{Op: "Allocate", Arg: "bytes", Value: bytes, Allowed: fmt.Sprintf("1 to %d", most)}
	}
	rounded := (bytes + page - 1) / page * page
	f, err := unnamed(b.directory)
	if err != nil {
		return nil, err
	}
	if err := syscall.Fallocate(int(f.Fd()), 0, 0, rounded); err != nil { // or a later store might find no room, and end the process
		return nil, errors.Join(fmt.Errorf("%d bytes in %s: %w", rounded, b.directory, full(err)), f.Close())
	}
	mem, ptr, err := b.mapped(f, rounded)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &allocation{toy: b, file: f, mem: mem, ptr: ptr, bytes: bytes}, nil
}

// unnamed makes a file that is gone when nobody has it open or mapped any more, however its processes end.
func unnamed(directory string) (*os.File, error) {
	f, err := os.CreateTemp(directory, "symmem-toy-")
	if err != nil {
		return nil, full(err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// full makes an ErrNoMemory of the errors that say so.
func full(err error) error {
	for _, e := range []syscall.Errno{syscall.ENOSPC, syscall.EFBIG, syscall.ENOMEM, syscall.EDQUOT} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %w", symmem.ErrNoMemory, err)
		}
	}
	return err
}

// mapped maps a file into this process and tells the device.
func (b *toy) mapped(f *os.File, bytes int64) ([]byte, device.Ptr, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if info.Size() < bytes { // a load behind the end would end the process
		return nil, 0, fmt.Errorf("the file has %d bytes, and %d were agreed on: %w", info.Size(), bytes, symmem.ErrMismatch)
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, int(bytes), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, 0, fmt.Errorf("mapping %d bytes: %w", bytes, full(err))
	}
	ptr, err := b.device.Map(mem)
	if err != nil {
		return nil, 0, errors.Join(err, syscall.Munmap(mem))
	}
	return mem, ptr, nil
}

func (b *toy) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	return nil, capabilities.Missing(Name, "register")
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return int64(len(a.mem)) }

func (a *allocation) Release(context.Context) error {
	return errors.Join(a.toy.device.Unmap(a.ptr), syscall.Munmap(a.mem), a.file.Close())
}

// mapping has the peers' files, mapped by this rank.
type mapping struct {
	own *allocation
	mem [][]byte     // by rank; nil for the own
	ptr []device.Ptr // by rank
}

func (b *toy) Rendezvous(ctx context.Context, brought backend.Allocation) (backend.Mapping, error) {
	a, ok := brought.(*allocation)
	var err error
	if !ok || a.toy != b {
		err = fmt.Errorf("an allocation of another backend: %w", symmem.ErrInvalid)
	}
	if err := b.group.Vote(ctx, "bringing toy memory", err); err != nil {
		return nil, err // on every rank
	}
	files, err := b.group.ExchangeFile(ctx, "toy memory", a.file)
	if err != nil {
		return nil, err // on every rank
	}
	m := &mapping{own: a, mem: make([][]byte, len(files)), ptr: make([]device.Ptr, len(files))}
	for r, f := range files {
		if f == nil {
			m.ptr[r] = a.ptr
			continue
		}
		if err == nil {
			m.mem[r], m.ptr[r], err = b.mapped(f, a.RoundedBytes())
		}
		err = errors.Join(err, f.Close())
	}
	if err != nil { // package memory lets the ranks vote on it
		return nil, errors.Join(err, m.Unmap(ctx))
	}
	return m, nil
}

func (m *mapping) Peer(rank int) (device.Ptr, error) { return m.ptr[rank], nil }

func (m *mapping) Unmap(context.Context) error {
	var err error
	for r, mem := range m.mem {
		if mem != nil {
			err = errors.Join(err, m.own.toy.device.Unmap(m.ptr[r]), syscall.Munmap(mem))
		}
	}
	return err
}

func (b *toy) Close(context.Context) error {
	if !b.owned {
		return nil
	}
	return b.device.Close()
}

// factory opens the backend by name.
type factory struct{}

// Preference lets auto take host before it, which does the same without files. A backend of more use says nothing, or where it belongs.
func (factory) Preference(bool) int { return -1000 }

func (factory) Options() []backend.Option {
	return []backend.Option{{
		Name: "directory", Default: "/dev/shm", Form: "an absolute path", Check: filepath.IsAbs, Usage: "where the files are that the memory is in",
	}}
}

func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

func (factory) Probe(_ context.Context, env *backend.Env) (backend.Capabilities, error) {
	directory, err := directory(env)
	if err != nil {
		return backend.Capabilities{}, err
	}
	f, err := unnamed(directory)
	if err != nil {
		return backend.Capabilities{}, fmt.Errorf("no file can be made in %s; name another directory in SYMMEM_TOY_DIRECTORY: %w: %w", directory, symmem.ErrUnavailable, err)
	}
	return capabilities, f.Close()
}

// directory is what the program says, or the user.
func directory(env *backend.Env) (string, error) {
	if o, ok := env.Given.(*Options); ok && o != nil && o.Directory != "" {
		return o.Directory, nil
	}
	return env.Option(Name, "directory")
}

func (factory) Open(_ context.Context, env *backend.Env) (backend.Backend, error) {
	directory, err := directory(env)
	if err != nil {
		return nil, err
	}
	b := &toy{group: env.Group, directory: directory}
	if env.Opened == nil {
		b.owned = true
		b.device, err = host.New(&host.Options{WaitTimeout: env.KernelTimeout, Err: env.Group.Err, Logger: env.Logger})
		if err != nil {
			return nil, err
		}
		return b, nil
	}
	var ok bool
	if b.device, ok = env.Opened.(*host.Device); !ok { // a sub-group uses its parent's
		return nil, &symmem.ArgumentError{Op: "toy", Arg: "device", Value: env.Opened.Name(), Allowed: "the host device"}
	}
	return b, nil
}
