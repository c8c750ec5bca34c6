package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/tensor"
)

// TuneKinds are the collectives that are tuned.
var TuneKinds = []string{AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll, AllReduceMany, AllReduceRMSNorm}

// TuneSpec is what the ranks of tune measure. It is the same on all of them.
type TuneSpec struct {
	Kinds       []string      `json:"kinds"`  // of TuneKinds
	Sizes       []int64       `json:"sizes"`  // in bytes, ascending; of AllReduceMany all tensors', and AllReduceRMSNorm is measured with whole rows
	DTypes      []string      `json:"dtypes"` // of reductions; what only moves elements is measured with the first
	Repetitions int           `json:"repetitions"`
	Time        time.Duration `json:"time_ns"` // after which no further size is begun
}

// Candidate is a form with what it is launched with.
type Candidate struct {
	Form   string `json:"form"`
	Blocks int    `json:"blocks,omitempty"`    // the most; 0 is as many as are of use
	Lap    int64  `json:"lap_bytes,omitempty"` // of the form two_shot_flow; 0 is that of the table
}

// String returns the candidate as reports have it: "two_shot_flow, 64 blocks, laps of 32 KiB".
func (c Candidate) String() string {
	text := c.Form
	if c.Blocks > 0 {
		text += fmt.Sprintf(", %d blocks", c.Blocks)
	}
	if c.Lap > 0 {
		text += fmt.Sprintf(", laps of %s", tuning.Size(c.Lap))
	}
	return text
}

// Timed is a candidate with what it took: the median of the repetitions, and half of the range in which the middle half of them is. Microseconds.
type Timed struct {
	Candidate
	Median float64 `json:"median_us"`
	Spread float64 `json:"spread_us"`
}

// Point is what was found of one collective at one size.
type Point struct {
	Collective string  `json:"collective"` // of package tuning
	DType      string  `json:"dtype"`
	Moves      bool    `json:"moves,omitempty"` // it only moves elements, so that the dtype does not matter
	Multicast  bool    `json:"multicast,omitempty"`
	Bytes      int64   `json:"bytes"`
	Default    Timed   `json:"default"` // what the tables in use take
	Best       Timed   `json:"best"`    // the default, unless another one is faster by more than noise; of long messages with the fewest blocks that are hardly slower
	All        []Timed `json:"all"`
}

// Tuned is what rank 0 of tune reports: first where it measures, then points, then why the time was over, if it was.
type Tuned struct {
	Machine *TunedMachine `json:"machine,omitempty"`
	Point   *Point        `json:"point,omitempty"`
	Late    string        `json:"late,omitempty"`
}

// TunedMachine is where the ranks of tune measure, and the rules that they go by otherwise.
type TunedMachine struct {
	Backend   string        `json:"backend"`
	Devices   []string      `json:"devices"`
	Link      string        `json:"link"`
	Driver    string        `json:"driver,omitempty"`
	Ranks     int           `json:"ranks"`
	Multicast bool          `json:"multicast"`
	Tables    string        `json:"tables"` // in use
	Rules     []tuning.Rule `json:"rules"`
	Points    int           `json:"points"` // that there will be
}

// TuneReporter receives what rank 0 of tune finds, one call at a time. An error ends the measuring.
type TuneReporter interface {
	Tuned(found Tuned) error
	// Refuse is called with the reason why nothing is measured. That is not a failure.
	Refuse(reason string) error
}

// The bounds of tune's measurements.
const (
	tuneRepetition = 3 * time.Millisecond // that a repetition takes, if a run is not longer
	mostTuneRuns   = 2000
	hopeless       = 1.5  // times the best, at a size: a one-shot form that takes so much longer is not tried for larger messages
	latencies      = 2    // times the smallest message: the bytes of one that takes longer matter
	contender      = 1.05 // times the best: numbers of blocks are tried of such forms
	leastGain      = 0.02 // of the time: less is noise, however narrow the spread
	tuneTensors    = 16   // of a list, which is cut from one tensor
	tuneTensorsCPU = 8    // on the host, where Auto takes one_shot for no longer list

	roomBytes = 64 << 20 // from so long a message on, other work runs beside it for long enough to matter: the fewest blocks are taken that are hardly slower,
	roomCost  = 1.03     // times the fastest
	roomMost  = 64       // blocks: more leave no room on a GPU, which has some hundred multiprocessors
)

// The numbers of blocks and the lengths of laps that are tried.
var (
	tuneBlocks = []int{16, 32, 64, 128}
	tuneLaps   = []int64{8 << 10, 16 << 10, 32 << 10, 64 << 10}
)

// Tune measures every form of the collectives of spec on this rank and blocks until that is done, or the time is over. It is collective, and all ranks pass the same spec. Rank 0
// reports to rep. After an error the ranks may be at different places, and the process has to end.
func Tune(ctx context.Context, r *symmem.Rank, spec TuneSpec, rep TuneReporter) error {
	t := &tuner{TuneSpec: spec, rep: rep, began: time.Now(), home: r.Memory().Tuning()}
	t.bencher = &bencher{r: r, op: kernels.Sum, spec: Spec{Op: kernels.Sum.String(), Repetitions: spec.Repetitions, Graph: r.Device().Kind() == device.CUDA}, unchecked: true}
	t.pool = &pool{most: spec.Sizes[len(spec.Sizes)-1], kept: map[tensor.DType][]*tensor.Tensor{}}
	return t.run(ctx)
}

// tuner measures on one rank. All of its methods are collective.
type tuner struct {
	*bencher
	TuneSpec
	rep   TuneReporter
	began time.Time
	home  *tuning.Set // the tables that were there before
}

func (t *tuner) run(ctx context.Context) (err error) {
	if refused, err := t.refuse(); refused || err != nil {
		return err
	}
	if t.s, err = t.r.NewStream(); err != nil {
		return err
	}
	defer func() {
		t.r.Memory().SetTuning(t.home)
		err = errors.Join(err, t.pool.close(ctx), t.s.Close())
	}()
	if err := t.tellMachine(ctx); err != nil {
		return err
	}
	for _, kind := range t.Kinds {
		for _, dtype := range t.dtypesOf(kind) {
			t.take(dtype)
			for _, multicast := range t.casts(kind, dtype) {
				forms := &trend{tired: map[string]bool{}}
				for _, bytes := range t.sizesOf(kind) {
					late, err := t.late(ctx)
					if err != nil || late {
						return err
					}
					if err := t.point(ctx, kind, dtype, multicast, bytes, forms); err != nil {
						return fmt.Errorf("tuning %s of %s of %s: %w", kind, bytesize.Text(bytes), dtype, err)
					}
				}
			}
		}
	}
	return nil
}

// refuse says why there is nothing to tune here, alike on all ranks.
func (t *tuner) refuse() (bool, error) {
	reason := ""
	switch {
	case t.r.WorldSize() < 2:
		reason = "a rank alone has nothing to choose: give --ranks 2 or more"
	case !t.r.Capabilities().PeerPointers:
		reason = fmt.Sprintf("backend %s has no peer pointers, so there is one form, transfers, and nothing to choose", t.r.Backend())
	}
	if reason == "" || t.r.Rank() != 0 {
		return reason != "", nil
	}
	return true, t.rep.Refuse(reason)
}

// dtypesOf are the dtypes that a collective is measured with.
func (t *tuner) dtypesOf(kind string) []string {
	if moves(kind) {
		return t.DTypes[:1]
	}
	if kind == AllReduceRMSNorm {
		return slices.DeleteFunc(slices.Clone(t.DTypes), func(name string) bool {
			dtype, _ := tensor.ParseDType(name) // the parent has checked it
			return !canNorm(dtype)
		})
	}
	return t.DTypes
}

// sizesOf are the sizes at which a collective is measured with the dtype that was taken.
func (t *tuner) sizesOf(kind string) []int64 {
	if kind != AllReduceRMSNorm {
		return t.Sizes
	}
	row := normHidden * t.dtype.Bytes()
	return slices.DeleteFunc(slices.Clone(t.Sizes), func(bytes int64) bool { return bytes%row != 0 })
}

// moves reports whether a collective only moves elements.
func moves(kind string) bool { return kind == AllGather || kind == Broadcast || kind == AllToAll }

// casts says for what memory a collective is measured: any, and such with multicast addresses, if there are forms for it and the policy allows it.
func (t *tuner) casts(kind, dtype string) []bool {
	if t.home.Multicast && t.r.Capabilities().Multicast && slices.ContainsFunc(t.forms(kind, dtype, true), tuning.NeedsMulticast) {
		return []bool{false, true}
	}
	return []bool{false}
}

// take makes the bencher measure a dtype.
func (t *tuner) take(dtype string) {
	t.spec.DType = dtype
	t.dtype, _ = tensor.ParseDType(dtype) // the parent has checked it
}

// listOrNorm are the constructors of all-reduces of more than one tensor, in package kernels.
var listOrNorm = map[string]string{AllReduceMany: "NewAllReduceMany", AllReduceRMSNorm: "NewAllReduceRMSNorm"}

// forms lists the forms of a collective that may be in a rule.
func (t *tuner) forms(kind, dtype string, multicast bool) []string {
	t.take(dtype)
	t.spec.Algorithms = []string{AllAlgorithms}
	have := t.algorithms()
	if kind != AllReduce {
		var all []kernels.Algorithm
		if constructor, ok := listOrNorm[kind]; ok {
			all = kernels.CollectiveAlgorithms(constructor, t.r.Device().Kind())
		} else {
			all = t.collectiveForms(kind)
		}
		have = nil
		for _, a := range all {
			have = append(have, a.String())
		}
	}
	link := tuning.LinkHost
	if t.r.Device().Kind() != device.Host {
		link = tuning.LinkNVLink // the forms of all GPUs
	}
	allowed := tuning.Forms(kind, link)
	return slices.DeleteFunc(have, func(form string) bool {
		a, err := kernels.ParseAlgorithm(form)
		return err != nil || !slices.Contains(allowed, form) || tuning.NeedsMulticast(form) && !multicast ||
			kind == AllReduce && !kernels.Supported(t.r.Device().Kind(), a, t.dtype, kernels.Sum, t.r.WorldSize())
	})
}

// tellMachine reports where this is.
func (t *tuner) tellMachine(ctx context.Context) error {
	name, err := json.Marshal(t.r.Device().Name())
	if err != nil {
		return err
	}
	all, err := t.r.Group().AllGather(ctx, "devices to tune", name)
	if err != nil || t.r.Rank() != 0 {
		return err
	}
	m := &TunedMachine{Backend: t.r.Backend(), Link: t.home.Link, Ranks: t.r.WorldSize(), Multicast: t.home.Multicast, Tables: t.home.Names(), Rules: t.home.For(t.r.WorldSize()).Rules}
	for _, text := range all {
		var name string
		if err := json.Unmarshal(text, &name); err != nil {
			return err
		}
		if name == "" { // a processor that does not say what it is called
			name = tuning.AnyDevice
		}
		if !slices.Contains(m.Devices, name) {
			m.Devices = append(m.Devices, name)
		}
	}
	if t.r.Device().Kind() == device.CUDA {
		m.Driver = cuda.ModuleVersion()
		if m.Link == "" {
			m.Link = tuning.LinkNVLink
		}
	}
	for _, kind := range t.Kinds {
		for _, dtype := range t.dtypesOf(kind) {
			t.take(dtype)
			m.Points += len(t.casts(kind, dtype)) * len(t.sizesOf(kind))
		}
	}
	return t.rep.Tuned(Tuned{Machine: m})
}

// late says, on every rank alike, whether rank 0's time is over.
func (t *tuner) late(ctx context.Context) (bool, error) {
	var mine []byte
	if t.r.Rank() == 0 && t.Time > 0 && time.Since(t.began) > t.Time {
		mine = []byte("late")
	}
	all, err := t.r.Group().AllGather(ctx, "time to tune", mine)
	if err != nil || len(all[0]) == 0 {
		return false, err
	}
	if t.r.Rank() == 0 {
		return true, t.rep.Tuned(Tuned{Late: fmt.Sprintf("the time of %s was over", t.Time)})
	}
	return true, nil
}

// trend is how forms did at smaller sizes.
type trend struct {
	tired  map[string]bool // that are not tried any more
	first  float64         // the time of the fastest at the smallest size
	before []Timed         // at the size before
}

// see looks at one size, and finds the one-shot forms that will be slow for all larger messages: those that take much longer than the fastest where messages are long enough to matter, and fall further behind.
func (r *trend) see(all []Timed) {
	fastest := best(all)
	if r.first == 0 {
		r.first = fastest.Median
	}
	grown := func(form string, median float64) float64 {
		for _, c := range r.before {
			if c.Form == form && c.Blocks == 0 {
				return median - c.Median
			}
		}
		return 0
	}
	least := 0.0
	if len(r.before) > 0 {
		least = fastest.Median - best(r.before).Median
	}
	for _, c := range all {
		if strings.HasPrefix(c.Form, kernels.OneShot.String()) && c.Blocks == 0 && c.Form != fastest.Form && c.Median > hopeless*fastest.Median &&
			fastest.Median > latencies*r.first && grown(c.Form, c.Median) > least {
			r.tired[c.Form] = true
		}
	}
	r.before = all
}

// point measures one size.
func (t *tuner) point(ctx context.Context, kind, dtype string, multicast bool, bytes int64, forms *trend) error {
	p := Point{Collective: kind, DType: dtype, Moves: moves(kind), Multicast: multicast, Bytes: bytes}
	choice, ok := t.inUse(kind, dtype, multicast, bytes)
	try := func(c Candidate) (bool, error) {
		if slices.ContainsFunc(p.All, func(o Timed) bool { return o.Candidate == c }) {
			return true, nil
		}
		timed, ok, err := t.timeCandidate(ctx, kind, c, bytes)
		if ok && err == nil {
			p.All = append(p.All, timed)
		}
		return ok, err
	}
	if ok {
		if _, err := try(choice); err != nil {
			return err
		}
	}
	for _, form := range t.forms(kind, dtype, multicast) {
		if forms.tired[form] && form != choice.Form {
			continue
		}
		if _, err := try(t.plain(form, choice)); err != nil {
			return err
		}
	}
	if len(p.All) == 0 {
		return nil
	}
	if p.Default = p.All[0]; ok && p.Default.Candidate != choice {
		ok = false // it cannot be had here
	}
	fastest := best(p.All)
	forms.see(slices.Clone(p.All))
	for _, c := range slices.Clone(p.All) {
		if c.Median > contender*fastest.Median {
			continue
		}
		for _, v := range t.variants(c.Candidate) {
			if _, err := try(v); err != nil {
				return err
			}
		}
	}
	fastest = best(p.All)
	p.Best = p.Default
	if fastest.Candidate != p.Default.Candidate && (!ok || faster(fastest, p.Default)) {
		// It has to win again, right beside what it would replace.
		again, one, err := t.timeCandidate(ctx, kind, p.Default.Candidate, bytes)
		if err != nil {
			return err
		}
		rival, two, err := t.timeCandidate(ctx, kind, fastest.Candidate, bytes)
		if err != nil {
			return err
		}
		if one && two && (faster(rival, again) || !ok && rival.Median < again.Median) {
			p.Default, p.Best = again, rival
		}
	}
	if bytes >= roomBytes {
		if err := t.leaveRoom(ctx, kind, bytes, &p); err != nil {
			return err
		}
	}
	if t.r.Rank() != 0 {
		return nil
	}
	return t.rep.Tuned(Tuned{Point: &p})
}

// leaveRoom makes the best of a point that one with the fewest blocks of its form and lap which is hardly slower, also when both are measured again, one beside the other.
func (t *tuner) leaveRoom(ctx context.Context, kind string, bytes int64, p *Point) error {
	fewer := roomier(p.All, p.Best.Candidate)
	for _, c := range fewer {
		all, one, err := t.timeCandidate(ctx, kind, p.Best.Candidate, bytes)
		if err != nil {
			return err
		}
		few, two, err := t.timeCandidate(ctx, kind, c, bytes)
		if err != nil {
			return err
		}
		if one && two && few.Median <= roomCost*all.Median {
			p.Best = few
			return nil
		}
	}
	return nil
}

// roomier are the candidates that leave more room than one, and are hardly slower than the fastest of its form and lap, those with the fewest blocks first.
func roomier(all []Timed, than Candidate) []Candidate {
	alike := slices.DeleteFunc(slices.Clone(all), func(c Timed) bool { return c.Form != than.Form || c.Lap != than.Lap })
	if len(alike) == 0 {
		return nil
	}
	most := roomCost * best(alike).Median
	var fewer []Candidate
	for _, c := range alike {
		if c.Blocks > 0 && c.Blocks <= roomMost && (than.Blocks == 0 || c.Blocks < than.Blocks) && c.Median <= most {
			fewer = append(fewer, c.Candidate)
		}
	}
	slices.SortFunc(fewer, func(a, b Candidate) int { return a.Blocks - b.Blocks })
	return fewer
}

// plain is a form by itself, or what the tables take if that is the form.
func (t *tuner) plain(form string, choice Candidate) Candidate {
	c := Candidate{Form: form}
	if form == choice.Form {
		return choice
	}
	if form == tuning.Flow {
		c.Lap = tuneLaps[1]
	}
	return c
}

// variants are a form with other numbers of blocks and laps.
func (t *tuner) variants(c Candidate) []Candidate {
	var all []Candidate
	if t.r.Device().Kind() != device.CUDA || c.Form == kernels.Transfers.String() {
		return nil
	}
	if c.Form == tuning.Flow {
		for _, lap := range tuneLaps {
			all = append(all, Candidate{Form: c.Form, Blocks: c.Blocks, Lap: lap})
		}
	}
	for _, n := range append([]int{0}, tuneBlocks...) {
		all = append(all, Candidate{Form: c.Form, Blocks: n, Lap: c.Lap})
	}
	return all
}

// inUse is what the tables take, if it is of the forms that are measured.
func (t *tuner) inUse(kind, dtype string, multicast bool, bytes int64) (Candidate, bool) {
	set := *t.home
	set.Multicast = multicast
	have := t.forms(kind, dtype, multicast)
	step, ok := set.Choose(kind, t.r.WorldSize(), dtype, bytes, true, func(s *tuning.Step) bool { return slices.Contains(have, s.Form) })
	return Candidate{Form: step.Form, Blocks: step.Blocks, Lap: int64(step.LapBytes)}, ok
}

// best is the fastest.
func best(all []Timed) Timed {
	return slices.MinFunc(all, func(a, b Timed) int {
		switch {
		case a.Median < b.Median:
			return -1
		case a.Median > b.Median:
			return 1
		}
		return 0
	})
}

// faster reports whether a is faster than b by more than noise.
func faster(a, b Timed) bool {
	return a.Median+a.Spread < b.Median-b.Spread && a.Median < (1-leastGain)*b.Median
}

// timeCandidate measures one form, through a table that has nothing else. ok is false where it cannot be had, on every rank.
func (t *tuner) timeCandidate(ctx context.Context, kind string, c Candidate, bytes int64) (timed Timed, ok bool, err error) {
	step := tuning.Step{Form: c.Form, Blocks: c.Blocks, LapBytes: tuning.Size(c.Lap)}
	only := &tuning.Table{Link: t.home.Link, Rules: []tuning.Rule{{Collective: kind, Ranks: t.r.WorldSize(), Multicast: tuning.NeedsMulticast(c.Form), Steps: []tuning.Step{step}}}}
	t.r.Memory().SetTuning(&tuning.Set{Tables: []*tuning.Table{only}, Link: t.home.Link, Multicast: true})
	defer t.r.Memory().SetTuning(t.home)
	t.pool.next = 0
	var p *kernels.Plan
	var closeAll func(context.Context) error
	switch kind {
	case AllReduce:
		p, closeAll, err = t.plan(ctx, bytes, kernels.Auto.String())
	case AllReduceMany:
		p, closeAll, err = t.listPlan(ctx, bytes)
	case AllReduceRMSNorm:
		p, closeAll, err = t.normPlan(ctx, bytes)
	default:
		p, _, closeAll, err = t.collectivePlan(ctx, kind, kernels.Auto, bytes)
	}
	if err != nil {
		if cannot(err) {
			return timed, false, nil
		}
		return timed, false, err
	}
	defer func() { err = errors.Join(err, closeAll(ctx)) }()
	if p.Algorithm().String() != c.Form {
		return timed, false, nil
	}
	times, err := t.timePlan(ctx, p)
	if err != nil {
		return timed, false, err
	}
	n := len(times)
	return Timed{Candidate: c, Median: median(times), Spread: (times[(3*n-1)/4] - times[n/4]) / 2}, true, nil
}

// listPlan makes a plan for a list of tensors of bytes in all, with a vector between any two of them, as tensors that adjoin are one on the host.
func (t *tuner) listPlan(ctx context.Context, bytes int64) (*kernels.Plan, func(context.Context) error, error) {
	all, err := t.tensorOf(ctx, t.dtype, bytes)
	if err != nil {
		return nil, nil, err
	}
	width, count := t.dtype.Bytes(), int64(tuneTensors)
	if t.r.Device().Kind() == device.Host {
		count = tuneTensorsCPU
	}
	each := bytes / count / vectorBytes * vectorBytes
	pairs := make([]kernels.Pair, count)
	if each <= vectorBytes { // there is no room for that
		pairs = pairs[:1]
		each = bytes + vectorBytes
	}
	for i := range pairs {
		if pairs[i].In, err = all.Sub(int64(i)*each/width, (each-vectorBytes)/width); err != nil {
			return nil, nil, err
		}
	}
	p, err := kernels.NewAllReduceMany(ctx, pairs, t.op, nil)
	if err != nil {
		return nil, nil, err
	}
	return p, p.Close, nil
}

// normPlan makes a plan for an all-reduce with residual and RMSNorm.
func (t *tuner) normPlan(ctx context.Context, bytes int64) (*kernels.Plan, func(context.Context) error, error) {
	n, err := t.newNorm(ctx, bytes)
	if err != nil {
		return nil, nil, err
	}
	p, err := kernels.NewAllReduceRMSNorm(ctx, n.in, n.n, nil)
	if err != nil {
		return nil, nil, errors.Join(err, n.Close(ctx))
	}
	return p, func(ctx context.Context) error { return errors.Join(p.Close(ctx), n.Close(ctx)) }, nil
}

// cannot reports whether a form cannot be had for want of memory or of something else, which every rank then knows.
func cannot(err error) bool {
	return (errors.Is(err, symmem.ErrNoMemory) || errors.Is(err, symmem.ErrUnsupported) || errors.Is(err, symmem.ErrNoMulticast)) && !errors.Is(err, symmem.ErrMismatch)
}

// timePlan is what a run takes on the slowest rank in each repetition, sorted.
func (t *tuner) timePlan(ctx context.Context, p *kernels.Plan) (_ []float64, err error) {
	enqueue := func() error { return p.Run(t.s) }
	n, err := t.runsOf(ctx, enqueue)
	if err != nil {
		return nil, err
	}
	each := 1
	if t.spec.Graph {
		each = min(graphRuns, n)
		n -= n % each
		graph, failure := t.capture(repeated(each, enqueue))
		if failure != nil {
			return nil, failure
		}
		defer func() { err = errors.Join(err, graph.Close()) }()
		enqueue = func() error { return graph.Launch(t.s) }
	}
	times, err := t.measure(ctx, n, each, enqueue)
	if err != nil {
		return nil, err
	}
	return t.slowest(ctx, times.total)
}

// runsOf is how many runs are worth tuneRepetition, alike on all ranks.
func (t *tuner) runsOf(ctx context.Context, enqueue func() error) (int, error) {
	const tries = 3
	took := make([]float64, 2) // the first does not count
	for i := range took {
		if err := meet(ctx, t.r, t.s); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := repeated(tries, enqueue)(); err != nil {
			return 0, err
		}
		if err := t.s.Synchronize(ctx); err != nil {
			return 0, err
		}
		took[i] = float64(time.Since(began).Nanoseconds()) / tries
	}
	slowest, err := t.slowest(ctx, took[1:])
	if err != nil {
		return 0, err
	}
	return int(min(max(float64(tuneRepetition.Nanoseconds())/max(slowest[0], 1), tries), mostTuneRuns)), nil
}

// pool is tensors that are used again and again, so that a plan costs no rendezvous.
type pool struct {
	most   int64                             // bytes of the largest message
	kept   map[tensor.DType][]*tensor.Tensor // nil among them for one that could not be had
	next   int                               // the number of the next tensor of a plan
	scarce bool                              // there was no memory for the largest message: tensors are as long as what is measured
}

// take gives the next tensor of a plan. Where there is no memory for it on some rank, the error is the same on all. Collective.
func (p *pool) take(ctx context.Context, b *bencher, dtype tensor.DType, bytes int64) (tensor.SymmetricTensor, error) {
	if p.next == len(p.kept[dtype]) {
		p.kept[dtype] = append(p.kept[dtype], nil)
	}
	t := &p.kept[dtype][p.next]
	if *t != nil && (*t).Bytes() < bytes {
		short := *t
		*t = nil
		if err := short.Close(ctx); err != nil {
			return nil, err
		}
	}
	if *t == nil {
		made, err := p.add(ctx, b, dtype, bytes)
		if err != nil {
			return nil, err
		}
		*t = made
	}
	p.next++
	return (*t).Sub(0, (bytes+dtype.Bytes()-1)/dtype.Bytes())
}

// add makes a tensor for messages of any size or, where there is no memory for that, for one of bytes.
func (p *pool) add(ctx context.Context, b *bencher, dtype tensor.DType, bytes int64) (*tensor.Tensor, error) {
	if !p.scarce {
		t, err := b.agreedTensor(ctx, dtype, p.most+int64(b.r.WorldSize())*vectorBytes) // see shareOf
		if err == nil || !cannot(err) {
			return t, err
		}
		p.scarce = true
	}
	return b.agreedTensor(ctx, dtype, bytes)
}

// agreedTensor is newTensor for ranks that go on without the tensor: they have it all, or none.
func (b *bencher) agreedTensor(ctx context.Context, dtype tensor.DType, bytes int64) (*tensor.Tensor, error) {
	t, err := b.r.Zeros(ctx, dtype, (bytes+dtype.Bytes()-1)/dtype.Bytes())
	if voted := b.r.Group().Vote(ctx, "memory to measure with", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, t.Close(ctx))
		}
		return nil, voted
	}
	if err := t.Rendezvous(ctx); err != nil {
		return nil, errors.Join(err, t.Close(ctx))
	}
	return t, nil
}

// close closes the tensors, in the same order on all ranks.
func (p *pool) close(ctx context.Context) error {
	var err error
	for _, d := range tensor.DTypes() {
		for _, t := range p.kept[d] {
			if t != nil {
				err = errors.Join(err, t.Close(ctx))
			}
		}
	}
	return err
}
