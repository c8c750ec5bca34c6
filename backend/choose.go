package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// refuseUnprotected is the value of Env.UnprotectedNetwork that keeps backends from opening ports that are not protected.
const refuseUnprotected = "refuse"

// Pick chooses a backend by the rules of [Choose], but for this process alone: try says whether the named backend can be used and, if so, whether it
// would work on the CPU's memory. candidates are the backends that the preferences stand for, in order; try is not called for those after the chosen
// one. name is "" if none can be used. The error is that of try, ErrInvalid for an unknown name, or ErrUnavailable if no backend is registered.
func Pick(preferences []string, try func(name string) (usable, onHost bool, err error)) (name string, candidates []string, err error) {
	if candidates, err = expand(preferences); err != nil {
		return "", nil, err
	}
	name, err = pick(candidates, preferences, try)
	return name, candidates, err
}

// expand turns a list of preferences into names that are registered: Auto becomes the backends not named before it.
func expand(preferences []string) ([]string, error) {
	if len(preferences) == 0 {
		preferences = []string{Auto}
	}
	var names []string
	for _, p := range preferences {
		candidates := []string{p}
		if p == Auto {
			candidates = Names()
		} else if _, err := Lookup(p); err != nil {
			return nil, err
		}
		for _, c := range candidates {
			if !slices.Contains(names, c) {
				names = append(names, c)
			}
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no backend is registered; import _ %q: %w",
			"github.com/symmem/symmem/backend/all", errs.ErrUnavailable)
	}
	return names, nil
}

// pick tries candidates in order until one can be used. One that would work on the CPU's memory is passed over for a later one that is preferred for
// that, unless it was named.
func pick(candidates, preferences []string, try func(name string) (usable, onHost bool, err error)) (string, error) {
	forCPU := func(name string) int {
		f, err := Lookup(name)
		if err != nil {
			return math.MinInt
		}
		return preference(f, true)
	}
	spare := "" // usable, but another is better for it
	for i, n := range candidates {
		usable, onHost, err := try(n)
		if err != nil {
			return "", err
		}
		if !usable {
			continue
		}
		better := func(later string) bool { return forCPU(later) > forCPU(n) }
		gives := onHost && !slices.Contains(preferences, n) && slices.ContainsFunc(candidates[i+1:], better)
		switch {
		case spare != "" && onHost && forCPU(spare) >= forCPU(n):
			if !gives {
				return spare, nil
			}
		case gives:
			spare = n
		default:
			return n, nil
		}
	}
	return spare, nil
}

// Refusal says why a backend was not chosen.
type Refusal struct {
	Name string // the backend
	Rank int    // the rank that cannot use it
	Err  string // its reason
	// Conditions are the errors of this module, such as ErrUnsupported, that the reason is.
	Conditions []error
}

// RefusedError is what Choose returns when no backend of the list can be used by all ranks. It is ErrUnavailable.
type RefusedError struct {
	Tried    []string // in order
	Refusals []Refusal
}

// Error returns each reason once, with the backend and the ranks that had it: in one line if there is one, else each in a line of its own.
func (e *RefusedError) Error() string {
	head := "none of the backends " + strings.Join(e.Tried, ", ") + " can be used"
	if len(e.Tried) == 1 {
		head = "backend " + e.Tried[0] + " cannot be used"
	}
	var reasons errs.Reasons
	for _, r := range e.Refusals {
		of := ""
		if len(e.Tried) > 1 {
			of = r.Name + " on "
		}
		reasons.Add(of, r.Rank, r.Err)
	}
	return reasons.Text(head)
}

// Is reports whether target is ErrUnavailable or a condition of any of the refusals.
func (e *RefusedError) Is(target error) bool {
	return target == errs.ErrUnavailable || slices.ContainsFunc(e.Refusals, func(r Refusal) bool { return slices.Contains(r.Conditions, target) })
}

// offer is what a rank tells the others about a backend that it has tried.
type offer struct {
	Refused    string   // "" if it is usable, else the reason
	Conditions []uint32 // what the reason is, in the codes of package errs
	OnHost     bool     // it would work on the CPU's memory
	Shares     bool     // its ranks must share memory
}

// Choose picks the first backend of the preferences that every rank of the group can use, and returns why the ones before it were passed over. One
// that would work on the CPU's memory, because there is no GPU, is passed over for a later one that is preferred for that ([Preferred]), unless it
// was named. Backends after the chosen one are not tried. If env.Given is set, only a backend that takes it can be used. Collective: a rank whose
// list is wrong, or differs from the others', makes every rank fail.
func Choose(ctx context.Context, g *group.Group, preferences []string, env *Env) (name string, refusals []Refusal, err error) {
	names, err := agreeOnNames(ctx, g, preferences, env)
	if err != nil {
		return "", nil, err
	}
	name, err = pick(names, preferences, func(n string) (usable, onHost bool, err error) {
		named := slices.Contains(preferences, n) || env.Given != nil
		offers, err := tryOne(ctx, g, n, env, named)
		if err != nil {
			return false, false, err
		}
		usable = true
		for r, o := range offers {
			onHost = onHost || o.OnHost
			if o.Refused != "" {
				usable = false
				refusals = append(refusals, Refusal{Name: n, Rank: r, Err: o.Refused, Conditions: errs.Conditions(o.Conditions)})
			}
		}
		return usable, onHost, nil
	})
	switch {
	case err != nil:
		return "", nil, err
	case name == "":
		return "", refusals, &RefusedError{Tried: names, Refusals: refusals}
	}
	return name, refusals, nil
}

// agreeOnNames returns the list of backends to try, which is the same on all ranks. Collective.
func agreeOnNames(ctx context.Context, g *group.Group, preferences []string, env *Env) ([]string, error) {
	names, err := expand(preferences)
	if err == nil && env.Given != nil && len(takers(env.Given)) == 0 {
		err = errs.Advised("choosing a backend", "options of a backend", fmt.Sprintf("of type %T", env.Given), "those that a registered backend takes, as *nccl.Options",
			"import the package of the backend that they are for, and give a pointer to its Options")
	}
	// Which of them were named counts too: pick asks for that.
	mine := slices.Clone(names)
	for i, n := range mine {
		if !slices.Contains(preferences, n) {
			mine[i] += " (" + Auto + ")"
		}
	}
	wishes, err := Tell(ctx, g, "choosing a backend", mine, err)
	if err != nil {
		return nil, err
	}
	if err := Alike("list of backends", wishes, func(w *[]string) string { return strings.Join(*w, ", ") }); err != nil {
		return nil, err
	}
	return names, nil
}

// tryOne tries one backend on every rank, and returns what each found. named says that this rank's program asks for the backend. Collective.
func tryOne(ctx context.Context, g *group.Group, name string, env *Env, named bool) ([]offer, error) {
	c, err := Probe(ctx, name, env)
	if c.OnRequest && !named && c.SeveralHosts {
		c.SeveralHosts = false
		c.Why = maps.Clone(c.Why)
		if c.Why == nil {
			c.Why = map[string]string{}
		}
		c.Why["several_hosts"] = "ask for backend " + name + " by name (SYMMEM_BACKEND) if what it can do between hosts is enough"
	}
	if err == nil {
		err = fits(c, g.Members())
	}
	mine := offer{OnHost: c.OnHost, Shares: !c.SeveralHosts}
	if err != nil {
		mine.Refused, mine.Conditions = errs.Text(err), errs.Codes(err)
	}
	offers, err := Tell(ctx, g, "trying backend "+name, mine, nil)
	if err != nil || slices.ContainsFunc(offers, func(o offer) bool { return o.Refused != "" }) || !slices.ContainsFunc(offers, func(o offer) bool { return o.Shares }) {
		return offers, err
	}
	// A rank's memory may not reach others on its host, as in containers. All ranks have come here, and all find the same.
	islands, err := g.Islands(ctx)
	if err != nil {
		return nil, err
	}
	if err := apart(islands); err != nil {
		for r := range offers {
			offers[r].Refused, offers[r].Conditions = errs.Text(err), errs.Codes(err)
		}
	}
	return offers, nil
}

// apart returns an error if the ranks cannot all share memory.
func apart(islands *group.Islands) error {
	if islands.Count() == 1 {
		return nil
	}
	why := cmp.Or(islands.Why(), "they are in several processes, and /proc/sys/kernel/random/boot_id does not say that these are on one host")
	return fmt.Errorf("not all ranks can share memory: %s: %w", why, errs.ErrUnsupported)
}

// fits returns an error if a backend that can be used on this machine cannot serve this group, because of the hosts that its ranks are on.
func fits(c Capabilities, members []group.Member) error {
	hosts, processes := map[string]bool{}, map[string]bool{}
	for _, m := range members {
		hosts[m.BootID], processes[m.Process] = true, true
	}
	if len(hosts) > 1 && !c.SeveralHosts {
		var unknown []int
		for r, m := range members {
			if m.BootID == "" {
				unknown = append(unknown, r)
			}
		}
		why := ""
		if len(unknown) > 0 {
			why = fmt.Sprintf(", as far as is known: %s cannot read /proc/sys/kernel/random/boot_id", errs.Ranks(unknown))
		}
		return fmt.Errorf("the ranks are on %d hosts%s: %s: %w", len(hosts), why, cmp.Or(c.Why["several_hosts"], "it serves one"), errs.ErrUnsupported)
	}
	if len(processes) < len(members) && !c.RanksInOneProcess {
		return fmt.Errorf("%d ranks are in %d processes: %s: %w", len(members), len(processes),
			cmp.Or(c.Why["ranks_in_one_process"], "it serves one rank in each"), errs.ErrUnsupported)
	}
	return nil
}

// Probe asks one backend whether it can be used on this machine with the settings of env, as [Choose] does. Local. The error of one that cannot is ErrUnavailable or
// ErrUnsupported; it is ErrInvalid if there is no such backend.
func Probe(ctx context.Context, name string, env *Env) (Capabilities, error) {
	f, err := Lookup(name)
	if err != nil {
		return Capabilities{}, err
	}
	e := *env
	if e.Logger == nil {
		e.Logger = slog.New(slog.DiscardHandler)
	}
	e.Group = nil
	if n, ok := f.(Networked); ok && e.UnprotectedNetwork == refuseUnprotected {
		return Capabilities{}, fmt.Errorf("%s, and unprotected-network is refuse; allow it (SYMMEM_UNPROTECTED_NETWORK) or take another backend: %w",
			n.Unprotected(), errs.ErrUnsupported)
	}
	if e.Given != nil && !takes(f, e.Given) {
		return Capabilities{}, fmt.Errorf("the program gives options that are for backend %s (%T); choose that, or give none: %w",
			strings.Join(takers(e.Given), ", "), e.Given, errs.ErrUnsupported)
	}
	c, err := f.Probe(ctx, &e)
	if err != nil && !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrUnsupported) {
		err = fmt.Errorf("probing backend %s: %w", name, err)
	}
	return c, err
}
