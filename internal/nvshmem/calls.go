package nvshmem

import (
	"fmt"
	"math"
	"slices"

	"github.com/symmem/symmem/internal/errs"
)

// NewUniqueID makes the id of one start and opens the socket at which the PEs will meet. One process calls it, PE 0.
func (l *Library) NewUniqueID() (*UniqueID, error) {
	id := &UniqueID{Version: uniqueIDVersion}
	if err := check("nvshmemx_get_uniqueid", l.call.getUniqueID(id)); err != nil {
		return nil, fmt.Errorf("making a unique id (is there a network interface, and the plugin %s? %s names another interface than lo): %w",
			l.bootstrap, loopback, err)
	}
	return id, nil
}

// Start makes this process PE number pe of pes, all of which bring id, each with another GPU. It is collective and blocks until all have come, for
// ever if one does not: see [Bound]. The library does not always report that it failed, so its status is checked.
func (l *Library) Start(pes, pe int, id *UniqueID) error {
	const op = "starting NVSHMEM"
	if pes < 1 || pes > math.MaxInt32 {
		return errs.Invalid(op, "PEs", pes, "1 and more")
	}
	if pe < 0 || pe >= pes {
		return errs.Invalid(op, "PE", pe, fmt.Sprintf("0 to %d", pes-1))
	}
	if id == nil || id.Version != uniqueIDVersion {
		return errs.Invalid(op, "unique id", id, "what NewUniqueID has given on PE 0")
	}
	if s := l.call.initStatus(); s != NotStarted {
		return fmt.Errorf("%s: it is %s already in this process: %w", op, s, errs.ErrInvalid)
	}
	attr := newInitAttr()
	attr.args.id.id = id // so does the library, of which the garbage collector is not told: it could miss an id that nobody else has any more
	l.attr.Store(attr)
	if err := check("nvshmemx_set_attr_uniqueid_args", l.call.setUniqueID(int32(pe), int32(pes), id, attr)); err != nil {
		return err
	}
	if err := check("nvshmemx_hostlib_init_attr", l.call.initAttr(withUniqueID, attr)); err != nil {
		return err
	}
	if s := l.call.initStatus(); s != Started {
		return fmt.Errorf("%s: it is %s and not %s: its GPU half failed, most often because the GPUs cannot reach each other, "+
			"/tmp is not writable, or two PEs share a GPU (NVSHMEM_DEBUG=INFO says more): %w", op, s, Started, errs.ErrUnavailable)
	}
	if has, is := int(l.call.pes()), int(l.call.myPE()); has != pes || is != pe {
		return fmt.Errorf("%s: this process has become PE %d of %d instead of %d of %d: %w", op, is, has, pe, pes, errs.ErrMismatch)
	}
	l.started.Store(true)
	return nil
}

// Finalize ends what Start began; then the library can be started again. It is collective and blocks until all PEs have come:
// see [Bound]. The heap is gone afterwards, whatever is left in it.
func (l *Library) Finalize() error {
	if !l.started.Swap(false) {
		return notStarted("Finalize")
	}
	l.call.finalize()
	return nil
}

// Align allocates bytes of the symmetric heap at a multiple of alignment, a power of two, and returns its address. If that is 0, NVSHMEM has torn the
// heap down and nothing works any more. All PEs call it with the same arguments: it blocks until they have.
func (l *Library) Align(alignment, bytes int64) (uint64, error) {
	if !l.started.Load() {
		return 0, notStarted("Align")
	}
	if alignment < 8 || alignment&(alignment-1) != 0 {
		return 0, errs.Invalid("Align", "alignment", alignment, "a power of two, 8 and more")
	}
	if bytes <= 0 {
		return 0, errs.Invalid("Align", "bytes", bytes, "1 and more")
	}
	return l.call.align(uintptr(alignment), uintptr(bytes)), nil
}

// Ptr returns the address in this process of PE pe's copy of p, an address of this PE's heap; 0 if there is none.
func (l *Library) Ptr(p uint64, pe int) (uint64, error) {
	if !l.started.Load() {
		return 0, notStarted("Ptr")
	}
	if pe < 0 || pe >= int(l.call.pes()) {
		return 0, errs.Invalid("Ptr", "PE", pe, fmt.Sprintf("0 to %d", l.call.pes()-1))
	}
	return l.call.ptr(p, int32(pe)), nil
}

// Register makes bytes at p, the beginning of memory of cuMemCreate, part of the heap and returns the address that they have there; they stay at p as
// well. bytes is a multiple of the heap's granularity and not more than the memory has. If the address is 0, NVSHMEM has torn the heap down and
// nothing works any more. All PEs call it with the same number of bytes: it blocks until they have.
func (l *Library) Register(p uint64, bytes int64) (uint64, error) {
	if !l.started.Load() {
		return 0, notStarted("Register")
	}
	if p == 0 || bytes <= 0 {
		return 0, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %#x", bytes, p), "at least 1 byte")
	}
	return l.call.register(p, uintptr(bytes), 0), nil
}

// Unregister removes from the heap what Register has added. All PEs call it: it blocks until they have.
func (l *Library) Unregister(alias uint64, bytes int64) error {
	if !l.started.Load() {
		return notStarted("Unregister")
	}
	return check("nvshmemx_buffer_unregister_symmetric", l.call.unregister(alias, uintptr(bytes)))
}

// NewTeam makes another team of all PEs: collectives of different teams do not disturb each other. All PEs call it: it blocks until they have.
func (l *Library) NewTeam() (Team, error) {
	if !l.started.Load() {
		return TeamInvalid, notStarted("NewTeam")
	}
	team := new(Team)
	*team = TeamInvalid
	err := check("nvshmem_team_split_strided", l.call.teamSplit(TeamWorld, 0, 1, l.call.pes(), 0, 0, team))
	if err == nil && *team <= TeamWorld {
		err = fmt.Errorf("nvshmem_team_split_strided gave team %d: %w", *team, errs.ErrUnsupported)
	}
	if err != nil {
		return TeamInvalid, fmt.Errorf("making a team (%s sets how many there can be): %w", MaxTeamsEnv, err)
	}
	return *team, nil
}

// MulticastPtr returns the address that reaches every PE's copy of p, an address of this PE's heap; 0 if there is none. The error is ErrUnsupported
// if the library was loaded without multicast.
func (l *Library) MulticastPtr(p uint64) (uint64, error) {
	if l.call.multicastPtr == nil {
		return 0, fmt.Errorf("multicast is switched off: %w", errs.ErrUnsupported)
	}
	if !l.started.Load() {
		return 0, notStarted("MulticastPtr")
	}
	return l.call.multicastPtr(TeamWorld, p), nil
}

// Barrier enqueues on stream, a CUstream, a barrier of the team. It returns at once.
func (l *Library) Barrier(team Team, stream uintptr) error {
	if !l.started.Load() {
		return notStarted("Barrier")
	}
	return check("nvshmemx_barrier_on_stream", l.call.barrier(team, stream))
}

// Put enqueues on stream a copy of bytes at src to PE pe's copy of dst, an address of this PE's heap.
func (l *Library) Put(dst, src uint64, bytes int64, pe int, stream uintptr) error {
	return l.copy("Put", l.call.put, dst, src, bytes, pe, stream)
}

// Get enqueues on stream a copy of bytes to dst from PE pe's copy of src, an address of this PE's heap.
func (l *Library) Get(dst, src uint64, bytes int64, pe int, stream uintptr) error {
	return l.copy("Get", l.call.get, dst, src, bytes, pe, stream)
}

func (l *Library) copy(op string, call func(dst, src uint64, bytes uintptr, pe int32, stream uintptr), dst, src uint64, bytes int64, pe int,
	stream uintptr,
) error {
	if !l.started.Load() {
		return notStarted(op)
	}
	if pe < 0 || pe >= int(l.call.pes()) {
		return errs.Invalid(op, "PE", pe, fmt.Sprintf("0 to %d", l.call.pes()-1))
	}
	if dst == 0 || src == 0 || bytes <= 0 {
		return errs.Invalid(op, "memory", fmt.Sprintf("%d bytes from %#x to %#x", bytes, src, dst), "at least 1 byte")
	}
	call(dst, src, uintptr(bytes), int32(pe), stream)
	return nil
}

// The names of types and operations in the names of NVSHMEM's collectives (nvshmemx_coll_api.h), by this module's names.
var (
	typeNames = map[string]string{
		"f16": "half", "bf16": "bfloat16", "f32": "float", "f64": "double", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
		"u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
	}
	opNames = map[string]string{"sum": "sum", "prod": "prod", "min": "min", "max": "max"}
)

// What Collective may be asked for, by NVSHMEM's names.
const (
	Reduce        = "reduce"        // the all-reduce
	ReduceScatter = "reducescatter" // share i of the sums to PE i
	Broadcast     = "broadcast"
	Collect       = "fcollect" // the all-gather of blocks of one size
	AllToAll      = "alltoall"
)

// moves are those that combine nothing.
var moves = []string{Broadcast, Collect, AllToAll}

// symbolOf is the name of the function that does what for a type by an operation, which what combines nothing has not; "" if there is none.
func symbolOf(what, dtype, op string) string {
	t, o := typeNames[dtype], opNames[op]
	switch {
	case t == "":
	case (what == Reduce || what == ReduceScatter) && o != "":
		return fmt.Sprintf("nvshmemx_%s_%s_%s_on_stream", t, o, what)
	case !slices.Contains(moves, what):
	case dtype == "u8":
		return fmt.Sprintf("nvshmemx_%smem_on_stream", what)
	default:
		return fmt.Sprintf("nvshmemx_%s_%s_on_stream", t, what)
	}
	return ""
}

// A Collective enqueues on stream, a CUstream, one of NVSHMEM's collectives on all PEs of the team, or records it if the stream is capturing. Src and dst are
// addresses of the heap, and count is that of elements of the message, or of one PE's block or share. Only a broadcast has a root, a PE of the team.
// All PEs enqueue it alike. It returns at once. NVSHMEM does not bound waits on the GPU: if a PE never comes, the streams of the others never end.
//
// NVSHMEM may write to a PE's dst before that PE's stream has come to the call: put a barrier in front.
type Collective func(team Team, dst, src uint64, count int64, root int, stream uintptr) error

// Collective returns one of NVSHMEM's collectives for a type ("bf16") and, if it combines, an operation ("sum"); ErrUnsupported where NVSHMEM has none, as for
// "avg".
func (l *Library) Collective(what, dtype, op string) (Collective, error) {
	symbol := symbolOf(what, dtype, op)
	if symbol == "" {
		return nil, fmt.Errorf("NVSHMEM has no %s of %s by %q: %w", what, dtype, op, errs.ErrUnsupported)
	}
	var plain collective
	var rooted broadcast
	var err error
	if what == Broadcast {
		rooted, err = l.call.broadcast(symbol)
	} else {
		plain, err = l.call.collective(symbol)
	}
	if err != nil {
		return nil, err
	}
	return func(team Team, dst, src uint64, count int64, root int, stream uintptr) error {
		if !l.started.Load() {
			return notStarted("Collective")
		}
		if team < TeamWorld || dst == 0 || src == 0 || count <= 0 || root < 0 || root >= int(l.call.pes()) {
			return errs.Invalid("Collective", "arguments", fmt.Sprintf("team %d, root %d, %d elements from %#x to %#x", team, root, count, src, dst),
				"a team that exists, a root in it, at least 1 element, memory of the heap")
		}
		if rooted != nil {
			return check(symbol, rooted(team, dst, src, uintptr(count), int32(root), stream))
		}
		return check(symbol, plain(team, dst, src, uintptr(count), stream))
	}, nil
}

// notStarted returns the error of a call that would end the process.
func notStarted(op string) error {
	return fmt.Errorf("%s: NVSHMEM is not started, or finalized: %w", op, errs.ErrClosed)
}
