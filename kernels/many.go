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
	// Out has the dtype of In. Of NewAllReduceMany it has the number of elements of In, and nil is In itself, in place. Of NewAllGatherMany it has those of all ranks' In, and of
	// NewReduceScatterMany one share of In's: see there.
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
	return newAllReduceMany(pairs, op, opts).make(ctx)
}

func newAllReduceMany(pairs []Pair, op Op, opts *Options) *many {
	return newMany(&manyKind{call: manyCall, title: "all-reduce", table: tuning.AllReduceMany, list: "pairs", combines: true}, pairs, op, 0, opts)
}

const manyCall = "NewAllReduceMany"

// manyKind is which collective of lists one is.
type manyKind struct {
	call     string // the constructor
	title    string // "all-reduce"
	table    string // which table Auto looks in, by its name in package tuning
	list     string // what the constructor calls the list: "pairs"
	combines bool   // it has an operation, and so one dtype
	sharesIn bool   // of each pair every rank has one share of the input in the end: a reduce-scatter
	shares   bool   // or had one of the output in the beginning: an all-gather
	rooted   bool   // one rank has it all in the beginning, in place: a broadcast
}

// many is a collective of a list that is being prepared: what all of them do alike.
type many struct {
	*manyKind
	pairs     []Pair
	op        Op
	root      int
	opts      Options
	memory    *memory.Memory
	algorithm Algorithm   // that was chosen
	maxBlocks int         // opts.MaxBlocks, or fewer if the table says so
	avoided   []Algorithm // that Auto has tried in vain

	dtype   tensor.DType // of all, if it combines
	parts   []part       // that have elements
	runs    []manyRun    // of these, for a kernel of the host; of an all-reduce only
	bytes   int64        // of all inputs
	message int64        // of all inputs or outputs, whichever is more: the same on all ranks
}

// part is one pair with elements. In place it has one tensor, the larger one.
type part struct {
	Pair
	in, out int  // the numbers of its tensors in the Spec
	inPlace bool // the smaller tensor is a part of the larger one, or both are one
}

// newMany is a list as the caller gives it. Of one whose tensors are not there it has no memory.
func newMany(kind *manyKind, pairs []Pair, op Op, root int, opts *Options) *many {
	m := &many{manyKind: kind, pairs: slices.Clone(pairs), op: op, root: root, memory: memoryOf(pairs)}
	if opts != nil {
		m.opts = *opts
	}
	return m
}

// make makes the plan.
func (m *many) make(ctx context.Context) (*Plan, error) {
	ctx, missing := errs.WithContext(m.call, ctx, nil)
	if m.memory == nil {
		return nil, errors.Join(missing, m.given())
	}
	return inTurn(ctx, m.memory, m.call, func(ctx context.Context, gaveUp error) (*Plan, error) { return m.plan(ctx, cmp.Or(gaveUp, missing)) })
}

// memoryOf is the memory of the first tensor that has one.
func memoryOf(pairs []Pair) *memory.Memory {
	for _, p := range pairs {
		for _, t := range []tensor.SymmetricTensor{p.In, p.Out} {
			if usable("", "", t) == nil {
				return t.Memory()
			}
		}
	}
	return nil
}

// name says which tensor of the list one is: "pairs[3].Out", or "tensors[3]" of a list that has one for each.
func (m *many) name(i int, which string) string {
	if m.rooted {
		return fmt.Sprintf("%s[%d]", m.list, i)
	}
	return fmt.Sprintf("%s[%d].%s", m.list, i, which)
}

// whole is the tensor of a pair that is alike on all ranks in place: of one that is shared out, the larger one.
func (m *many) whole(p Pair) tensor.SymmetricTensor {
	if m.shares {
		return p.Out
	}
	return p.In
}

// given says what is missing in the list.
func (m *many) given() error {
	if len(m.pairs) < 1 || len(m.pairs) > MaxPairs {
		return errs.Invalid(m.call, m.list, fmt.Sprintf("a list of %d", len(m.pairs)), fmt.Sprintf("1 to %d %s", MaxPairs, m.list))
	}
	var all []error
	look := func(arg string, t tensor.SymmetricTensor) {
		if err := usable(m.call, arg, t); err != nil {
			all = append(all, fmt.Errorf("%s: %w", arg, err))
		}
	}
	for i, p := range m.pairs {
		look(m.name(i, "In"), p.In)
		if !errs.IsNil(p.Out) || m.shares || m.sharesIn {
			look(m.name(i, "Out"), p.Out)
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
		return nil, fmt.Errorf("preparing %s of many tensors: %w", m.title, err)
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
	s := collective.Spec{Name: m.call, Failure: failure, FirstEpoch: m.opts.FirstEpoch, Exclusive: m.opts.Exclusive}
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
	size := m.memory.Group().Size()
	switch {
	case m.combines && !m.op.Valid():
		return errs.Invalid(m.call, "op", m.op, fmt.Sprint(Ops()))
	case m.rooted && (m.root < 0 || m.root >= size):
		return errs.Invalid(m.call, "root", m.root, fmt.Sprintf("0 to %d", size-1))
	case m.opts.MaxBlocks < 0:
		return errs.Invalid(m.call, "MaxBlocks", m.opts.MaxBlocks, "0 for the default, or more")
	}
	m.dtype = m.pairs[0].In.DType()
	inPlace := make([]bool, len(m.pairs))
	for i := range m.pairs {
		p := &m.pairs[i]
		if errs.IsNil(p.Out) {
			p.Out = p.In
		}
		var err error
		if inPlace[i], err = m.checkPair(*p); err != nil {
			return fmt.Errorf("%s[%d]: %w", m.list, i, err)
		}
	}
	if err := m.checkApart(inPlace); err != nil {
		return err
	}
	numbers := 0
	for i, p := range m.pairs {
		if max(p.In.Bytes(), p.Out.Bytes()) == 0 {
			continue
		}
		v := part{Pair: p, in: numbers, out: numbers, inPlace: inPlace[i]}
		if !v.inPlace {
			v.out++
		}
		numbers = v.out + 1
		m.parts = append(m.parts, v)
		m.bytes += p.In.Bytes()
		m.message += max(p.In.Bytes(), p.Out.Bytes())
	}
	if m.shares || m.sharesIn || m.rooted {
		return nil
	}
	var err error
	m.runs, err = m.findRuns()
	return err
}

// checkPair says what is wrong with one pair, and whether it is in place.
func (m *many) checkPair(p Pair) (inPlace bool, err error) {
	for _, t := range []tensor.SymmetricTensor{p.In, p.Out} {
		if err := t.Err(); err != nil {
			return false, err
		}
		if t.Memory() != m.memory {
			return false, errs.Foreign(m.call, m.list, fmt.Sprintf("%s of another group", t), "tensors of one memory")
		}
		if m.combines && t.DType() != m.dtype {
			return false, errs.Invalid(m.call, "DType", t.DType(), m.dtype.String()+", that of pairs[0].In: a plan has one dtype")
		}
		if t.Bytes() == 0 {
			continue
		}
		if _, _, err := t.Window(); err != nil {
			return false, err
		}
	}
	if p.Out.DType() != p.In.DType() {
		return false, errs.Invalid(m.call, "Out.DType", p.Out.DType(), p.In.DType().String()+", that of In")
	}
	switch {
	case m.shares:
		return isShare(m.call, p.Out, p.In, "In")
	case m.sharesIn:
		return isShare(m.call, p.In, p.Out, "Out")
	case p.Out.NumElements() != p.In.NumElements():
		return false, errs.Invalid(m.call, "Out.NumElements", p.Out.NumElements(), fmt.Sprintf("%d, the input's", p.In.NumElements()))
	}
	return p.In.Ptr() == p.Out.Ptr(), nil
}

// checkApart says which outputs overlap anything else of the list. In place the larger tensor counts as an output.
func (m *many) checkApart(inPlace []bool) error {
	type span struct {
		from, to device.Ptr
		pair     int
		written  bool
	}
	var spans []span
	add := func(t tensor.SymmetricTensor, pair int, written bool) {
		if n := t.Bytes(); n > 0 {
			spans = append(spans, span{t.Ptr(), t.Ptr().Add(n), pair, written})
		}
	}
	for i, p := range m.pairs {
		if inPlace[i] {
			add(m.whole(p), i, true)
			continue
		}
		add(p.Out, i, true)
		add(p.In, i, false)
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
			return errs.Invalid(m.call, m.name(s.pair, "Out"), fmt.Sprintf("%d bytes at %s", s.to-s.from, s.from),
				fmt.Sprintf("memory apart from the tensors of %s[%d], %d bytes at %s", m.list, before.pair, before.to-before.from, before.from))
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

// forms lists the forms on the memory's device.
func (m *many) forms() []Algorithm {
	kind := m.memory.Device().Kind()
	switch {
	case !m.shares && !m.sharesIn && !m.rooted:
		return manyAlgorithms(kind, m.dtype)
	case kind != device.CUDA:
		return []Algorithm{OneShot, Transfers}
	case m.sharesIn && ptx.ManyLine(m.dtype.String()) == 16:
		return []Algorithm{OneShotPush, OneShotPull, Transfers}
	}
	return []Algorithm{OneShotLL, OneShotPull, Transfers}
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
	have := m.forms()
	asked := m.opts.Algorithm
	m.maxBlocks = m.opts.MaxBlocks
	shared := m.shares || m.sharesIn || m.rooted
	if !asked.known() {
		return errs.Invalid(m.call, "Algorithm", asked, fmt.Sprint(append([]Algorithm{Auto}, have...)))
	}
	switch {
	case asked == Auto && (m.message == 0 || !m.reachable()):
		m.algorithm = Transfers
	case shared && (asked == Auto || asked == OneShot):
		m.chooseOneShot(have)
	case asked == Auto && size == 1:
		m.algorithm = have[1] // a copy, or the rounding of an average
	case asked == Auto:
		_, special := ptx.ManyPushWhole(m.dtype.String(), int(m.op), size, false) // else rules for whole vectors were measured with another kernel
		l := lookup{tables: m.memory.Tuning(), collective: m.table, kind: kind, dtype: m.dtype.String(), bytes: m.bytes, size: size, whole: special && m.wholeVectors()}
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
	case asked == TwoShot && !shared:
		m.algorithm = have[1]
	case slices.Contains(have, asked):
		m.algorithm = asked
	default:
		what, there := m.title+" of many tensors", asks(have)
		if m.combines {
			what = fmt.Sprintf("%s of many %s", m.title, m.dtype)
		}
		if shared {
			there = slices.DeleteFunc(there, func(a Algorithm) bool { return a == TwoShot })
		}
		return fmt.Errorf("there is no %s in the form %s on a %s device; there are %v: %w", what, asked, kind, there, errs.ErrUnsupported)
	}
	return nil
}

// chooseOneShot makes Auto and OneShot into a form of a collective that is no all-reduce: that of a single tensor of all bytes, by its table. Where that would store pieces, a list loads
// them, and where it would send long shares in chunks, too.
func (m *many) chooseOneShot(have []Algorithm) {
	kind, size := m.memory.Device().Kind(), m.memory.Group().Size()
	direct := OneShotPull
	if kind != device.CUDA {
		direct = OneShot
	}
	m.algorithm = direct
	if kind != device.CUDA || size == 1 {
		return
	}
	l := lookup{tables: m.memory.Tuning(), collective: m.table, asked: m.opts.Algorithm, kind: kind, dtype: m.dtype.String(), bytes: m.message, size: size}
	l.can = func(a Algorithm) bool {
		return !a.NeedsMulticast() && !slices.Contains(m.avoided, a) && slices.Contains([]Algorithm{OneShotLL, OneShotPush, OneShotPull, TwoShotPush, TwoShotPull, Transfers}, a)
	}
	c, ok := l.find()
	small := !m.sharesIn || m.message/int64(size) < flowLeastBytes
	switch {
	case !ok:
	case c.algorithm == Transfers:
		m.algorithm = Transfers
	case slices.Contains([]Algorithm{OneShotLL, OneShotPush}, c.algorithm) && slices.Contains(have, c.algorithm) && small:
		m.algorithm = c.algorithm
	}
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
		mine.What = m.what()
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	blobs, err := m.memory.Group().AllGather(ctx, "the tensors of "+m.title+" of many", blob)
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
	longest := 0
	for _, r := range all {
		longest = max(longest, len(r.What))
	}
	for i := range longest {
		var values []string
		differ := false
		for _, r := range all {
			value := "nothing" // where the first lines are alike, so are the lengths, unless it is another program that says so
			if i < len(r.What) {
				value = r.What[i]
			}
			values = append(values, value)
			differ = differ || value != values[0]
		}
		what := fmt.Sprintf("%s[%d]", m.list, i-1)
		switch {
		case i > 0:
		case m.combines:
			what = "op, length and dtype of the list"
		case m.rooted:
			what = "length and root of the list"
		default:
			what = "length of the list"
		}
		if differ {
			return &group.MismatchError{What: what, Values: values}
		}
	}
	return nil
}

// what says what the list is, and then each pair, alike on ranks that come with the same.
func (m *many) what() []string {
	first := fmt.Sprintf("%d tensors", len(m.pairs))
	switch {
	case m.combines:
		first = fmt.Sprintf("%s of %s of %s", m.op, first, m.dtype)
	case m.rooted:
		first += fmt.Sprintf(" from rank %d", m.root)
	}
	all := []string{first}
	for _, p := range m.pairs {
		dtype := ""
		if !m.combines {
			dtype = p.In.DType().String() + ", "
		}
		in, out := placeOf(p.In), placeOf(p.Out)
		inPlace, _ := m.checkPair(p) // which has been right
		switch {
		case m.rooted:
			all = append(all, dtype+in)
		case inPlace && (m.shares || m.sharesIn): // the share is at another place on each rank
			all = append(all, fmt.Sprintf("%s%s, of which a share, in place", dtype, placeOf(m.whole(p))))
		default:
			all = append(all, dtype+in+" to "+out)
		}
	}
	return all
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
	what := m.title
	size := fmt.Sprintf("%d bytes", m.message)
	switch {
	case m.combines:
		what = fmt.Sprintf("%s %s", m.title, m.op)
		size = fmt.Sprintf("%d %s", m.message/m.dtype.Bytes(), m.dtype)
	case m.rooted:
		what = fmt.Sprintf("%s from rank %d", m.title, m.root)
	}
	s.Name = fmt.Sprintf("%s of %d tensors of %s in all, %s", what, len(m.pairs), size, m.algorithm)
	s.Parameters = fmt.Sprintf("at most %d blocks", m.maxBlocks)
	if m.opts.Algorithm == Auto {
		s.Parameters += ", chosen by auto" // who asks for the form does not go on with another one
	}
	s.Program = &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }}
	for _, v := range m.parts {
		if v.inPlace {
			s.Tensors = append(s.Tensors, m.whole(v.Pair))
		} else {
			s.Tensors = append(s.Tensors, v.In, v.Out)
		}
	}
	kind := m.memory.Device().Kind()
	switch {
	case m.message == 0:
		s.Tensors = []tensor.SymmetricTensor{m.pairs[0].In}
	case m.sharesIn:
		(&manyScatter{m}).spec(s, kind)
	case m.shares, m.rooted:
		(&manyMoves{m}).spec(s, kind)
	case m.algorithm == Transfers:
		m.byTransfers(s)
	case kind == device.CUDA:
		m.onCUDA(s)
	default:
		m.onHost(s)
	}
}
