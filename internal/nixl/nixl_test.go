package nixl

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNames(t *testing.T) {
	assert.Equal(t, "ERROR_BACKEND", BackendError.String())
	assert.Equal(t, "status -99", Status(-99).String())
	assert.Equal(t, "VRAM", VRAM.String())
	assert.Equal(t, "memory type 5", Memory(5).String())
}

// TestConfigSuitsBothLayouts: the mode of threads is where either layout has it, and there is no listener.
func TestConfigSuitsBothLayouts(t *testing.T) {
	c := newAgentConfig(true, 1000)
	type today struct {
		prog, listen bool
		port, sync   int32
		workers      uint32
		prThread     uint64
		lThread      uint64
		telemetry    bool
	}
	type later struct {
		prog, listen bool
		port         uint16
		sync         int32
		workers      uint32
		prThread     uint64
		lThread      uint64
		telemetry    bool
	}
	require.EqualValues(t, 40, unsafe.Sizeof(today{}))
	require.EqualValues(t, 40, unsafe.Sizeof(later{}))
	a, b := (*today)(unsafe.Pointer(c)), (*later)(unsafe.Pointer(c))
	assert.True(t, a.prog && b.prog)
	assert.False(t, a.listen || b.listen || a.telemetry || b.telemetry)
	assert.EqualValues(t, syncRW, a.sync)
	assert.EqualValues(t, syncRW, b.sync)
	assert.EqualValues(t, 1000, a.prThread)
	assert.EqualValues(t, 1000, b.prThread)
}

// TestTable holds that every type in the table can be passed to C, where no library is needed to find out.
func TestTable(t *testing.T) {
	lib := libc(t)
	var f functions
	for _, s := range f.table() {
		assert.NoError(t, lib.Bind(s.fn, "getpid"), s.name)
	}
}

// libc returns a library that is surely there, on the systems on which libraries can be loaded at all; the test is skipped on
// others.
func libc(t *testing.T) *dl.Library {
	t.Helper()
	lib, err := dl.Open(dl.Search{Library: "C", Names: []string{"libc.so.6"}})
	if runtime.GOOS != "linux" && errors.Is(err, errs.ErrUnavailable) {
		testneed.Missing(t, "nixl", err)
	}
	require.NoError(t, err)
	return lib
}

func TestLibraryThatIsNotThere(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(LibraryEnv, dir)
	t.Setenv("UCX_HANDLE_ERRORS", "bt")
	_, err := Load(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, LibraryEnv)
	assert.ErrorContains(t, err, "pip install nixl-cu13")
	assert.Equal(t, "bt", os.Getenv("UCX_HANDLE_ERRORS"), "never over the user's own")

	path := filepath.Join(dir, "other.so")
	_, err = Load(&Options{Path: path})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, path, "the path goes before the variable")

	// Another library in the place of NIXL is no crash.
	file, err := libc(t).File("getpid")
	require.NoError(t, err)
	var lacking *dl.SymbolError
	_, err = Load(&Options{Path: file})
	require.ErrorAs(t, err, &lacking)
	assert.Contains(t, lacking.Symbols, "nixl_capi_create_configured_agent")
	assert.ErrorContains(t, err, "1.0")
}

// TestPackages: the package for the driver's CUDA is taken, wherever pip has put it.
func TestPackages(t *testing.T) {
	dir := t.TempDir()
	for _, version := range []int{12, 13} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, packageFolder(version)), 0o777))
	}
	for cuda, want := range map[int]string{0: packageFolder(13), 12: packageFolder(12), 13: packageFolder(13),
		14: packageFolder(13)} {
		assert.Equal(t, filepath.Join(dir, want), inPackages(dir, cuda), "driver of CUDA %d", cuda)
	}
	assert.Equal(t, "/nowhere", inPackages("/nowhere", 13))

	modules := filepath.Join(dir, "nixl_cu13.libs", "ucx")
	require.NoError(t, os.MkdirAll(modules, 0o777))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "nixl_cu13-1.5.1.dist-info"), 0o777))
	t.Setenv("UCX_MODULE_DIR", "mine")
	l := &Library{path: filepath.Join(dir, packageFolder(13), "libnixl_capi.so")}
	require.NoError(t, l.place(13))
	assert.Equal(t, 13, l.CUDA())
	assert.Equal(t, modules, l.Modules())
	assert.Equal(t, "1.5.1", l.Version())
	assert.Equal(t, "mine", os.Getenv("UCX_MODULE_DIR"))
	err := l.place(12)
	require.ErrorIs(t, err, errs.ErrUnsupported, "the wrong major version of CUDA")
	assert.ErrorContains(t, err, "CUDA 13")
	assert.ErrorContains(t, err, "install nixl-cu12")
	_, _, err = l.UCX()
	require.ErrorIs(t, err, errs.ErrUnavailable)

	require.NoError(t, os.Unsetenv("UCX_MODULE_DIR"))
	require.NoError(t, l.place(0))
	assert.Equal(t, modules, os.Getenv("UCX_MODULE_DIR"))
}

// table returns a library whose functions succeed and count what is made and not given back, and looks for notifications.
func table() (*Library, map[handle]string, map[handle]int) {
	made, looks := map[handle]string{}, map[handle]int{}
	last := handle(0)
	create := func(what string, h *handle) Status {
		last++
		*h, made[last] = last, what
		return Success
	}
	destroy := func(h handle) Status {
		if made[h] == "" {
			return InvalidParam
		}
		delete(made, h)
		return Success
	}
	l := &Library{path: "fake", call: functions{
		free:         func(unsafe.Pointer) {},
		createAgent:  func(_ string, _ *agentConfig, a *handle) Status { return create("agent", a) },
		destroyAgent: destroy,
		plugins:      func(_ handle, list *handle) Status { return create("plugins", list) },
		listSize:     func(_ handle, n *uintptr) Status { *n = 1; return Success },
		listGet: func(_ handle, _ uintptr, s *unsafe.Pointer) Status {
			*s = unsafe.Pointer(&[]byte("POSIX\x00")[0])
			return Success
		},
		destroyList:    destroy,
		createParams:   func(p *handle) Status { return create("params", p) },
		addParam:       func(_ handle, _, _ string) Status { return Success },
		destroyParams:  destroy,
		createBackend:  func(_ handle, _ string, _ handle, b *handle) Status { return create("backend", b) },
		destroyBackend: destroy,
		createRegs:     func(_ Memory, r *handle) Status { return create("regs", r) },
		addReg:         func(handle, uintptr, uintptr, uint64, unsafe.Pointer, uintptr) Status { return Success },
		destroyRegs:    destroy,
		register:       func(_, _, _ handle) Status { return Success },
		deregister:     func(_, _, _ handle) Status { return Success },
		metadataOf: func(_, _ handle, data *unsafe.Pointer, n *uintptr, _ handle) Status {
			*data, *n = unsafe.Pointer(&[]byte("meta")[0]), 4
			return Success
		},
		loadMetadata: func(_ handle, _ unsafe.Pointer, _ uintptr, name *unsafe.Pointer) Status {
			*name = unsafe.Pointer(&[]byte("other\x00")[0])
			return Success
		},
		createNotes:    func(n *handle) Status { return create("notes", n) },
		getNotes:       func(_, notes, _ handle) Status { looks[notes]++; return Success },
		destroyNotes:   destroy,
		createBlocks:   func(_ Memory, b *handle) Status { return create("blocks", b) },
		addBlock:       func(handle, uintptr, uintptr, uint64) Status { return Success },
		destroyBlocks:  destroy,
		createRequest:  func(_ handle, _ Op, _, _ handle, _ string, r *handle, _ handle) Status { return create("request", r) },
		post:           func(_, _, _ handle) Status { return InProgress },
		status:         func(_, _ handle) Status { return Success },
		releaseRequest: func(_, _ handle) Status { return Success },
		destroyRequest: destroy,
	}}
	return l, made, looks
}

// TestNothingIsLeft: whatever fails, the lists that carry arguments are given back.
func TestNothingIsLeft(t *testing.T) {
	l, made, _ := table()
	a, err := l.NewAgent("a", nil)
	require.NoError(t, err)
	block := Block{Addr: 4096, Bytes: 8}
	require.NoError(t, a.Register(DRAM, block))
	blob, err := a.MetadataOf(DRAM, block)
	require.NoError(t, err)
	assert.Equal(t, "meta", string(blob))
	name, err := a.Know(blob)
	require.NoError(t, err)
	assert.Equal(t, "other", name)
	r, err := a.NewRequest(Write, DRAM, []Block{block}, []Block{block}, "other")
	require.NoError(t, err)
	ended, err := r.Post()
	require.NoError(t, err)
	assert.False(t, ended)
	ended, err = r.Status()
	require.NoError(t, err)
	assert.True(t, ended)
	require.NoError(t, r.Release())
	require.ErrorIs(t, r.Release(), errs.ErrClosed)
	_, err = r.Status()
	require.ErrorIs(t, err, errs.ErrClosed)

	l.call.register = func(_, _, _ handle) Status { return BackendError }
	l.call.addBlock = func(handle, uintptr, uintptr, uint64) Status { return InvalidParam }
	err = a.Register(VRAM, block)
	require.ErrorContains(t, err, "nixl_capi_register_mem returned -2 (ERROR_BACKEND)")
	require.ErrorContains(t, err, "NIXL_LOG_LEVEL")
	_, err = a.NewRequest(Write, DRAM, []Block{block}, []Block{block}, "other")
	require.ErrorIs(t, err, errs.ErrInvalid)
	for _, bad := range [][2][]Block{{nil, nil}, {{block}, nil}, {{block}, {{Addr: 1, Bytes: 9}}}, {{{Addr: 1}}, {{Addr: 1}}}} {
		_, err = a.NewRequest(Write, DRAM, bad[0], bad[1], "other")
		require.ErrorIs(t, err, errs.ErrInvalid, "%v", bad)
	}
	_, err = a.Know(nil)
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.NoError(t, a.Close())
	require.ErrorIs(t, a.Close(), errs.ErrClosed)
	_, err = a.Know(blob)
	require.ErrorIs(t, err, errs.ErrClosed)
	assert.Empty(t, made)
}

// TestListsThatAreKept: what was made is given back where only the list that carried its arguments cannot be.
func TestListsThatAreKept(t *testing.T) {
	l, made, _ := table()
	registered := 0
	l.call.register = func(_, _, _ handle) Status { registered++; return Success }
	l.call.deregister = func(_, _, _ handle) Status { registered--; return Success }
	keep := func(handle) Status { return BackendError }
	a, err := l.NewAgent("a", nil)
	require.NoError(t, err)
	block := Block{Addr: 4096, Bytes: 8}

	l.call.destroyRegs = keep
	require.ErrorContains(t, a.Register(DRAM, block), "nixl_capi_destroy_reg_dlist returned -2")
	assert.Zero(t, registered)

	l.call.destroyBlocks = keep
	_, err = a.NewRequest(Write, DRAM, []Block{block}, []Block{block}, "other")
	require.ErrorContains(t, err, "nixl_capi_destroy_xfer_dlist returned -2")
	assert.NotContains(t, slices.Collect(maps.Values(made)), "request")
	require.NoError(t, a.Close())
}

// TestProgress: an agent without a thread looks for what has come when it is asked to, one with a thread never does.
func TestProgress(t *testing.T) {
	l, made, looks := table()
	with, err := l.NewAgent("with", nil)
	require.NoError(t, err)
	require.NoError(t, with.Progress())
	assert.Empty(t, looks)
	var config agentConfig
	create := l.call.createAgent
	l.call.createAgent = func(name string, c *agentConfig, a *handle) Status { config = *c; return create(name, c, a) }
	without, err := l.NewAgent("without", &AgentOptions{NoThread: true})
	require.NoError(t, err)
	assert.Zero(t, config[0])
	require.NoError(t, without.Progress())
	require.NoError(t, without.Progress())
	require.Len(t, looks, 1)
	for notes, n := range looks {
		assert.Equal(t, "notes", made[notes])
		assert.Equal(t, 2, n)
	}
	l.call.getNotes = func(_, _, _ handle) Status { return BackendError }
	require.ErrorContains(t, without.Progress(), "nixl_capi_get_notifs returned -2")
	require.NoError(t, without.Close())
	require.ErrorIs(t, without.Progress(), errs.ErrClosed)
	l.call.createNotes = func(*handle) Status { return BackendError }
	_, err = l.NewAgent("none", &AgentOptions{NoThread: true})
	require.Error(t, err)
	require.NoError(t, with.Close())
	assert.Empty(t, made)
}

// TestNoEngine: settings that leave UCX without a transport are named, and nothing is left.
func TestNoEngine(t *testing.T) {
	l, made, _ := table()
	l.call.createBackend = func(handle, string, handle, *handle) Status { return BackendError }
	t.Setenv("UCX_TLS", "sm,self")
	_, err := l.NewAgent("a", nil)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	require.ErrorContains(t, err, `UCX_TLS is "sm,self"`)
	require.ErrorContains(t, err, "POSIX", "it says which plugins there are")
	assert.Empty(t, made)
	_, err = l.NewAgent("", nil)
	require.ErrorIs(t, err, errs.ErrInvalid)
}

// TestLateAgent: an agent that is made when nobody waits for it any more is closed, and so is one whose caller gets an error.
func TestLateAgent(t *testing.T) {
	l, made, _ := table()
	plain := func(f func() error) error { return f() }
	a, err := l.NewAgentWithin(t.Context(), plain, "in time", nil)
	require.NoError(t, err)
	require.NoError(t, a.Close())
	failed := errors.New("no context")
	_, err = l.NewAgentWithin(t.Context(), func(f func() error) error { return errors.Join(f(), failed) }, "in vain", nil)
	require.ErrorIs(t, err, failed)
	assert.Empty(t, made)

	release, ended := make(chan struct{}), make(chan struct{})
	create, destroy := l.call.createBackend, l.call.destroyAgent
	l.call.createBackend = func(a handle, plugin string, params handle, b *handle) Status {
		<-release
		return create(a, plugin, params, b)
	}
	l.call.destroyAgent = func(a handle) Status { defer close(ended); return destroy(a) }
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = l.NewAgentWithin(ctx, plain, "late", nil)
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	close(release)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the agent is left")
	}
	assert.Empty(t, made)
}

// TestCloseBehindAStuckCall: an agent that is closed while a call that was given up is still in the library says so, takes no more calls, and is ended when that has
// returned.
func TestCloseBehindAStuckCall(t *testing.T) {
	l, made, _ := table()
	a, err := l.NewAgent("a", nil)
	require.NoError(t, err)
	release := make(chan struct{})
	know := l.call.loadMetadata
	l.call.loadMetadata = func(agent handle, data unsafe.Pointer, n uintptr, name *unsafe.Pointer) Status {
		<-release
		return know(agent, data, n, name)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = Bound(ctx, "taking metadata", func() (string, error) { return a.Know([]byte("b")) })
	var known, closed *StuckError
	require.ErrorAs(t, err, &known)

	done := make(chan error, 1)
	go func() { done <- a.Close() }()
	select {
	case err = <-done:
	case <-time.After(20 * time.Second):
		close(release)
		t.Fatal("Close waits for the call")
	}
	require.ErrorAs(t, err, &closed)
	require.ErrorIs(t, a.Register(DRAM, Block{Addr: 1, Bytes: 1}), errs.ErrClosed)
	require.ErrorIs(t, a.Close(), errs.ErrClosed)
	close(release)
	<-known.Ended
	select {
	case <-closed.Ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the agent is left")
	}
	assert.Empty(t, made)
}

func TestPeerThatHasGone(t *testing.T) {
	l, _, _ := table()
	require.ErrorIs(t, l.check("get_xfer_status", RemoteDisconnect), errs.ErrPeerLost)
}

func TestBound(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n, err := Bound(ctx, "counting", func() (int, error) { return 7, nil })
	require.NoError(t, err)
	assert.Equal(t, 7, n)
	var inside sync.WaitGroup
	release := make(chan struct{})
	inside.Add(1)
	cancel()
	_, err = Bound(ctx, "making an agent", func() (int, error) {
		defer inside.Done()
		<-release
		return 1, nil
	})
	var stuck *StuckError
	require.ErrorAs(t, err, &stuck)
	require.ErrorIs(t, err, context.Canceled)
	assert.ErrorContains(t, err, "making an agent: NIXL has not done it")
	close(release)
	inside.Wait()
}
