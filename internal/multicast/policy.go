// Package multicast holds the rule by which every backend decides whether NVLink multicast may be used: the setting and, where that leaves it open,
// the switches of other libraries in the environment. It imports no device and no library.
package multicast

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Policy says whether multicast may be used.
type Policy struct {
	Must      bool   // opening is an error where there can be no multicast
	Forbidden string // why no multicast function may even be looked up; "" if it may
}

// switches are the variables that tell other libraries, and this one too, to leave multicast alone.
var switches = []struct {
	name string
	off  func(value string) bool
}{
	{"NCCL_NVLS_ENABLE", func(v string) bool { return v == "0" }},
	{"NVSHMEM_DISABLE_NVLS", truthy},
	{"TORCH_SYMM_MEM_DISABLE_MULTICAST", truthy},
}

// truthy reports whether a switch is set: in doubt it is.
func truthy(v string) bool {
	switch strings.ToLower(v) {
	case "", "0", "false", "no", "off", "n", "f":
		return false
	}
	return true
}

// NewPolicy reads the setting ("auto", "on", "off", or "" for "auto") and, if that leaves it open, the environment. Any other setting is an error, in
// which op names the caller.
func NewPolicy(op, setting string, getenv func(string) string) (*Policy, error) {
	switch setting {
	case "on":
		return &Policy{Must: true}, nil
	case "off":
		return &Policy{Forbidden: "it is switched off (multicast is off)"}, nil
	case "", "auto":
		for _, s := range switches {
			if v := strings.TrimSpace(getenv(s.name)); s.off(v) {
				return &Policy{Forbidden: fmt.Sprintf("multicast is auto, and %s=%s in the environment switches it off", s.name, v)}, nil
			}
		}
		return &Policy{}, nil
	}
	return nil, errs.Invalid(op, "multicast", strconv.Quote(setting), "auto, on or off")
}
