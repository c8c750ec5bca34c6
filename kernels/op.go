package kernels

import (
	"fmt"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Op is how the ranks' elements are combined.
type Op int

// The operations. Integers wrap around. Min and Max give NaN if any rank has NaN, and hold -0 to be less than +0. Avg is the
// sum divided by the world size: in float32 for 16-bit floats, in the dtype for the others, towards zero for integers.
const (
	Sum Op = iota + 1
	Prod
	Min
	Max
	Avg
)

var opNames = [...]string{Sum: "sum", Prod: "prod", Min: "min", Max: "max", Avg: "avg"}

// Ops lists all operations.
func Ops() []Op { return []Op{Sum, Prod, Min, Max, Avg} }

// Valid reports whether op is one of the operations.
func (op Op) Valid() bool { return op >= Sum && op <= Avg }

// String gives the name: "sum".
func (op Op) String() string {
	if !op.Valid() {
		return fmt.Sprintf("Op(%d)", int(op))
	}
	return opNames[op]
}

// ParseOp gives the operation of a name.
func ParseOp(name string) (Op, error) {
	for _, op := range Ops() {
		if op.String() == name {
			return op, nil
		}
	}
	return 0, errs.Invalid("ParseOp", "name", fmt.Sprintf("%q", name), strings.Join(opNames[1:], ", "))
}

// Algorithm is the form of an all-reduce.
type Algorithm int

// The forms; see the package comment.
const (
	Auto    Algorithm = iota // by size, from one table
	OneShot                  // one exchange, every rank computes everything
	TwoShot                  // two exchanges, every rank computes one part for all
)

var algorithmNames = [...]string{Auto: "auto", OneShot: "one_shot", TwoShot: "two_shot"}

// Algorithms lists the forms that can be asked for, Auto excluded.
func Algorithms() []Algorithm { return []Algorithm{OneShot, TwoShot} }

// String gives the name: "one_shot".
func (a Algorithm) String() string {
	if a < Auto || a > TwoShot {
		return fmt.Sprintf("Algorithm(%d)", int(a))
	}
	return algorithmNames[a]
}

// ParseAlgorithm gives the form of a name.
func ParseAlgorithm(name string) (Algorithm, error) {
	for a := Auto; a <= TwoShot; a++ {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, errs.Invalid("ParseAlgorithm", "name", fmt.Sprintf("%q", name), strings.Join(algorithmNames[:], ", "))
}

// oneShotBytes is the size in bytes up to which one-shot is the faster form on the host device, by world size (the last entry
// serves all above). Found by `symmem bench --algorithm`.
var oneShotBytes = [...]int64{2: 1 << 10, 3: 4 << 10, 4: 4 << 10}

// choose picks the form for a message of bytes between size ranks.
func choose(bytes int64, size int) Algorithm {
	if size < 2 || bytes <= oneShotBytes[min(size, len(oneShotBytes)-1)] {
		return OneShot
	}
	return TwoShot
}
