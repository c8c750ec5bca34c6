package host

import (
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/symmem/symmem/internal/errs"
)

// Shared memory counts as memory of the processes that touch it, and of their control groups. Pages are taken when they are first touched, and a
// process that takes more than it may is killed. So the memory that is left is checked before more is allocated.

// systemRoot is where the file systems proc and sys are; tests have their own.
var systemRoot = "/"

// enough returns ErrNoMemory, with the values, if the host or a control group that this process is in has less than bytes left, or the host can promise less. A limit that cannot
// be read is ignored.
func enough(bytes int64) error {
	if left, ok := memAvailable(); ok && bytes > left {
		return fmt.Errorf("%d bytes are asked for and the host has %d left: %w", bytes, left, errs.ErrNoMemory)
	}
	if p, ok := promised(); ok && bytes > p.left() {
		return fmt.Errorf("%d bytes are asked for and the host can promise %d more: vm.overcommit_memory is 2, CommitLimit is %d, of which %d are kept back (vm.user_reserve_kbytes, "+
			"vm.admin_reserve_kbytes), and %d are promised already (/proc/meminfo); free tensors, end other programs, or raise vm.overcommit_ratio: %w", bytes, p.left(), p.limit, p.kept, p.used, errs.ErrNoMemory)
	}
	for _, g := range controlGroups() {
		if left := max(g.limit-g.used+g.cache, 0); bytes > left {
			return fmt.Errorf("%d bytes are asked for and control group %s has %d left: its limit %s is %d, and %d of that are in use, %d of "+
				"which the kernel can take back; free tensors, or raise the limit of the container or job: %w",
				bytes, g.folder, left, g.file, g.limit, g.used, g.cache, errs.ErrNoMemory)
		}
	}
	return nil
}

// memAvailable returns how much memory the kernel can provide without swapping, in bytes.
func memAvailable() (int64, bool) {
	kb, ok := counter(filepath.Join(systemRoot, "proc/meminfo"), "MemAvailable:")
	return kb << 10, ok
}

// promises are what a host may promise that never promises more memory than it has, in bytes: then a page of shared memory is accounted when it is first touched, and a process that touches one
// more gets a SIGBUS.
type promises struct {
	limit int64
	kept  int64 // of limit, for administrators, and so that a large process leaves its user some
	used  int64 // what is promised already
}

// left is what the host may still promise.
func (p promises) left() int64 { return max(p.limit-p.kept-p.used, 0) }

// promised returns the promises of this host; false if it promises more than it has. The system keeps back less of a process that is small, and nothing for administrators of one that is theirs: that is
// not looked at, as a process may grow, and it is little.
func promised() (p promises, ok bool) {
	vm := filepath.Join(systemRoot, "proc/sys/vm")
	if mode, known := number(filepath.Join(vm, "overcommit_memory")); !known || mode != 2 {
		return p, false
	}
	meminfo := filepath.Join(systemRoot, "proc/meminfo")
	limit, ok := counter(meminfo, "CommitLimit:")
	used, known := counter(meminfo, "Committed_AS:")
	user, _ := number(filepath.Join(vm, "user_reserve_kbytes"))
	admin, _ := number(filepath.Join(vm, "admin_reserve_kbytes"))
	return promises{limit: limit << 10, kept: (user + admin) << 10, used: used << 10}, ok && known
}

// mapped is how many mappings of this process the memory of all its ranks has: one for what a rank allocates, and one for each rank's copy in a window.
var mapped atomic.Int64

// takeMappings counts more mappings. It returns ErrNoMemory, with the values, where they would leave the process too few of those that the system allows it: it could not
// grow its heap or start a thread any more, which ends it. A limit that cannot be read is ignored. giveMappings gives them back.
func takeMappings(n int) error {
	have := mapped.Add(int64(n))
	limit, ok := number(filepath.Join(systemRoot, "proc/sys/vm/max_map_count"))
	if most := limit - limit/16; !ok || have <= most {
		return nil
	}
	giveMappings(n)
	return fmt.Errorf("%d more mappings are asked for, memory of ranks has %d of this process already, and the limit of these is %d (vm.max_map_count), of which a sixteenth "+
		"is left to all else: take small tensors from a heap, which has one for each rank in all, free some, or raise the limit: %w", n, have-int64(n), limit, errs.ErrNoMemory)
}

func giveMappings(n int) { mapped.Add(-int64(n)) }

// controlGroup is a group of processes with a limit of its memory, in bytes.
type controlGroup struct {
	folder string
	file   string // that holds the limit
	limit  int64
	used   int64
	cache  int64 // what of used the kernel can take back
}

// hierarchy is a version of control groups, and the names of what is read of them.
type hierarchy struct {
	fstype, controller, limit, used string
	cache                           []string
}

// hierarchies are version 2 and version 1; a system may have both, and the memory controller is in one of them. Pages of shared memory
// are not among the cached files that are counted here.
var hierarchies = []hierarchy{
	{"cgroup2", "", "memory.max", "memory.current", []string{"inactive_file", "active_file", "slab_reclaimable"}},
	{"cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", []string{"total_inactive_file", "total_active_file"}},
}

// controlGroups returns the control groups of this process that have a limit, and those above them that it can see.
func controlGroups() []controlGroup {
	member, err := os.ReadFile(filepath.Join(systemRoot, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	mounts, err := os.ReadFile(filepath.Join(systemRoot, "proc/self/mountinfo"))
	if err != nil {
		return nil
	}
	var groups []controlGroup
	for _, h := range hierarchies {
		own, ok := h.member(string(member))
		if !ok {
			continue
		}
		for line := range strings.Lines(string(mounts)) {
			if root, point, ok := h.mount(line); ok {
				groups = append(groups, h.walk(own, root, point)...)
			}
		}
	}
	return groups
}

// member finds the group of this process in the text of /proc/self/cgroup: lines of number, controllers and path, with colons between.
func (h *hierarchy) member(text string) (string, bool) {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) < 3 {
			continue
		}
		for controller := range strings.SplitSeq(fields[1], ",") {
			if controller == h.controller && (controller != "" || fields[0] == "0") {
				return fields[2], true
			}
		}
	}
	return "", false
}

// mount reads a line of /proc/self/mountinfo: which group is mounted, and where. See proc_pid_mountinfo(5).
func (h *hierarchy) mount(line string) (root, point string, ok bool) {
	left, right, found := strings.Cut(line, " - ")
	fields, kind := strings.Fields(left), strings.Fields(right)
	if !found || len(fields) < 5 || len(kind) < 3 || kind[0] != h.fstype {
		return "", "", false
	}
	if h.controller != "" && !strings.Contains(","+kind[2]+",", ","+h.controller+",") {
		return "", "", false
	}
	return unescaped.Replace(fields[3]), unescaped.Replace(fields[4]), true
}

// unescaped has what mountinfo writes in place of characters that would part its fields. Names of systemd have backslashes.
var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// walk reads the limits from the group of this process up to the one that is mounted. The path of a group counts from the top of the
// hierarchy, of which a container may see only a part: then the group that is mounted is its own.
func (h *hierarchy) walk(own, root, point string) []controlGroup {
	below, inside := strings.CutPrefix(own, strings.TrimSuffix(root, "/"))
	if !inside || below != "" && below[0] != '/' {
		below = ""
	}
	var groups []controlGroup
	for at := path.Clean("/" + below); ; at = path.Dir(at) {
		if g, ok := h.read(path.Join(point, at)); ok {
			groups = append(groups, g)
		}
		if at == "/" {
			return groups
		}
	}
}

// read reads one group; false if it has no limit.
func (h *hierarchy) read(folder string) (controlGroup, bool) {
	at := filepath.Join(systemRoot, folder)
	g := controlGroup{folder: folder, file: h.limit}
	var ok bool
	// Version 2 writes "max" for none, and version 1 the largest number of pages.
	if g.limit, ok = number(filepath.Join(at, h.limit)); !ok || g.limit >= math.MaxInt64-math.MaxInt32 {
		return g, false
	}
	if g.used, ok = number(filepath.Join(at, h.used)); !ok {
		return g, false
	}
	for _, name := range h.cache {
		bytes, _ := counter(filepath.Join(at, "memory.stat"), name)
		g.cache += bytes
	}
	g.cache = min(g.cache, g.used)
	return g, true
}

// number reads a file that holds one number.
func number(file string) (int64, bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil && n >= 0
}

// counter reads a number of a file whose lines begin with a name and a number.
func counter(file, name string) (int64, bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == name {
			n, err := strconv.ParseInt(fields[1], 10, 64)
			return n, err == nil && n >= 0
		}
	}
	return 0, false
}
