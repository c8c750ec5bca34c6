package errs

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestCodesStay: a release must not change what the codes of an earlier one stand for. New conditions come at the end of the list.
func TestCodesStay(t *testing.T) {
	for i, c := range []error{
		ErrNoMemory, ErrUnavailable, ErrUnsupported, ErrNotReachable, ErrMismatch, ErrPeerLost, ErrClosed, ErrInvalid, ErrNoRendezvous,
		ErrNoMulticast, ErrNotSymmetric, ErrNotPosted, ErrInProgress, ErrTwoStreams, ErrNoRoom, ErrContextLost,
	} {
		assert.Equal(t, []uint32{uint32(i + 1)}, Codes(fmt.Errorf("a step: %w", c)))
		assert.Equal(t, []error{c}, Conditions([]uint32{uint32(i + 1)}))
	}
	assert.Empty(t, Codes(nil))
	assert.Empty(t, Codes(errors.New("of the program")))
	assert.Equal(t, []uint32{2, 7}, Codes(errors.Join(ErrClosed, ErrUnavailable)))
	assert.Equal(t, []uint32{8}, Codes(Invalid("Op", "arg", 1, "2")))
}

func TestArgumentErrorTexts(t *testing.T) {
	for want, err := range map[string]error{
		"Slice: start is 5; allowed: 0 to 3":              Invalid("Slice", "start", 5, "0 to 3"),
		"Run: stream is nil; allowed: a stream":           Given("Run", "stream", nil, "a stream"),
		"Join: token is short; allowed: long; set it":     Advised("Join", "token", "short", "long", "set it"),
		"Join: token is short; set it":                    Advised("Join", "token", "short", "", "set it"),
		"Broadcast: root is 9; allowed: 0 to 7; count ok": Advised("Broadcast", "root", 9, "0 to 7", "count ok"),
	} {
		require.EqualError(t, err, want)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

// TestArgumentErrorClips: a value that is too long to be read is named by its beginning and its length.
func TestArgumentErrorClips(t *testing.T) {
	assert.EqualError(t, Invalid("F", "x", strings.Repeat("a", 199)+strings.Repeat("é", 1<<19), "y"), "F: x is "+strings.Repeat("a", 199)+"… (1048775 bytes); allowed: y")
	short := strings.Repeat("b", 1000)
	assert.EqualError(t, Invalid("F", "x", short, "y"), "F: x is "+short+"; allowed: y")
}

func TestReasons(t *testing.T) {
	assert.Equal(t, "rank 7", Ranks([]int{7}))
	assert.Equal(t, "ranks 0, 1", Ranks([]int{1, 0}))
	assert.Equal(t, "ranks 0-2, 5", Ranks([]int{0, 1, 2, 5}))

	var r Reasons
	for _, rank := range []int{0, 1, 2, 5} {
		r.Add("", rank, "no driver")
	}
	assert.Equal(t, "opening failed: ranks 0-2, 5: no driver", r.Text("opening failed"))
	var below Reasons
	below.Add("", 0, "a")
	below.Add("", 1, "b")
	r.Add("", 3, below.Text("sub-group failed")+"\nand more")
	assert.Equal(t, "opening failed:\n\tranks 0-2, 5: no driver\n\trank 3: sub-group failed: rank 0: a; rank 1: b; and more", r.Text("opening failed"))
}
