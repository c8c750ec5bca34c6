package collective

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// A kernel that waits for peers keeps its place on the device until they come. If it took all of the device, nothing that the peers
// wait for could start there, and nobody would go on. So a plan takes at most half of what a device holds, less a reserve: any two
// plans run at the same time, whichever comes first on which rank, and signals, copies and the user's own kernels beside them. Ranks
// that share a device share that. More plans than that are counted by the streams they are on, because what is on one stream runs one
// after the other: see RoomError. An exclusive plan takes what two may have, and is counted like that.

// plansAtOnce is how many plans of any size run on one device at the same time.
const plansAtOnce = 2

// reserved is how many of a device's multiprocessors plans leave to everything else.
func reserved(processors int) int { return max(1, processors/32) }

// capacity is the part of a device that the plans on it may take together: beside two of the largest, small ones may have half of the
// reserve. The plans that a symmem.Rank keeps for its methods are such, on its own stream.
func capacity(processors int) float64 {
	return (float64(processors) - float64(reserved(processors))/2) / float64(processors)
}

// mostBlocks is how many blocks one of so many plans may launch at the same time on a device that runs resident of them and that so many ranks
// share.
func mostBlocks(resident, processors, ranks, plans int) int {
	return max(1, resident*(processors-reserved(processors))/processors/(plans*ranks))
}

// RoomError is the error of Plan.Run where the kernels of plans on different streams, which may all wait for peers at the same time, would
// not fit the device together: then what one rank waits for might find no place on another one. Two plans of any size always
// fit, unless one is exclusive, and more if they are small or were made with fewer blocks. A plan counts on the stream that it was last run or recorded on,
// until it, or memory of one of its tensors, is closed. errors.Is(err, ErrNoRoom) holds.
//
// The error is this rank's own. Ranks that run their plans alike, on as many streams and in one order, all get it.
type RoomError struct {
	Takes   float64 // what the plan takes of the device
	Taken   float64 // what the plans on other streams take
	Most    float64 // what they may take together
	Streams int     // the other streams
}

func (e *RoomError) Error() string {
	return fmt.Sprintf("the plan takes %.0f%% of the device and plans on %d other streams %.0f%%, of at most %.0f%% together: "+
		"run plans on fewer streams, close those that are done, or make them with fewer blocks (MaxBlocks, and not Exclusive)", 100*e.Takes, e.Streams, 100*e.Taken, 100*e.Most)
}

// Unwrap gives ErrNoRoom.
func (e *RoomError) Unwrap() error { return errs.ErrNoRoom }

// tenants are the plans of this process that wait for peers, by the UUID of their device.
var tenants = struct {
	sync.Mutex
	of map[string]map[*tenant]bool
}{of: map[string]map[*tenant]bool{}}

// tenant is what a plan takes of its device. A nil tenant takes nothing.
type tenant struct {
	device string      // UUID
	rank   int         // in the world
	shared bool        // other ranks of this process have the device too; what they do is a part of takes
	takes  float64     // part of the device
	most   float64     // that all may take together
	over   func() bool // the plan can never run again, and has ended
	stream atomic.Pointer[device.Stream]
}

// move notes that the plan is now on stream s, if there is room.
func (t *tenant) move(s device.Stream) error {
	if t == nil {
		return nil
	}
	if last := t.stream.Load(); last != nil && *last == s {
		return nil
	}
	return t.settle(s)
}

// settle is move for a stream that the plan was not on before. It is apart because it allocates.
func (t *tenant) settle(s device.Stream) error {
	tenants.Lock()
	defer tenants.Unlock()
	all := tenants.of[t.device]
	if all == nil {
		all = map[*tenant]bool{}
		tenants.of[t.device] = all
	}
	maps.DeleteFunc(all, func(o *tenant, _ bool) bool { return o != t && o.forget() }) // which nobody may ever close
	taken, streams := t.others(all, s, false)
	if t.takes+taken > t.most+1e-9 {
		taken, streams = t.others(all, s, true)
	}
	if streams > 0 && t.takes+taken > t.most+1e-9 {
		return &RoomError{Takes: t.takes, Taken: taken, Most: t.most, Streams: streams}
	}
	all[t] = true
	t.stream.Store(&s)
	return nil
}

// forget reports whether the plan is over, and no longer counts. Should its memory be kept after all, its next run counts it again.
func (t *tenant) forget() bool {
	if !t.over() {
		return false
	}
	t.stream.Store(nil)
	return true
}

// others adds up what the plans on streams other than s take: on each, the largest. look says to leave out closed streams.
func (t *tenant) others(all map[*tenant]bool, s device.Stream, look bool) (taken float64, streams int) {
	largest := map[device.Stream]float64{}
	for o := range all {
		on := *o.stream.Load()
		if o == t || on == s || t.shared && o.rank != t.rank || look && gone(on) {
			continue
		}
		largest[on] = max(largest[on], o.takes)
	}
	for _, takes := range largest {
		taken += takes
	}
	return taken, len(largest)
}

// gone reports whether a stream is closed and has come to its end: one whose Close waits for its work, or has given that up, may still be at a plan's. It asks by what does not wait
// for a launch that is being enqueued there: the plans of other ranks of the process, for which that launch may wait, need tenants meanwhile.
func gone(s device.Stream) bool {
	if _, err := s.Query(); !errors.Is(err, errs.ErrClosed) {
		return false
	}
	e, tells := s.(interface{ Ended() bool })
	return !tells || e.Ended()
}

// leave gives the plan's place back.
func (t *tenant) leave() {
	if t == nil {
		return
	}
	tenants.Lock()
	defer tenants.Unlock()
	t.stream.Store(nil)
	delete(tenants.of[t.device], t)
	if len(tenants.of[t.device]) == 0 {
		delete(tenants.of, t.device)
	}
}
