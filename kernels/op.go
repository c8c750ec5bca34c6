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
