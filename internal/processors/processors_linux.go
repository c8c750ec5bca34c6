package processors

import (
	"io/fs"
	"math/bits"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// allowed returns the processors that the kernel lets this process run on: those of its first thread, which all others have unless they were bound one
// by one.
func allowed() Set {
	var words [Most / bits.UintSize]uintptr
	// unix.SchedGetaffinity knows 1024 processors only, and fails where the kernel knows more.
	n, _, errno := unix.RawSyscall(unix.SYS_SCHED_GETAFFINITY, uintptr(os.Getpid()), unsafe.Sizeof(words), uintptr(unsafe.Pointer(&words)))
	if errno != 0 {
		return first(runtime.NumCPU())
	}
	return setOf(words[:n/unsafe.Sizeof(words[0])])
}

// quota returns the smallest quota of processor time that the control group of this process has, or one that it is in, as far as they can be seen here,
// in thousandths of a processor, and the number of that group; 0 if there is none. What cannot be read is no quota.
func quota() (thousandths int64, of uint64) { return quotaIn(os.DirFS("/")) }

// quotaIn is quota on the files of a system.
func quotaIn(root fs.FS) (thousandths int64, of uint64) {
	at, top, version1 := controlGroup(root)
	for ; top != "" && strings.HasPrefix(at+"/", top+"/"); at = path.Dir(at) {
		if q := quotaOf(root, at, version1); q > 0 && (thousandths == 0 || q <= thousandths) {
			if info, err := fs.Stat(root, at); err == nil {
				if stat, ok := info.Sys().(*syscall.Stat_t); ok {
					thousandths, of = q, stat.Ino
				}
			}
		}
	}
	return thousandths, of
}

// controlGroup returns the folder of the control group that this process's time is counted in, the topmost folder that can be seen of that hierarchy,
// and whether the hierarchy is one of version 1. The folders are "" if there are none.
func controlGroup(root fs.FS) (at, top string, version1 bool) {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return "", "", false
	}
	within := ""
	for line := range strings.Lines(string(text)) {
		// number:controllers:path; version 2 is number 0, without controllers.
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		if slices.Contains(strings.Split(fields[1], ","), "cpu") {
			within, version1 = fields[2], true
			break
		}
		if fields[0] == "0" && fields[1] == "" {
			within = fields[2]
		}
	}
	text, err = fs.ReadFile(root, "proc/self/mountinfo")
	if err != nil || within == "" {
		return "", "", false
	}
	for line := range strings.Lines(string(text)) {
		// number parent device root folder options [more] - type source options
		mount, kind, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields, more := strings.Fields(mount), strings.Fields(kind)
		if !ok || len(fields) < 6 || len(more) < 3 {
			continue
		}
		if version1 && (more[0] != "cgroup" || !slices.Contains(strings.Split(more[2], ","), "cpu")) || !version1 && more[0] != "cgroup2" {
			continue
		}
		rest, ok := strings.CutPrefix(within, strings.TrimSuffix(unescaped.Replace(fields[3]), "/"))
		if !ok || rest != "" && rest[0] != '/' {
			continue // the group is not below what is mounted here
		}
		top = strings.TrimPrefix(path.Clean(unescaped.Replace(fields[4])), "/")
		return path.Join(top, rest), top, version1 // at is outside of top where the process was moved out of its namespace
	}
	return "", "", false
}

// unescaped has what mountinfo writes in place of characters that would part its fields.
var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// quotaOf returns the quota of one control group, in thousandths of a processor; 0 if it has none.
func quotaOf(root fs.FS, folder string, version1 bool) int64 {
	var fields []string
	files := []string{"cpu.max"} // the time that may be used in each period, or max, and the period
	if version1 {
		files = []string{"cpu.cfs_quota_us", "cpu.cfs_period_us"}
	}
	for _, file := range files {
		text, err := fs.ReadFile(root, path.Join(folder, file))
		if err != nil {
			return 0
		}
		fields = append(fields, strings.Fields(string(text))...)
	}
	if len(fields) != 2 {
		return 0
	}
	time, err1 := strconv.ParseInt(fields[0], 10, 64)
	period, err2 := strconv.ParseInt(fields[1], 10, 64)
	if err1 != nil || err2 != nil || time <= 0 || period <= 0 || time/period >= Most {
		return 0
	}
	return max(1000*time/period, 1)
}
