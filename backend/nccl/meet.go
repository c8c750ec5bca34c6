package nccl

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// member is what a rank tells the others about itself when the backend is opened.
type member struct {
	UUID     string // of its device
	HostID   string // what NCCL is told to take in place of the host's name; "" if nothing
	NoShare  string // why it cannot share its device with another rank; "" if it can
	Version  string // of its library
	Window   string // kind of window
	Given    bool   // it was given a communicator
	Split    bool   // it could split its parent's communicator
	NoCast   string // why it may not use multicast; "" if it may
	MustCast bool   // it wants multicast or an error
	Kept     keptOffer
	Topic    string // rank 0's is that of all
}

// opening names the agreement in errors.
const opening = "opening backend " + Name

// meet tells the others what this rank found out, or why it cannot take part, and makes the communicator with them.
func (b *Backend) meet(ctx context.Context, o *Options, failure error) error {
	// Every rank comes to this, also one that has failed.
	islands, err := b.group.Islands(ctx)
	failure = cmp.Or(failure, err)
	var mine member
	var t *cuda.Thread
	if failure == nil {
		mine = b.member(o)
		// What makes the communicator has the context from here on: whoever cannot have it says so before there is an id.
		if t, failure = b.device.NewThread(); failure == nil {
			defer t.Close()
		}
	}
	peers, err := backend.Tell(ctx, b.group, opening, mine, failure)
	// From here on every rank decides alike, since all know the same.
	var shared bool
	var hosts []int
	if err == nil {
		b.topic = peers[0].Topic
		hosts = onHosts(islands, peers)
		shared, err = agree(peers, hosts)
	}
	if err == nil {
		err = b.agreeMulticast(peers, hosts, shared)
	}
	kept := b.takeKept(ctx, peers, err)
	if err != nil {
		return err
	}
	if kept != nil {
		b.use(kept)
		err := b.try(ctx)
		if err == nil {
			err = b.openPuts(ctx)
		}
		if _, all := errors.AsType[*group.VoteError](err); !all {
			return err
		}
		// All ranks know, and end it.
		b.log.Warn("an NCCL communicator that was kept does not work any more, and another one is made", "error", err)
		b.link, b.comm, b.near, b.isle, b.split, b.reused, b.reach = nil, nil, nil, nil, false, false, reach{}
		kept.forms, b.spare = b.spare, nil
		b.endLinks(ctx, []*link{kept})
	}
	split := !slices.ContainsFunc(peers, func(m member) bool { return !m.Split })
	back := func() {}
	if split {
		if split, back, err = b.borrow(ctx, o.Parent); err != nil {
			back()
			return err
		}
	}
	var id nccl.UniqueID
	if o.Comm == 0 && !split {
		if id, err = b.agreeID(ctx, t); err != nil {
			return err
		}
	}
	err = b.connect(ctx, o, split, id, t)
	back()
	if err := b.land(ctx, hosts, err); err != nil {
		return err
	}
	if b.keeps {
		b.link = &link{id: peers[0].Kept.NewID, ranks: b.worldRanks(), comm: b.comm, near: b.near, isle: b.isle, split: b.split, noCast: b.noCast != ""}
		b.shelf.add(b.link)
	}
	if err := b.try(ctx); err != nil {
		return err
	}
	return b.openPuts(ctx)
}

// member describes this rank.
func (b *Backend) member(o *Options) member {
	m := member{
		UUID: b.device.UUID(), HostID: o.Getenv(hostEnv), Version: b.lib.Version().String(), Window: o.Window, Given: o.Comm != 0, NoCast: b.noCast, MustCast: b.mustCast,
		Split: o.Comm == 0 && b.splits(o.Parent), NoShare: b.whyNotShare(o),
	}
	if m.NoCast == "" {
		cast, err := b.lib.ResolveMulticast()
		if err != nil {
			m.NoCast = err.Error()
		}
		b.multicast = cast
	}
	m.Kept, m.Topic = b.offerKept(o), rand.Text()
	return m
}

// agreeID returns the unique id for a new communicator, which rank 0 makes. It is made only when nothing but making the communicator can still fail:
// NCCL keeps a thread and a socket for an id until all ranks of its communicator have come (bootstrapRoot in bootstrap.cc), and has no call that
// releases them.
func (b *Backend) agreeID(ctx context.Context, t *cuda.Thread) (id nccl.UniqueID, err error) {
	if b.group.Rank() == 0 {
		err = t.Do(func() (err error) {
			id, err = b.lib.NewUniqueID()
			return err
		})
	}
	all, err := backend.Tell(ctx, b.group, opening+": the unique id", id[:], err)
	if err == nil && len(all[0]) != len(id) {
		err = fmt.Errorf("rank 0 brought a unique id of %d bytes: %w", len(all[0]), errs.ErrMismatch)
	}
	if err != nil {
		return id, err
	}
	return nccl.UniqueID(all[0]), nil
}

// whyNotShare says why this rank cannot share its device with another one; "" if it can.
func (b *Backend) whyNotShare(o *Options) string {
	allowed := o.Getenv(nccl.ShareGPUEnv)
	switch {
	case !b.lib.SharesGPUs():
		return fmt.Sprintf("NCCL %s cannot share a GPU, and 2.30.3 or newer can with share-device", b.lib.Version())
	case !o.ShareDevice:
		return "allow the sharing with share-device (SYMMEM_SHARE_DEVICE=true)"
	case allowed == "0":
		return nccl.ShareGPUEnv + "=0 in the environment forbids it: unset it"
	}
	return ""
}

// splits reports whether this rank's group has all of the parent's ranks, and the parent's communicator can be split.
func (b *Backend) splits(parent *Backend) bool {
	return parent != nil && parent.group.Size() == b.group.Size() && parent.device == b.device && parent.group.Err() == nil &&
		parent.comm != nil && parent.comm.Handle() != 0 && !parent.comm.Stuck() && b.lib.Require("ncclCommSplit") == nil
}

// agree returns an error, the same on every rank, if the ranks do not fit together. shared reports whether some of them share a device. hosts are the
// lowest ranks of each one's host: NCCL looks for devices that are shared on each host alone, so that those that only seem to be several may.
func agree(peers []member, hosts []int) (shared bool, err error) {
	for i, p := range peers {
		for j, q := range peers[:i] {
			if q.UUID != p.UUID {
				continue
			}
			shared = true
			if why := cmp.Or(p.NoShare, q.NoShare); why != "" && hosts[i] == hosts[j] {
				return true, errs.Invalid(opening, "device", fmt.Sprintf("%s on rank %d and on rank %d", p.UUID, j, i),
					"a device for each rank: set device or local-rank, or use backend native with share-device; or else "+why)
			}
		}
	}
	return shared, cmp.Or(
		backend.Alike("version of NCCL (name the same library in "+libraryEnv+")", peers, func(m *member) string { return m.Version }),
		backend.Alike("kind of window ("+windowEnv+")", peers, func(m *member) string { return m.Window }),
		backend.Alike("whether a communicator was given", peers, func(m *member) bool { return m.Given }),
	)
}

// agreeMulticast finds out whether all ranks may use multicast.
func (b *Backend) agreeMulticast(peers []member, hosts []int, shared bool) error {
	var whys []string
	must := false
	for r, p := range peers {
		must = must || p.MustCast && len(peers) > 1
		if p.NoCast != "" && !slices.Contains(whys, p.NoCast) {
			if len(whys) > 0 {
				p.NoCast = fmt.Sprintf("rank %d: %s", r, p.NoCast)
			}
			whys = append(whys, p.NoCast)
		}
	}
	b.mustCast = must
	switch {
	case len(whys) > 0:
	case len(peers) == 1:
		whys = []string{"the group has only one rank"}
	case slices.ContainsFunc(hosts, func(first int) bool { return first != 0 }):
		whys = []string{"the ranks are on several hosts, and NVLink multicast reaches those of one"}
	case shared:
		whys = []string{"several ranks share a device, and a device can take part in multicast once"}
	}
	if b.noCast = strings.Join(whys, "; "); b.noCast == "" {
		return nil
	}
	b.multicast = nil
	if must {
		return mustCastError(b.noCast)
	}
	return nil
}

// connect makes the communicator, splits it from the parent's, or takes the one that was given.
func (b *Backend) connect(ctx context.Context, o *Options, split bool, id nccl.UniqueID, t *cuda.Thread) error {
	defer b.lib.Log()
	ctx, end := b.together(ctx, "making the communicator")
	config := &nccl.Config{NonBlocking: true, NoMulticast: b.noCast != ""}
	var err error
	switch {
	case o.Comm != 0:
		b.comm, err = b.adopt(o.Comm)
	case split:
		b.split = true
		b.comm, err = o.Parent.comm.Split(ctx, config)
	default:
		b.comm, err = b.lib.NewComm(ctx, &nccl.CommOptions{
			Ranks: b.group.Size(), Rank: b.group.Rank(), ID: id, Config: config,
			Scope: b.device.WithContext, Making: t.Do,
		})
		b.givenUp(err, 0)
	}
	return end(err)
}

// adopt takes the caller's communicator, if it is the right one.
func (b *Backend) adopt(handle uintptr) (*nccl.Comm, error) {
	comm, err := b.lib.Adopt(nccl.CommHandle(handle), b.device.WithContext)
	if err != nil {
		return nil, err
	}
	gpu, err := comm.Device()
	if err != nil {
		return nil, err
	}
	if comm.Ranks() != b.group.Size() || comm.Rank() != b.group.Rank() || gpu != int(b.device.Ordinal()) {
		return nil, errs.Invalid("nccl.New", "Comm", fmt.Sprintf("rank %d of %d on GPU %d", comm.Rank(), comm.Ranks(), gpu),
			fmt.Sprintf("a communicator of the group's ranks: rank %d of %d on GPU %d", b.group.Rank(), b.group.Size(),
				b.device.Ordinal()))
	}
	return comm, nil
}

// lossTime is how long this rank waits at most for word of whom the group has lost, when NCCL says that some rank is gone. NCCL is told by the sockets between ranks,
// and the group by its service's, which may come a little later. Kernels that wait for this rank wait longer than that.
func (b *Backend) lossTime() time.Duration { return min(time.Second, b.timeout/4) }

// unnamed reports whether err is NCCL's word to this rank that some rank is gone, while the group knows of none.
func (b *Backend) unnamed(err error) bool {
	if _, told := errors.AsType[*group.VoteError](err); told { // by another rank, which has waited
		return false
	}
	return errors.Is(err, errs.ErrPeerLost) && b.group.Err() == nil
}

// explain names the member of the group that is lost, if that is the cause of NCCL's error. It waits for that where NCCL says only that some rank is gone.
func (b *Backend) explain(ctx context.Context, err error) error {
	if b.unnamed(err) {
		wait := time.NewTimer(b.lossTime())
		defer wait.Stop()
		select {
		case <-b.group.Lost():
		case <-wait.C:
		case <-ctx.Done():
		}
	}
	return b.named(err)
}

// named is explain without waiting.
func (b *Backend) named(err error) error {
	lost := b.group.Err()
	if _, is := errors.AsType[*group.PeerLostError](err); err == nil || lost == nil || is {
		return err
	}
	return fmt.Errorf("%w: %w", lost, err)
}
