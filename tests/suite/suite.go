package suite

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// CaseTimeout bounds each case.
const CaseTimeout = 60 * time.Second

// Case is one thing that every backend must do alike.
type Case struct {
	// Name is a path of lower-case letters, digits and underscores: "all_reduce/two_shot/bf16/1048577/delayed".
	Name string
	// Needs lists the capabilities, by their JSON names, without which the case is skipped; beside these there are [Puts] and [SeveralIslands].
	Needs []string
	// MinWorld is the least world size that the case makes sense at.
	MinWorld int
	// Run is the case. Every rank runs it; an error on any rank fails it.
	Run func(ctx context.Context, e *Env) error
}

// Group is the first element of the name.
func (c Case) Group() string {
	g, _, _ := strings.Cut(c.Name, "/")
	return g
}

// Options choose cases. Nil is all of them.
type Options struct {
	// Device is the kind of device that the backend works on; default [device.Host].
	Device device.Kind
	// Backend is the name of the backend, for the cases of its library's own all-reduces; default: there are none.
	Backend string
	// World is the number of ranks; default 2.
	World int
	// Filter keeps the cases whose name it matches.
	Filter *regexp.Regexp
	// Short leaves out the large sizes and does fewer rounds, for machines where many worlds are tested.
	Short bool
	// Simulated takes sizes with which simulated GPUs, which have few multiprocessors, are as full as real ones are with large messages.
	Simulated bool
}

// Cases gives the cases in a fixed order, the same on every rank.
func Cases(opts *Options) []Case {
	if opts == nil {
		opts = &Options{}
	}
	kind, world := cmp.Or(opts.Device, device.Host), cmp.Or(opts.World, 2)
	all := slices.Concat(
		memoryCases(opts.Short),
		agreementCases(),
		transferCases(opts.Short),
		sliceCases(),
		heapCases(kind, opts.Backend, world),
		signalCases(opts.Short),
		graphCases(kind, opts.Backend, world),
		windowCases(),
		allReduceCases(kind, opts.Backend, world, opts.Short),
		planCases(kind, opts.Backend, world, opts.Short),
		libraryCases(kind, opts.Backend, world),
		collectiveCases(kind, opts.Backend),
		libraryCollectiveCases(opts.Backend),
		dispatchCases(kind),
		barrierCases(kind, opts.Backend),
		rmsNormCases(kind),
		quantizedCases(),
		manyCases(kind),
		rankCases(),
		sameBitsCases(opts.Short),
		groupCases(),
		lifetimeCases(kind, opts.Backend, world, opts.Short),
		badInputCases(),
	)
	if opts.Filter == nil {
		return all
	}
	return slices.DeleteFunc(all, func(c Case) bool { return !opts.Filter.MatchString(c.Name) })
}

// Status is how a case ended.
type Status string

// The ways a case ends.
const (
	Passed  Status = "passed"
	Failed  Status = "failed"
	Skipped Status = "skipped"
)

// Result is how one case ended, for the whole group.
type Result struct {
	Case   string `json:"case"`
	Status Status `json:"status"`
	Reason string `json:"reason,omitempty"` // of a failure: each rank's; of a skip: what is missing, in words
	// Missing is, of a skip, what is missing: the JSON name of a capability, [SeveralIslands] or [MoreRanks].
	Missing string        `json:"missing,omitempty"`
	Took    time.Duration `json:"took_ns"`
}

// MoreRanks is what a case lacks that makes no sense with so few ranks.
const MoreRanks = "more_ranks"

// Summary counts results.
type Summary struct {
	Passed, Failed, Skipped int
}

// String is the line that a run ends with.
func (s Summary) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", s.Passed, s.Failed, s.Skipped)
}

// Add counts a result.
func (s *Summary) Add(r Result) {
	switch r.Status {
	case Passed:
		s.Passed++
	case Failed:
		s.Failed++
	case Skipped:
		s.Skipped++
	}
}

// Env is what a case works with on one rank.
type Env struct {
	// R is the rank, in a group that only this run's cases use.
	R *symmem.Rank
	// S is a stream; the case leaves it idle.
	S device.Stream
	// Rand gives this rank's random numbers, from the case's name and the rank.
	Rand *rand.Rand
	// Short is set when fewer rounds are wanted.
	Short bool
	// Simulated is set on simulated GPUs.
	Simulated bool
}

// Skew makes this rank a little later than the others, at random, to shake out what works only when all come together.
func (e *Env) Skew() {
	if e.Rand.IntN(2) == 0 {
		time.Sleep(time.Duration(e.Rand.IntN(3000)) * time.Microsecond)
	}
}

// Run runs the cases in order on every rank of r's group and agrees on each result; report, which may be nil, is called
// with each. Collective: every rank comes with the same cases, but each is asked for only when the one before it has been reported, so
// that they may be chosen while others run. The error is not about a case: the run could not go on, as when a rank has died.
func Run(ctx context.Context, r *symmem.Rank, cases iter.Seq[Case], opts *Options, report func(Result)) (Summary, error) {
	if opts == nil {
		opts = &Options{}
	}
	var sum Summary
	all := make([]int, r.WorldSize())
	for i := range all {
		all[i] = i
	}
	// Cases run in a group of their own: when one fails half way, its ranks no longer agree where they are, and the next
	// cases get a new group. The outer group agrees on the results.
	var env *Env
	leave := func(timeout time.Duration) error {
		if env == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		err := errors.Join(env.S.Close(), env.R.Close(ctx))
		env = nil
		return err
	}
	for c := range cases {
		began := time.Now()
		res := Result{Case: c.Name}
		if what, why := missing(r, c); what != "" {
			res.Status, res.Missing, res.Reason = Skipped, what, why
		} else {
			if env == nil {
				sub, err := r.Sub(ctx, all)
				if err != nil {
					return sum, fmt.Errorf("case %s: %w", c.Name, err)
				}
				s, err := sub.NewStream()
				if err != nil {
					return sum, fmt.Errorf("case %s: %w", c.Name, errors.Join(err, sub.Close(ctx)))
				}
				env = &Env{R: sub, S: s, Short: opts.Short, Simulated: opts.Simulated}
			}
			env.Rand = rand.New(rand.NewPCG(hash(c.Name), uint64(r.Rank())))
			text := ""
			if err := runCase(ctx, c, env); err != nil {
				text = err.Error()
			}
			texts, err := agree(ctx, r.Group(), text)
			if err != nil {
				return sum, fmt.Errorf("case %s: %w", c.Name, err)
			}
			res.Status = Passed
			if len(texts) > 0 {
				res.Status, res.Reason = Failed, strings.Join(texts, "; ")
				// The ranks may wait for each other in vain: what they held goes with this process.
				_ = leave(2 * time.Second)
			}
		}
		res.Took = time.Since(began)
		sum.Add(res)
		if report != nil {
			report(res)
		}
	}
	return sum, leave(CaseTimeout)
}

// runCase runs one case on this rank, and turns what it leaves behind, and a panic, into errors.
func runCase(ctx context.Context, c Case, e *Env) (err error) {
	ctx, cancel := context.WithTimeout(ctx, CaseTimeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	had := e.R.Memory().Allocations()
	if err := c.Run(ctx, e); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return fmt.Errorf("left on the stream: %w", err)
	}
	if has := e.R.Memory().Allocations(); has != had {
		return fmt.Errorf("%d allocations were left behind", has-had)
	}
	return nil
}

// Puts, among [Case.Needs], is for what puts and signals, and gets nothing: nccl has no gets between hosts.
const Puts = "puts"

// SeveralIslands, among [Case.Needs], is ranks that have no addresses of each other's memory, as those of several hosts.
const SeveralIslands = "several_islands"

// missing says what the case lacks here, as [Result.Missing] names it and in words; "" if nothing.
func missing(r *symmem.Rank, c Case) (what, why string) {
	if r.WorldSize() < c.MinWorld {
		return MoreRanks, fmt.Sprintf("needs %d ranks", c.MinWorld)
	}
	if slices.Contains(c.Needs, SeveralIslands) && slices.Max(r.Memory().Islands()) == 0 {
		return SeveralIslands, fmt.Sprintf("backend %s has one island here: all ranks have addresses of each other's memory", r.Backend())
	}
	for _, b := range r.Capabilities().List() {
		if !b.Have && (slices.Contains(c.Needs, b.Name) || b.Name == "transfers" && slices.Contains(c.Needs, Puts) && !r.Memory().CanSignal()) {
			return b.Name, fmt.Sprintf("backend %s has no %s: %s", r.Backend(), b.Name, b.Why)
		}
	}
	return "", ""
}

// agree gives the texts of the ranks that have one. Collective.
func agree(ctx context.Context, g *group.Group, text string) ([]string, error) {
	blob, err := json.Marshal(text)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*CaseTimeout)
	defer cancel()
	blobs, err := g.AllGather(ctx, "case result", blob)
	if err != nil {
		return nil, err
	}
	var texts []string
	for rank, b := range blobs {
		var t string
		if err := json.Unmarshal(b, &t); err != nil {
			return nil, err
		}
		if t != "" {
			texts = append(texts, fmt.Sprintf("rank %d: %s", rank, t))
		}
	}
	return texts, nil
}

func hash(s string) uint64 {
	h := uint64(14695981039346656037) // FNV-1a
	for _, b := range []byte(s) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return h
}

// wantError gives an error unless err is the condition and its text has all of parts.
func wantError(what string, err, is error, parts ...string) error {
	if err == nil {
		return fmt.Errorf("%s: no error; expected %q", what, is)
	}
	if !errors.Is(err, is) {
		return fmt.Errorf("%s: error %q is not %q", what, err, is)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			return fmt.Errorf("%s: error %q does not name %q", what, err, p)
		}
	}
	return nil
}

// wantArgument is wantError for a refused argument, which must also say what is allowed.
func wantArgument(what string, err error, parts ...string) error {
	if err := wantError(what, err, symmem.ErrInvalid, parts...); err != nil {
		return err
	}
	arg, ok := errors.AsType[*errs.ArgumentError](err)
	if !ok || arg.Allowed == "" {
		return fmt.Errorf("%s: error %q does not say what is allowed", what, err)
	}
	return nil
}
