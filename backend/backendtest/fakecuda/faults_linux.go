package fakecuda

import (
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// Codes are what a call of the driver may fail with, one of each sort that is treated in its own way.
var Codes = []backendtest.Code{
	{Name: "CUDA_ERROR_UNKNOWN", Value: int(cu.Unknown)},
	{Name: "CUDA_ERROR_OUT_OF_MEMORY", Value: int(cu.OutOfMemory)},
	{Name: "CUDA_ERROR_INVALID_VALUE", Value: int(cu.InvalidValue)},
	{Name: "CUDA_ERROR_NOT_SUPPORTED", Value: int(cu.NotSupported)},
	{Name: "CUDA_ERROR_OPERATING_SYSTEM", Value: int(cu.OperatingSystem)},
	{Name: "CUDA_ERROR_SYSTEM_NOT_READY", Value: int(cu.SystemNotReady)},
	{Name: "CUDA_ERROR_ILLEGAL_ADDRESS", Value: int(cu.IllegalAddress), Lasting: true},
}

// Between puts calls before every function of the table, and before those of multicast, so that one may go wrong. It is the last change of a table.
func Between(d *cu.Driver, calls *backendtest.Calls) *cu.Driver {
	if calls == nil {
		return d
	}
	// These tell what an error is: that they fail as well is no case of its own.
	calls.Table(d, "cuda", Codes, "cuGetErrorName", "cuGetErrorString")
	if source := d.MulticastSource; source != nil {
		d.MulticastSource = func() (*cu.Multicast, error) {
			m, err := source()
			if err == nil {
				calls.Table(m, "cuda", Codes)
			}
			return m, err
		}
	}
	return d
}

// Recordings adds capture to the table: what is enqueued on a capturing stream is kept and runs at each launch of its graph. Work is recorded that
// the table has functions for when it is called; events order nothing, since streams run their work at once. It returns what says how many graphs are left.
func (g *GPUs) Recordings(d *cu.Driver) (left func() int) {
	recording := map[cu.StreamHandle]*[]func() cu.Result{}
	graphs := map[cu.GraphHandle]*[]func() cu.Result{}
	execs := map[cu.GraphExecHandle]*[]func() cu.Result{}
	var latest uintptr
	enqueue := func(s cu.StreamHandle, run func() cu.Result) cu.Result {
		g.Mu.Lock()
		work := recording[s]
		if work != nil {
			*work = append(*work, run)
		}
		g.Mu.Unlock()
		if work != nil {
			return cu.Success
		}
		return run()
	}
	memcpy, memset := d.MemcpyDtoDAsync, d.MemsetD8Async
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return enqueue(s, func() cu.Result { return memcpy(dst, src, n, s) })
	}
	d.MemsetD8Async = func(p device.Ptr, v uint8, n uint64, s cu.StreamHandle) cu.Result {
		return enqueue(s, func() cu.Result { return memset(p, v, n, s) })
	}
	d.StreamWaitEvent = func(cu.StreamHandle, cu.EventHandle, uint32) cu.Result { return g.Do("cuStreamWaitEvent", done) }
	d.StreamBeginCapture = func(s cu.StreamHandle, _ int32) cu.Result {
		return g.Do("cuStreamBeginCapture", func(int) cu.Result { recording[s] = new([]func() cu.Result); return cu.Success })
	}
	d.StreamEndCapture = func(s cu.StreamHandle, graph *cu.GraphHandle) cu.Result {
		return g.Do("cuStreamEndCapture", func(int) cu.Result {
			if recording[s] == nil {
				return g.Violation("the end of no capture")
			}
			latest++
			*graph = cu.GraphHandle(latest)
			graphs[*graph] = recording[s]
			delete(recording, s)
			return cu.Success
		})
	}
	d.GraphInstantiateWithFlags = func(x *cu.GraphExecHandle, graph cu.GraphHandle, _ uint64) cu.Result {
		return g.Do("cuGraphInstantiateWithFlags", func(int) cu.Result {
			latest++
			*x = cu.GraphExecHandle(latest)
			execs[*x] = graphs[graph]
			return cu.Success
		})
	}
	d.GraphLaunch = func(x cu.GraphExecHandle, _ cu.StreamHandle) cu.Result {
		g.Mu.Lock()
		work := execs[x]
		g.Mu.Unlock()
		if work == nil {
			return cu.InvalidValue
		}
		for _, run := range *work {
			if r := run(); r != cu.Success {
				return r
			}
		}
		return cu.Success
	}
	d.GraphExecDestroy = func(x cu.GraphExecHandle) cu.Result {
		return g.Do("cuGraphExecDestroy", func(int) cu.Result { delete(execs, x); return cu.Success })
	}
	d.GraphDestroy = func(graph cu.GraphHandle) cu.Result {
		return g.Do("cuGraphDestroy", func(int) cu.Result { delete(graphs, graph); return cu.Success })
	}
	destroy := d.StreamDestroy
	d.StreamDestroy = func(s cu.StreamHandle) cu.Result {
		g.Mu.Lock()
		delete(recording, s)
		g.Mu.Unlock()
		return destroy(s)
	}
	return func() int { return len(graphs) + len(execs) + len(recording) }
}
