package nvshmem

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Setting is one variable of NVSHMEM's environment as the library sees it.
type Setting struct {
	Name, Value string
	// Ours is set if this package chose the value; otherwise it was there before.
	Ours bool
}

// multicastOff are the variables that keep NVSHMEM, and the NCCL that it may load, from making NVLink multicast objects. No
// other switch exists.
var multicastOff = [...]Setting{{Name: "NVSHMEM_DISABLE_NVLS", Value: "1"}, {Name: "NCCL_NVLS_ENABLE", Value: "0"}}

// defaults returns the settings of this module where the user has not chosen otherwise.
func defaults(granularity int64) []Setting {
	return []Setting{
		// On one host every PE has pointers to all others. The network transports would look for cards, and UCX's replaces
		// handlers of signals that Go needs.
		{Name: "NVSHMEM_REMOTE_TRANSPORT", Value: "none"},
		// The PEs of one host meet on its loopback, so that no network card is needed.
		{Name: "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", Value: "lo"},
		// The unit in which memory is added to the heap, and which registered memory must be a multiple of.
		{Name: "NVSHMEM_CUMEM_GRANULARITY", Value: strconv.FormatInt(granularity, 10)},
		// A thread that drives the network would have nothing to do.
		{Name: "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY", Value: "1"},
		// Otherwise each team gets a communicator of whichever NCCL the loader finds, and NVSHMEM's reductions are NCCL's.
		{Name: "NVSHMEM_DISABLE_NCCL", Value: "1"},
	}
}

// loopback is the variable that is not set when the user has said where the PEs meet.
const (
	loopback  = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
	sessionID = "NVSHMEM_BOOTSTRAP_UID_SESSION_ID"
)

// MaxHeapEnv names the variable with the most bytes that a PE's heap can have; NVSHMEM 3.4.5 takes 256 GiB if it is not set.
const MaxHeapEnv = "NVSHMEM_MAX_MEMORY_PER_GPU"

// GranularityEnv names the variable with the unit in which memory is added to the heap.
const GranularityEnv = "NVSHMEM_CUMEM_GRANULARITY"

// MaxTeamsEnv names the variable with the largest number of teams.
const MaxTeamsEnv = "NVSHMEM_MAX_TEAMS"

// Environment sets the variables that the library reads at its first start, for this process, C's side included, and returns all of NVSHMEM's that
// are then set. Variables that the user has set stay as they are, except the switches of multicast: unless multicast is allowed they are turned off,
// whatever they were.
func Environment(multicast bool, granularity int64) ([]Setting, error) {
	wanted := defaults(granularity)
	given.Lock()
	defer given.Unlock()
	ours := map[string]bool{}
	for _, s := range wanted {
		if os.Getenv(s.Name) != "" && os.Getenv(s.Name) != given.values[s.Name] || s.Name == loopback && os.Getenv(sessionID) != "" {
			continue
		}
		given.values[s.Name], ours[s.Name] = s.Value, true
		if err := os.Setenv(s.Name, s.Value); err != nil {
			return nil, fmt.Errorf("setting %s: %w", s.Name, err)
		}
	}
	if !multicast {
		if err := ForbidMulticast(); err != nil {
			return nil, err
		}
	}
	var all []Setting
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "NVSHMEM_") || name == "NCCL_NVLS_ENABLE" {
			all = append(all, Setting{name, value, ours[name]})
		}
	}
	return all, nil
}

// given is what this package has set in this process, and may set again.
var given = struct {
	sync.Mutex
	values map[string]string
}{values: map[string]string{}}

// ForbidMulticast keeps the library from making multicast objects. It has no effect after the library's first start.
func ForbidMulticast() error {
	for _, s := range multicastOff {
		if os.Getenv(s.Name) == s.Value {
			continue
		}
		if err := os.Setenv(s.Name, s.Value); err != nil {
			return fmt.Errorf("switching NVSHMEM's multicast off: %w", err)
		}
	}
	return nil
}

// ParseSize reads a size as NVSHMEM does: a number, and perhaps a letter K, M, G or T right after it, for 1024 to the power
// of 1 to 4; what follows is ignored. It reports whether it could.
func ParseSize(text string) (int64, bool) {
	text = strings.TrimSpace(text)
	number, shift := text, 0
	if i := strings.IndexAny(text, "kKmMgGtT"); i > 0 {
		number, shift = text[:i], 10*(1+strings.IndexByte("KMGT", text[i]&^0x20))
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !(v >= 0) || v*float64(int64(1)<<shift) > 1<<62 {
		return 0, false
	}
	return int64(v * float64(int64(1)<<shift)), true
}
