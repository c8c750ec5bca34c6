package nccl

import (
	"context"
	"testing"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
)

// ncclCodes are what a call of NCCL may fail with.
var ncclCodes = []backendtest.Code{
	{Name: "ncclSystemError", Value: int(nccl.SystemError)},
	{Name: "ncclUnhandledCudaError", Value: int(nccl.UnhandledCudaError)},
	{Name: "ncclInternalError", Value: int(nccl.InternalError)},
	{Name: "ncclInvalidArgument", Value: int(nccl.InvalidArgument)},
	{Name: "ncclInvalidUsage", Value: int(nccl.InvalidUsage)},
	{Name: "ncclRemoteError", Value: int(nccl.RemoteError)},
}

// complete gives the machine's driver what else there is to do with memory: copies, waits for events, and kernels that do nothing.
func (m *machine) complete() *cu.Driver {
	d := m.driver()
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoDAsync", func(int) cu.Result {
			copy(m.span(dst, n), m.span(src, n))
			return cu.Success
		})
	}
	d.StreamWaitEvent = func(cu.StreamHandle, cu.EventHandle, uint32) cu.Result { return cu.Success }
	return d
}

// TestFaults lets every call of the driver and of NCCL go wrong.
func TestFaults(t *testing.T) {
	const (
		keeps      = "it is the call that gives it back"
		notKept    = "where it asks whether a communicator can be kept for the next sub-group: it is not"
		sound      = "nccl.(*Comm).Sound"
		watch      = "nccl.(*Backend).watch"
		again      = "a communicator that nobody runs on at the time is given up on all ranks: the next plan makes a new one"
		notVMM     = "so the driver says that memory is not of cuMemCreate"
		root       = "NCCL keeps a thread and a socket for an id until all its ranks have come"
		capability = "what the driver or NCCL does not tell is not there, and the capability says so"
	)
	backendtest.Faults{
		Polls: []string{"cuEventQuery", "cuStreamQuery", "ncclCommGetAsyncError"},
		Unheard: map[string]string{
			"cuCtxPopCurrent": "it is logged; the thread is given away", "cuCtxPushCurrent in " + sound: notKept, "ncclCommGetAsyncError in " + sound: notKept,
			"cuCtxPushCurrent in " + watch: again, "ncclCommGetAsyncError in " + watch: again,
			"cuStreamQuery in cuda.(*Stream).idle":     "memory that goes with it is freed when the driver has answered",
			"cuDeviceTotalMem in nccl.(*Backend).open": capability, "ncclCommQueryProperties in nccl.(*Comm).MulticastSupport": capability,
		},
		Unnamed: map[string]string{
			"cuMemRetainAllocationHandle:CUDA_ERROR_INVALID_VALUE": notVMM, "cuMemRetainAllocationHandle:CUDA_ERROR_NOT_SUPPORTED": notVMM,
		},
		Keeps: map[string]string{
			"cuDevicePrimaryCtxRelease": keeps, "cuGraphDestroy": keeps, "cuGraphExecDestroy": keeps, "cuMemFreeHost": keeps, "cuMemRelease": keeps,
			"cuModuleUnload": keeps, "cuStreamDestroy": keeps, "ncclCommDestroy": keeps, "ncclCommAbort": keeps, "ncclMemFree": keeps,
			"cuCtxPushCurrent in nccl.(*Backend).freeMemory": keeps, "cuCtxPushCurrent in nccl.(*Comm).reclaim": keeps,
			"cuCtxPushCurrent in cuda.(*Stream).finishClose": keeps, "cuCtxPushCurrent in cuda.(*Device).close": keeps,
			"ncclDevCommDestroy": keeps, "ncclCommInitRankScalable": root, "ncclGetUniqueId": root, "ncclCommGetAsyncError in nccl.(*Library).NewComm": root,
		},
		Machine: func() backendtest.FaultMachine {
			m := newMachine(3)
			m.version, m.nvls = 22907, true
			m.Kernel = func(int, string, []unsafe.Pointer) {} // before any driver of the machine is in use
			return backendtest.FaultMachine{
				Open: func(ctx context.Context, g *group.Group, parent backend.Backend, calls *backendtest.Calls) (backend.Backend, error) {
					o := m.plain(g.Rank())
					o.Multicast = "auto"
					o.load = func(*nccl.Options) (*nccl.Library, error) {
						f := m.library()
						calls.Table(&f, "nccl", ncclCodes)
						if source := f.MulticastSource; source != nil {
							f.MulticastSource = func() (*nccl.Multicast, error) {
								found, err := source()
								if err == nil {
									calls.Table(found, "nccl", ncclCodes)
								}
								return found, err
							}
						}
						return nccl.New("/fake/libnccl.so.2", f)
					}
					if parent != nil {
						o.Parent = parent.(*Backend)
						o.Opened = parent.Device().(*cuda.Device)
					} else {
						o.Driver = fakecuda.Between(m.complete(), calls)
					}
					return New(ctx, g, o)
				},
				AllReduces: []string{plainForm, symmetricForm},
				Left: func() string {
					left := m.left()
					m.set(func() {
						for _, c := range m.comms { // of the late calls
							close(c.aborted)
						}
					})
					return left
				},
			}
		},
	}.Run(t)
}
