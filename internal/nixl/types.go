package nixl

import (
	"encoding/binary"
	"strconv"
)

// The values and layouts below are those of src/bindings/rust/wrapper.h of NIXL 0.10.1 to 1.5.1, in which they are the same (TestHeader
// compares them), and of src/api/c/nixl_capi.h that is to follow it.

// Status is a nixl_capi_status_t.
type Status int32

// The statuses. Those below NotFound only the later interface has.
const (
	Success          Status = 0
	InProgress       Status = 1
	InvalidParam     Status = -1
	BackendError     Status = -2
	InvalidState     Status = -3
	Exception        Status = -4
	NoTelemetry      Status = -5
	NotFound         Status = -6
	NotPosted        Status = -7
	Mismatch         Status = -8
	NotAllowed       Status = -9
	RepostActive     Status = -10
	Unknown          Status = -11
	NotSupported     Status = -12
	RemoteDisconnect Status = -13
	Canceled         Status = -14
)

var statusNames = map[Status]string{
	Success: "SUCCESS", InProgress: "IN_PROG", InvalidParam: "ERROR_INVALID_PARAM", BackendError: "ERROR_BACKEND",
	InvalidState: "ERROR_INVALID_STATE", Exception: "ERROR_EXCEPTION", NoTelemetry: "ERROR_NO_TELEMETRY",
	NotFound:  "ERROR_NOT_FOUND",
	NotPosted: "ERROR_NOT_POSTED", Mismatch: "ERROR_MISMATCH", NotAllowed: "ERROR_NOT_ALLOWED",
	RepostActive: "ERROR_REPOST_ACTIVE", Unknown: "ERROR_UNKNOWN", NotSupported: "ERROR_NOT_SUPPORTED",
	RemoteDisconnect: "ERROR_REMOTE_DISCONNECT", Canceled: "ERROR_CANCELED",
}

// String returns the name, without the prefix NIXL_CAPI_.
func (s Status) String() string {
	if name, ok := statusNames[s]; ok {
		return name
	}
	return "status " + strconv.Itoa(int(s))
}

// Memory is a nixl_capi_mem_type_t.
type Memory int32

// The kinds of memory that this module uses.
const (
	DRAM Memory = 0 // of the host
	VRAM Memory = 1 // of a GPU
)

// String returns NIXL's name.
func (m Memory) String() string {
	switch m {
	case DRAM:
		return "DRAM"
	case VRAM:
		return "VRAM"
	}
	return "memory type " + strconv.Itoa(int(m))
}

// Op is a nixl_capi_xfer_op_t, the direction of a transfer.
type Op int32

// The directions.
const (
	Read  Op = 0 // from the other agent's memory into this one's
	Write Op = 1 // from this agent's memory into the other's
)

// Block is a piece of memory. Device is a number that the agent was told at registration: the UCX engine makes nothing of it,
// but metadata is found by all three.
type Block struct {
	Addr   uint64
	Bytes  uint64
	Device uint64
}

// syncRW is the mode of a nixl_capi_thread_sync_t in which posting and asking go on side by side.
const syncRW = 2

// agentConfig is a nixl_capi_agent_config_t of either layout.
//
//	today:    bool prog 0, bool listen 1, int32 port 4, int32 sync 8, uint32 workers 12,
//	          uint64 delay of prog 16, uint64 delay of listen 24, bool telemetry 32
//	to come:  bool prog 0, bool listen 1, uint16 port 2, int32 sync 4, uint32 workers 8, the rest alike
//
// The port is ignored without a listener, and the number of workers always, so the same bytes suit both.
type agentConfig [40]byte

// newAgentConfig returns the configuration of an agent, with a progress thread that wakes after so many microseconds at the latest,
// or without one.
func newAgentConfig(thread bool, progressDelayUS uint64) *agentConfig {
	c := new(agentConfig)
	if thread {
		c[0] = 1
	}
	binary.NativeEndian.PutUint32(c[4:], syncRW)
	binary.NativeEndian.PutUint32(c[8:], syncRW)
	binary.NativeEndian.PutUint64(c[16:], progressDelayUS)
	binary.NativeEndian.PutUint64(c[24:], progressDelayUS)
	return c
}
