package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// NCCL's windows have addresses for ranks of one LSA team: those of one host, or fewer. What windows over several teams are differs from version to
// version, and most make none. So the windows are registered with a communicator of the team alone, which is split from that of all ranks. What takes
// all ranks, NCCL's own collectives, runs on communicators that are split from the latter, and knows nothing of windows.

// hostEnv names NCCL's own variable that takes the place of the host's name: ranks with different values are on different hosts, as NCCL sees it.
const hostEnv = "NCCL_HOSTID"

// isle is the ranks that have addresses of each other's windows, as one of them sees it.
type isle struct {
	firsts []int // by rank of the group: the lowest rank of its isle
	ranks  []int // of this rank's, ascending, itself included
	me     int   // this rank's place among them
}

// newIsle returns the isle of a rank.
func newIsle(firsts []int, rank int) *isle {
	i := &isle{firsts: firsts}
	for r, first := range firsts {
		if first == firsts[rank] {
			i.ranks = append(i.ranks, r)
		}
	}
	i.me = slices.Index(i.ranks, rank)
	return i
}

// whole reports whether it has all ranks of the group.
func (i *isle) whole() bool { return len(i.ranks) == len(i.firsts) }

// part says which communicator the isle gets when that of all ranks is split.
func (i *isle) part() nccl.Part {
	return nccl.Part{Color: i.ranks[0], Ranks: len(i.ranks), Rank: i.me}
}

// String lists the isles of the group: "0,1; 2,3".
func (i *isle) String() string {
	var all []string
	for r, first := range i.firsts {
		if r == first {
			all = append(all, errs.FoldRanks(newIsle(i.firsts, r).ranks, ","))
		}
	}
	return strings.Join(all, "; ")
}

// why says why there are no addresses of all ranks.
func (i *isle) why() string {
	return "NCCL's windows have addresses only between the ranks of one of these, which share a host (or an LSA team of NCCL's): " + i.String()
}

// onHosts returns which ranks are on one host, as the group and NCCL see it: by rank, the lowest rank there.
func onHosts(islands *group.Islands, peers []member) []int {
	firsts := make([]int, len(peers))
	for r := range peers {
		for firsts[r] < r && (peers[firsts[r]].HostID != peers[r].HostID || !islands.Same(firsts[r], r)) {
			firsts[r]++
		}
	}
	return firsts
}

// team is what a rank knows about the ranks of a communicator that reach each other's windows.
type team struct{ Ranks, Rank, Stride int }

// teamOf asks NCCL. A team of no ranks is one that it does not know.
func teamOf(comm *nccl.Comm) (team, error) {
	t, err := comm.Lsa()
	if errors.Is(err, errs.ErrUnsupported) && !ofDriver(err) {
		return team{}, nil
	}
	return team{int(t.Ranks), int(t.Rank), int(t.Stride)}, err
}

// ofDriver reports whether an error is that of a call of the driver, as the one that makes the context current: it says nothing of NCCL.
func ofDriver(err error) bool {
	failed, ok := errors.AsType[*dl.Error](err)
	return ok && strings.HasPrefix(failed.Call, "cu")
}

// inTeams cuts each isle into NCCL's teams, of which teams says by rank what each is like in the communicator of its isle. It returns firsts where NCCL
// does not know, and where the teams are not what they are known to be: consecutive ranks, as many in each.
func inTeams(firsts []int, teams []team) []int {
	cut := make([]int, len(firsts))
	for r := range firsts {
		i, t := newIsle(firsts, r), teams[r]
		if t.Ranks <= 0 || t.Ranks > len(i.ranks) || len(i.ranks)%t.Ranks != 0 || t.Rank != i.me%t.Ranks || t.Ranks > 1 && t.Stride != 1 {
			return firsts
		}
		cut[r] = i.ranks[i.me-t.Rank]
	}
	return cut
}

// land finds out which ranks this one shares windows with, and makes their communicator, unless that is the communicator of all. failure is why this rank
// has not made that. Collective.
func (b *Backend) land(ctx context.Context, hosts []int, failure error) error {
	b.near, b.isle = b.comm, newIsle(hosts, b.group.Rank())
	all := slices.Repeat([]int{0}, len(hosts))
	whole := newIsle(all, b.group.Rank())
	var mine team
	if failure == nil {
		mine, failure = teamOf(b.comm)
	}
	teams, err := backend.Tell(ctx, b.group, opening+": the communicator", mine, failure)
	if err != nil {
		return err
	}
	// Where hosts share a domain of NVLink, a team may have the ranks of several. Before 2.28.7 NCCL makes windows on one host only.
	inOne := !slices.ContainsFunc(teams, func(t team) bool { return t.Ranks != len(hosts) })
	switch {
	case inOne && (b.isle.whole() || b.lib.Version() >= hostsToo):
		b.isle = whole
		return nil
	case b.isle.whole():
		b.isle = newIsle(inTeams(hosts, teams), b.group.Rank())
		if b.isle.whole() {
			return nil
		}
		return b.splitIsle(ctx, b.isle)
	}
	if err := b.splitIsle(ctx, b.isle); err != nil {
		return err
	}
	// The ranks of one host may still be several teams (NCCL_LSA_TEAM_SIZE), which is known only now: those of the communicator of all ranks are as
	// small as its hosts' numbers of ranks make them.
	mine, failure = teamOf(b.near)
	if teams, err = backend.Tell(ctx, b.group, opening+": the teams of each host", mine, failure); err != nil {
		return err
	}
	cut := inTeams(hosts, teams)
	if slices.Equal(cut, hosts) {
		return nil
	}
	host := b.near
	b.isle = newIsle(cut, b.group.Rank())
	if err := b.splitIsle(ctx, b.isle); err != nil {
		return errors.Join(err, b.endComm(ctx, host))
	}
	return b.group.Vote(ctx, opening+": ending the communicators of the hosts", b.endComm(ctx, host))
}

// hostsToo is the first version whose windows may be those of ranks on several hosts (symmetricSupport in dev_runtime.cc).
const hostsToo nccl.Version = 22807

// splitIsle makes the communicator of an isle. Collective.
func (b *Backend) splitIsle(ctx context.Context, i *isle) error {
	defer b.lib.Log()
	within, end := b.together(ctx, "splitting the communicator by hosts")
	near, err := b.comm.SplitBy(within, i.part(), &nccl.Config{NonBlocking: true, NoMulticast: b.noCast != ""})
	if err = end(err); err != nil {
		b.near = nil
		return b.group.Vote(ctx, opening+": the communicators of the hosts", err)
	}
	if err := b.group.Vote(ctx, opening+": the communicators of the hosts", nil); err != nil {
		b.near = nil
		return errors.Join(err, near.Abort(context.WithoutCancel(ctx), err)) // the others may have none
	}
	b.near = near
	return nil
}

// apart reports whether the windows have a communicator of their own.
func (b *Backend) apart() bool { return b.near != nil && b.near != b.comm }

// far is why a rank has no address here, or nil if it is of this rank's isle.
func (b *Backend) far(rank int) error {
	if b.isle == nil || slices.Contains(b.isle.ranks, rank) {
		return nil
	}
	return fmt.Errorf("rank %d is not on the host of rank %d, and NCCL's windows end there (%s): collectives of the form %s reach all ranks; %s: %w",
		rank, b.group.Rank(), b.isle, plainForm, b.farWhy(), errs.ErrNotReachable)
}
