package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/survey"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
)

var _ backend.Libraries = factory{}

// Libraries looks for NCCL and says whether it makes symmetric windows here. It tries that with one rank on the GPU that the environment names. What
// only several ranks could show (peer access) it asks the driver.
func (factory) Libraries(ctx context.Context, env *backend.Env) []backend.Library {
	o, err := options(env)
	if err != nil {
		return []backend.Library{{Name: libraryName, State: "unusable", Reason: err.Error()}}
	}
	o.fill()
	return []backend.Library{examine(ctx, o)}
}

const (
	libraryName = "NCCL"
	install     = "install NCCL 2.28.3 or newer (Debian's libnccl2, or the Python package nvidia-nccl-cu13), or name its file in " + libraryEnv
)

// examine finds out all there is to know about the library. Multicast stays off.
func examine(ctx context.Context, o *Options) backend.Library {
	l := backend.Library{Name: libraryName, State: "unusable"}
	lib, err := o.load(&nccl.Options{Path: o.Library, Logger: o.Logger})
	if err != nil {
		return survey.Failed(libraryName, err, install)
	}
	l.Path, l.Version = lib.Path(), lib.Version().String()
	detail := func(name, format string, args ...any) {
		l.Details = append(l.Details, backend.Detail{Name: name, Value: fmt.Sprintf(format, args...)})
	}
	if lacks := lib.Missing(); len(lacks) > 0 {
		detail("functions that it lacks", "%s", strings.Join(lacks, ", "))
	}
	if lib.PeerPointers() {
		detail("peer pointers", "by the library's own function")
	} else {
		detail("peer pointers", "by the window's structure, which is known for 2.28 to 2.30")
	}
	for _, name := range []string{"NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_LOCAL_REGISTER", "NCCL_P2P_DISABLE",
		"NCCL_P2P_LEVEL", "NCCL_NVLS_ENABLE", nccl.ShareGPUEnv,
		"NCCL_DEBUG", windowEnv} {
		if v := o.Getenv(name); v != "" {
			detail(name, "%s", v)
		}
	}
	if err := serves(lib); err != nil {
		detail("symmetric windows", "no: %v", err)
		l.Reason, l.Fix = err.Error(), install
		return l
	}
	pairs, err := peerAccess(o)
	switch {
	case err != nil:
		detail("peer access", "not known: %v", err)
	case len(pairs) > 0:
		detail("peer access", "not between GPUs %s, so that ranks on these get no windows", strings.Join(pairs, ", "))
	default:
		detail("peer access", "between all GPUs that this process sees")
	}
	none, err := alone(ctx, o)
	switch {
	case err != nil:
		detail("symmetric windows", "no: %v", err)
		l.Reason, l.Fix = err.Error(), "see the reason, and the details"
		return l
	case none != nil && lib.Version() >= aloneToo:
		detail("symmetric windows", "no: %v", none)
		l.Reason, l.Fix = none.Error(), "see the reason, and the details"
		return l
	case none != nil:
		detail("symmetric windows", "this version makes them for two ranks and more, which one process cannot try")
	default:
		detail("symmetric windows", "yes, tried on one GPU")
	}
	l.State = "usable"
	return l
}

// aloneToo is the first version that makes windows for a rank that is alone.
const aloneToo nccl.Version = 22809

// alone opens the backend for a world of one rank, which tries a window, and closes it; none is why NCCL has made none.
func alone(ctx context.Context, o *Options) (none, err error) {
	groups, err := group.Local(1, nil)
	if err != nil {
		return nil, err
	}
	one := *o
	one.Multicast = "off"
	b, err := New(ctx, groups[0], &one)
	if err == nil {
		none = b.reach.none
		err = b.Close(ctx)
	}
	return none, errors.Join(err, groups[0].Close(ctx))
}

// peerAccess lists the pairs of GPUs of this process that cannot reach each other's memory.
func peerAccess(o *Options) ([]string, error) {
	drv := o.Driver
	if drv == nil {
		var err error
		if drv, err = cu.Load(&cu.LoadOptions{Logger: o.Logger}); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(drv.Require("cuDeviceCanAccessPeer"), drv.Check("cuInit", drv.Init(0))); err != nil {
		return nil, err
	}
	var count int32
	if err := drv.Check("cuDeviceGetCount", drv.DeviceGetCount(&count)); err != nil {
		return nil, err
	}
	var pairs []string
	for i := range count {
		for j := range count {
			var a, b cu.DeviceOrdinal
			var can int32
			if err := errors.Join(drv.Check("cuDeviceGet", drv.DeviceGet(&a, i)), drv.Check("cuDeviceGet", drv.DeviceGet(&b,
				j))); err != nil {
				return nil, err
			}
			if i == j {
				continue
			}
			if err := drv.Check("cuDeviceCanAccessPeer", drv.DeviceCanAccessPeer(&can, a, b)); err != nil {
				return nil, err
			}
			if can == 0 {
				pairs = append(pairs, fmt.Sprintf("%d and %d", i, j))
			}
		}
	}
	return pairs, nil
}
