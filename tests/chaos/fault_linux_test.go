package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fault is what befalls one rank.
type fault struct {
	victim int

	// When: before a stage; or at the system call of that count, after the victim has come to a stage if one is named too, and at all later ones if on
	// is set; or, without both, from the start.
	stage string
	call  *call
	count int
	on    bool

	// What: the call fails; the process is killed; it is stopped for a while; it may have no more files.
	errno unix.Errno
	kill  bool
	pause time.Duration
	files int
	hang  bool // until the others have come to their ends

	// again makes the ranks that are left do the job once more.
	again bool
	// counted, unless nil, takes how often the victim makes each call of every, and nothing befalls it.
	counted map[string]int

	seen    int           // of the calls that are trapped
	struck  bool          // it has befallen the victim
	staged  atomic.Bool   // the victim has come to the stage
	over    atomic.Bool   // the victim has come to the end of the job
	release chan struct{} // closed when what hangs goes on
}

// The bounds of what a rank waits for: of a job that must fail, and of one that must not, however long a rank is stopped.
const (
	shortTimeout = 6 * time.Second
	longTimeout  = 40 * time.Second
	hangTimeout  = 3 * time.Second
)

func (f *fault) timeout() time.Duration {
	switch {
	case f.pause > 0, f.counted != nil, f.broken():
		return longTimeout
	case f.hang:
		return hangTimeout
	}
	return shortTimeout
}

// environ is what the victim's environment has besides.
func (f *fault) environ() []string {
	var env []string
	if f.call != nil {
		env = append(env, trapVariable+"="+f.call.name)
	}
	if f.counted != nil {
		env = append(env, trapVariable+"="+everyCall)
	}
	if f.files > 0 {
		env = append(env, filesVariable+"="+strconv.Itoa(f.files))
	}
	return env
}

// String says what befalls whom.
func (f *fault) String() string {
	var what string
	switch {
	case f.files > 0:
		return fmt.Sprintf("rank %d may have %d open files", f.victim, f.files)
	case f.errno != 0:
		what = "fails: " + unix.ErrnoName(f.errno)
	case f.kill:
		what = "is killed"
	case f.hang:
		what = "hangs"
	default:
		what = fmt.Sprintf("is stopped for %v", f.pause)
	}
	switch {
	case f.call == nil:
		return fmt.Sprintf("rank %d %s before %s", f.victim, what, f.stage)
	case f.on:
		return fmt.Sprintf("rank %d %s at %s %d and all later ones", f.victim, what, f.call.name, f.count)
	}
	return fmt.Sprintf("rank %d %s at %s %d", f.victim, what, f.call.name, f.count)
}

// atStage is called when the victim comes to a stage, and waits.
func (f *fault) atStage(p *os.Process, stage string) {
	if f.stage != stage {
		return
	}
	if f.staged.Store(true); f.call == nil {
		f.strike(p)
	}
}

// atCall is called when the victim comes to a trapped call, and waits. It gives what the call fails with, or 0, and until when it hangs, or nil.
func (f *fault) atCall(p *os.Process, n *notification) (unix.Errno, <-chan struct{}) {
	if f.counted != nil {
		for _, c := range every() {
			if !f.over.Load() && c.match(n) {
				f.counted[c.name]++
			}
		}
		return 0, nil
	}
	if f.over.Load() || f.stage != "" && !f.staged.Load() || !f.call.match(n) {
		return 0, nil
	}
	f.seen++
	if f.seen != f.count && (!f.on || f.seen < f.count) {
		return 0, nil
	}
	f.struck = true
	f.strike(p)
	if f.hang {
		return 0, f.release
	}
	return f.errno, nil
}

// strike kills or stops the process, if that is what is to befall it.
func (f *fault) strike(p *os.Process) {
	switch {
	case f.kill:
		_ = p.Kill()
	case f.pause > 0:
		_ = p.Signal(syscall.SIGSTOP)
		time.Sleep(f.pause)
		_ = p.Signal(syscall.SIGCONT)
	}
}

// pick gives one of some.
func pick[T any](r *rand.Rand, some []T) T { return some[r.IntN(len(some))] }

// failingCall lets a system call of one rank fail, once or from then on.
func failingCall(r *rand.Rand, size int) *fault {
	c := &calls[r.IntN(len(calls))]
	for len(c.errnos) == 0 {
		c = &calls[r.IntN(len(calls))]
	}
	f := &fault{victim: r.IntN(size), call: c, count: 1 + r.IntN(20)*r.IntN(2), on: r.IntN(3) == 0, errno: pick(r, c.errnos)}
	if f.errno == unix.ECONNABORTED {
		f.on = false // package net asks again for as long as that comes
	}
	return f
}

// fewFiles limits the open files of one rank.
func fewFiles(r *rand.Rand, size int) *fault {
	most := pick(r, []int{16, 32, 64, 200})
	return &fault{victim: r.IntN(size), files: 8 + r.IntN(most-8+1)}
}

// struck is calls at which a rank is killed or stopped: those on the way to others, and those that make memory.
func struck() []*call {
	var some []*call
	for i := range calls {
		if c := &calls[i]; slices.Contains([]string{"connect", "accept4", "setsockopt", "memfd_create", "mmap(MAP_SHARED)", "sendmsg", "recvmsg"}, c.name) {
			some = append(some, c)
		}
	}
	return some
}

// place sets when a fault strikes: at a stage, or in the middle of one. The first some ten writes are those of joining.
func (f *fault) place(r *rand.Rand) *fault {
	switch r.IntN(3) {
	case 0:
		f.stage = pick(r, stages)
	case 1:
		f.call, f.count = pick(r, struck()), 1+r.IntN(12)*r.IntN(2)
	default:
		i := slices.IndexFunc(calls, func(c call) bool { return c.name == "write" })
		f.call, f.count = &calls[i], 1+r.IntN(pick(r, []int{20, 150}))
	}
	return f
}

// killed kills a rank.
func killed(r *rand.Rand, size int) *fault {
	return (&fault{victim: r.IntN(size), kill: true}).place(r)
}

// stopped stops a rank for 0.5 to 4 s.
func stopped(r *rand.Rand, size int) *fault {
	return (&fault{victim: r.IntN(size), pause: time.Duration(5+r.IntN(36)) * 100 * time.Millisecond}).place(r)
}

// judge says what is wrong with how a world has ended.
func (f *fault) judge(world []*worker) []string {
	var wrong []string
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	victim := world[f.victim]
	for _, w := range world {
		noise := strings.TrimSpace(w.noise.String())
		switch {
		case w.watched != nil:
			complain("rank %d: its trap: %v", w.rank, w.watched)
		case w == victim && f.kill && w.last == nil:
			continue
		case w.last == nil:
			complain("rank %d did not come to its end in %v: %v; it wrote: %s", w.rank, w.took.Round(time.Millisecond), w.err, noise)
			continue
		case w.err != nil:
			complain("rank %d: %v; it wrote: %s", w.rank, w.err, noise)
		case noise != "":
			complain("rank %d wrote: %s", w.rank, noise)
		}
		if w.left != "" {
			complain("rank %d has left behind: %s", w.rank, w.left)
		}
		if w.last.Goroutines > 0 {
			complain("rank %d has left %d goroutines behind", w.rank, w.last.Goroutines)
		}
		if strings.Contains(w.last.Error, errWrong.Error()) {
			complain("rank %d has %s", w.rank, w.last.Error)
		}
	}
	if len(wrong) > 0 {
		return wrong
	}
	if f.pause > 0 {
		for _, w := range world {
			if w.last.Error != "" {
				complain("rank %d, in %s: %s", w.rank, w.last.In, w.last.Error)
			}
		}
		return wrong
	}
	if f.hang {
		f.judgeHang(world, complain)
		return wrong
	}
	for _, w := range world {
		if f.broken() && w.last != nil && (slices.Contains(w.last.Conditions, "gave up") || slices.Contains(w.last.Conditions, "deadline")) {
			complain("rank %d has waited for its deadline, in %s: %s", w.rank, w.last.In, w.last.Error)
		}
	}
	if !f.kill && victim.last.Error != "" {
		f.judgeVictim(victim, complain)
	}
	f.judgeOthers(world, complain)
	return wrong
}

// unsaid are the calls that a rank may fail for without the system's reason in its error, with why.
var unsaid = map[string]string{
	"getsockname":   "package net drops the reason, and says that the socket is not one it can use",
	"getpeername":   "package net takes it for a connection that is still being made, until the time is over",
	"read(socket)":  "a connection that is broken is one to a rank that is lost",
	"write(socket)": "a connection that is broken is one to a rank that is lost",
}

// breaks reports whether the fault breaks a connection. Then the rank at its other end counts as lost, and whose end has failed nobody can tell.
func (f *fault) breaks() bool { return f.errno != 0 && f.connection() }

// connection reports whether the fault befalls a connection that the ranks talk over.
func (f *fault) connection() bool {
	return f.call != nil && (f.call.name == "read(socket)" || f.call.name == "write(socket)")
}

// broken reports whether the fault breaks a connection that the ranks talk over after joining. Nobody waits for a deadline then: both ends learn of it.
func (f *fault) broken() bool { return f.breaks() && f.stage != "" }

// judgeVictim: the rank whose call failed says which condition it is in, and the system's own reason.
func (f *fault) judgeVictim(w *worker, complain func(string, ...any)) {
	e := w.last
	text := "too many open files"
	switch {
	case f.errno == unix.EACCES && strings.Contains(e.Error, "boot_id"):
		text = "cannot read" // a boot id that is hidden from a rank is none: the rank counts as one of another host
	case f.errno != 0:
		text = f.errno.Error()
	}
	if !strings.Contains(e.Error, text) && (f.call == nil || unsaid[f.call.name] == "") {
		complain("rank %d does not say why, %q, in %s: %s", w.rank, text, e.In, e.Error)
	}
	if f.files > 0 && !e.FileLimit && !strings.Contains(e.Error, "raise") {
		complain("rank %d does not say what to do about its limit of files, in %s: %s", w.rank, e.In, e.Error)
	}
	if f.errno == unix.ENOMEM && slices.Contains([]string{"memfd_create", "ftruncate", "mmap(MAP_SHARED)", "mmap(MAP_NORESERVE)"}, f.call.name) &&
		!slices.Contains(e.Conditions, "no memory") && !slices.Contains(e.Conditions, "unavailable") {
		complain("rank %d: the error is not ErrNoMemory, in %s: %s", w.rank, e.In, e.Error)
	}
}

// judgeOthers: if any rank has an error, all that came after it have one, the same, and it names the victim.
func (f *fault) judgeOthers(world []*worker, complain func(string, ...any)) {
	victim := world[f.victim].last
	if f.kill && !slices.ContainsFunc(world, func(w *worker) bool { return w.rank != f.victim && (w.last.Error != "" || w.last.In != "close") }) {
		return // they were done when it was killed
	}
	var first *worker
	for _, w := range world {
		if w.rank == f.victim || w.last == nil {
			continue
		}
		e := w.last
		switch {
		case e.Error == "" && victim != nil && victim.Error == "":
			continue
		case e.Error == "" && (victim == nil || victim.In != "close"):
			complain("rank %d has no error, though rank %d has failed", w.rank, f.victim)
			continue
		case e.Error == "":
			continue
		}
		if slices.Contains(e.Conditions, "mismatch") {
			complain("rank %d blames what the ranks asked for, in %s: %s", w.rank, e.In, e.Error)
		}
		// While ranks join, one that rank 0 has taken in can only know which others it has not.
		refusing := f.files > 0 || f.call != nil && f.call.name == "accept4"
		joining := f.victim == 0 && e.In == "join" && refusing && len(e.Names) > 0
		names := slices.Contains(e.Names, f.victim) || f.victim == 0 && e.Connect || joining
		if f.breaks() {
			names = names || slices.Contains(e.Conditions, "peer lost") || f.victim == 0 && strings.Contains(e.Error, "rendezvous service")
		}
		if !names {
			complain("rank %d does not name rank %d, in %s: %s", w.rank, f.victim, e.In, e.Error)
		}
		if e.Told && f.errno != 0 && !strings.Contains(e.Error, f.errno.Error()) {
			complain("rank %d is not told why, in %s: %s", w.rank, e.In, e.Error)
		}
		if f.kill && names && !e.Connect && f.stage != "join" && e.In != "join" && !slices.Contains(e.Conditions, "peer lost") {
			complain("rank %d: the error is not ErrPeerLost, in %s: %s", w.rank, e.In, e.Error)
		}
		if f.victim == 0 && e.Connect {
			if f.files > 0 && !strings.Contains(e.Error, "open files") {
				complain("rank %d does not say what keeps rank 0 from serving it, in %s: %s", w.rank, e.In, e.Error)
			}
			continue // those that were connected to it have seen more
		}
		if first == nil {
			first = w
		} else if !slices.Equal(first.last.Conditions, e.Conditions) {
			complain("ranks %d and %d are in conditions that differ: %v: %s; %v: %s", first.rank, w.rank,
				first.last.Conditions, first.last.Error, e.Conditions, e.Error)
		}
	}
}
