package memory

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// RecordVersion is the version of what ranks tell each other in a rendezvous, and of what plans without an image of their own have where in workspaces, which is
// compared nowhere else. Ranks of different versions do not mix.
const RecordVersion = 4

// Record is what a rank brings to a rendezvous. The fields that the ranks must agree on are compared; the others are there
// for the backend and for error messages.
type Record struct {
	Version      int    `json:"v"`
	Operation    uint64 `json:"op"`      // counts the rendezvous of this Memory
	Backend      string `json:"backend"` // name
	Name         string `json:"name,omitempty"`
	Bytes        int64  `json:"bytes"`
	RoundedBytes int64  `json:"rounded"`
	Offset       int64  `json:"offset"` // of the tensor in its allocation, in bytes
	DType        string `json:"dtype,omitempty"`
	Shape        string `json:"shape,omitempty"`
	Mapped       bool   `json:"mapped"`          // the allocation has its window already
	Taken        string `json:"taken,omitempty"` // of the rank's workspaces, where one is asked for

	// Not compared.
	DeviceUUID string `json:"device"`
	BootID     string `json:"boot"`
	PID        int    `json:"pid"`
	Failure    string `json:"failure,omitempty"`    // why this rank cannot take part
	Offer      []byte `json:"offer,omitempty"`      // of a WorkspaceRequest
	Adopted    bool   `json:"adopted,omitempty"`    // this rank has adopted the allocation
	Capability int    `json:"capability,omitempty"` // the compute capability of this rank's GPU

	// What the rank's heaps were asked for is compared where it has come, see [Heap].
	Heaps []HeapState `json:"heaps,omitempty"`

	Conditions []uint32 `json:"conditions,omitempty"` // what the failure is, in the codes of package errs
}

// compared lists the fields that must be the same on every rank, in the order in which differences are reported.
var compared = []struct {
	what string
	of   func(*Record) string
}{
	{"rendezvous protocol version", func(r *Record) string { return strconv.Itoa(r.Version) }},
	{"backend", func(r *Record) string { return r.Backend }},
	{"order of rendezvous (operation number)", func(r *Record) string { return strconv.FormatUint(r.Operation, 10) }},
	{"name or purpose", func(r *Record) string { return strconv.Quote(r.Name) }},
	{"dtype", func(r *Record) string { return r.DType }},
	{"shape", func(r *Record) string { return r.Shape }},
	{"size in bytes", func(r *Record) string { return strconv.FormatInt(r.Bytes, 10) }},
	{"rounded size in bytes", func(r *Record) string { return strconv.FormatInt(r.RoundedBytes, 10) }},
	{"offset in the allocation in bytes", func(r *Record) string { return strconv.FormatInt(r.Offset, 10) }},
	{"whether the allocation is mapped already", func(r *Record) string { return strconv.FormatBool(r.Mapped) }},
	{"what is taken of the workspaces (some rank gave up an earlier call that others went on with: close the rank and open it again)", func(r *Record) string { return r.Taken }},
}

// exchange sends this rank's record to all and gives all records. Collective. An error on any rank, or a difference, is an
// error on every rank. The records come with an error only if that is a difference between the requests to a heap.
func exchange(ctx context.Context, g *group.Group, mine *Record, failure error) ([]Record, error) {
	mine.Version = RecordVersion
	mine.PID = os.Getpid()
	mine.BootID = g.Members()[g.Rank()].BootID
	if failure != nil {
		mine.Failure, mine.Conditions = errs.Text(failure), errs.Codes(failure)
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	blobs, err := g.AllGather(ctx, "rendezvous", blob)
	if err != nil {
		return nil, err
	}
	records := make([]Record, len(blobs))
	vote := &group.VoteError{Op: "rendezvous", Local: failure}
	if mine.DType == workspaceKind {
		vote.Op = "taking part" // in whatever wants the workspace
	}
	for r, blob := range blobs {
		if err := json.Unmarshal(blob, &records[r]); err != nil {
			return nil, fmt.Errorf("reading the record of rank %d: %w", r, err)
		}
		if f := records[r].Failure; f != "" {
			vote.Failures = append(vote.Failures, group.RankFailure{Rank: r, Text: f, Conditions: errs.Conditions(records[r].Conditions)})
		}
	}
	// What a rank that failed brought may be incomplete: its failure is told, not the difference.
	if len(vote.Failures) > 0 {
		return nil, vote
	}
	if _, differ := heapDifference(records); differ != nil {
		return records, differ
	}
	for _, c := range compared {
		if err := backend.Alike(c.what, records, c.of); err != nil {
			return nil, err
		}
	}
	return records, nil
}
