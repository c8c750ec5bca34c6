package machine

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fill adds what only the system knows.
func (m *Machine) fill() {
	m.CPU = cpuModel()
	if text, err := os.ReadFile("/sys/devices/system/cpu/online"); err == nil {
		m.Online = countList(strings.TrimSpace(string(text)))
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
}

// countList returns how many numbers a list of the kernel's has, such as "0-3,8"; 0 if it is none.
func countList(list string) int {
	count := 0
	for part := range strings.SplitSeq(list, ",") {
		first, last, ranged := strings.Cut(part, "-")
		if !ranged {
			last = first
		}
		low, err := strconv.Atoi(first)
		high, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || low < 0 || high < low {
			return 0
		}
		count += high - low + 1
	}
	return count
}

// cpuModel returns the name of the first processor: "model name" on x86, other keys elsewhere.
func cpuModel() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	found := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, ok := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); ok && found[key] == "" {
			found[key] = strings.TrimSpace(value)
		}
	}
	for _, key := range []string{"model name", "Model", "cpu model", "cpu", "CPU part"} {
		if found[key] != "" {
			return found[key]
		}
	}
	return ""
}
