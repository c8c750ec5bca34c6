package cuda

import (
	"fmt"
	"os"
	"regexp"

	cu "github.com/symmem/symmem/internal/cuda"
)

// moduleFile is where Linux tells the version of the driver's kernel module.
var moduleFile = "/proc/driver/nvidia/version"

// moduleVersion finds it there: "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build".
var moduleVersion = regexp.MustCompile(`(?m)^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s`)

// ModuleVersion returns the version of the driver's kernel module, "580.159.04", or "" where the system does not say.
func ModuleVersion() string {
	text, err := os.ReadFile(moduleFile)
	if err != nil {
		return ""
	}
	if found := moduleVersion.FindSubmatch(text); found != nil {
		return string(found[1])
	}
	return ""
}

// VersionText returns a version of the driver's API as people write it: "12.4" for 12040.
func VersionText(version int) string { return fmt.Sprintf("%d.%d", version/1000, version%1000/10) }

// GPU is what is known about a GPU without a context on it.
type GPU struct {
	Index             int // among those that this process sees
	Name, UUID        string
	ComputeCapability int   // 90 for 9.0
	Memory            int64 // bytes; 0 if not known
}

// Survey initialises the driver, checks that it is new enough, and lists the GPUs that this process sees, without making a context. What keeps [Open]
// from working is an error here too; it is ErrUnavailable and says what to do. It uses only the options Driver and Logger.
func Survey(opts *Options) ([]GPU, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if err := o.load("listing the GPUs"); err != nil {
		return nil, err
	}
	d := o.Driver
	if err := d.Start(); err != nil {
		return nil, err
	}
	all, err := visible(d)
	if err != nil {
		return nil, err
	}
	gpus := make([]GPU, len(all))
	for i, g := range all {
		seen := Device{drv: d, ordinal: g.ordinal}
		if err := seen.identify(); err != nil {
			return nil, err
		}
		gpus[i] = GPU{Index: g.index, Name: seen.name, UUID: g.uuid, ComputeCapability: seen.limits.capability}
		var total uint64
		if d.DeviceTotalMem != nil && d.DeviceTotalMem(&total, g.ordinal) == cu.Success {
			gpus[i].Memory = int64(total)
		}
	}
	return gpus, nil
}
