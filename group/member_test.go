package group

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/processors"
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

// TestOversubscribed: ranks of one process go by GOMAXPROCS, and each machine by its own ranks.
func TestOversubscribed(t *testing.T) {
	n, quota := runtime.GOMAXPROCS(0), int(processors.Here().Quota)
	few := func(ranks int) bool { return ranks > runtime.NumCPU() || quota > 0 && 1000*ranks > quota }
	require.Equal(t, few(n), newLocal(t, n, nil)[0].Oversubscribed())
	groups := newLocal(t, n+1, nil)
	for _, g := range groups {
		require.True(t, g.Oversubscribed())
	}
	apart := &LocalOptions{BootIDs: make([]string, n+1)}
	apart.BootIDs[n] = "another"
	for r, g := range newLocal(t, n+1, apart) {
		require.Equal(t, few([]int{n, 1}[r/n]), g.Oversubscribed(), "ranks of another machine have its processors")
	}

	// A group of some of the ranks counts those alone.
	alone, err := groups[0].Sub(testContext(t), []int{0})
	require.NoError(t, err)
	require.Equal(t, few(1), alone.Oversubscribed())
}

// TestMemberOnTheWire: all that a rank says of itself arrives; what cannot be true of its processors counts as not known.
func TestMemberOnTheWire(t *testing.T) {
	m, err := thisProcess(3, 1, "boot")
	require.NoError(t, err)
	m.share.Quota, m.share.QuotaOf = 1500, 1<<63+7
	require.Equal(t, m, memberFromWire(m.toWire()))
	require.NotZero(t, m.share)

	for name, change := range map[string]func(w *pb.Member){
		"none":            func(w *pb.Member) { w.Processors = nil },
		"too many":        func(w *pb.Member) { w.Processors = bytes.Repeat([]byte{255}, processors.Most/8+1) },
		"none at once":    func(w *pb.Member) { w.AtOnce = 0 },
		"negative":        func(w *pb.Member) { w.AtOnce = math.MinInt64 },
		"negative quota":  func(w *pb.Member) { w.Quota = -1 },
		"an older member": func(w *pb.Member) { w.Processors, w.AtOnce, w.Quota, w.QuotaOf = nil, 0, 0, 0 },
	} {
		w := m.toWire()
		change(w)
		want := m
		want.share = processors.Share{}
		require.Equal(t, want, memberFromWire(w), name)
	}

	groups := newLocal(t, 1, nil)
	groups[0].members[0].share = processors.Share{}
	require.True(t, groups[0].Oversubscribed(), "who does not know sleeps")
}
