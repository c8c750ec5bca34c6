package backendtest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ofToys returns a harness for toys with a flaw, near or far.
func ofToys(t *testing.T, flaw string, isFar bool) Harness {
	t.Helper()
	d, err := devhost.New(nil)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, d.Close()) })
	all := newToys(d, flaw)
	h := Harness{Adoptable: all.adoptable, AdoptAlign: toyAlign, Unreachable: isFar}
	if !isFar {
		h.AllReduces = []string{"toy"}
	}
	h.Open = func(_ context.Context, g *group.Group) (backend.Backend, error) {
		near := &toy{toys: all, group: g}
		if !isFar {
			return near, nil
		}
		f := Far(near, g, &FarOptions{Delay: 200 * time.Microsecond}).(*far)
		if flaw == "peers cannot be reached at all" {
			return silent{f}, nil
		}
		return &farToy{far: f, flaw: flaw}, nil
	}
	return h
}

// TestToys: toys without a flaw pass, so that a flaw is what others fail of.
func TestToys(t *testing.T) {
	for name, isFar := range map[string]bool{"near": false, "far": true} {
		t.Run(name, func(t *testing.T) { Run(t, ofToys(t, "", isFar)) })
	}
}

// flawed runs one test of the suite on backends with a flaw, and wants it to say so.
func flawed(t *testing.T, h Harness, name, says string) {
	t.Helper()
	for _, tt := range tests {
		if tt.name == name {
			err := errors.Join(onBackends(t, h, 3, tt)...)
			require.Error(t, err, "%s does not notice it", name)
			assert.Contains(t, strings.ReplaceAll(err.Error(), "\n", " "), says)
			return
		}
	}
	t.Fatalf("there is no test %s", name)
}

// TestFlaws: each promise that is broken is noticed by the test that holds it, which says what is wrong.
func TestFlaws(t *testing.T) {
	for _, tt := range []struct {
		flaw, test, says string
		far              bool
	}{
		{"bad memory is ErrUnsupported", "RegisterErrors", "is not ErrInvalid", false},
		{"no bytes are adopted", "RegisterErrors", "no bytes was adopted", false},
		{"misaligned memory is adopted", "RegisterErrors", "misaligned memory was adopted", false},
		{"any memory is adopted", "RegisterErrors", "what nobody has allocated was adopted", false},
		{"more than there is is adopted", "RegisterErrors", "more than was allocated was adopted", false},
		{"adopted memory is copied", "Register", "were adopted, and the allocation says", false},
		{"releasing clears adopted memory", "Register", "of the caller's memory is 0 and not", false},
		{"memory is adopted once", "Register", "adopting again", false},
		{"a part is mapped at its neighbour's place", "Register", "of the caller's memory is", false},
		{"multicast is nil", "Multicast", "the multicast address is", false},
		{"multicast is one address for all windows", "Multicast", "two windows have the multicast address", false},
		{"multicast fails on one rank", "Multicast", "multicast: ", false},
		{"multicast is gone the second time", "Multicast", "the multicast address is", false},
		{"windows have no handle and say no error", "WindowHandle", "handle is 0x0", false},
		{"windows have one name", "WindowHandle", "two windows are", false},
		{"a window's name changes", "WindowHandle", "asked again", false},
		{"a window has a name on some ranks", "WindowHandle", "window: ", false},
		{"unknown operations are prepared", "AllReduceErrors", "was prepared", false},
		{"what the library has not is ErrInvalid", "AllReduceErrors", "is not ErrUnsupported", false},
		{"an all-reduce forgets a rank", "AllReduce", "element", false},
		{"an all-reduce goes beyond its end", "AllReduce", "element 164 is", false},
		{"an all-reduce forgets its last element", "AllReduce", "element 163 is", false},
		{"an all-reduce forgets the offset of its output", "AllReduce", "element 0 is", false},
		{"an all-reduce runs once", "AllReduce", "round 1", false},

		{"peers cannot be reached at all", "Transfers", "no peer can be reached", true},
		{"peers cannot be reached at all", "Flags", "no peer can be reached", true},
		{"a transfer forgets its last block", "Transfers", "byte 9191", true},
		{"a transfer moves a byte too many", "Transfers", "byte 1 from", true},
		{"a transfer moves a byte too few", "Transfers", "byte 4195 from", true},
		{"a transfer goes one byte too far", "Transfers", "byte 9190 from", true},
		{"a read is a write", "Transfers", "read: ", true},
		{"a transfer runs once", "Transfers", "round 1", true},
		{"a transfer that never ran cannot be closed", "Transfers", "closing what never ran", true},
		{"a transfer cannot be closed", "Transfers", "closing", true},
		{"a transfer ends before the data is there", "Transfers", "byte 0 from", true},
		{"a transfer ends before the data is there", "FlagsFollowData", "behind a flag", true},
		{"a run that overlaps is started", "TransfersOverlap", "is not ErrInProgress", true},
		{"a run that overlaps disturbs the first", "TransfersOverlap", "byte 0 from", true},
		{"the loss of a peer is another error", "TransferToTheDead", "is not ErrPeerLost", true},
		{"a transfer to the dead succeeds", "TransferToTheDead", "is not ErrPeerLost", true},
		{"a transfer to the dead never ends", "TransferToTheDead", "the end of a transfer to the dead has not come", true},
		{"a flag is missing", "Flags", "flags were made, and there are", true},
		{"new flags are not 0", "Flags", "word 0 of new flags", true},
		{"all flags are one", "Flags", "flags were made, and there are", true},
		{"a store writes another word", "Flags", "has not come", true},
		{"a store writes its own rank", "Flags", "has not come", true},
		{"half of a word is written", "Flags", "has not come", true},
		{"a word is written once", "Flags", "has not come", true},
		{"a store never ends", "Flags", "the end of a store has not come", true},
		{"flags cannot be closed", "Flags", "closing set", true},
		{"it never comes to rest", "Quiesce", "quiescing what never moved", true},
		{"quiescing outlasts its context", "Quiesce", "outlasts its context", true},
	} {
		t.Run(strings.ReplaceAll(tt.flaw+"/"+tt.test, " ", "_"), func(t *testing.T) {
			h := ofToys(t, tt.flaw, tt.far)
			if strings.Contains(tt.says, "has not come") || strings.Contains(tt.says, "outlasts") {
				h.patience = 300 * time.Millisecond // what does not come is waited for
			}
			flawed(t, h, tt.test, tt.says)
		})
	}
}

// TestHarnesses: a harness that keeps from the suite what the backend has is noticed.
func TestHarnesses(t *testing.T) {
	h := ofToys(t, "", false)
	h.Adoptable = nil
	flawed(t, h, "Register", "the harness gives none")
	h = ofToys(t, "", false)
	h.AllReduces = nil
	flawed(t, h, "AllReduce", "the harness names []")
}

// TestFlawsOfViews is TestFlaws for the contiguous view.
func TestFlawsOfViews(t *testing.T) {
	for flaw, says := range map[string]string{
		"copies overlap in the view":         "lie 4096 apart",
		"the view begins too late":           "through its view",
		"the view is reversed":               "apart",
		"all windows have one view":          "through its view",
		"a view without the capability":      "the capability says false and the mapping true",
		"no view in spite of the capability": "the capability says true and the mapping false",
	} {
		t.Run(strings.ReplaceAll(flaw, " ", "_"), func(t *testing.T) {
			flawed(t, Harness{Open: func(_ context.Context, g *group.Group) (backend.Backend, error) {
				b, err := host.New(g, nil)
				if err != nil {
					return nil, err
				}
				return &views{Backend: b, group: g, flaw: flaw}, nil
			}}, "Contiguous", says)
		})
	}
}

// struckUnder makes a call, which may fail, from a function literal, as most are made.
func struckUnder(c *Calls) (failed bool) {
	func() { _, failed = c.Enter("call", Code{Name: "CODE"}) }()
	return failed
}

// TestReasons: a fault strikes the call that it is for, by its place, however often the call is made elsewhere before; an exception holds for what it names
// and for nothing else.
func TestReasons(t *testing.T) {
	counting, calls := newCalls(nil), newCalls(nil)
	counting.places = map[string][]place{}
	for _, c := range []*Calls{counting, calls} {
		more := 0
		if c == calls {
			c.set(&strike{call: "call", at: counting.places["call"][1], nth: 2, code: Code{Name: "CODE"}})
			more = 3
		}
		var failed []bool
		for range 3 {
			for range 1 + more {
				c.Enter("call")
			}
			failed = append(failed, struckUnder(c))
		}
		require.Equal(t, []bool{false, c == calls, false}, failed)
	}
	require.Equal(t, counting.places["call"][1], counting.places["call"][3])
	require.NotEqual(t, counting.places["call"][0], counting.places["call"][1])
	require.Contains(t, calls.under(), "backendtest.struckUnder")
	c := faultCase{call: "call", nth: 2, what: "CODE", under: calls.under()}
	for _, key := range []string{"call", "call/2", "call:CODE", "call in backendtest.struckUnder", "call:CODE in backendtest.struckUnder"} {
		require.Equal(t, "why", reason(map[string]string{key: "why"}, c), key)
	}
	for _, key := range []string{"cal", "call/1", "call:hangs", "call in backendtest.struck", "call:hangs in backendtest.struckUnder", "other in backendtest.struckUnder"} {
		require.Empty(t, reason(map[string]string{key: "why"}, c), key)
	}
}
