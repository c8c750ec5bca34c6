package kernels

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// AllReduceForm is an all-reduce of somebody else's, for RegisterAllReduce.
type AllReduceForm struct {
	// Name is what it is asked for by: small letters, digits and underscores, a letter first, at most 32.
	Name string
	// Supports reports whether it has a kernel for a kind of device, a dtype, an operation and a world size. It is always the same.
	Supports func(kind device.Kind, dtype tensor.DType, op Op, worldSize int) bool
	// Spec describes the collective that combines in on all ranks by op into out, which may be in itself; neither is empty, and they are as
	// NewAllReduce has checked. It is called once for each plan. Name, FirstEpoch, and Tensors where it is nil ({in, out}) are filled in.
	// It respects opts.MaxBlocks. Its error is every rank's. Unless it is AnyOrder, the first element of each combination is that of rank 0 itself, and no neutral one: a sum of -0 is -0.
	Spec func(in, out tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (collective.Spec, error)
	// NeedsPeerPointers says that it needs an address of every peer's memory, and NeedsMulticast multicast addresses.
	NeedsPeerPointers, NeedsMulticast bool
	// AnyOrder says that it does not combine in the order of the ranks, as this package's own forms do but for the multimem ones: floats
	// may come out a little different then. Every rank still gets the same.
	AnyOrder bool
}

// registered is the forms of others; the first has the number algorithms.
var registered struct {
	sync.RWMutex
	forms []AllReduceForm
}

// formName is what the names of registered forms are like.
var formName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,31}$`)

// RegisterAllReduce makes a form known by its name, to NewAllReduce, and to the correctness suite and the measurements of a command that
// has it (package cmd/symmem/command). It returns its number, which is this process's own. It is meant for the init of the form's package. A
// mistake in that is one of the program and not of its user, so that RegisterAllReduce panics: with an ErrInvalid, the *ArgumentError of
// package symmem. It is one if the name is taken, stands for something else, or is no such name, and if a function is nil.
func RegisterAllReduce(f AllReduceForm) Algorithm {
	a, err := register(f)
	if err != nil {
		panic(err)
	}
	return a
}

func register(f AllReduceForm) (Algorithm, error) {
	const call = "RegisterAllReduce"
	registered.Lock()
	defer registered.Unlock()
	if !formName.MatchString(f.Name) {
		return 0, errs.Invalid(call, "Name", fmt.Sprintf("%q", f.Name), "small letters, digits and underscores, a letter first, at most 32")
	}
	taken := f.Name == "all" // which stands for every form in the command
	for a := Auto; a < algorithms; a++ {
		taken = taken || algorithmNames[a] == f.Name
	}
	for _, o := range registered.forms {
		taken = taken || o.Name == f.Name
	}
	if taken {
		return 0, errs.Invalid(call, "Name", fmt.Sprintf("%q", f.Name), "a name that no other form has, and not all")
	}
	if err := errors.Join(errs.Given(call, "Supports", f.Supports, "a function"), errs.Given(call, "Spec", f.Spec, "a function")); err != nil {
		return 0, err
	}
	registered.forms = append(registered.forms, f)
	return algorithms + Algorithm(len(registered.forms)-1), nil
}

// form returns the registered form of a, or nil if a is not one.
func (a Algorithm) form() *AllReduceForm {
	if a < algorithms {
		return nil
	}
	registered.RLock()
	defer registered.RUnlock()
	if i := int(a - algorithms); i < len(registered.forms) {
		return &registered.forms[i]
	}
	return nil
}

// known reports whether there is such a form.
func (a Algorithm) known() bool { return a >= Auto && a < algorithms || a.form() != nil }

// others lists the registered forms.
func others() []Algorithm {
	registered.RLock()
	defer registered.RUnlock()
	all := make([]Algorithm, len(registered.forms))
	for i := range all {
		all[i] = algorithms + Algorithm(i)
	}
	return all
}

// byForm makes the spec that of a registered form.
func (a *allReduce) byForm(s *collective.Spec) {
	spec, err := a.algorithm.form().Spec(a.in, a.out, a.op, a.opts)
	if err != nil {
		s.Failure = err
		return
	}
	spec.Name = s.Name
	if spec.Tensors == nil {
		spec.Tensors = s.Tensors
	}
	if spec.Parameters = s.Parameters + ", " + spec.Parameters; strings.HasSuffix(spec.Parameters, ", ") {
		spec.Parameters = s.Parameters
	}
	spec.Exclusive = spec.Exclusive || s.Exclusive
	*s = spec
}
