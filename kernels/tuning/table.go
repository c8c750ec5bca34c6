package tuning

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Version is that of the form of the files that this package reads and writes.
const Version = 1

// AnyDevice, as the only name of Table.Devices, stands for every device behind links of the table's kind.
const AnyDevice = "any"

// The kinds of links between the devices of a group.
const (
	LinkNVLink = "nvlink" // GPUs whose links carry atomic operations
	LinkPCIe   = "pcie"   // GPUs whose links do not
	LinkHost   = "host"   // the memory of the CPU
)

// Links lists the kinds of links.
func Links() []string { return []string{LinkNVLink, LinkPCIe, LinkHost} }

// The collectives, by the names that rules have.
const (
	AllReduce        = "all_reduce"
	AllReduceMany    = "all_reduce_many"
	AllReduceRMSNorm = "all_reduce_rms_norm"
	Broadcast        = "broadcast"
	Reduce           = "reduce"
	AllGather        = "all_gather"
	ReduceScatter    = "reduce_scatter"
	AllToAll         = "all_to_all"
)

// Collectives lists the collectives that rules may be about.
func Collectives() []string {
	return []string{AllReduce, AllReduceMany, AllReduceRMSNorm, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll}
}

// Forms lists the forms of a collective that a rule may take between devices behind links of a kind; nil for a collective or kind that there is not.
// Those of libraries and those that others have registered are not among them, nor is one that is lossy. Nor are multimem forms of reductions to one rank or to
// shares, which whoever is content with another order than that of the ranks asks for, nor one_shot_multimem of an all-reduce, whose bits may differ from rank to rank.
func Forms(collective, link string) []string {
	if !slices.Contains(Links(), link) {
		return nil
	}
	host := link == LinkHost
	switch collective {
	case AllReduce:
		if host {
			return []string{"one_shot", "two_shot", "transfers", "hierarchical"}
		}
		return []string{"one_shot_ll", "one_shot_push", "one_shot_pull", "two_shot_push", "two_shot_pull", "two_shot_flow", "two_shot_multimem", "transfers"}
	case AllReduceMany:
		if host {
			return []string{"one_shot", "two_shot", "transfers"}
		}
		return []string{"one_shot_ll", "one_shot_push", "two_shot_pull", "transfers"}
	case AllReduceRMSNorm:
		if host {
			return []string{"one_shot", "two_shot", "transfers"}
		}
		return []string{"one_shot_push", "two_shot_push", "two_shot_pull", "transfers"}
	case AllGather, AllToAll, Broadcast, Reduce, ReduceScatter:
		if host {
			return []string{"one_shot", "transfers", "hierarchical"}
		}
	}
	switch collective {
	case Broadcast:
		return []string{"one_shot_ll", "one_shot_push", "one_shot_pull", "two_shot_push", "two_shot_pull", "one_shot_multimem", "transfers"}
	case AllGather:
		return []string{"one_shot_ll", "one_shot_push", "one_shot_pull", "one_shot_multimem", "transfers"}
	case AllToAll, Reduce, ReduceScatter:
		return []string{"one_shot_ll", "one_shot_push", "one_shot_pull", "transfers"}
	}
	return nil
}

// NeedsMulticast reports whether a form works on multicast addresses.
func NeedsMulticast(form string) bool { return strings.HasSuffix(form, "_multimem") }

// Flow is the form whose steps may say how long a lap is.
const Flow = "two_shot_flow"

// DTypes lists the names of the dtypes that rules may have.
func DTypes() []string {
	return []string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}
}

// Where the steps of a rule come from.
const (
	Measured  = "measured"  // on Table.Machine
	Estimated = "estimated" // from what was measured of other sizes, ranks or devices
)

// Table is what a file holds: rules for one kind of device.
type Table struct {
	Version int      `json:"version"`
	Devices []string `json:"devices"` // names, as drivers give them, or AnyDevice
	Link    string   `json:"link"`    // of Links
	Machine string   `json:"machine,omitempty"`
	Date    string   `json:"date,omitempty"`   // 2006-01-02
	Driver  string   `json:"driver,omitempty"` // its version
	Command string   `json:"command,omitempty"`
	Notes   []string `json:"notes,omitempty"`
	Rules   []Rule   `json:"rules"`

	// Name is what the table is called in logs and by the command doctor: the file, or whose shipped table it is. It is not in the file.
	Name string `json:"-"`
}

// Rule says which form is the fastest by size, of one collective between so many ranks.
type Rule struct {
	Collective string `json:"collective"`
	Ranks      int    `json:"ranks"`
	AndMore    bool   `json:"and_more,omitempty"` // it serves larger worlds too, for which the table has no rule
	// DTypes are those that the rule is for. Without any it is for all that no other rule of the table names, and for operations of f16, bf16 and f32
	// other than sum and avg between GPUs, which do without the push forms that these two have.
	DTypes    []string `json:"dtypes,omitempty"`
	Multicast bool     `json:"multicast,omitempty"` // for memory that has multicast addresses, before the rule for any memory
	Source    string   `json:"source"`              // Measured or Estimated
	// Steps are in the order of their sizes. The first one that the message is not too large for counts. The last one has no bound.
	Steps []Step `json:"steps"`
}

// Step is one form, up to some size.
type Step struct {
	UpTo Size `json:"up_to,omitempty"` // of the whole message; 0 is no bound
	// WholeVectors leaves the step to messages that are vectors of 16 bytes and nothing else, for which push forms and lines have faster kernels.
	WholeVectors bool   `json:"whole_vectors,omitempty"`
	Form         string `json:"form"`
	Blocks       int    `json:"blocks,omitempty"`    // the most that a kernel takes; 0 is as many as are of use
	LapBytes     Size   `json:"lap_bytes,omitempty"` // of Flow; 0 is by size
}

// Size is a number of bytes. In files it is a text: "384 KiB", "12345 B".
type Size int64

// units are the largest first.
var units = []struct {
	name  string
	bytes int64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// String returns the size in the largest unit that it is a whole number of.
func (s Size) String() string {
	for _, u := range units {
		if n := int64(s); n != 0 && n%u.bytes == 0 {
			return fmt.Sprintf("%d %s", n/u.bytes, u.name)
		}
	}
	return fmt.Sprintf("%d B", int64(s))
}

// MarshalText writes the form of files.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// sizeForm says what the texts of sizes are like.
const sizeForm = `a whole number and B, KiB, MiB or GiB, like "384 KiB", from 1 B to 1024 GiB`

// UnmarshalText reads the form of files.
func (s *Size) UnmarshalText(text []byte) error {
	number, unit, ok := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(number, 10, 64)
	for _, u := range units {
		if ok && err == nil && u.name == unit && n >= 1 && n <= (1<<40)/u.bytes {
			*s = Size(n * u.bytes)
			return nil
		}
	}
	return errs.Invalid("a tuning table", "a size", strconv.Quote(string(text)), sizeForm)
}

// For reports whether the table is for a device behind links of a kind. "" stands for links of which nothing is known.
func (t *Table) For(device, link string) bool {
	if link != "" && link != t.Link {
		return false
	}
	return slices.Contains(t.Devices, device) || slices.Equal(t.Devices, []string{AnyDevice}) && link != ""
}

// Covers reports whether the table has any rule that serves so many ranks.
func (t *Table) Covers(ranks int) bool {
	return slices.ContainsFunc(t.Rules, func(r Rule) bool { return r.Ranks == ranks || r.AndMore && r.Ranks < ranks })
}

// Complete reports whether the table has a rule for every collective between so many ranks and every dtype.
func (t *Table) Complete(ranks int) bool {
	for _, collective := range Collectives() {
		for _, dtype := range DTypes() {
			if t.Find(collective, ranks, dtype, false) == nil {
				return false
			}
		}
	}
	return true
}

// Find returns the rule of the table for a collective between ranks, of a dtype; nil if there is none.
func (t *Table) Find(collective string, ranks int, dtype string, multicast bool) *Rule {
	var best *Rule
	for i := range t.Rules {
		r := &t.Rules[i]
		if r.Collective != collective || r.Multicast != multicast || r.Ranks != ranks && !(r.AndMore && r.Ranks < ranks) {
			continue
		}
		named := slices.Contains(r.DTypes, dtype)
		if !named && len(r.DTypes) > 0 {
			continue
		}
		// Of rules that serve, the one for most ranks counts, and of those the one that names the dtype.
		if best == nil || r.Ranks > best.Ranks || r.Ranks == best.Ranks && named {
			best = r
		}
	}
	return best
}
