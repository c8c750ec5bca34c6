package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Options sets what the constructors of this package other than NewAllReduce make. Nil or zero values mean the defaults. Every rank gives the
// same.
type Options struct {
	// Algorithm is the form; Auto by default: a kernel where every peer's memory has an address in this process, and otherwise Transfers,
	// or, from 64 KiB on, and of all-to-alls up to 128 KiB of a block, Hierarchical, where there are several islands, as hosts with several ranks each are, and the collective has it. It does not combine in the order of the ranks;
	// between hosts of GPUs, on memory of backend nccl, it is NCCL's own collective, and Hierarchical for shares that are not of one length (a list of tensors has neither, and needs puts); where NCCL has puts,
	// what neither has, as 16-bit integers and the order of the ranks, goes by Transfers;
	// Transfers does: see RankOrder.
	// [Forms] lists the forms; OneShot stands for the best of its family. Which is the best, tables say ([memory.Memory.Tuning]). OneShotMultimem
	// makes the ranks have multicast addresses of the tensors. Auto takes it where a table says so, but of NewReduce and NewReduceScatter it has to be asked for,
	// since it does not combine in the order of the ranks; OneShot never takes it.
	Algorithm Algorithm
	// MaxBlocks is the most blocks that a kernel of the plan may take on a CUDA device, as in AllReduceOptions. Ignored by forms that launch none of this module.
	MaxBlocks int
	// Exclusive lets the plan's kernels take all of a CUDA device but a small part, where without it they take at most half of that, so that two plans on
	// different streams never wait for each other for ever. More threads are a little faster in the middle: an all-reduce of 4 or 8 MiB between 2 H200 takes 1 % less (docs/hardware.md).
	// It is for programs that run their plans on one stream, or one after the other: from its first Run until it is closed, unless it moves to their stream, a Run of another
	// plan on another stream is a [*collective.RoomError], as is its own after such a one; the plans that a Rank keeps for its methods are on the rank's own stream.
	// Ignored by forms that launch none of this module, and on the host device.
	Exclusive bool
	// RankOrder keeps NewReduce and NewReduceScatter to forms that promise the bits of the order of the ranks ([Algorithm.RankOrder]), as it does for NewAllReduce: Auto takes none but
	// those then, and an Algorithm without the promise is ErrUnsupported. The setting rank-order does so for all that Auto takes. All other collectives that combine have the promise in every form, and ignore it, as do those that
	// combine nothing.
	RankOrder bool
	// FirstEpoch is the count that runs begin at. It exists to test that counting wraps around.
	FirstEpoch uint32
}

// maker is a collective that is being prepared: what all of them do alike.
type maker struct {
	call    string                 // the constructor: "NewBroadcast"
	in, out tensor.SymmetricTensor // one and the same for a collective that has one
	opts    Options

	more []argument // tensors besides, for which the Spec has the next numbers

	combines bool // it is one that RankOrder is for
	op       Op   // by which it combines

	whole     tensor.SymmetricTensor // in place: the larger of the two
	algorithm Algorithm              // that was chosen
	maxBlocks int                    // opts.MaxBlocks, or fewer if the table says so
	avoided   []Algorithm            // that Auto has tried in vain
}

// argument is a tensor by its name.
type argument struct {
	name   string
	tensor tensor.SymmetricTensor
}

func (m *maker) inPlace() bool { return m.whole != nil }

// specOut is the number of the output in the Spec.
func (m *maker) specOut() int {
	if m.inPlace() {
		return specIn // there is one
	}
	return specOut
}

func newMaker(call string, in, out tensor.SymmetricTensor, opts *Options) *maker {
	m := &maker{call: call, in: in, out: out}
	if opts != nil {
		m.opts = *opts
	}
	if m.opts.Algorithm == Auto && !errs.IsNil(in) && in.Memory().RankOrder() {
		m.opts.RankOrder = true
	}
	return m
}

// collectiveForm is one collective, of a maker whose tensors are there and open.
type collectiveForm interface {
	// check says what is wrong with this rank's request beyond what a maker sees. In place, when one of the tensors is a part of the other,
	// it gives the larger one.
	check() (whole tensor.SymmetricTensor, err error)
	// describe is what errors call it, and all that ranks have to agree on beside the tensors.
	describe() string
	// algorithms lists the forms on a kind of device, Transfers excluded.
	algorithms(kind device.Kind) []Algorithm
	// spec makes the spec that of the form that was chosen. There is something to do.
	spec(s *collective.Spec)
}

// given says which argument is missing.
func (m *maker) given(ctx context.Context) error {
	err := errs.Given(m.call, "ctx", ctx, "a context")
	if m.in == m.out && len(m.more) == 0 {
		return errors.Join(err, usable(m.call, "t", m.in))
	}
	err = errors.Join(err, usable(m.call, "in", m.in), usable(m.call, "out", m.out))
	for _, a := range m.more {
		err = errors.Join(err, usable(m.call, a.name, a.tensor))
	}
	return err
}

// usable refuses nil, and the zero Tensor, which has no memory either.
func usable(call, arg string, t tensor.SymmetricTensor) error {
	if err := errs.Given(call, arg, t, "a tensor"); err != nil {
		return err
	}
	if err := t.Err(); errors.Is(err, errs.ErrInvalid) {
		return err
	}
	return nil
}

// tensors are all that the collective has been given.
func (m *maker) tensors() []tensor.SymmetricTensor {
	all := []tensor.SymmetricTensor{m.in, m.out}
	for _, a := range m.more {
		all = append(all, a.tensor)
	}
	return all
}

// plan prepares the collective. A rank that cannot take part comes all the same, so that the others are told, unless it has no tensor that
// says with whom.
func (m *maker) plan(ctx context.Context, f collectiveForm) (*Plan, error) {
	failure := m.given(ctx)
	if failure != nil {
		return nil, refuse(ctx, m.call, failure, m.tensors()...)
	}
	return inTurn(ctx, m.in.Memory(), m.call, func(ctx context.Context, _ error) (*Plan, error) { return m.planFirst(ctx, f) })
}

// planFirst prepares the collective in the form that was asked for, or the first that can be had.
func (m *maker) planFirst(ctx context.Context, f collectiveForm) (*Plan, error) {
	return untilHad(m.in.Memory(), m.opts.Algorithm, &m.avoided, func() (*Plan, Algorithm, error) {
		p, err := m.planOnce(ctx, f)
		return p, m.algorithm, err
	})
}

// refuse returns the failure of a constructor's arguments, and tells the other ranks of it, if one of the tensors says which they are: the first that does.
func refuse(ctx context.Context, call string, failure error, tensors ...tensor.SymmetricTensor) error {
	var memory *memory.Memory
	for _, t := range tensors {
		if memory == nil && usable(call, "", t) == nil {
			memory = t.Memory()
		}
	}
	if memory == nil {
		return failure
	}
	_, err := collective.New(ctx, memory, collective.Spec{Name: call, Failure: failure})
	return err
}

// planOnce is plan for arguments that are there.
func (m *maker) planOnce(ctx context.Context, f collectiveForm) (*Plan, error) {
	s := collective.Spec{FirstEpoch: m.opts.FirstEpoch, Exclusive: m.opts.Exclusive}
	m.maxBlocks = m.opts.MaxBlocks
	if s.Failure = m.check(); s.Failure == nil {
		m.whole, s.Failure = f.check()
	}
	if s.Failure == nil {
		s.Failure = m.choose(f)
	}
	s.Name = fmt.Sprintf("%s, %s", f.describe(), m.algorithm)
	s.Parameters = fmt.Sprintf("at most %d blocks, in one tensor %t", m.maxBlocks, m.inPlace())
	if m.combines {
		s.Parameters += fmt.Sprintf(", in rank order %t", m.opts.RankOrder)
	}
	if m.opts.Algorithm == Auto {
		s.Parameters += ", chosen by auto" // who asks for the form does not go on with another one
	}
	if s.Tensors = []tensor.SymmetricTensor{m.in, m.out}; m.inPlace() {
		s.Tensors = []tensor.SymmetricTensor{m.whole} // of which the other is a part, at another place on each rank
	}
	for _, a := range m.more {
		s.Tensors = append(s.Tensors, a.tensor)
	}
	s.Program = &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }}
	if s.Failure == nil && (max(m.in.Bytes(), m.out.Bytes()) > 0 || len(m.more) > 0) {
		f.spec(&s)
	}
	p, err := collective.New(ctx, m.in.Memory(), s)
	if err != nil {
		return nil, err
	}
	return &Plan{Plan: p, algorithm: m.algorithm, bytes: m.in.Bytes()}, nil
}

// check says what is wrong with the tensors and options of this rank.
func (m *maker) check() error {
	for _, t := range m.tensors() {
		if err := t.Err(); err != nil {
			return err
		}
		if t.Bytes() == 0 {
			continue
		}
		if _, _, err := t.Window(); err != nil {
			return err
		}
	}
	switch {
	case m.opts.MaxBlocks < 0:
		return errs.Invalid(m.call, "MaxBlocks", m.opts.MaxBlocks, "0 for the default, or more")
	case m.out.Memory() != m.in.Memory():
		return errs.Foreign(m.call, "out", "a tensor of another group", "a tensor of the same memory as in")
	case m.out.DType() != m.in.DType():
		return errs.Invalid(m.call, "out.DType", m.out.DType(), m.in.DType().String()+", that of in")
	}
	for _, a := range m.more {
		if a.tensor.Memory() != m.in.Memory() {
			return errs.Foreign(m.call, a.name, "a tensor of another group", "a tensor of the same memory as in")
		}
	}
	return nil
}

// far reports whether peers have no pointers.
func (m *maker) far() bool { return !m.in.Memory().Backend().Capabilities().PeerPointers }

// checkRoot says what is wrong with a root.
func (m *maker) checkRoot(root int) error {
	if size := m.in.WorldSize(); root < 0 || root >= size {
		return errs.Invalid(m.call, "root", root, fmt.Sprintf("0 to %d", size-1))
	}
	return nil
}

// checkOp says what is wrong with an operation.
func (m *maker) checkOp(op Op) error {
	if !op.Valid() {
		return errs.Invalid(m.call, "op", op, fmt.Sprint(Ops()))
	}
	return nil
}

// checkApart says whether input and output overlap.
func (m *maker) checkApart(allowed string) error {
	in, out := m.in.Ptr(), m.out.Ptr()
	if in < out.Add(m.out.Bytes()) && out < in.Add(m.in.Bytes()) {
		return errs.Invalid(m.call, "out", fmt.Sprintf("%d bytes at %s", m.out.Bytes(), out),
			fmt.Sprintf("memory apart from in, %d bytes at %s%s", m.in.Bytes(), in, allowed))
	}
	return nil
}

// checkShare is for a collective whose whole tensor has n elements, and whose part one rank's share of them. The part has as many elements as
// the largest share, or is this rank's share of the whole itself.
func (m *maker) checkShare(whole, part tensor.SymmetricTensor, name string) (tensor.SymmetricTensor, error) {
	switch inPlace, err := isShare(m.call, whole, part, name); {
	case err != nil:
		return nil, err
	case inPlace:
		return whole, nil
	}
	return nil, m.checkApart(", or just this rank's share of the larger one")
}

// isShare says whether part is this rank's share of whole itself, in place, and else what is wrong with its number of elements.
func isShare(call string, whole, part tensor.SymmetricTensor, name string) (inPlace bool, err error) {
	w := whole.WorldSize()
	lo, hi := shareOf(whole.NumElements(), w, whole.Rank())
	if part.NumElements() == hi-lo && (hi == lo && whole.NumElements() > 0 || part.Ptr() == whole.Ptr().Add(lo*whole.DType().Bytes())) {
		return true, nil
	}
	if c := shareElements(whole.NumElements(), w); part.NumElements() != c {
		return false, errs.Invalid(call, name+".NumElements", part.NumElements(),
			fmt.Sprintf("%d, the largest of %d shares of %d elements, or just this rank's share of these, in place", c, w, whole.NumElements()))
	}
	return false, nil
}

// shareElements is the most elements that one of size ranks has of n.
func shareElements(n int64, size int) int64 { return (n + int64(size) - 1) / int64(size) }

// shareOf is the range of elements that rank has of n.
func shareOf(n int64, size, rank int) (lo, hi int64) {
	c := shareElements(n, size)
	return min(int64(rank)*c, n), min(int64(rank+1)*c, n)
}

// choose makes Auto and families into one form.
func (m *maker) choose(f collectiveForm) error {
	kind := m.in.Device().Kind()
	asked := m.opts.Algorithm
	m.algorithm = asked
	have := f.algorithms(kind)
	all := append(append([]Algorithm{Auto}, have...), Transfers)
	all = append(all, LibraryCollectives(m.call, m.in.Memory().Backend().Name())...)
	if name := m.in.Memory().Backend().Name(); kind == device.CUDA && (name == NCCL.Backend() || m.in.Memory().MovesBetweenIslands()) && hasRails(m.call) {
		all = append(all, Hierarchical)
	}
	if !asked.known() {
		return errs.Invalid(m.call, "Algorithm", asked, fmt.Sprint(all))
	}
	switch {
	case asked == Auto && (m.far() || !reachable(m.tensors()...)):
		m.algorithm = farForm(m.in.Memory(), m.libraryDoes, LibraryCollectives(m.call, m.in.Memory().Backend().Name())...)
		// Where NCCL has none, nor puts, there is no other form that could be had in its place.
		islands := slices.Contains(have, Hierarchical) && !slices.Contains(m.avoided, Hierarchical) && m.takesIslands() || m.algorithm == NCCL && m.takesRails()
		if islands && m.ordered(Hierarchical) {
			m.algorithm = Hierarchical
		}
	case asked == Auto, asked == OneShot && kind == device.CUDA:
		m.byTable(have)
	case !slices.Contains(all, asked):
		return fmt.Errorf("there is no %s in the form %s on a %s device; there are %v: %w", f.describe(), asked, kind, all, errs.ErrUnsupported)
	}
	if !m.ordered(m.algorithm) {
		return notInRankOrder(asked, m.algorithm)
	}
	return nil
}

// libraryDoes reports whether a library's form does what is asked for, or, where shares are not of one length, Hierarchical, which Auto takes in its place if there is room for it.
func (m *maker) libraryDoes(a Algorithm) bool {
	if m.takesRails() {
		a = Hierarchical
	}
	return !slices.Contains(m.avoided, a) && m.ordered(a) && (!m.combines || Supported(m.in.Device().Kind(), a, m.in.DType(), m.op, m.in.WorldSize()))
}

// ordered reports whether RankOrder allows a form.
func (m *maker) ordered(a Algorithm) bool { return !m.combines || !m.opts.RankOrder || a.RankOrder() }

// notInRankOrder is the error of a form that RankOrder does not allow.
func notInRankOrder(asked, a Algorithm) error {
	instead := fmt.Sprintf("take %s", Auto)
	if asked == Auto {
		instead = "there is no other one here: do without"
	}
	return fmt.Errorf("%s does not combine in the order of the ranks, which RankOrder asks for: %s: %w", a, instead, errs.ErrUnsupported)
}

// takesIslands reports whether Auto takes Hierarchical where not all peers have addresses.
func (m *maker) takesIslands() bool {
	if m.call == "NewAllToAll" {
		return (&allToAll{m}).packs() && hasIslands(m.in.Memory(), m.in, m.out)
	}
	return takesIslands(m.in.Memory(), max(m.in.Bytes(), m.out.Bytes()), m.in, m.out)
}
