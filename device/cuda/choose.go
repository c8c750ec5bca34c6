package cuda

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// gpu is a GPU that this process sees.
type gpu struct {
	index   int
	ordinal cu.DeviceOrdinal
	uuid    string
}

// visible lists the GPUs that this process sees. The error says that there are none.
func visible(drv *cu.Driver) ([]gpu, error) {
	var count int32
	if err := drv.Check("cuDeviceGetCount", drv.DeviceGetCount(&count)); err != nil {
		return nil, err
	}
	if count <= 0 {
		return nil, fmt.Errorf("the driver sees no GPU%s: %w", visibility(), device.ErrUnavailable)
	}
	all := make([]gpu, count)
	for i := range all {
		g := gpu{index: i}
		if err := drv.Check("cuDeviceGet", drv.DeviceGet(&g.ordinal, int32(i))); err != nil {
			return nil, err
		}
		var id cu.UUID
		if err := drv.Check("cuDeviceGetUuid", drv.DeviceGetUUID(&id, g.ordinal)); err != nil {
			return nil, err
		}
		g.uuid = id.String()
		all[i] = g
	}
	return all, nil
}

// choose returns the GPU that want, or the local rank, selects.
func choose(all []gpu, want string, localRank int) (gpu, error) {
	const op = "cuda.Open"
	switch index, err := strconv.Atoi(want); {
	case want == "" && localRank < len(all):
		return all[localRank], nil
	case want == "" && len(all) == 1:
		return all[0], nil
	case want == "":
		return gpu{}, errs.Invalid(op, "LocalRank", localRank,
			fmt.Sprintf("0 to %d, since %d GPUs are visible%s; start fewer ranks on this host, or give each its device",
				len(all)-1, len(all), visibility()))
	case err == nil && (index < 0 || index >= len(all)):
		return gpu{}, errs.Invalid(op, "Device", want,
			fmt.Sprintf("an index from 0 to %d, or one of%s%s", len(all)-1, list(all), visibility()))
	case err == nil:
		return all[index], nil
	}
	fits := all[:0:0]
	for _, g := range all {
		if hasUUIDPrefix(g.uuid, want) {
			fits = append(fits, g)
		}
	}
	switch len(fits) {
	case 1:
		return fits[0], nil
	case 0:
		return gpu{}, errs.Invalid(op, "Device", strconv.Quote(want),
			fmt.Sprintf("an index from 0 to %d, or one of%s%s", len(all)-1, list(all), visibility()))
	}
	return gpu{}, errs.Invalid(op, "Device", strconv.Quote(want), fmt.Sprintf("a UUID that fits only one of%s", list(fits)))
}

// hasUUIDPrefix reports whether uuid begins with want, in either case. "MIG-" and "GPU-" are equivalent: the driver does not distinguish them, and a
// process sees only one kind.
func hasUUIDPrefix(uuid, want string) bool {
	uuid, want = strings.ToLower(uuid), strings.ToLower(want)
	if rest, ok := strings.CutPrefix(want, "mig-"); ok {
		want = "gpu-" + rest
	}
	// "GPU-" alone matches nothing.
	return len(want) > len("gpu-") && strings.HasPrefix(uuid, want)
}

// list returns the GPUs as an error prints them.
func list(all []gpu) string {
	var b strings.Builder
	for _, g := range all {
		fmt.Fprintf(&b, " %s (index %d)", g.uuid, g.index)
	}
	return b.String()
}

// visibility describes CUDA_VISIBLE_DEVICES, if it is set: it hides GPUs from this process.
func visibility() string {
	if value, ok := os.LookupEnv("CUDA_VISIBLE_DEVICES"); ok {
		return fmt.Sprintf(" (CUDA_VISIBLE_DEVICES is %q)", value)
	}
	return ""
}

// PeerAtomics reports whether the link to the GPU with that UUID carries atomic operations: NVLink does, PCI Express mostly does
// not. The driver can only be asked about GPUs that this process sees.
func (d *Device) PeerAtomics(uuid string) bool {
	return uuid == d.uuid || d.links(func(g gpu) bool { return g.uuid == uuid })[uuid]
}

// PeerLinks says of every other GPU that this process sees, by UUID, what PeerAtomics does. It is empty where the driver cannot say.
func (d *Device) PeerLinks() map[string]bool {
	return d.links(func(g gpu) bool { return g.uuid != d.uuid })
}

// links asks the driver about some GPUs.
func (d *Device) links(about func(gpu) bool) map[string]bool {
	links := map[string]bool{}
	if d.made("PeerLinks") != nil || d.drv.DeviceGetP2PAttribute == nil || d.use("PeerLinks") != nil {
		return links
	}
	defer d.unuse()
	all, err := visible(d.drv)
	if err != nil {
		return links
	}
	for _, g := range all {
		var have int32
		if about(g) && d.drv.DeviceGetP2PAttribute(&have, cu.P2PNativeAtomics, d.ordinal, g.ordinal) == cu.Success {
			links[g.uuid] = have != 0
		}
	}
	return links
}
