package kernels

import (
	"errors"
	"slices"
	"strings"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// lookup is what the tables are asked for. The answer is the same on every rank, since the ranks have the same tables and bring the same.
type lookup struct {
	tables     *tuning.Set
	collective string // of package tuning
	asked      Algorithm
	kind       device.Kind
	dtype      string // as rules name it; "" is for rules that name none
	bytes      int64
	size       int
	whole      bool                   // the message is whole vectors
	can        func(a Algorithm) bool // whether there is such a form here
}

// choice is a form, and how its kernel is launched.
type choice struct {
	algorithm Algorithm
	blocks    int   // the most; 0 is as many as are of use
	lap       int64 // of TwoShotFlow
}

// find makes Auto and families into a form. ok is false if the tables have none that can be had.
func (l lookup) find() (c choice, ok bool) {
	step, ok := l.tables.Choose(l.collective, l.size, l.dtype, l.bytes, l.whole, func(s *tuning.Step) bool {
		a, err := ParseAlgorithm(s.Form)
		return err == nil && l.fits(a) && l.can(a)
	})
	if !ok {
		return choice{}, false
	}
	a, _ := ParseAlgorithm(step.Form) // of which the same has just been right
	return choice{algorithm: a, blocks: step.Blocks, lap: int64(step.LapBytes)}, true
}

// fits reports whether a form is what was asked for. Families do without multicast.
func (l lookup) fits(a Algorithm) bool {
	switch l.asked {
	case Auto:
		return true
	case OneShot, TwoShot:
		return a == l.asked || strings.HasPrefix(a.String(), l.asked.String()+"_") && !a.NeedsMulticast() && a.form() == nil
	}
	return a == l.asked
}

// shortLap is the lap of TwoShotFlow where no table says another one, in bytes.
const shortLap = 16 << 10

// chooseAllReduce makes Auto, and on CUDA the families OneShot and TwoShot, into one form. Everything else stays as it was asked for. avoided says which
// forms Auto does without.
func chooseAllReduce(m *memory.Memory, tables *tuning.Set, asked Algorithm, kind device.Kind, dtype tensor.DType, op Op, bytes int64, size int, whole bool, avoided func(Algorithm) bool) choice {
	family := asked == Auto || kind == device.CUDA && (asked == OneShot || asked == TwoShot)
	switch {
	case !family && asked != TwoShotFlow:
		return choice{algorithm: asked}
	case size == 1 && asked == TwoShotFlow:
		return choice{algorithm: asked, lap: shortLap}
	case size == 1 && kind == device.CUDA:
		return choice{algorithm: OneShotPull} // a copy, or the rounding of an average
	case size == 1:
		return choice{algorithm: OneShot}
	}
	l := lookup{tables: tables, collective: tuning.AllReduce, asked: asked, kind: kind, dtype: dtype.String(), bytes: bytes, size: size, whole: whole}
	if slices.Contains(tuning.Floats, l.dtype) && !Supported(kind, OneShotPush, dtype, op, size) && kind == device.CUDA {
		l.dtype = "" // rules for these were measured with sums, whose lines are all data
	}
	l.can = func(a Algorithm) bool {
		// Without having been asked for it nobody gets other bits than the other ranks.
		return Supported(kind, a, dtype, op, size) && !(a.NeedsMulticast() && !castable(m)) && !(a == OneShotMultimem && asked == Auto) && !avoided(a)
	}
	c, ok := l.find()
	switch {
	case ok:
	case asked == OneShot && Supported(kind, OneShotPush, dtype, op, size):
		c.algorithm = OneShotPush
	case asked == OneShot:
		c.algorithm = OneShotLL
	case kind == device.CUDA && asked == Auto && avoided(TwoShotFlow):
		c.algorithm = TwoShotPull // which needs no workspace
	case asked == TwoShot || kind == device.CUDA && asked == Auto:
		c.algorithm = TwoShotFlow
	case asked == Auto:
		c.algorithm = TwoShot
	default:
		c.algorithm = asked
	}
	if !family {
		c.blocks = 0 // who asks for a form by its name says how many
	}
	if c.algorithm == TwoShotFlow && c.lap == 0 {
		c.lap = shortLap
	}
	return c
}

// castable reports whether memory can have multicast addresses, as far as it is known, and its GPUs kernels for them. What takes that away takes it away on every rank.
func castable(m *memory.Memory) bool {
	return m != nil && m.Backend().Capabilities().Multicast && hopper(m)
}

// untilHad makes a plan by once, which says what form that takes: where the form is left to Auto and cannot be had, it goes to avoided, and the next is tried.
func untilHad(m *memory.Memory, asked Algorithm, avoided *[]Algorithm, once func() (*Plan, Algorithm, error)) (*Plan, error) {
	for {
		p, form, err := once()
		if asked != Auto || slices.Contains(*avoided, form) || !avoidable(form, err) {
			return p, err
		}
		m.Logger().Info("a form cannot be had; auto takes another one", "form", form, "error", err)
		*avoided = append(*avoided, form)
	}
}

// avoidable reports whether a form that Auto has taken failed for what another one may do without, on every rank: multicast addresses, or workspace. Both are asked for when
// the ranks have compared what they make: one that fails before, with another form that it asks for by name say, tries no other, and nobody may then.
func avoidable(a Algorithm, err error) bool {
	if _, large := errors.AsType[*memory.WorkspaceError](err); large {
		return true
	}
	_, agreed := errors.AsType[interface {
		error
		Agreed()
	}](err)
	return agreed && a.NeedsMulticast() && a.form() == nil && (errors.Is(err, errs.ErrUnsupported) || errors.Is(err, errs.ErrNoMemory)) && !errors.Is(err, errs.ErrMismatch)
}

// atMostBlocks is the bound of the blocks of a plan: what was asked for, or fewer if a table says so; 0 is none.
func atMostBlocks(asked, table int) int {
	if asked == 0 || table > 0 && table < asked {
		return table
	}
	return asked
}

// collectiveNames are the collectives of makers in tables.
var collectiveNames = map[string]string{
	"NewBroadcast": tuning.Broadcast, "NewReduce": tuning.Reduce, "NewAllGather": tuning.AllGather, "NewReduceScatter": tuning.ReduceScatter, "NewAllToAll": tuning.AllToAll,
}

// byTable makes Auto and OneShot into one of the forms that there are.
func (m *maker) byTable(have []Algorithm) {
	kind, size := m.in.Device().Kind(), m.in.WorldSize()
	if size == 1 && kind == device.CUDA && slices.Contains(have, OneShotPull) {
		m.algorithm = OneShotPull
		return
	}
	l := lookup{
		tables: m.in.Memory().Tuning(), collective: collectiveNames[m.call], asked: m.opts.Algorithm, kind: kind, dtype: m.in.DType().String(),
		bytes: max(m.in.Bytes(), m.out.Bytes()), size: size, whole: m.wholePieces(),
	}
	l.can = func(a Algorithm) bool {
		return (slices.Contains(have, a) || a == Transfers) && !(a.NeedsMulticast() && !castable(m.in.Memory())) && !slices.Contains(m.avoided, a) && m.ordered(a)
	}
	c, ok := l.find()
	if !ok {
		c.algorithm = have[0]
		if slices.Contains(m.avoided, have[0]) {
			// What needs islands is chosen where there are some.
			others := append(slices.DeleteFunc(slices.Clone(have), func(a Algorithm) bool { return a == Hierarchical }), Transfers)
			if i := slices.IndexFunc(others, l.can); i >= 0 {
				c.algorithm = others[i]
			}
		}
	}
	m.algorithm, m.maxBlocks = c.algorithm, atMostBlocks(m.opts.MaxBlocks, c.blocks)
}

// wholePieces reports whether all that ranks exchange is vectors of 16 bytes and nothing else, of one length, and there are kernels for such, on this rank, and so on
// every rank, since tensors lie alike on them modulo 16. The tables are asked by it, and kernels taken by it.
func (m *maker) wholePieces() bool {
	size, piece, message := int64(m.in.WorldSize()), min(m.in.Bytes(), m.out.Bytes()), max(m.in.Bytes(), m.out.Bytes())
	if m.call == "NewAllToAll" {
		piece = message / size
	}
	most := int64(wholeMostBytes)
	switch {
	case m.call == "NewReduceScatter" && size > 1:
		most = flowMostBytes / (size - 1)
	case m.call == "NewReduce" && size > 2:
		most = flowMostBytes
	}
	return size <= ptx.Inline && !(m.combines && m.op != Sum && m.op != Avg) && piece > 0 && piece <= most &&
		(uint64(m.in.Ptr())|uint64(m.out.Ptr())|uint64(piece))%16 == 0 && (piece == message || piece*size == message)
}
