package machine

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// fill adds what only the system knows.
func (m *Machine) fill() {
	m.CPU = cpuModel()
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
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
