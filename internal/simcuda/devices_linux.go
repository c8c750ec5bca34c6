package simcuda

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// Driver returns a table for the machine. Each call makes a new one.
func (m *Machine) Driver() *cu.Driver {
	d := &cu.Driver{Path: "simulated", Origin: m}
	m.devices(d)
	m.contexts(d)
	m.memory(d)
	m.streamCalls(d)
	m.eventCalls(d)
	m.moduleCalls(d)
	m.graphCalls(d)
	d.MulticastSource = func() (*cu.Multicast, error) { return m.multicast(), nil }
	return d
}

// text writes s as C does into size bytes at p.
func text(p *byte, size int32, s string) cu.Result {
	if size <= 0 {
		return cu.InvalidValue
	}
	to := unsafe.Slice(p, size)
	to[copy(to[:size-1], s)] = 0
	return cu.Success
}

// names are what the driver calls its results.
var names = map[cu.Result]string{
	cu.Success: "CUDA_SUCCESS", cu.InvalidValue: "CUDA_ERROR_INVALID_VALUE", cu.OutOfMemory: "CUDA_ERROR_OUT_OF_MEMORY",
	cu.InvalidDevice: "CUDA_ERROR_INVALID_DEVICE", cu.InvalidImage: "CUDA_ERROR_INVALID_IMAGE", cu.InvalidContext: "CUDA_ERROR_INVALID_CONTEXT",
	cu.NoBinaryForGPU: "CUDA_ERROR_NO_BINARY_FOR_GPU", cu.PeerAccessUnsupported: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
	cu.InvalidPTX: "CUDA_ERROR_INVALID_PTX", cu.OperatingSystem: "CUDA_ERROR_OPERATING_SYSTEM", cu.InvalidHandle: "CUDA_ERROR_INVALID_HANDLE",
	cu.NotFound: "CUDA_ERROR_NOT_FOUND", cu.NotReady: "CUDA_ERROR_NOT_READY", cu.IllegalAddress: "CUDA_ERROR_ILLEGAL_ADDRESS",
	cu.LaunchTimeout: "CUDA_ERROR_LAUNCH_TIMEOUT", cu.PeerAccessAlreadyEnabled: "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
	cu.MisalignedAddress: "CUDA_ERROR_MISALIGNED_ADDRESS", cu.LaunchFailed: "CUDA_ERROR_LAUNCH_FAILED", cu.NotPermitted: "CUDA_ERROR_NOT_PERMITTED",
	cu.NotSupported: "CUDA_ERROR_NOT_SUPPORTED", cu.CaptureUnjoined: "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
	captureUnsupported: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", captureInvalidated: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	captureMerge: "CUDA_ERROR_STREAM_CAPTURE_MERGE", captureUnmatched: "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
	captureIsolation: "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", capturedEvent: "CUDA_ERROR_CAPTURED_EVENT",
}

// Results of captures that the module does not tell apart (cuda.h).
const (
	captureUnsupported cu.Result = 900
	captureInvalidated cu.Result = 901
	captureMerge       cu.Result = 902
	captureUnmatched   cu.Result = 903
	captureIsolation   cu.Result = 905
	capturedEvent      cu.Result = 907
)

func (m *Machine) devices(d *cu.Driver) {
	d.Init = func(flags uint32) cu.Result {
		if flags != 0 {
			return cu.InvalidValue
		}
		return cu.Success
	}
	d.DriverGetVersion = func(v *int32) cu.Result { *v = 13000; return cu.Success }
	d.GetErrorName = func(r cu.Result, p **byte) cu.Result {
		name, ok := names[r]
		if !ok {
			*p = nil
			return cu.InvalidValue
		}
		*p = unsafe.StringData(name + "\x00")
		return cu.Success
	}
	d.GetErrorString = func(r cu.Result, p **byte) cu.Result {
		*p = unsafe.StringData("by simulated GPUs\x00")
		return cu.Success
	}
	d.DeviceGetCount = func(n *int32) cu.Result { *n = int32(len(m.gpus)); return cu.Success }
	d.DeviceGet = func(dev *cu.DeviceOrdinal, i int32) cu.Result {
		*dev = cu.DeviceOrdinal(i)
		return m.device(*dev, func(*gpu) cu.Result { return cu.Success })
	}
	d.DeviceGetName = func(p *byte, n int32, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(g *gpu) cu.Result { return text(p, n, g.Name) })
	}
	d.DeviceGetUUID = func(u *cu.UUID, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(*gpu) cu.Result {
			*u = cu.UUID{0: 0x51, 1: 0x51, 14: byte(dev >> 8), 15: byte(dev)} // the same in all processes
			return cu.Success
		})
	}
	d.DeviceGetPCIBusID = func(p *byte, n int32, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(*gpu) cu.Result { return text(p, n, fmt.Sprintf("0000:%02X:00.0", int(dev))) })
	}
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(g *gpu) cu.Result {
			var ok bool
			*v, ok = g.attribute(a)
			if !ok {
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
	d.DeviceTotalMem = func(n *uint64, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(g *gpu) cu.Result { *n = g.Memory; return cu.Success })
	}
	access := func(can *int32, dev, peer cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(*gpu) cu.Result {
			return m.device(peer, func(*gpu) cu.Result {
				// CUDA driver API, cuDeviceCanAccessPeer: of a device and itself it says 0.
				if *can = 0; dev != peer && m.peer(int(dev), int(peer)) {
					*can = 1
				}
				return cu.Success
			})
		})
	}
	d.DeviceCanAccessPeer = access
	d.DeviceGetP2PAttribute = func(v *int32, attr cu.P2PAttribute, src, dst cu.DeviceOrdinal) cu.Result {
		if src == dst {
			return cu.InvalidDevice
		}
		if attr != cu.P2PNativeAtomics {
			return cu.InvalidValue
		}
		return access(v, src, dst) // not through the table, in which a test may have put another function by now
	}
}

// device calls f with the GPU of an ordinal.
func (m *Machine) device(dev cu.DeviceOrdinal, f func(g *gpu) cu.Result) cu.Result {
	if dev < 0 || int(dev) >= len(m.gpus) {
		return cu.InvalidDevice
	}
	return f(m.gpus[dev])
}

// The limits of an H100: CUDA C++ programming guide, compute capabilities.
const (
	mostThreads    = 2048 // of a multiprocessor
	mostBlocks     = 32
	mostRegisters  = 64 << 10
	mostShared     = 228 << 10
	mostBlockBytes = 227 << 10
	registers      = 64 // of a thread; PTX does not say how many a kernel takes once it is compiled
)

func (g *gpu) attribute(a cu.DeviceAttribute) (int32, bool) {
	yes := func(b bool) (int32, bool) {
		if b {
			return 1, true
		}
		return 0, true
	}
	switch a {
	case cu.AttrMaxThreadsPerBlock, cu.AttrMaxBlockDimX, cu.AttrMaxBlockDimY:
		return 1024, true
	case cu.AttrMaxBlockDimZ:
		return 64, true
	case cu.AttrMaxGridDimX:
		return 1<<31 - 1, true
	case cu.AttrMaxGridDimY, cu.AttrMaxGridDimZ:
		return 65535, true
	case cu.AttrMaxSharedPerBlock:
		return 48 << 10, true
	case cu.AttrMaxSharedPerBlockOptin:
		return mostBlockBytes, true
	case cu.AttrMultiprocessors:
		return int32(g.Multiprocessors), true
	case cu.AttrComputeCapabilityMajor:
		return int32(g.Capability / 10), true
	case cu.AttrComputeCapabilityMinor:
		return int32(g.Capability % 10), true
	case cu.AttrVMM, cu.AttrHandlePosixFD, cu.AttrGPUDirectRDMAWithVMM:
		return 1, true
	case cu.AttrHandleFabric:
		return 0, true
	case cu.AttrMulticast:
		return yes(g.machine.config.Multicast && g.Capability >= 90)
	}
	return 0, false
}

// contexts: the handle of a primary context is its GPU's ordinal and one.
func (m *Machine) contexts(d *cu.Driver) {
	d.PrimaryCtxRetain = func(c *cu.ContextHandle, dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(g *gpu) cu.Result {
			return m.do(func() cu.Result {
				if g.refs.Add(1) == 1 {
					g.begin()
				}
				*c = cu.ContextHandle(dev) + 1
				return cu.Success
			})
		})
	}
	d.PrimaryCtxRelease = func(dev cu.DeviceOrdinal) cu.Result {
		return m.device(dev, func(g *gpu) cu.Result {
			return m.do(func() cu.Result {
				if g.refs.Load() == 0 {
					return m.violation(cu.InvalidContext, "cuDevicePrimaryCtxRelease of GPU %d, which has no context", dev)
				}
				if g.refs.Add(-1) == 0 {
					m.drain(g)
					g.end()
				}
				return cu.Success
			})
		})
	}
	d.CtxGetCurrent = func(c *cu.ContextHandle) cu.Result {
		if *c = 0; m.current() != nil {
			*c = cu.ContextHandle(m.current().ordinal) + 1
		}
		return cu.Success
	}
	d.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
		return m.device(cu.DeviceOrdinal(c)-1, func(g *gpu) cu.Result {
			if g.refs.Load() == 0 { // CUDA driver API, result codes: a primary context that was not initialized
				return m.do(func() cu.Result {
					return m.violation(cu.ContextIsDestroyed, "cuCtxPushCurrent of the context of GPU %d, which nobody retains", g.ordinal)
				})
			}
			tid := unix.Gettid()
			s, ok := m.stacks.Load(tid)
			if !ok {
				s = &stack{}
				m.stacks.Store(tid, s)
			}
			x := s.(*stack)
			x.mu.Lock()
			defer x.mu.Unlock()
			x.gpus = append(x.gpus, g)
			return cu.Success
		})
	}
	d.CtxPopCurrent = func(c *cu.ContextHandle) cu.Result {
		if s, ok := m.stacks.Load(unix.Gettid()); ok {
			x := s.(*stack)
			x.mu.Lock()
			defer x.mu.Unlock()
			if last := len(x.gpus) - 1; last >= 0 {
				if c != nil {
					*c = cu.ContextHandle(x.gpus[last].ordinal) + 1
				}
				x.gpus = x.gpus[:last]
				return cu.Success
			}
		}
		return m.do(func() cu.Result {
			return m.violation(cu.InvalidContext, "cuCtxPopCurrent on a thread without a context")
		})
	}
	d.CtxGetStreamPriorityRange = func(least, greatest *int32) cu.Result {
		*least, *greatest = 0, -5
		return cu.Success
	}
	// CUDA driver API, cuCtxEnablePeerAccess.
	d.CtxEnablePeerAccess = func(peer cu.ContextHandle, flags uint32) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			other := int(peer) - 1
			switch {
			case flags != 0:
				return cu.InvalidValue
			case other < 0 || other >= len(m.gpus) || other == g.ordinal || m.gpus[other].refs.Load() == 0:
				return cu.InvalidContext
			case !m.peer(g.ordinal, other):
				return cu.PeerAccessUnsupported
			case g.peers[other]:
				return cu.PeerAccessAlreadyEnabled
			}
			g.peers[other] = true
			for _, x := range m.spaces {
				m.enter(g, x)
			}
			return cu.Success
		})
	}
}

// begin makes the GPU's context.
func (g *gpu) begin() {
	m := g.machine
	g.space, g.peers = ptxvm.NewMemory(), map[int]bool{}
	began := time.Now()
	// Threads that wait look again and again, as long as their turn is.
	const turn = 50
	config := ptxvm.Config{
		Seed: m.rand.Uint64(), Turn: turn, Trace: m.config.Trace,
		Clock: func() uint64 { return uint64(time.Since(began)) + 1<<40 },
	}
	if m.config.Weak {
		g.vm = m.beginWeak(g, config)
	} else {
		g.vm = ptxvm.New(g.space, config)
	}
	g.vm.Limit(g.ordinal, ptxvm.Limits{Multiprocessors: g.Multiprocessors, Blocks: mostBlocks, Threads: min(mostThreads, mostRegisters/registers), Shared: mostShared})
	g.lanes, g.stores = nil, 0
	g.context.Add(1)
	g.failed.Store(0)
	for _, x := range m.spaces {
		m.enter(g, x)
	}
}

// end destroys the context. What was made in it and not given back stays, for Left to tell.
func (g *gpu) end() {
	m := g.machine
	for _, x := range m.spaces {
		m.leave(g, x)
	}
	if m.weak != nil {
		m.endWeak(g)
	} else {
		m.stats.Instructions += g.vm.Steps()
	}
	g.vm, g.space, g.lanes, g.peers = nil, nil, nil, nil
	g.context.Add(1)
}
