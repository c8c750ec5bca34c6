package nixl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/survey"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

var _ backend.Libraries = factory{}

// Libraries looks for NIXL, starts an engine, and tries whether it reaches the memory of the GPU, if there is one.
func (factory) Libraries(ctx context.Context, env *backend.Env) []backend.Library {
	answer := backend.Library{Name: "NIXL", State: "unusable"}
	o, err := options(env)
	var p *place
	if err == nil {
		if p, err = choosePlace(o); err != nil {
			p, err = &place{kind: device.Host}, nil // what is wrong with the driver is the driver's answer
		}
	}
	if err != nil {
		answer.Reason = err.Error()
		return []backend.Library{answer}
	}
	lib, err := load(o.Library, p.cuda, o.Logger)
	if err != nil {
		return []backend.Library{survey.Failed(answer.Name, err, "install nixl-cu13 with pip, or nixl-cu12 for a driver of CUDA 12")}
	}
	return []backend.Library{look(ctx, answer, lib, p, o)}
}

// look tries the library.
func look(ctx context.Context, answer backend.Library, lib *nixl.Library, p *place, o *Options) backend.Library {
	answer.Path, answer.Version = lib.Path(), lib.Version()
	detail := func(name, value string) {
		answer.Details = append(answer.Details, backend.Detail{Name: name, Value: value})
	}
	if lib.CUDA() > 0 {
		detail("built for CUDA", fmt.Sprint(lib.CUDA()))
	}
	if version, path, err := lib.UCX(); err == nil {
		detail("UCX", version+" at "+path)
	} else {
		detail("UCX", "the one that the loader finds ("+err.Error()+")")
	}
	detail("UCX modules", orNone(lib.Modules()))
	cpu, err := (&place{kind: device.Host}).open(o, nil)
	if err != nil {
		answer.Reason = err.Error()
		return answer
	}
	defer func() { _ = cpu.Close() }() // it holds nothing
	a, on, err := firstAgent(func(n route) (*nixl.Agent, error) { return makeAgent(ctx, lib, cpu, "doctor-"+nonce(), n, false) })
	if err != nil {
		answer.Reason = err.Error()
		answer.Fix = "the environment variable NIXL_LOG_LEVEL=DEBUG makes it say more"
		return answer
	}
	plugins, err := a.Plugins()
	if err != nil {
		detail("plugins", err.Error())
	} else {
		detail("plugins", strings.Join(plugins, ", "))
	}
	_, err = probe(ctx, lib, cpu)
	if err := errors.Join(a.Close(), err); err != nil {
		answer.Reason = err.Error()
		return answer
	}
	detail("between ranks of one host", map[reach]string{
		reachNothing: "no network", reachLoopback: "loopback, which every user of the host can reach", reachUser: "as " + chosenByUser() + " says",
	}[on.reach])
	detail("memory of the CPU", "reached")
	detail("memory of the GPU", gpuMemory(ctx, lib, p, o))
	answer.State = "usable"
	return answer
}

// gpuMemory says whether the library reaches the memory of the GPU.
func gpuMemory(ctx context.Context, lib *nixl.Library, p *place, o *Options) string {
	if p.kind != device.CUDA {
		return "not tried: there is no GPU here"
	}
	d, err := p.open(o, nil)
	if err == nil {
		_, err = probe(ctx, lib, d)
		err = errors.Join(err, d.Close())
	}
	switch {
	case err == nil:
		return "reached (one byte was registered)"
	case errors.Is(err, errs.ErrUnavailable):
		return "not tried: " + err.Error()
	}
	return "not reached: " + err.Error()
}

// orNone returns s, or a word for nothing.
func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
