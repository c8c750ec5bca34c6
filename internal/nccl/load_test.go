package nccl

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

func TestLibraryThatIsNotThere(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(LibraryEnv, dir)
	t.Setenv(multicastEnv, "2")
	_, err := Load(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, "loading NCCL")
	assert.ErrorContains(t, err, LibraryEnv, "the error says what to do")
	assert.Equal(t, "0", os.Getenv(multicastEnv))

	path := filepath.Join(dir, "other", "libnccl.so.2.28.9")
	_, err = Load(&Options{Path: path})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, path, "the path goes before the variable")
}

func TestMulticastIsLeftAlone(t *testing.T) {
	t.Setenv(LibraryEnv, t.TempDir())
	t.Setenv(multicastEnv, "2")
	for _, o := range []Options{{Multicast: true}, {Look: true}} {
		_, err := Load(&o)
		require.ErrorIs(t, err, errs.ErrUnavailable)
		assert.Equal(t, "2", os.Getenv(multicastEnv))
	}
}

func TestSearch(t *testing.T) {
	t.Setenv("VIRTUAL_ENV", "/home/me/venv")
	s := search(&Options{})
	assert.Equal(t, LibraryEnv, s.Env)
	assert.Equal(t, []string{"libnccl.so.2"}, s.Names)
	assert.Equal(t, "/home/me/venv/lib/python3*/*-packages/nvidia/nccl/lib", filepath.ToSlash(s.Folders[0]))
	for _, file := range []string{
		"/usr/local/lib/python3.12/site-packages/nvidia/nccl/lib", "/usr/local/lib/python3.12/dist-packages/nvidia/nccl/lib",
		"/usr/lib/python3/dist-packages/nvidia/nccl/lib", "/opt/venv/lib/python3.13/site-packages/nvidia/nccl/lib",
		"/opt/app/.venv/lib/python3.13/site-packages/nvidia/nccl/lib",
	} {
		found := false
		for _, folder := range s.Folders {
			ok, err := filepath.Match(folder, file)
			require.NoError(t, err)
			found = found || ok
		}
		assert.True(t, found, file)
	}
	t.Setenv("VIRTUAL_ENV", "")
	assert.Len(t, search(&Options{}).Folders, len(s.Folders)-1)
}

func TestOldLibraryLacksFunctions(t *testing.T) {
	f := table()
	f.CommInitRankScalable = nil
	f.GetVersion = func(v *int32) Result { *v = 22205; return Success }
	_, err := New("/old/libnccl.so.2", f)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	var lacking *dl.SymbolError
	require.ErrorAs(t, err, &lacking)
	assert.Equal(t, []string{"ncclCommInitRankScalable"}, lacking.Symbols)
	assert.ErrorContains(t, err, "NCCL 2.22.5 (/old/libnccl.so.2)", "the version is told")
	assert.ErrorContains(t, err, "2.23.4", "and the one that is needed")
}

// TestWhatALibraryLacks: what came later is a capability, and the error of who needs it says which version has it.
func TestWhatALibraryLacks(t *testing.T) {
	f := table()
	f.CommWindowRegister, f.CommSplit, f.GetPeerDevicePointer, f.TeamLsa, f.PutSignal = nil, nil, nil, nil, nil
	l, err := New("/some/libnccl.so.2", f)
	require.NoError(t, err)
	assert.ElementsMatch(t, []string{"ncclCommWindowRegister", "ncclCommSplit", "ncclGetPeerDevicePointer", "ncclTeamLsa", "ncclPutSignal"},
		l.Missing())
	assert.False(t, l.PeerPointers())
	require.NoError(t, l.Require("ncclMemAlloc"))
	err = l.Require("ncclMemAlloc", "ncclCommWindowRegister", "ncclCommSplit")
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.ErrorContains(t, err, "ncclCommWindowRegister, ncclCommSplit")
	assert.ErrorContains(t, err, "2.27.3 or newer")
	_, err = l.ResolveMulticast()
	require.ErrorIs(t, err, errs.ErrUnsupported)
	for symbol := range introduced {
		known := slices.Contains(missing(&Functions{}, false), symbol) || slices.Contains(missing(&Multicast{}, false), symbol)
		assert.True(t, known, symbol)
	}
}

func TestAnotherLibraryInItsPlace(t *testing.T) {
	lib := libc(t)
	var lacking *dl.SymbolError
	file, err := lib.File("getpid")
	require.NoError(t, err)
	t.Setenv(multicastEnv, "0")
	_, err = Load(&Options{Path: file})
	require.ErrorAs(t, err, &lacking)
}

// TestEnvironmentReachesC holds what Load relies on: variables set by Go are seen by native libraries.
func TestEnvironmentReachesC(t *testing.T) {
	lib := libc(t)
	var getenv func(name string) string
	require.NoError(t, lib.Bind(&getenv, "getenv"))
	t.Setenv(multicastEnv, "2")
	t.Setenv(LibraryEnv, t.TempDir())
	require.Equal(t, "2", getenv(multicastEnv))
	_, err := Load(nil)
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.Equal(t, "0", getenv(multicastEnv))
}

// TestTable holds that every type in the tables can be passed to C, where no library is needed to find out.
func TestTable(t *testing.T) {
	lib := libc(t)
	for _, table := range []any{&Functions{}, &Multicast{}} {
		eachFunction(table, func(field reflect.Value, symbol string, _ bool) {
			assert.NoError(t, lib.Bind(field.Addr().Interface(), "getpid"), symbol)
		})
	}
}

// libc returns a library that is surely there, on the systems on which libraries can be loaded at all; the test is skipped on
// others.
func libc(t *testing.T) *dl.Library {
	t.Helper()
	lib, err := dl.Open(dl.Search{Library: "C", Names: []string{"libc.so.6"}})
	if runtime.GOOS != "linux" && errors.Is(err, errs.ErrUnavailable) {
		testneed.Missing(t, "nccl", err)
	}
	require.NoError(t, err)
	return lib
}
