package kernels

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Pair is one tensor of a list: what goes in, and where the result goes.
type Pair struct {
	In tensor.SymmetricTensor
	// Out has the dtype and the number of elements of In. Nil is In itself, in place.
	Out tensor.SymmetricTensor
}

// MaxPairs is how many pairs a list may have.
const MaxPairs = 4096

// NewAllReduceMany prepares an all-reduce of many tensors at once: after a run, every pair's Out is the combination by op of its In on all
// ranks, in the order of the ranks: the bits are those that a plan of that pair alone gives in any form with [Algorithm.RankOrder]. A run is
// one launch and one exchange, as a group of calls is in NCCL: of many small tensors it takes little more than of one. On the host, tensors
// that adjoin in memory cost what one with their bytes does. The gradients of a model are such a list, without a copy to a bucket of the user's.
//
// All tensors have one dtype, since one kernel adds them; make a plan for each dtype that there is. Every number of elements works at every
// place, 0 too. Inputs may overlap each other. An output overlaps nothing else of the list, but may be its own input. There are 1 to
// [MaxPairs] pairs.
//
// The forms are, of [Options.Algorithm]: OneShot and TwoShot, which on CUDA are OneShotPush (OneShotLL for dtypes other than f32, f16 and bf16)
// and TwoShotPull, and Transfers, which gathers the list in the workspace, sends that, and scatters the result. Auto chooses by the size of all
// tensors together.
//
// Collective: all ranks come with the same list, op and options. Where lists differ every rank gets an ErrMismatch with the number of the first
// pair that does and everybody's value of it. The tensors must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for a list that is empty or too long, a nil input, pairs that do not fit or overlap, an
// operation or option that does not exist, and ErrUnsupported for a form that a list has not on the device. An empty list, or one without any
// tensor, is an error of this rank alone: it does not say with whom.
func NewAllReduceMany(ctx context.Context, pairs []Pair, op Op, opts *Options) (*Plan, error) {
	m := &many{pairs: slices.Clone(pairs), op: op}
	if opts != nil {
		m.opts = *opts
	}
	ctx, missing := errs.WithContext(manyCall, ctx, nil)
	if m.memory = memoryOf(pairs); m.memory == nil {
		return nil, errors.Join(missing, m.given())
	}
	return inTurn(ctx, m.memory, manyCall, func(ctx context.Context, gaveUp error) (*Plan, error) { return m.plan(ctx, cmp.Or(gaveUp, missing)) })
}

const manyCall = "NewAllReduceMany"

// memoryOf is the memory of the first tensor that has one.
func memoryOf(pairs []Pair) *memory.Memory {
	for _, p := range pairs {
		for _, t := range []tensor.SymmetricTensor{p.In, p.Out} {
			if usable(manyCall, "", t) == nil {
				return t.Memory()
			}
		}
	}
	return nil
}

// many is an all-reduce of a list that is being prepared.
type many struct {
	pairs     []Pair
	op        Op
	opts      Options
	memory    *memory.Memory
	algorithm Algorithm   // that was chosen
	maxBlocks int         // opts.MaxBlocks, or fewer if the table says so
	avoided   []Algorithm // that Auto has tried in vain

	dtype tensor.DType
	parts []part    // that have elements
	runs  []manyRun // of these, for a kernel of the host
	bytes int64     // of all inputs
}

// part is one pair with elements. In place it has one tensor.
type part struct {
	Pair
	in, out int // the numbers of its tensors in the Spec
}

// given says what is missing in the list.
func (m *many) given() error {
	if len(m.pairs) < 1 || len(m.pairs) > MaxPairs {
		return errs.Invalid(manyCall, "pairs", fmt.Sprintf("a list of %d", len(m.pairs)), fmt.Sprintf("1 to %d pairs", MaxPairs))
	}
	var all []error
	look := func(arg string, t tensor.SymmetricTensor) {
		if err := usable(manyCall, arg, t); err != nil {
			all = append(all, fmt.Errorf("%s: %w", arg, err))
		}
	}
	for i, p := range m.pairs {
		look(fmt.Sprintf("pairs[%d].In", i), p.In)
		if !errs.IsNil(p.Out) {
			look(fmt.Sprintf("pairs[%d].Out", i), p.Out)
		}
	}
	return errors.Join(all...)
}

func (m *many) plan(ctx context.Context, gaveUp error) (*Plan, error) {
	failure := cmp.Or(gaveUp, m.check())
	if failure == nil {
		failure = m.choose()
	}
	if err := m.agree(ctx, failure); err != nil {
		return nil, fmt.Errorf("preparing an all-reduce of many tensors: %w", err)
	}
	return untilHad(m.memory, m.opts.Algorithm, &m.avoided, func() (*Plan, Algorithm, error) {
		if len(m.avoided) > 0 {
			failure = m.choose()
		}
		p, err := m.planOnce(ctx, failure)
		return p, m.algorithm, err
	})
}

// planOnce is plan for a list that the ranks have agreed on, in the form that was chosen.
func (m *many) planOnce(ctx context.Context, failure error) (*Plan, error) {
	s := collective.Spec{Name: manyCall, Failure: failure, FirstEpoch: m.opts.FirstEpoch, Exclusive: m.opts.Exclusive}
	if failure == nil {
		m.spec(&s)
	}
	p, err := collective.New(ctx, m.memory, s)
	if err != nil {
		return nil, err
	}
	return &Plan{Plan: p, algorithm: m.algorithm, bytes: m.bytes}, nil
}

// check says what is wrong with this rank's request, and lists the parts.
func (m *many) check() error {
	if err := m.given(); err != nil {
		return err
	}
	switch {
	case !m.op.Valid():
		return errs.Invalid(manyCall, "op", m.op, fmt.Sprint(Ops()))
	case m.opts.MaxBlocks < 0:
		return errs.Invalid(manyCall, "MaxBlocks", m.opts.MaxBlocks, "0 for the default, or more")
	}
	m.dtype = m.pairs[0].In.DType()
	for i := range m.pairs {
		p := &m.pairs[i]
		if errs.IsNil(p.Out) {
			p.Out = p.In
		}
		if err := m.checkPair(*p); err != nil {
			return fmt.Errorf("pairs[%d]: %w", i, err)
		}
	}
	if err := m.checkApart(); err != nil {
		return err
	}
	numbers := 0
	for _, p := range m.pairs {
		if p.In.Bytes() == 0 {
			continue
		}
		v := part{Pair: p, in: numbers, out: numbers}
		if p.In.Ptr() != p.Out.Ptr() {
			v.out++
		}
		numbers = v.out + 1
		m.parts = append(m.parts, v)
		m.bytes += p.In.Bytes()
	}
	var err error
	m.runs, err = m.findRuns()
	return err
}

// checkPair says what is wrong with one pair.
func (m *many) checkPair(p Pair) error {
	for _, t := range []tensor.SymmetricTensor{p.In, p.Out} {
		if err := t.Err(); err != nil {
			return err
		}
		if t.Memory() != m.memory {
			return errs.Foreign(manyCall, "pairs", fmt.Sprintf("%s of another group", t), "tensors of one memory")
		}
		if t.DType() != m.dtype {
			return errs.Invalid(manyCall, "DType", t.DType(), m.dtype.String()+", that of pairs[0].In: a plan has one dtype")
		}
		if t.Bytes() == 0 {
			continue
		}
		if _, _, err := t.Window(); err != nil {
			return err
		}
	}
	if p.Out.NumElements() != p.In.NumElements() {
		return errs.Invalid(manyCall, "Out.NumElements", p.Out.NumElements(), fmt.Sprintf("%d, the input's", p.In.NumElements()))
	}
	return nil
}

// checkApart says which outputs overlap anything else of the list.
func (m *many) checkApart() error {
	type span struct {
		from, to device.Ptr
		pair     int
		written  bool
	}
	var spans []span
	for i, p := range m.pairs {
		n := p.In.Bytes()
		if n == 0 {
			continue
		}
		spans = append(spans, span{p.Out.Ptr(), p.Out.Ptr().Add(n), i, true})
		if p.In.Ptr() != p.Out.Ptr() {
			spans = append(spans, span{p.In.Ptr(), p.In.Ptr().Add(n), i, false})
		}
	}
	slices.SortFunc(spans, func(a, b span) int {
		if a.from < b.from {
			return -1
		}
		if a.from > b.from {
			return 1
		}
		return a.pair - b.pair
	})
	var last, lastWritten span // which of those so far end last
	for _, s := range spans {
		before := lastWritten
		if s.written {
			before = last
		}
		if s.from < before.to {
			if !s.written {
				s, before = before, s
			}
			return errs.Invalid(manyCall, fmt.Sprintf("pairs[%d].Out", s.pair), fmt.Sprintf("%d bytes at %s", s.to-s.from, s.from),
				fmt.Sprintf("memory apart from the tensors of pairs[%d], %d bytes at %s", before.pair, before.to-before.from, before.from))
		}
		if s.to > last.to {
			last = s
		}
		if s.written && s.to > lastWritten.to {
			lastWritten = s
		}
	}
	return nil
}

// manyAlgorithms lists the forms on a kind of device: of one exchange, of two, and of transfers.
func manyAlgorithms(kind device.Kind, dtype tensor.DType) []Algorithm {
	switch {
	case kind != device.CUDA:
		return CollectiveAlgorithms(manyCall, kind)
	case ptx.ManyLine(dtype.String()) == 16:
		return []Algorithm{OneShotPush, TwoShotPull, Transfers}
	}
	return []Algorithm{OneShotLL, TwoShotPull, Transfers}
}

// asks lists what may be asked for where these forms are.
func asks(have []Algorithm) []Algorithm {
	all := []Algorithm{Auto, OneShot, TwoShot}
	for _, a := range have {
		if !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// choose makes Auto and families into one form.
func (m *many) choose() error {
	kind, size := m.memory.Device().Kind(), m.memory.Group().Size()
	have := manyAlgorithms(kind, m.dtype)
	asked := m.opts.Algorithm
	m.maxBlocks = m.opts.MaxBlocks
	if !asked.known() {
		return errs.Invalid(manyCall, "Algorithm", asked, fmt.Sprint(append([]Algorithm{Auto}, have...)))
	}
	switch {
	case asked == Auto && (m.bytes == 0 || !m.reachable()):
		m.algorithm = Transfers
	case asked == Auto && size == 1:
		m.algorithm = have[1] // a copy, or the rounding of an average
	case asked == Auto:
		l := lookup{tables: m.memory.Tuning(), collective: tuning.AllReduceMany, kind: kind, dtype: m.dtype.String(), bytes: m.bytes, size: size, whole: m.wholeVectors()}
		l.can = func(a Algorithm) bool { return slices.Contains(have, a) && !slices.Contains(m.avoided, a) }
		c, ok := l.find()
		if !ok {
			c.algorithm = have[1]
		}
		if kind != device.CUDA && c.algorithm == OneShot && len(m.runs) > manyOneShot {
			c.algorithm = have[1]
		}
		m.algorithm, m.maxBlocks = c.algorithm, atMostBlocks(m.opts.MaxBlocks, c.blocks)
	case asked == OneShot:
		m.algorithm = have[0]
	case asked == TwoShot:
		m.algorithm = have[1]
	case slices.Contains(have, asked):
		m.algorithm = asked
	default:
		return fmt.Errorf("there is no all-reduce of many %s in the form %s on a %s device; there are %v: %w", m.dtype, asked, kind, asks(have), errs.ErrUnsupported)
	}
	return nil
}

// reachable reports whether every peer's copy of the tensors has an address in this process.
func (m *many) reachable() bool {
	if !m.memory.Backend().Capabilities().PeerPointers {
		return false
	}
	for _, v := range m.parts {
		if !reachable(v.In, v.Out) {
			return false
		}
	}
	return true
}

// manyRecord is what the ranks compare before they make the plan.
type manyRecord struct {
	Failed bool     `json:"failed,omitempty"` // this rank tells why in the next step
	What   []string `json:"what"`             // what the list is, and then each pair
}

// agree compares the ranks' lists, so that it can be said where they differ. Collective.
func (m *many) agree(ctx context.Context, failure error) error {
	mine := manyRecord{Failed: failure != nil}
	if failure == nil {
		mine.What = []string{fmt.Sprintf("%s of %d tensors of %s", m.op, len(m.pairs), m.dtype)}
		for _, p := range m.pairs {
			mine.What = append(mine.What, placeOf(p.In)+" to "+placeOf(p.Out))
		}
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	blobs, err := m.memory.Group().AllGather(ctx, "the tensors of an all-reduce of many", blob)
	if err != nil {
		return err
	}
	all := make([]manyRecord, len(blobs))
	for r, b := range blobs {
		if err := json.Unmarshal(b, &all[r]); err != nil {
			return fmt.Errorf("reading the list of rank %d: %w", r, err)
		}
		if all[r].Failed {
			return nil // which is told
		}
	}
	for i := range all[0].What {
		var values []string
		differ := false
		for _, r := range all {
			values = append(values, r.What[i]) // where the first lines are alike, so are the lengths
			differ = differ || r.What[i] != all[0].What[i]
		}
		what := fmt.Sprintf("pairs[%d]", i-1)
		if i == 0 {
			what = "op, length and dtype of the list"
		}
		if differ {
			return &group.MismatchError{What: what, Values: values}
		}
	}
	return nil
}

// placeOf says where the memory of a tensor is in a way that is the same on every rank. Vectors of GPUs begin at multiples of 16: which of its bytes does
// is the same, too.
func placeOf(t tensor.SymmetricTensor) string {
	if t.Bytes() == 0 {
		return "nothing"
	}
	w, offset, err := t.Window()
	if err != nil {
		return err.Error()
	}
	place := fmt.Sprintf("%d elements at byte %d of window %d", t.NumElements(), offset, w.Number())
	if t.Device().Kind() == device.CUDA && t.Ptr()%manyAlign != 0 {
		place += fmt.Sprintf(", %d bytes behind a multiple of %d", t.Ptr()%manyAlign, manyAlign)
	}
	return place
}

// spec makes the spec that of the form that was chosen.
func (m *many) spec(s *collective.Spec) {
	s.Name = fmt.Sprintf("all-reduce %s of %d tensors of %d %s in all, %s", m.op, len(m.pairs), m.bytes/m.dtype.Bytes(), m.dtype, m.algorithm)
	s.Parameters = fmt.Sprintf("at most %d blocks", m.maxBlocks)
	if m.opts.Algorithm == Auto {
		s.Parameters += ", chosen by auto" // who asks for the form does not go on with another one
	}
	s.Program = &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }}
	for _, v := range m.parts {
		if s.Tensors = append(s.Tensors, v.In); v.out != v.in {
			s.Tensors = append(s.Tensors, v.Out)
		}
	}
	switch {
	case m.bytes == 0:
		s.Tensors = []tensor.SymmetricTensor{m.pairs[0].In}
	case m.algorithm == Transfers:
		m.byTransfers(s)
	case m.memory.Device().Kind() == device.CUDA:
		m.onCUDA(s)
	default:
		m.onHost(s)
	}
}
