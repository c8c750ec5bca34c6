package tune

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/kernels/tuning"
)

// Options are the flags of tune, except for the settings of the configuration.
type Options struct {
	Backend    string // a name, or auto
	Sizes      string // as bytesize.ParseList reads them
	Kinds      string // of measure.TuneKinds, with commas between them
	DTypes     string // with commas between them
	OutputFile string // "" writes none
	Ranks      int
	Reps       int
	Time       time.Duration
	JSON       bool // print the table instead of text
}

// The largest message that is measured.
const mostBytes = 16 << 30

// spec checks the flags and says what to measure. An error lists every mistake.
func (o *Options) spec() (measure.TuneSpec, error) {
	var all []error
	s := measure.TuneSpec{Repetitions: o.Reps, Time: o.Time}
	var err error
	if s.Sizes, err = bytesize.ParseList(o.Sizes); err != nil {
		all = append(all, fmt.Errorf("--sizes: %w", err))
	}
	slices.Sort(s.Sizes)
	s.Sizes = slices.Compact(s.Sizes)
	for _, n := range s.Sizes {
		if n < 16 || n%16 != 0 || n > mostBytes {
			all = append(all, fmt.Errorf("--sizes has %d bytes; multiples of 16 up to 16G are allowed", n))
			break
		}
	}
	list := func(flag, text string, allowed []string) (names []string) {
		for name := range strings.SplitSeq(text, ",") {
			if !slices.Contains(allowed, name) || slices.Contains(names, name) {
				all = append(all, fmt.Errorf("--%s is %q; allowed are %s, each once%s", flag, text, strings.Join(allowed, ", "), suggest.DidYouMean(name, allowed)))
				return names
			}
			names = append(names, name)
		}
		return names
	}
	s.Kinds = list("kind", o.Kinds, measure.TuneKinds)
	s.DTypes = list("dtype", o.DTypes, tuning.DTypes())
	if o.Ranks < 2 || o.Ranks > launch.MaxRanks {
		all = append(all, fmt.Errorf("--ranks is %d; 2 to %d are allowed: a rank alone has nothing to choose", o.Ranks, launch.MaxRanks))
	}
	if o.Reps < 3 || o.Reps > 1000 {
		all = append(all, fmt.Errorf("--reps is %d; 3 to 1000 are allowed", o.Reps))
	}
	if o.Time < 0 {
		all = append(all, fmt.Errorf("--time is %s; 0 for no bound, or more is allowed", o.Time))
	}
	return s, exit.UsageError(errors.Join(all...))
}
