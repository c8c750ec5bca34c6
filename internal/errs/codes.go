package errs

import (
	"errors"
	"fmt"
)

// MaxCodes is the most codes that the rendezvous service takes from a rank for one failure. There are far fewer conditions.
const MaxCodes = 64

// conditions are all conditions of the module by code. Ranks send each other the codes, so a code never changes its meaning: new conditions are added
// at the end.
var conditions = []error{
	1:  ErrNoMemory,
	2:  ErrUnavailable,
	3:  ErrUnsupported,
	4:  ErrNotReachable,
	5:  ErrMismatch,
	6:  ErrPeerLost,
	7:  ErrClosed,
	8:  ErrInvalid,
	9:  ErrNoRendezvous,
	10: ErrNoMulticast,
	11: ErrNotSymmetric,
	12: ErrNotPosted,
	13: ErrInProgress,
	14: ErrTwoStreams,
	15: ErrNoRoom,
	16: ErrContextLost,
}

// All returns every condition of the module.
func All() []error { return append([]error(nil), conditions[1:]...) }

// Codes returns the codes of all conditions that errors.Is finds in err, ascending; none for nil.
func Codes(err error) []uint32 {
	var codes []uint32
	for code, c := range conditions {
		if c != nil && errors.Is(err, c) {
			codes = append(codes, uint32(code))
		}
	}
	return codes
}

// Conditions returns what codes stand for. It leaves out codes that it does not know, of a newer release.
func Conditions(codes []uint32) []error {
	var found []error
	for _, code := range codes {
		if code > 0 && uint64(code) < uint64(len(conditions)) {
			found = append(found, conditions[code])
		}
	}
	return found
}

// Text returns the text of err for other ranks, or its type if the text is empty, since an empty text would mean that nothing failed.
func Text(err error) string {
	if text := err.Error(); text != "" {
		return text
	}
	return fmt.Sprintf("%T", err)
}
