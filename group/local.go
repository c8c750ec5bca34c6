package group

import (
	"fmt"
	"log/slog"
	"time"
)

// LocalOptions are the choices of [Local]. Nil or zero values are the defaults.
type LocalOptions struct {
	// Timeout bounds each collective call whose context does not end sooner. Zero is 60 seconds.
	Timeout time.Duration
	// BootIDs pretends, by rank, that ranks run on other machines than this one; nil, or "" for a rank, is the truth.
	BootIDs []string
	// Islands pretends, by rank, that only ranks with the same name share memory, as those of one container; nil is the truth.
	Islands []string
	// Logger takes the ranks' events. Nil is silence.
	Logger *slog.Logger
}

// Local makes a world of n ranks inside this process, without a network and without goroutines of its own. It returns their groups, by
// rank; use each from its own goroutine, and close each. It does not block. It is ErrInvalid if n is not 1 to [MaxWorldSize], or if
// BootIDs or Islands has another length.
func Local(n int, opts *LocalOptions) ([]*Group, error) {
	if n < 1 || n > MaxWorldSize {
		return nil, invalid("Local", "n", n, fmt.Sprintf("1 to %d ranks", MaxWorldSize))
	}
	if opts == nil {
		opts = &LocalOptions{}
	}
	if opts.BootIDs != nil && len(opts.BootIDs) != n {
		return nil, invalid("Local", "len(opts.BootIDs)", len(opts.BootIDs), fmt.Sprintf("none, or one for each of the %d ranks", n))
	}
	if opts.Islands != nil && len(opts.Islands) != n {
		return nil, invalid("Local", "len(opts.Islands)", len(opts.Islands), fmt.Sprintf("none, or one for each of the %d ranks", n))
	}
	h := newHub(n, &defaultLimits)
	all := &roster{members: make([]Member, n), world: make([]int, n)}
	for rank := range n {
		bootID := ""
		if opts.BootIDs != nil {
			bootID = opts.BootIDs[rank]
		}
		m, err := thisProcess(rank, rank, bootID)
		if err != nil {
			return nil, err
		}
		all.members[rank], all.world[rank] = m, rank
	}
	files := newDepot()
	groups := make([]*Group, n)
	for rank := range groups {
		s := newSession(rank, opts.Timeout, opts.Logger, &defaultLimits)
		s.transport = &localTransport{hub: h, worldRank: rank}
		s.files = &depotCarrier{depot: files}
		groups[rank] = newGroup(s, worldName, rank, all)
		groups[rank].pretend(opts.Islands)
		if err := s.add(groups[rank]); err != nil {
			return nil, err
		}
		if _, ok := h.attach(all.members[rank], s); !ok {
			return nil, fmt.Errorf("attaching rank %d to a new hub", rank)
		}
	}
	return groups, nil
}
