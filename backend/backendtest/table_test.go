package backendtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFaultTable: a table counts cases by call, fault and outcome, says which exceptions they needed, and stands in the file behind what that has.
func TestFaultTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table")
	t.Setenv("SYMMEM_TEST_TABLE", path)
	require.NoError(t, os.WriteFile(path, []byte("before\n"), 0o600))
	var table FaultTable
	table.Add("b", "hangs", "goes on late")
	table.Add("a", "kills", FaultWrong)
	table.Add("b", "hangs", "goes on late", "no error: it is logged")
	table.Print(t)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, `before
call  fault  outcome       cases
a     kills  WRONG         1
b     hangs  goes on late  2

call  exception               cases
b     no error: it is logged  1
TestFaultTable: 2 of 3 cases are as they should be, 1 times by an exception

`, string(got))
}

// TestRepeated: of calls that are made often, the first, the last and some between stand for those of one place; each of a rare name is a case.
func TestRepeated(t *testing.T) {
	require.NotContains(t, repeated(make([]place, often)), true)
	places := make([]place, 2*often)
	for i := range places {
		places[i][0] = uintptr(i % 2)
	}
	places[often][1] = 1 // a place of its own
	taken := map[place]int{}
	for i, skip := range repeated(places) {
		if !skip {
			taken[places[i]]++
		}
	}
	require.Equal(t, map[place]int{{0}: fewAlike, {1}: fewAlike, {0, 1}: 1}, taken)
	require.False(t, repeated(places)[0])
	require.False(t, repeated(places)[len(places)-1])
}
