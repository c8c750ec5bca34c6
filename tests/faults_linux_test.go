package tests

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// planUse is a plan that a rank makes, runs, records, replays and closes.
type planUse struct {
	name      string
	multicast bool
	make      func(ctx context.Context, in, out *tensor.Tensor) (*kernels.Plan, error)
}

// planUses has a plan of each mechanism that runs on GPUs: kernels that push, pull and use multicast, a list of tensors, a barrier, and transfers.
var planUses = []planUse{
	allReduceBy(kernels.OneShotLL), allReduceBy(kernels.TwoShotPull), allReduceBy(kernels.TwoShotMultimem), allReduceBy(kernels.Transfers),
	{"list", false, func(ctx context.Context, in, out *tensor.Tensor) (*kernels.Plan, error) {
		return kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: in, Out: out}}, kernels.Sum, nil)
	}},
	{"broadcast", false, func(ctx context.Context, in, _ *tensor.Tensor) (*kernels.Plan, error) {
		return kernels.NewBroadcast(ctx, in, 0, nil)
	}},
}

func allReduceBy(a kernels.Algorithm) planUse {
	return planUse{a.String(), a.NeedsMulticast(), func(ctx context.Context, in, out *tensor.Tensor) (*kernels.Plan, error) {
		return kernels.NewAllReduce(ctx, in, kernels.Sum, &kernels.AllReduceOptions{Out: out, Algorithm: a})
	}}
}

// usePlans makes, runs and closes a plan of each sort. All ranks end each step together.
func usePlans(ctx context.Context, m *memory.Memory) (err error) {
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var closing []func() error
	defer func() {
		for i := len(closing) - 1; i >= 0; i-- {
			err = errors.Join(err, closing[i]())
		}
	}()
	step := func(name string, f func() error) error { return m.Group().Vote(ctx, name, f()) }
	var s device.Stream
	err = step("a stream for plans", func() (err error) {
		if s, err = m.Device().NewStream(); err == nil {
			closing = append(closing, s.Close)
		}
		return err
	})
	if err != nil {
		return err
	}
	var tensors [2]*tensor.Tensor
	for i := range tensors {
		err := step("a tensor", func() error {
			t, err := tensor.Zeros(ctx, m, tensor.Float32, 64)
			if t != nil {
				tensors[i] = t
				closing = append(closing, func() error { return t.Close(after) })
			}
			return err
		})
		if err == nil { // a rank without a tensor has nothing to rendezvous with
			err = step("its rendezvous", func() error { return tensors[i].Rendezvous(ctx) })
		}
		if err != nil {
			return err
		}
	}
	for _, u := range planUses {
		if u.multicast && !m.Backend().Capabilities().Multicast {
			continue // of a rank that is left alone
		}
		p, err := u.make(ctx, tensors[0], tensors[1])
		if err != nil {
			return fmt.Errorf("%s: %w", u.name, err)
		}
		err = step("running "+u.name, func() error { return errors.Join(p.Run(s), s.Synchronize(ctx)) })
		if err == nil {
			err = step("recording "+u.name, func() error { return recordPlan(ctx, p, s) })
		}
		err = errors.Join(err, m.Group().Vote(after, "closing "+u.name, p.Close(after)))
		if err != nil {
			return fmt.Errorf("%s: %w", u.name, err)
		}
	}
	return nil
}

// recordPlan runs a plan from a graph.
func recordPlan(ctx context.Context, p *kernels.Plan, s device.Stream) error {
	if err := s.BeginCapture(); err != nil {
		return err
	}
	err := p.Run(s)
	g, ended := s.EndCapture()
	if ended != nil {
		return errors.Join(err, ended)
	}
	if err == nil {
		err = errors.Join(g.Launch(s), s.Synchronize(ctx))
	}
	return errors.Join(err, g.Close())
}

// driverOf is the driver of a machine whose GPUs no other has. Cases run beside each other in one process, which has one machine anywhere else and knows by
// the UUID what plans take of a GPU together.
func driverOf(m *simcuda.Machine, number uint64) *cu.Driver {
	d := m.Driver()
	uuid := d.DeviceGetUUID
	d.DeviceGetUUID = func(u *cu.UUID, dev cu.DeviceOrdinal) cu.Result {
		r := uuid(u, dev)
		binary.BigEndian.PutUint64(u[2:], number)
		return r
	}
	return d
}

// TestFaultsOfPlans lets every call of the driver go wrong, while ranks with simulated GPUs do everything with backend native and with plans.
func TestFaultsOfPlans(t *testing.T) {
	const (
		keeps      = "it is the call that gives it back"
		capability = "what the driver does not tell is not there, and the capability says so"
		trial      = "the trial of memory for network cards; the next is without"
		notReady   = "CUDA_ERROR_SYSTEM_NOT_READY"
		again      = "all ranks try again"
		links      = "where it is asked about the links between GPUs: what the driver does not tell is not there"
		answer     = "so the driver says that there are no more parameters, or that a kernel has no blocks of that size"
		creators   = "the creator's handle of a multicast object: all ranks have the address, and what is not released goes with the mapping"
		gone       = "a multicast object is gone with its last holder, and nobody but the creator holds it before the first import: it has died, or its time was over"
		joining    = " in native.(*cast).join"
		around     = " in native.(*cast).make"
		letGo      = "native.(*cast).letGo"
		try        = "native.(*finding).try"
		asking     = "cuda.(*Device).links"
		offering   = "CUDA_ERROR_INVALID_VALUE in collective.(*kernelForm).offer"
	)
	var machines atomic.Uint64
	backendtest.Faults{
		Unheard: map[string]string{
			"cuCtxPopCurrent": "it is logged; the thread is given away", "cuCtxPushCurrent in " + letGo: creators, "cuMemRelease in " + letGo: creators,
			"cuDeviceTotalMem in native.find": capability, "cuDeviceGetAttribute in native.attribute": capability,
			"cuMulticastGetGranularity in native.(*finding).findMulticast": capability,
			"cuStreamQuery in cuda.(*Stream).idle":                         "memory that goes with it is freed when the driver has answered",
			"cuMemGetAllocationGranularity in " + try:                      trial, "cuMemCreate in " + try: trial, "cuMemExportToShareableHandle in " + try: trial,
			"cuMemRelease in " + try:        trial,
			"cuDeviceGetCount in " + asking: links, "cuDeviceGet in " + asking: links, "cuDeviceGetUuid in " + asking: links,
			"cuDeviceGetP2PAttribute in " + asking:        links,
			"cuFuncGetParamInfo:CUDA_ERROR_INVALID_VALUE": answer, "cuOccupancyMaxActiveBlocksPerMultiprocessor:" + offering: answer,
			"cuMulticastAddDevice:" + notReady + around: again, "cuMulticastBindMem:" + notReady + around: again, "cuMulticastCreate:" + notReady + around: again,
			"cuMemAddressReserve:" + notReady + around: again, "cuMemMap:" + notReady + around: again, "cuMemSetAccess:" + notReady + around: again,
			"cuMemImportFromShareableHandle:" + notReady + around: again, "cuMemExportToShareableHandle:" + notReady + around: again,
			"cuCtxPushCurrent:" + notReady + around: again,
		},
		Keeps: map[string]string{
			"cuCtxPushCurrent in native.(*allocation).Release": keeps, "cuCtxPushCurrent in native.(*mapping).Unmap": keeps,
			"cuCtxPushCurrent in cuda.(*Stream).finishClose": keeps, "cuCtxPushCurrent in cuda.(*Device).close": keeps,
			"cuDevicePrimaryCtxRelease": keeps, "cuEventDestroy": keeps,
			"cuGraphDestroy": keeps, "cuGraphExecDestroy": keeps, "cuMemAddressFree": keeps, "cuMemFree": keeps, "cuMemFreeHost": keeps, "cuMemRelease": keeps,
			"cuMemUnmap": keeps, "cuModuleUnload": keeps, "cuMulticastUnbind": keeps, "cuStreamDestroy": keeps, "cuUserObjectRelease": keeps,
			"cuMemImportFromShareableHandle:hangs" + joining: gone, "cuMemImportFromShareableHandle:kills" + joining: gone,
			"cuMulticastAddDevice:kills" + joining: gone, "cuCtxPushCurrent:hangs" + around: gone, "cuCtxPushCurrent:kills" + around: gone,
			"cuCtxPopCurrent:kills" + around: gone,
		},
		Unnamed: map[string]string{"cuFuncGetParamInfo:CUDA_ERROR_INVALID_VALUE": answer},
		Ranks:   2,
		Polls:   []string{"cuEventQuery", "cuStreamQuery"},
		Machine: func() backendtest.FaultMachine {
			m, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1, Multicast: true})
			require.NoError(t, err)
			number := machines.Add(1)
			return backendtest.FaultMachine{
				Open: func(ctx context.Context, g *group.Group, parent backend.Backend, calls *backendtest.Calls) (backend.Backend, error) {
					o := &native.Options{LocalRank: g.Rank(), Multicast: config.MulticastAuto, KernelTimeout: 20 * time.Second}
					if parent != nil {
						o.Opened = parent.Device().(*cuda.Device)
					} else {
						o.Driver = fakecuda.Between(driverOf(m, number), calls)
					}
					return native.New(ctx, g, o)
				},
				More: usePlans,
				Left: func() string { return strings.Join(append(m.Left(), m.Violations()...), ", ") },
			}
		},
	}.Run(t)
}
