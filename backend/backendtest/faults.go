package backendtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// Faults lets every native call go wrong, one in each case, while ranks do everything with a backend from opening to closing it: the n-th call of its
// name on one rank fails with each of its codes, or hangs until the deadline of what the ranks do, or ends its rank.
//
// Whatever befalls a call, each rank has an error that names the call and the rank, or none has one where the failure means nothing; the next attempt
// works on the same ranks, or on those that are left; and nothing is left behind.
//
// Each name has its turn once: it fails, and one in thirty hangs and ends its rank, or one in ten with SYMMEM_TEST_MATRIX=full. With
// SYMMEM_TEST_FAULTS=full every call hangs, ends its rank, and fails with one of its codes, in turn. Of a call that a rank makes more than 64 times,
// as it asks whether something is done and makes a context current, that is six of those made at one place of the code: the first, the last, and others
// at equal distances. SYMMEM_TEST_FAULTS=all leaves none out, and lets every call fail with all of its codes. The table of calls, faults and outcomes,
// and of the exceptions that cases needed, is logged, and written to the file that SYMMEM_TEST_TABLE names, behind what that has.
type Faults struct {
	// Ranks is how many there are; default 3.
	Ranks int
	// Machine makes a new machine for a case.
	Machine func() FaultMachine
	// Unheard are the calls whose failure may be no error of any rank, each with the reason. A name stands for every call of it, a name with a
	// number for that one, "cuMemCreate/1", a name with a code for what this call means by that: "cuMulticastCreate:CUDA_ERROR_SYSTEM_NOT_READY", or with
	// "hangs" or "kills"; and either a name or a name with a code is narrowed by a function to what is called under it: "cuMemCreate in
	// native.(*finding).try".
	Unheard map[string]string
	// Keeps are, in the same way, the calls whose failure may leave something behind: those that would have given it back.
	Keeps map[string]string
	// Unnamed are, in the same way, the calls whose failure leads to an error that does not name them, since it is an answer.
	Unnamed map[string]string
	// Late are, in the same way but not by functions, the calls that take all ranks inside the library: the others learn at their own deadline that one
	// has failed.
	Late map[string]string
	// Endless are, in the same way as those, the calls that are not let hang.
	Endless map[string]string
	// Polls are the calls by which a rank asks again and again whether something is done: of those in a row, the first is a case.
	Polls []string
}

// FaultMachine is a pretended machine, and how the ranks that live on it use it.
type FaultMachine struct {
	// Open opens the backend for a rank of g. All native calls below it go through calls, which may be nil. Parent is the backend of the group that g
	// is a part of, or nil.
	Open func(ctx context.Context, g *group.Group, parent backend.Backend, calls *Calls) (backend.Backend, error)
	// Adopt, unless nil, is as [Harness.Adoptable].
	Adopt func(b backend.Backend, rank int, bytes int64) (p device.Ptr, free func() error, err error)
	// AllReduces are as in [Harness].
	AllReduces []string
	// More, unless nil, is what else the ranks do: each runs it as a step that all end together.
	More func(ctx context.Context, m *memory.Memory) error
	// Left says what was not given back; "" if everything was.
	Left func() string
}

// faultCase is one thing that goes wrong.
type faultCase struct {
	victim int
	call   string
	nth    int    // of its name, in a run in which nothing went wrong
	at     place  // where it was made, and
	turn   int    // which of the calls of its name it was there
	what   string // "hangs", "kills", or the name of a code
	code   Code
	under  []string // when it has struck: the functions that the call was made under
}

func (c faultCase) String() string {
	return fmt.Sprintf("rank=%d/%s/%d/%s", c.victim, c.call, c.nth, c.what)
}

// What befalls a call besides failing.
const (
	hangs = "hangs"
	kills = "kills"
)

// faultPatience bounds what must end soon, on a machine that does much else. What hangs does not wait for it: its deadline comes when it does.
const faultPatience = 60 * time.Second

// How long kernels wait for each other: where a call goes wrong, one may wait for what does not come. Where none does, the machine may be busy.
const (
	faultKernels = 5 * time.Second
	calmKernels  = faultPatience / 2
)

// Run runs the cases.
func (f Faults) Run(t *testing.T) {
	f.Ranks = cmp.Or(f.Ranks, 3)
	all := os.Getenv("SYMMEM_TEST_FAULTS") == "all"
	full := all || os.Getenv("SYMMEM_TEST_FAULTS") == "full"
	some := 30
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		some = 10
	}
	var cases []faultCase
	known := map[string]bool{}
	for victim := range 2 {
		calls := newCalls(f.Polls)
		calls.places = map[string][]place{}
		out := f.once(t, faultCase{victim: victim}, calls)
		require.Empty(t, out.wrong, "without a fault")
		require.Equal(t, "ok", out.what, "without a fault")
		cases = append(cases, f.cases(calls, victim, full, all, some, known)...)
	}
	require.NotEmpty(t, cases, "no native call was seen")
	var table FaultTable
	files, err := OpenFiles()
	require.NoError(t, err)
	sameFiles := func(t *testing.T, c faultCase) {
		most := files
		if reason(f.Keeps, c) != "" || c.code.Lasting {
			most = math.MaxInt // memory that stays may have one
		}
		if files, err = FilesLeft(most); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() { // when the cases have ended
		if full && len(f.Keeps) == 0 {
			sameFiles(t, faultCase{})
		}
		table.Print(t)
	})
	for _, c := range cases {
		t.Run(c.String(), func(t *testing.T) {
			// Most of a case is waiting. So where there are thousands they run beside each other, and descriptors are not counted in each.
			if full {
				t.Parallel()
			} else {
				defer func() { sameFiles(t, c) }()
			}
			out := f.once(t, c, newCalls(f.Polls))
			c.under = out.under
			for _, w := range out.wrong {
				t.Error(w)
			}
			if len(out.wrong) > 0 {
				out.what, out.excused = FaultWrong, nil
			}
			table.Add(c.call, c.fault(), out.what, out.excused...)
		})
	}
}

// cases are the faults of the calls that a rank has made, in the order of their names.
func (f Faults) cases(calls *Calls, victim int, full, all bool, some int, known map[string]bool) []faultCase {
	var cases []faultCase
	for _, name := range slices.Sorted(maps.Keys(calls.counts)) {
		codes := calls.codes[name]
		alike := repeated(calls.places[name])
		turns := map[place]int{}
		for nth := 1; nth <= calls.counts[name]; nth++ {
			at := calls.places[name][nth-1]
			turns[at]++
			one := faultCase{victim: victim, call: name, nth: nth, at: at, turn: turns[at]}
			with := func(what string, code Code) faultCase {
				c := one
				c.what, c.code = what, code
				return c
			}
			switch {
			case all:
			case !full && (known[name] || nth > 1):
				continue // the first is as good as another, and what both ranks call is enough on one
			case full && alike[nth-1]:
				continue
			}
			for i, code := range codes {
				if all || i == (nth-1+victim)%len(codes) {
					cases = append(cases, with(code.Name, code))
				}
			}
			if !full && len(known)%some != 0 {
				continue // hanging and dying take time
			}
			if reason(f.Endless, one) == "" {
				cases = append(cases, with(hangs, Code{}))
			}
			cases = append(cases, with(kills, Code{}))
		}
		known[name] = true
	}
	return cases
}

// Of a call that a rank makes more often than often, a few that are made at one place stand for all that are made there: the first, the last, and
// others at equal distances between them.
const (
	often    = 64
	fewAlike = 6
)

// repeated says of each call of one name whether others stand for it.
func repeated(places []place) []bool {
	skip := make([]bool, len(places))
	if len(places) <= often {
		return skip
	}
	at := map[place][]int{}
	for i, p := range places {
		at[p] = append(at[p], i)
	}
	for _, same := range at {
		if len(same) <= fewAlike {
			continue
		}
		for _, i := range same {
			skip[i] = true
		}
		for k := range fewAlike {
			skip[same[k*(len(same)-1)/(fewAlike-1)]] = false
		}
	}
	return skip
}

// reason is what an exception says of a call; "" if it is none.
func reason(exceptions map[string]string, c faultCase) string {
	for _, f := range c.under {
		if why := cmp.Or(exceptions[c.call+":"+c.what+" in "+f], exceptions[c.call+" in "+f]); why != "" {
			return why
		}
	}
	return cmp.Or(exceptions[fmt.Sprintf("%s/%d", c.call, c.nth)], exceptions[c.call+":"+c.what], exceptions[c.call])
}

// outcome is how a case has ended.
type outcome struct {
	what    string
	wrong   []string
	excused []string // what is not as it should be, each with the reason of an exception
	under   []string // as in faultCase
}

// deadline is a context whose deadline comes when somebody says so.
type deadline struct {
	context.Context
	once sync.Once
	over chan struct{}
}

func (d *deadline) Done() <-chan struct{} { return d.over }

func (d *deadline) Err() error {
	select {
	case <-d.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func (d *deadline) come() { d.once.Do(func() { close(d.over) }) }

// once runs one case on a new machine.
func (f Faults) once(t *testing.T, c faultCase, calls *Calls) outcome {
	t.Helper()
	m := f.Machine()
	type ended struct {
		first, second error
		took          time.Duration
	}
	all := make([]ended, f.Ranks)
	var gathered sync.WaitGroup // until all have ended the first attempt
	gathered.Add(f.Ranks)
	until := &deadline{Context: context.Background(), over: make(chan struct{})}
	patience := faultPatience / 2
	if reason(f.Late, c) != "" {
		patience = time.Second
	}
	defer time.AfterFunc(patience, until.come).Stop()
	kernels := faultKernels
	if c.call == "" {
		kernels = calmKernels
	}
	var struck bool
	failed := OnRanks(t, f.Ranks, nil, func(ctx context.Context, g *group.Group) error {
		ctx, cancel := context.WithTimeout(ctx, 2*faultPatience)
		defer cancel()
		me := &all[g.Rank()]
		var mine *Calls
		if g.Rank() == c.victim {
			mine = calls
			s := &strike{call: c.call, at: c.at, nth: c.turn, code: c.code}
			switch c.what {
			case hangs:
				s.before = func() { until.come(); time.Sleep(30 * time.Millisecond) }
			case kills:
				s.before, s.dead = func() { g.Abort("it was killed") }, true
			}
			mine.set(s)
		}
		began := time.Now()
		me.first = m.attempt(until, ctx, g, mine, kernels)
		me.took = time.Since(began)
		gathered.Done()
		gathered.Wait()
		if mine != nil {
			struck, c.under = mine.struck(), mine.under()
			mine.set(nil)
		}
		if c.what != kills || !struckAll(ctx, g) {
			me.second = m.attempt(ctx, ctx, g, nil, calmKernels)
			return nil
		}
		if g.Rank() == c.victim {
			return nil
		}
		rest := make([]int, 0, f.Ranks)
		for r := range f.Ranks {
			if r != c.victim {
				rest = append(rest, r)
			}
		}
		sub, err := g.Sub(ctx, rest)
		if err != nil {
			me.second = fmt.Errorf("the survivors' group: %w", err)
			return nil
		}
		me.second = m.attempt(ctx, ctx, sub, nil, calmKernels)
		return sub.Close(ctx)
	})
	out := outcome{under: c.under}
	complain := func(format string, args ...any) { out.wrong = append(out.wrong, fmt.Sprintf(format, args...)) }
	for r, err := range failed {
		if err != nil {
			complain("rank %d: %v", r, err)
		}
	}
	errors := make([]error, f.Ranks)
	for r, e := range all {
		errors[r] = e.first
		if e.took > faultPatience {
			complain("rank %d has taken %v: %v", r, e.took, e.first)
		}
		if e.second != nil {
			complain("rank %d: the next attempt: %v", r, e.second)
		}
	}
	excuse := func(what, why string) { out.excused = append(out.excused, what+": "+why) }
	if left := m.Left(); left != "" {
		switch why := reason(f.Keeps, c); {
		case why != "":
			excuse("something is left", why)
		case c.code.Lasting:
			excuse("something is left", "the context is lost")
		default:
			complain("left behind: %s", left)
		}
	}
	if c.call != "" && !struck {
		out.what = "not reached"
	} else {
		out.what = f.judge(c, errors, complain, excuse)
	}
	if len(out.wrong) > 0 {
		for r, err := range errors {
			complain("  rank %d had: %v", r, err)
		}
		complain("  the call was made under %s", strings.Join(c.under, ", "))
	}
	return out
}

// struckAll waits until this rank knows that one is lost, and reports whether it is.
func struckAll(ctx context.Context, g *group.Group) bool {
	if g.Err() != nil {
		return true
	}
	return errors.Is(g.Barrier(ctx, "after the fault"), errs.ErrPeerLost)
}

// judge says what has come of a case.
func (f Faults) judge(c faultCase, failed []error, complain func(string, ...any), excuse func(what, why string)) string {
	count := 0
	for _, err := range failed {
		if err != nil {
			count++
		}
	}
	own := failed[c.victim]
	switch {
	case c.call == "":
		if count > 0 {
			complain("it fails")
		}
		return "ok"
	case c.what == kills:
		return f.judgeKilled(c, failed, complain)
	case count == 0 && c.what == hangs:
		return "goes on late"
	case count == 0:
		if why := reason(f.Unheard, c); why != "" {
			excuse("no error", why)
		} else {
			complain("no rank has heard of it")
		}
		return "no error"
	case own == nil:
		complain("the rank itself has no error, and others have")
	}
	if c.what == hangs {
		for r, err := range failed {
			if err != nil && !errors.Is(err, context.DeadlineExceeded) && !isAbandoned(err) && !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
				complain("rank %d: the error is not of the deadline", r)
			}
			if err != nil && r != c.victim && !names(err) && !mentions(err, c.victim) {
				complain("rank %d does not say who did not come", r)
			}
		}
		return fmt.Sprintf("deadline on %s", someOrAll(count, len(failed)))
	}
	var excused string // once for the case, however many ranks have it
	for r, err := range failed {
		late := reason(f.Late, c)
		switch {
		case err == nil:
			if count > 1 {
				complain("rank %d has no error", r)
			}
		case errors.Is(err, context.DeadlineExceeded) && late == "":
			complain("rank %d has waited for its deadline", r)
		case c.code.Lasting && errors.Is(err, errs.ErrContextLost): // the first call to be heard of may be a later one
		case strings.Contains(err.Error(), c.call) && (r == c.victim || strings.Contains(err.Error(), fmt.Sprintf("rank %d", c.victim))):
		case reason(f.Unnamed, c) != "":
			excused = reason(f.Unnamed, c)
		case late != "" && names(err): // the deadline of all has come while they told each other
			excused = late
		case !strings.Contains(err.Error(), c.call):
			complain("rank %d does not name %s", r, c.call)
		default:
			complain("rank %d does not name rank %d", r, c.victim)
		}
	}
	if excused != "" {
		excuse("the call or the rank is not named", excused)
	}
	return "error on " + someOrAll(count, len(failed))
}

func (f Faults) judgeKilled(c faultCase, failed []error, complain func(string, ...any)) string {
	count := 0
	for r, err := range failed {
		if r == c.victim {
			continue
		}
		if err == nil {
			continue
		}
		count++
		if !errors.Is(err, errs.ErrPeerLost) {
			complain("rank %d: the error is not ErrPeerLost", r)
		}
		if lost, ok := errors.AsType[*group.PeerLostError](err); ok && lost.Rank != c.victim {
			complain("rank %d says that rank %d is lost", r, lost.Rank)
		}
	}
	if count == 0 {
		return "nobody needs the rank any more"
	}
	return "lost, and the others go on"
}

func someOrAll(count, all int) string {
	if count == all {
		return "all ranks"
	}
	return "the rank alone"
}

// names reports whether the error says which ranks were waited for: the one that hangs, or those that wait for it as well.
func names(err error) bool {
	if missing, ok := errors.AsType[*group.MissingRanksError](err); ok && len(missing.Missing) > 0 {
		return true
	}
	return isAbandoned(err)
}

// ranksNamed finds the ranks that the text of an error names: "rank 1", "ranks 0-2, 5".
var ranksNamed = regexp.MustCompile(`ranks? ([0-9]+(?:-[0-9]+)?(?:, [0-9]+(?:-[0-9]+)?)*)`)

// mentions reports whether the text of the error has the rank.
func mentions(err error, rank int) bool {
	for _, found := range ranksNamed.FindAllStringSubmatch(err.Error(), -1) {
		for one := range strings.SplitSeq(found[1], ", ") {
			first, last, isRange := strings.Cut(one, "-")
			from, _ := strconv.Atoi(first)
			to, _ := strconv.Atoi(last)
			if rank == from || isRange && from <= rank && rank <= to {
				return true
			}
		}
	}
	return false
}

func isAbandoned(err error) bool {
	_, ok := errors.AsType[*group.AbandonedError](err)
	return ok
}

// fault names what befalls the call, as the table has it.
func (c faultCase) fault() string {
	if c.code.Name != "" {
		return "fails: " + c.code.Name
	}
	return c.what
}

// attempt does everything with the backend. What it does ends with ctx; giving back what it has ends with after, which ends later. Kernels wait for each
// other no longer than kernels.
func (m FaultMachine) attempt(ctx, after context.Context, g *group.Group, calls *Calls, kernels time.Duration) error {
	b, err := m.Open(ctx, g, nil, calls)
	if err != nil {
		return fmt.Errorf("opening: %w", err)
	}
	return m.use(ctx, after, g, b, calls, kernels, true)
}

// use does everything with an open backend, and closes it.
func (m FaultMachine) use(ctx, after context.Context, g *group.Group, b backend.Backend, calls *Calls, kernels time.Duration, whole bool) error {
	u := &usage{Memory: memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: kernels}), machine: m, ctx: ctx, after: after, calls: calls}
	err := u.everything(whole)
	for i := len(u.closing) - 1; i >= 0; i-- {
		err = errors.Join(err, u.closing[i]())
	}
	err = errors.Join(err, u.Close(after))
	if u.Busy() {
		err = errors.Join(err, u.Close(after))
	}
	return err
}

// free frees memory, and once more if the device could not say that it is done with it.
func (u *usage) free(a backend.Allocation) error {
	err := u.Free(u.after, a)
	if err != nil && u.Holds(a) {
		err = errors.Join(err, u.Free(u.after, a))
	}
	return err
}

// usage is what one rank does with everything there is.
type usage struct {
	*memory.Memory
	machine    FaultMachine
	ctx, after context.Context
	calls      *Calls
	stream     device.Stream
	window     *memory.Window
	local      device.Ptr
	closing    []func() error
}

// usageBytes is the size of the memory that is used.
const usageBytes = 4096

func (u *usage) later(f func() error) { u.closing = append(u.closing, f) }

// step is done by all ranks; if one fails, all are told.
func (u *usage) step(name string, f func() error) error {
	return u.Group().Vote(u.ctx, name, f())
}

func (u *usage) everything(whole bool) error {
	caps := u.Backend().Capabilities()
	steps := []struct {
		name string
		when bool
		do   func() error
	}{
		{"a stream", true, u.makeStream},
		{"memory", true, u.makeMemory},
		{"stores", caps.PeerPointers, u.store},
		{"loads", caps.PeerPointers, u.load},
		{"copies", true, u.copies},
		{"signals", true, u.signals},
		{"a transfer", true, u.transfer},
		{"a graph", whole, u.graph},
		{"multicast", whole && caps.Multicast, u.multicast},
		{"workspace", whole, u.workspace},
		{"adopted memory", whole && u.machine.Adopt != nil, u.adopt},
		{"the library's all-reduce", whole && len(u.machine.AllReduces) > 0, u.allReduce},
		{"more", whole && u.machine.More != nil, func() error { return u.machine.More(u.ctx, u.Memory) }},
		{"a sub-group", whole && u.Group().Size() > 1, u.subGroup},
	}
	for _, s := range steps {
		if !s.when {
			continue
		}
		if err := u.step(s.name, s.do); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

func (u *usage) makeStream() error {
	s, err := u.Device().NewStream()
	if err != nil {
		return err
	}
	u.later(s.Close)
	u.stream = s
	e, err := u.Device().NewEvent()
	if err != nil {
		return err
	}
	if err := errors.Join(s.Record(e), s.WaitEvent(e), e.Synchronize(u.ctx)); err != nil {
		return errors.Join(err, e.Close())
	}
	return e.Close()
}

func (u *usage) makeMemory() error {
	a, err := u.Allocate(u.ctx, usageBytes, "used")
	if err == nil {
		u.later(func() error { return u.free(a) })
		u.local = a.Ptr().Add(usageBytes / 2)
	}
	// Whoever has no memory brings a nil allocation, so that the others are told.
	w, mapped := u.Rendezvous(u.ctx, a, memory.Record{})
	u.window = w
	return errors.Join(err, mapped)
}

func (u *usage) next() int { return (u.Group().Rank() + 1) % u.Group().Size() }
func (u *usage) before() int {
	return (u.Group().Rank() + u.Group().Size() - 1) % u.Group().Size()
}

// store writes a byte to each rank, and load reads what the others wrote.
func (u *usage) store() error {
	me := u.Group().Rank()
	for r := range u.Group().Size() {
		p, err := u.window.Peer(r, int64(me))
		if err == nil {
			err = u.Device().CopyFromHost(p, []byte{Sent(me, r)})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (u *usage) load() error {
	got := make([]byte, u.Group().Size())
	p, err := u.window.Peer(u.Group().Rank(), 0)
	if err == nil {
		err = u.Device().CopyToHost(got, p)
	}
	if err != nil {
		return err
	}
	for r, b := range got {
		if b != Sent(r, u.Group().Rank()) {
			return fmt.Errorf("rank %d's byte is %d: the memory is another", r, b)
		}
	}
	return nil
}

func (u *usage) copies() error {
	err := errors.Join(
		u.stream.Fill(u.local, 0, 64),
		u.Copy(u.stream, backend.Write, u.next(), u.window, 0, u.local, 64),
		u.Copy(u.stream, backend.Read, u.next(), u.window, 128, u.local.Add(128), 64),
	)
	return errors.Join(err, u.stream.Synchronize(u.ctx))
}

func (u *usage) signals() error {
	err := errors.Join(
		u.PutSignal(u.stream, u.next(), u.window, 0, u.local, 64, 0),
		u.Wait(u.stream, u.before(), 0),
		u.Signal(u.stream, u.next(), 1),
		u.Wait(u.stream, u.before(), 1),
		u.Barrier(u.stream, 0),
	)
	return errors.Join(err, u.stream.Synchronize(u.ctx))
}

func (u *usage) transfer() error {
	x, err := u.PrepareTransfer(backend.Write, u.next(), []memory.TransferBlock{{Local: u.local, Window: u.window, Offset: 256, Bytes: 128}})
	if err != nil {
		return err
	}
	err = x.Post(u.stream)
	if err == nil {
		err = errors.Join(x.WaitOn(u.stream), x.Wait(u.ctx))
	}
	return errors.Join(err, u.stream.Synchronize(u.ctx), x.Close())
}

func (u *usage) graph() error {
	if err := u.stream.BeginCapture(); err != nil {
		return err
	}
	err := u.Copy(u.stream, backend.Write, u.next(), u.window, 0, u.local, 64)
	g, ended := u.stream.EndCapture()
	if ended != nil {
		return errors.Join(err, ended)
	}
	if err == nil {
		err = errors.Join(g.Launch(u.stream), u.stream.Synchronize(u.ctx))
	}
	return errors.Join(err, g.Close())
}

func (u *usage) multicast() error {
	if err := u.EnableMulticast(u.ctx, u.window, nil); err != nil {
		return err
	}
	_, err := u.window.Multicast(0)
	return err
}

func (u *usage) workspace() error {
	w, err := u.NewWorkspace(u.ctx, memory.WorkspaceRequest{Purpose: "faults", Bytes: 64 << 10})
	if err != nil {
		return err
	}
	return errors.Join(w.Close(u.after), u.TrimWorkspace(u.after))
}

func (u *usage) adopt() error {
	p, free, err := u.machine.Adopt(u.Backend(), u.Group().Rank(), 2<<20)
	if err == nil {
		u.later(free)
	}
	var a backend.Allocation
	if err == nil {
		a, err = u.Register(u.ctx, p, 2<<20, "adopted")
	}
	if a != nil {
		u.later(func() error { return u.free(a) })
	}
	_, mapped := u.Rendezvous(u.ctx, a, memory.Record{})
	return errors.Join(err, mapped)
}

func (u *usage) allReduce() error {
	for _, name := range u.machine.AllReduces {
		place := memory.Place{Window: u.window}
		var p backend.PreparedAllReduce
		if err := u.step("preparing "+name, func() (err error) {
			p, err = u.PrepareAllReduce(u.ctx, name, place, place, 64, 256, "f32", "sum")
			if err == nil {
				u.later(p.Close)
			}
			return err
		}); err != nil {
			return err
		}
		if err := u.step("running "+name, func() error { return errors.Join(p.Enqueue(u.stream), u.stream.Synchronize(u.ctx)) }); err != nil {
			return err
		}
	}
	return nil
}

func (u *usage) subGroup() error {
	ranks := make([]int, u.Group().Size())
	for i := range ranks {
		ranks[i] = i
	}
	sub, err := u.Group().Sub(u.ctx, ranks)
	if err != nil {
		return err
	}
	b, err := u.machine.Open(u.ctx, sub, u.Backend(), u.calls)
	if err == nil {
		err = u.machine.use(u.ctx, u.after, sub, b, u.calls, u.KernelTimeout(), false)
	}
	return errors.Join(err, sub.Close(u.after))
}
