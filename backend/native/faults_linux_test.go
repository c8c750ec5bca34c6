package native

import (
	"context"
	"fmt"
	"testing"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
)

// complete gives the machine's driver what else there is to do with memory: copies, graphs, and kernels that do nothing.
func (m *machine) complete() (*cu.Driver, func() int) {
	d := m.driver()
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoDAsync", func(int) cu.Result {
			var data []byte
			if r := m.bytes(m.Streams[s], src, n, func(of *physical, off, n uint64) { data = append(data, of.data()[off:off+n]...) }); r != cu.Success {
				return r
			}
			return m.bytes(m.Streams[s], dst, n, func(of *physical, off, n uint64) { data = data[copy(of.data()[off:off+n], data):] })
		})
	}
	return d, m.Recordings(d)
}

// exceptions are calls with reasons.
type exceptions map[string]string

func (e exceptions) and(reason string, calls ...string) exceptions {
	for _, c := range calls {
		e[c] = reason
	}
	return e
}

// TestFaults lets every call of the driver go wrong.
func TestFaults(t *testing.T) {
	const (
		notReady = "CUDA_ERROR_SYSTEM_NOT_READY"
		again    = "all ranks try again"
		try      = "native.(*finding).try"
		trial    = "the trial of memory for network cards; the next is without"
		creators = "the creator's handle of a multicast object: all ranks have the address, and what is not released goes with the mapping"
		letGo    = "native.(*cast).letGo"
		around   = " in native.(*cast).make"
		keeps    = "it is the call that gives it back"
	)
	backendtest.Faults{
		Polls: []string{"cuEventQuery", "cuStreamQuery"},
		Unheard: exceptions{
			"cuCtxPopCurrent":                                              "it is logged; the thread is given away",
			"cuDeviceTotalMem in native.find":                              "how much memory there is, is not known then, and cuMemCreate says what is too much",
			"cuDeviceGetAttribute in native.attribute":                     "what the driver does not tell is not there, and the capability says so",
			"cuStreamQuery in cuda.(*Stream).idle":                         "memory that goes with it is freed when the driver has answered",
			"cuMulticastGetGranularity in native.(*finding).findMulticast": "there is no multicast then, and the capability says why",
			"cuMulticastAddDevice:" + notReady + around:                    again, "cuMulticastBindMem:" + notReady + around: again, "cuMulticastCreate:" + notReady + around: again,
			"cuMemAddressReserve:" + notReady + around: again, "cuMemMap:" + notReady + around: again, "cuMemSetAccess:" + notReady + around: again,
			"cuMemImportFromShareableHandle:" + notReady + around: again, "cuMemExportToShareableHandle:" + notReady + around: again,
			"cuCtxPushCurrent:" + notReady + around: again,
		}.and(trial, "cuMemGetAllocationGranularity in "+try, "cuMemCreate in "+try, "cuMemExportToShareableHandle in "+try, "cuMemRelease in "+try).
			and(creators, "cuMemRelease in "+letGo, "cuCtxPushCurrent in "+letGo),
		Keeps: exceptions{}.and(keeps, "cuDevicePrimaryCtxRelease", "cuGraphDestroy", "cuGraphExecDestroy", "cuMemAddressFree", "cuMemFreeHost",
			"cuMemRelease", "cuMemUnmap", "cuModuleUnload", "cuMulticastUnbind", "cuStreamDestroy",
			"cuCtxPushCurrent in native.(*allocation).Release", "cuCtxPushCurrent in native.(*mapping).Unmap",
			"cuCtxPushCurrent in cuda.(*Stream).finishClose", "cuCtxPushCurrent in cuda.(*Device).close"),
		Unnamed: exceptions{
			"cuMemRetainAllocationHandle:CUDA_ERROR_INVALID_VALUE": "so the driver says that memory is not of cuMemCreate",
			"cuMemRetainAllocationHandle:CUDA_ERROR_NOT_SUPPORTED": "so the driver says that memory is not of cuMemCreate",
		},
		Machine: func() backendtest.FaultMachine {
			m := newMachine(3)
			m.multicast = 1
			m.Kernel = func(int, string, []unsafe.Pointer) {} // before any driver of the machine is in use
			var graphs []func() int
			return backendtest.FaultMachine{
				Open: func(ctx context.Context, g *group.Group, parent backend.Backend, calls *backendtest.Calls) (backend.Backend, error) {
					o := m.plain(g.Rank())
					o.Multicast = "auto"
					if parent != nil {
						o.Opened = parent.Device().(*cuda.Device)
					} else {
						d, left := m.complete()
						m.Mu.Lock()
						graphs = append(graphs, left)
						m.Mu.Unlock()
						o.Driver = fakecuda.Between(d, calls)
					}
					return New(ctx, g, o)
				},
				Adopt: adoptable("virtual"),
				Left: func() string {
					left := m.left()
					for _, x := range m.mapped { // what is left of a lost context
						x.of.forget()
					}
					for _, count := range graphs {
						if n := count(); n != 0 {
							left += fmt.Sprintf(", %d graphs", n)
						}
					}
					return left
				},
			}
		},
	}.Run(t)
}
