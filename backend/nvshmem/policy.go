package nvshmem

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// policy says whether multicast may be used.
type policy struct {
	must      bool   // without multicast, opening and rendezvous are errors
	forbidden string // why the library may not make multicast objects; "" if it may
}

// switches are the variables by which libraries, and this one with them, are told to leave multicast alone.
var switches = []struct {
	name string
	off  func(value string) bool
}{
	{"NVSHMEM_DISABLE_NVLS", truthy},
	{"NCCL_NVLS_ENABLE", func(v string) bool { return v == "0" }},
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

// newPolicy reads the setting and, if that leaves it open, the environment.
func newPolicy(setting string, getenv func(string) string) (*policy, error) {
	switch setting {
	case "on":
		return &policy{must: true}, nil
	case "off":
		return &policy{forbidden: "it is switched off (multicast is off)"}, nil
	case "", "auto":
		for _, s := range switches {
			if v := strings.TrimSpace(getenv(s.name)); s.off(v) {
				return &policy{forbidden: fmt.Sprintf("multicast is auto, and %s=%s in the environment switches it off", s.name, v)}, nil
			}
		}
		return &policy{}, nil
	}
	return nil, errs.Invalid("nvshmem.New", "multicast", strconv.Quote(setting), "auto, on or off")
}
