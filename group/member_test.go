package group

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBootIDThatCannotBeRead: ranks of one process are on one machine all the same, and nobody else is taken for it.
func TestBootIDThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	empty, whole := filepath.Join(dir, "empty"), filepath.Join(dir, "whole")
	require.NoError(t, os.WriteFile(empty, []byte("\n"), 0o600))
	require.NoError(t, os.WriteFile(whole, []byte("3bea4158\n"), 0o600))
	for file, want := range map[string]string{filepath.Join(dir, "absent"): "", dir: "", empty: "", whole: "3bea4158"} {
		id, err := bootIDIn(file)
		require.NoError(t, err)
		require.Equal(t, want, id)
	}

	here := Member{Process: "a"}
	for other, same := range map[Member]bool{
		{Process: "a"}: true, {Process: "b"}: false, {Process: "b", BootID: "x"}: false, {Process: "a", BootID: "x"}: false,
	} {
		require.Equal(t, same, here.sameMachine(other), other)
		require.Equal(t, same, other.sameMachine(here), other)
	}
	require.True(t, Member{Process: "a", BootID: "x"}.sameMachine(Member{Process: "b", BootID: "x"}))

	groups := newLocal(t, 2, nil)
	groups[0].members[0].BootID, groups[0].members[1].BootID = "", ""
	groups[0].members[1].Process = "another"
	err := groups[0].checkOneMachine()
	require.ErrorIs(t, err, ErrUnsupported)
	require.ErrorContains(t, err, "boot_id cannot be read")
}
