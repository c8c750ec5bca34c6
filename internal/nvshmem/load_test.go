package nvshmem

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// clean takes NVSHMEM's variables out of the environment for the time of the test.
func clean(t *testing.T) {
	t.Helper()
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "NVSHMEM_") || name == "NCCL_NVLS_ENABLE" {
			t.Setenv(name, "")
			require.NoError(t, os.Unsetenv(name))
		}
	}
	names := []string{"NVSHMEM_DISABLE_NVLS", "NCCL_NVLS_ENABLE"}
	for _, s := range defaults(1) {
		names = append(names, s.Name)
	}
	for _, name := range names {
		t.Setenv(name, "")
		require.NoError(t, os.Unsetenv(name))
	}
}

func TestLibraryThatIsNotThere(t *testing.T) {
	clean(t)
	dir := t.TempDir()
	t.Setenv(LibraryEnv, dir)
	_, err := Load(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, "loading NVSHMEM")
	assert.ErrorContains(t, err, filepath.Join(dir, fileName))
	assert.ErrorContains(t, err, LibraryEnv, "the error says what to do")

	path := filepath.Join(dir, "other", fileName)
	_, err = Load(&Options{Path: path})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, path, "the path goes before the variable")

	_, err = Load(&Options{Granularity: 3 << 20})
	require.ErrorIs(t, err, errs.ErrInvalid)
}

// TestEnvironmentReachesC holds what Load relies on: it sets variables before the library is there, and C sees them.
func TestEnvironmentReachesC(t *testing.T) {
	clean(t)
	var getenv func(name string) string
	require.NoError(t, libc(t).Bind(&getenv, "getenv"))
	t.Setenv("NVSHMEM_DISABLE_NVLS", "0")
	t.Setenv("NCCL_NVLS_ENABLE", "2")
	t.Setenv(LibraryEnv, t.TempDir())
	_, err := Load(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.Equal(t, "1", getenv("NVSHMEM_DISABLE_NVLS"), "the policy goes before the user's own")
	assert.Equal(t, "0", getenv("NCCL_NVLS_ENABLE"))
	assert.Equal(t, "none", getenv("NVSHMEM_REMOTE_TRANSPORT"))
	assert.Equal(t, "2097152", getenv(GranularityEnv))
}

// TestLookingChangesLittle: a program that only looks whether the library is there keeps its environment, but for multicast.
func TestLookingChangesLittle(t *testing.T) {
	clean(t)
	t.Setenv(LibraryEnv, t.TempDir())
	_, err := Load(&Options{Look: true})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.Empty(t, os.Getenv("NVSHMEM_REMOTE_TRANSPORT"))
	assert.Equal(t, "1", os.Getenv("NVSHMEM_DISABLE_NVLS"))
	_, err = Load(&Options{Look: true, Multicast: true})
	require.ErrorIs(t, err, errs.ErrUnavailable)
}

func TestEnvironment(t *testing.T) {
	clean(t)
	find := func(all []Setting, name string) Setting {
		for _, s := range all {
			if s.Name == name {
				return s
			}
		}
		return Setting{}
	}
	t.Setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
	t.Setenv(sessionID, "127.0.0.1:7000")
	all, err := Environment(true, 4096)
	require.NoError(t, err)
	assert.Equal(t, Setting{"NVSHMEM_REMOTE_TRANSPORT", "ibrc", false}, find(all, "NVSHMEM_REMOTE_TRANSPORT"), "the user's own stays")
	assert.Equal(t, Setting{GranularityEnv, "4096", true}, find(all, GranularityEnv))
	assert.Zero(t, find(all, loopback), "the user has said where to meet")
	assert.Zero(t, find(all, "NVSHMEM_DISABLE_NVLS"), "multicast is NVSHMEM's own to decide")

	all, err = Environment(false, 8192)
	require.NoError(t, err)
	assert.Equal(t, Setting{GranularityEnv, "8192", true}, find(all, GranularityEnv), "what was set here may change")
	assert.Equal(t, "1", find(all, "NVSHMEM_DISABLE_NVLS").Value)
	t.Setenv(GranularityEnv, "1048576")
	all, err = Environment(false, 8192)
	require.NoError(t, err)
	assert.Equal(t, Setting{GranularityEnv, "1048576", false}, find(all, GranularityEnv))
}

func TestSearch(t *testing.T) {
	t.Setenv("VIRTUAL_ENV", "/home/me/venv")
	s := search(&Options{})
	assert.Equal(t, LibraryEnv, s.Env)
	assert.Equal(t, "/home/me/venv/lib/python3*/*-packages/nvidia/nvshmem/lib", filepath.ToSlash(s.Folders[0]))
	for _, file := range []string{
		"/usr/local/lib/python3.12/dist-packages/nvidia/nvshmem/lib", "/opt/app/.venv/lib/python3.13/site-packages/nvidia/nvshmem/lib",
		"/opt/venv/lib/python3.13/site-packages/nvidia/nvshmem/lib",
	} {
		found := false
		for _, folder := range s.Folders {
			ok, err := filepath.Match(folder, file)
			require.NoError(t, err)
			found = found || ok
		}
		assert.True(t, found, file)
	}
}

func TestOtherLibraryLacksFunctions(t *testing.T) {
	clean(t)
	lib := libc(t)
	var f functions
	var lacking *dl.SymbolError
	require.ErrorAs(t, f.bind(lib, false), &lacking)
	assert.Contains(t, lacking.Symbols, "nvshmemx_hostlib_init_attr")
	assert.NotContains(t, lacking.Symbols, "nvshmemx_mc_ptr", "without multicast nobody looks for it")
	require.ErrorAs(t, f.bind(lib, true), &lacking)
	assert.Contains(t, lacking.Symbols, "nvshmemx_mc_ptr")

	file, err := lib.File("getpid")
	require.NoError(t, err)
	_, err = Load(&Options{Path: file})
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.ErrorContains(t, err, "3.4.5")
}

// TestTable holds that every type in the table can be passed to C, where no library is needed to find out.
func TestTable(t *testing.T) {
	lib := libc(t)
	var f functions
	var r collective
	var b broadcast
	for _, fn := range []any{&f.getVersion, &f.getUniqueID, &f.setUniqueID, &f.initAttr, &f.initStatus, &f.finalize, &f.myPE, &f.pes, &f.align,
		&f.ptr, &f.register, &f.unregister, &f.teamSplit, &f.barrier, &f.put, &f.get, &f.multicastPtr, &r, &b} {
		assert.NoError(t, lib.Bind(fn, "getpid"), "%T", fn)
	}
}

func TestBootstrapPlugin(t *testing.T) {
	dir := t.TempDir()
	library := filepath.Join(dir, fileName)
	_, err := findBootstrap(library, "")
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, filepath.Join(dir, bootstrapName))
	assert.ErrorContains(t, err, bootstrapEnv)
	require.NoError(t, os.WriteFile(filepath.Join(dir, bootstrapName), nil, 0o600))
	path, err := findBootstrap(library, "")
	require.NoError(t, err)
	assert.Equal(t, filepath.Join(dir, bootstrapName), path)
	_, err = findBootstrap(library, "/nowhere/plugin.so")
	require.ErrorContains(t, err, "/nowhere/plugin.so")
	path, err = findBootstrap(library, "mine.so")
	require.NoError(t, err)
	assert.Equal(t, "mine.so", path)
}

// TestLayout holds the sizes and offsets of nvshmem_types.h 3.4.5, as a C compiler has them.
func TestLayout(t *testing.T) {
	var a initAttr
	assert.EqualValues(t, 144, unsafe.Sizeof(a))
	assert.EqualValues(t, 8, unsafe.Offsetof(a.mpiComm))
	assert.EqualValues(t, 16, unsafe.Offsetof(a.args))
	assert.EqualValues(t, 128, unsafe.Sizeof(a.args))
	assert.EqualValues(t, 8, unsafe.Offsetof(a.args.id))
	assert.EqualValues(t, 32, unsafe.Offsetof(a.args.content))
	assert.EqualValues(t, 24, unsafe.Sizeof(a.args.id))
	assert.EqualValues(t, 8, unsafe.Offsetof(a.args.id.id))
	assert.EqualValues(t, 16, unsafe.Offsetof(a.args.id.rank))
	assert.EqualValues(t, 20, unsafe.Offsetof(a.args.id.ranks))
	assert.EqualValues(t, UniqueIDBytes, unsafe.Sizeof(UniqueID{}))
	assert.Equal(t, [4]int32{65680, 65664, 65560, 65664}, [4]int32{attrVersion, argsVersion, idArgsVersion, uniqueIDVersion})
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "4096": 4096, "2M": 2 << 20, " 1g ": 1 << 30, "1.5K": 1536, "128GB": 128 << 30, "1T": 1 << 40} {
		got, ok := ParseSize(text)
		assert.True(t, ok, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "G", "lots", "-1", "1e30", "NaN"} {
		_, ok := ParseSize(text)
		assert.False(t, ok, text)
	}
}

// libc returns a library that is surely there, on the systems on which libraries can be loaded at all; the test is skipped on
// others.
func libc(t *testing.T) *dl.Library {
	t.Helper()
	lib, err := dl.Open(dl.Search{Library: "C", Names: []string{"libc.so.6"}})
	if runtime.GOOS != "linux" && err != nil {
		testneed.Missing(t, "nvshmem", err)
	}
	require.NoError(t, err)
	return lib
}
