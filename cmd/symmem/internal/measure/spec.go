// Package measure takes the measurements of bench on the ranks of a job, and the same ones of other libraries beside them.
package measure

import (
	"time"
)

// The kinds of measurements.
const (
	AllReduce  = "all_reduce"
	Put        = "put"        // every rank puts to the next, all at once
	Get        = "get"        // every rank gets from the next, all at once
	PutSignal  = "put_signal" // put and signal to the next, wait for the one before: one hop, in two calls
	Rendezvous = "rendezvous" // allocate and make reachable
	PlanRun    = "plan_run"   // what enqueuing one run costs the host

	PutSignalWait = "put_signal_wait" // the same hop in one call
	SignalWait    = "signal_wait"     // a hop without data

	HeapAlloc = "heap_alloc" // take a tensor from a symmetric heap and close it: host time
	Enqueue   = "enqueue"    // what enqueuing a put, a signal, a wait or a barrier costs the host

	Broadcast     = "broadcast" // from rank 0
	Reduce        = "reduce"    // to rank 0
	AllGather     = "all_gather"
	ReduceScatter = "reduce_scatter"
	AllToAll      = "all_to_all"
	AllToAllV     = "all_to_all_v" // with equal counts, read when it runs
	Barrier       = "barrier"      // as a plan

	AllReduceRMSNorm = "all_reduce_rms_norm" // with residual and RMSNorm, in one plan, and beside it in two
	AllReduceMany    = "all_reduce_many"     // of Spec.Tensors tensors in one plan
	AllReduceMatMul  = "all_reduce_matmul"   // beside products of matrices on another stream

	// The same of lists, of Spec.Tensors tensors in one plan.
	AllGatherMany     = "all_gather_many"
	ReduceScatterMany = "reduce_scatter_many"
	BroadcastMany     = "broadcast_many" // from rank 0
)

// DefaultKinds are the kinds of measurements that are taken unless others are asked for, and Kinds are all. Lists are those of lists of tensors.
var (
	DefaultKinds = []string{AllReduce, Put, Get, PutSignal, Rendezvous, PlanRun}
	Kinds        = append(DefaultKinds[:len(DefaultKinds):len(DefaultKinds)], Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, AllToAllV, Barrier, PutSignalWait, SignalWait, HeapAlloc, Enqueue, AllReduceRMSNorm, AllReduceMany, AllReduceMatMul, AllGatherMany, ReduceScatterMany, BroadcastMany)
	Collectives  = []string{AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, AllToAllV, Barrier, AllReduceRMSNorm, AllReduceMany, AllReduceMatMul, PlanRun, AllGatherMany, ReduceScatterMany, BroadcastMany} // that make plans
	Lists        = []string{AllReduceMany, AllGatherMany, ReduceScatterMany, BroadcastMany}
)

// AllAlgorithms, as the only element of Spec.Algorithms, stands for every form of all-reduce that there is for what is measured.
const AllAlgorithms = "all"

// The peers, by the names that their rows have as backends. NCCLSymmetric is NCCL's all-reduce over symmetric windows, for which it
// has kernels of its own.
const (
	NCCL          = "nccl"
	NCCLSymmetric = "nccl_symmetric"
	NVSHMEM       = "nvshmem"
	Unfused       = "unfused" // of AllReduceRMSNorm: our own all-reduce and RMSNorm, one after the other
	SGLang        = "sglang"  // its push kernels
	PyTorch       = "pytorch" // its symmetric memory
)

// Spec is what the ranks measure. It is the same on all of them.
type Spec struct {
	Kinds       []string `json:"kinds"`
	Sizes       []int64  `json:"sizes"` // in bytes
	DType       string   `json:"dtype"`
	Op          string   `json:"op"`
	Algorithms  []string `json:"algorithms"` // or AllAlgorithms
	Graph       bool     `json:"graph"`      // replay a captured graph instead of running each time
	OutOfPlace  bool     `json:"out_of_place"`
	Exclusive   bool     `json:"exclusive,omitempty"` // plans may take the whole of a device
	Repetitions int      `json:"repetitions"`         // of each measurement
	Tensors     int      `json:"tensors"`             // of a list, each of the size

	Peer *PeerSpec `json:"peer,omitempty"` // nil measures none
}

// Row is one measurement. Times are those of the slowest rank.
//
// A row with Beside is a measurement of a peer. If it has no iterations the peer was not measured, and Note says why.
type Row struct {
	Kind        string  `json:"kind"`
	Backend     string  `json:"backend"`          // or the peer
	Beside      string  `json:"beside,omitempty"` // of a peer: the backend that it is compared with
	Ranks       int     `json:"ranks"`
	Bytes       int64   `json:"bytes"`             // of the message: of collectives with a whole and shares, the whole
	Tensors     int     `json:"tensors,omitempty"` // that the bytes are in, if there are many
	DType       string  `json:"dtype,omitempty"`
	Op          string  `json:"op,omitempty"`
	Algorithm   string  `json:"algorithm,omitempty"` // that was asked for
	Chosen      string  `json:"chosen,omitempty"`    // the form that auto took
	Mode        string  `json:"mode,omitempty"`      // eager or graph
	Place       string  `json:"place,omitempty"`     // in place or out of place
	Exclusive   bool    `json:"exclusive,omitempty"` // the plans, or those that a peer is compared with, might take the whole of a device
	Note        string  `json:"note,omitempty"`      // first or later, of rendezvous; what is enqueued, of enqueue; what was measured, of a peer
	Iterations  int     `json:"iterations"`          // back to back, in one repetition
	Repetitions int     `json:"repetitions"`
	Median      float64 `json:"median_us"` // of the repetitions, per iteration
	Min         float64 `json:"min_us"`
	Max         float64 `json:"max_us"`
	Bandwidth   float64 `json:"gb_per_s,omitempty"`     // bytes by time, in 1e9 bytes a second
	Bus         float64 `json:"bus_gb_per_s,omitempty"` // of collectives: the same times what each rank has to send of a message
	Wire        int64   `json:"wire_bytes,omitempty"`   // of a quantized all-reduce: what each rank sends, scales and all

	// Of AllReduceMatMul, whose other times are those of one collective with its share of the products: what either takes alone.
	Alone  float64 `json:"alone_us,omitempty"`  // the collective
	MatMul float64 `json:"matmul_us,omitempty"` // its share of the products

	// The same of the peer, if it was measured.
	PeerMedian float64 `json:"peer_us,omitempty"`
	PeerBus    float64 `json:"peer_bus_gb_per_s,omitempty"`
	PeerRatio  float64 `json:"peer_ratio,omitempty"` // peer_us by median_us: above 1 the peer is slower
}

// PeerSpec is what the ranks do about the peer. It is the same on all of them.
type PeerSpec struct {
	Required  bool          `json:"required"`
	Library   string        `json:"library,omitempty"` // its file or folder; "" looks for it
	Multicast bool          `json:"multicast"`         // leave it to NCCL whether multicast is used
	Timeout   time.Duration `json:"timeout_ns"`        // of coming together
	NVSHMEM   bool          `json:"nvshmem,omitempty"` // it is NVSHMEM's reductions, and not NCCL
	SGLang    bool          `json:"sglang,omitempty"`  // it is SGLang's kernels, and Library is their cubin
	PyTorch   bool          `json:"pytorch,omitempty"` // it is PyTorch's symmetric memory, and Library is the Python that has it; "" is python3
}

// Reporter receives what rank 0 finds, one call at a time. An error ends the measuring.
type Reporter interface {
	// Rows is called before the first row, with how many there will be, not counting those of peers.
	Rows(n int) error
	// Row is called with each measurement, or with the reason why a peer was not measured.
	Row(row Row) error
	// Refuse is called with the reason why nothing is measured. That is not a failure.
	Refuse(reason string) error
}

// name returns the name of the peer.
func (p *PeerSpec) name() string {
	switch {
	case p.NVSHMEM:
		return NVSHMEM
	case p.SGLang:
		return SGLang
	case p.PyTorch:
		return PyTorch
	}
	return NCCL
}
