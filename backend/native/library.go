package native

import (
	"context"
	"fmt"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/survey"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// driverName is the name of the only library that this backend needs.
const driverName = "CUDA driver"

var _ backend.Libraries = factory{}

// Libraries reports on the driver, which is all that the backend needs. It loads and initialises the driver, and makes no context.
func (factory) Libraries(_ context.Context, env *backend.Env) []backend.Library {
	drv, err := cu.Load(&cu.LoadOptions{Logger: env.Logger})
	if err != nil {
		return []backend.Library{survey.Failed(driverName, err, "install the NVIDIA driver, series 550 or newer")}
	}
	return []backend.Library{driverLibrary(drv)}
}

// driverLibrary reports on a driver that was loaded.
func driverLibrary(drv *cu.Driver) backend.Library {
	l := backend.Library{Name: driverName, State: "usable"}
	gpus, err := cuda.Survey(&cuda.Options{Driver: drv})
	if err != nil {
		l = survey.Failed(driverName, err, "install the NVIDIA driver, series 550 or newer, and see that nvidia-smi lists the GPUs")
	}
	l.Path = drv.Path
	detail := func(name, value string) {
		if value != "" {
			l.Details = append(l.Details, backend.Detail{Name: name, Value: value})
		}
	}
	if version, err := drv.Version(); err == nil {
		l.Version = "CUDA " + cuda.VersionText(version)
	}
	detail("kernel module", cuda.ModuleVersion())
	for _, g := range gpus {
		l.Devices = append(l.Devices, g.Name)
		detail(fmt.Sprintf("GPU %d", g.Index), fmt.Sprintf("%s, compute capability %d.%d, %d MiB, %s", g.Name, g.ComputeCapability/10,
			g.ComputeCapability%10, g.Memory>>20, g.UUID))
	}
	if lacks := drv.Missing(); len(lacks) > 0 {
		detail("functions that it lacks", strings.Join(lacks, ", "))
	}
	return l
}
