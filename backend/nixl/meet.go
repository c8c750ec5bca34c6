package nixl

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// member is what a rank tells the others about itself when the backend is opened.
type member struct {
	Agent    string // its name
	Metadata []byte // how to connect to it; a sub-group's agents are connected already
	Version  string // of its library; "" if that is not known
	Kind     string // of its device
	UUID     string // of its device
	Share    bool   // whether it would share its device
	Unit     int64  // bytes that its memory is a multiple of, where it is mapped; else 0
	Apart    string // why the ranks of its island do not map memory; "" if they do
}

// meet tells the others what this rank found out, or why it cannot take part, and connects to them.
func (b *Backend) meet(ctx context.Context, o *Options, failure error) error {
	failure = b.tryLibrary(ctx, failure)
	var mine member
	if failure == nil {
		mine = member{Agent: b.node.name, Kind: b.device.Kind().String(), UUID: b.device.UUID(),
			Share: o.ShareDevice || o.Parent != nil, Unit: b.granularity, Apart: b.apart}
		mine.Version = o.version
		if b.lib != nil {
			mine.Version = b.lib.Version()
		}
		if b.ownsNode {
			mine.Metadata, failure = b.node.engine.Metadata()
		}
	}
	peers, err := backend.Tell(ctx, b.group, "opening backend nixl", mine, failure)
	if err != nil {
		return err
	}
	b.peers = peers
	for _, p := range peers { // what the ranks allocate is alike, on an island or not
		b.granularity = max(b.granularity, p.Unit)
		if p.Apart != "" && !slices.Contains(b.whys, p.Apart) {
			b.whys = append(b.whys, p.Apart)
		}
	}
	// From here on every rank decides alike, since all know the same.
	if err := b.agree(); err != nil {
		return err
	}
	for r, p := range peers {
		if len(p.Metadata) == 0 {
			continue
		}
		if err = b.node.connect(ctx, p.Agent, p.Metadata); err != nil {
			err = fmt.Errorf("rank %d: %w", r, err)
			break
		}
	}
	if err := b.group.Vote(ctx, "connecting", err); err != nil || len(peers) == 1 {
		return err
	}
	if b.device.Kind() == device.CUDA || o.shareFlags {
		if err := b.tryShareFlags(ctx); err != nil {
			return err
		}
	}
	if !b.ownsNode {
		return nil
	}
	return b.greet(ctx)
}

// agree checks that the ranks fit together.
func (b *Backend) agree() error {
	const op = "opening backend nixl"
	if err := backend.Alike("kind of device", b.peers, func(m *member) string { return m.Kind }); err != nil {
		return err
	}
	if err := agreeVersion(b.peers); err != nil {
		return err
	}
	if b.peers[0].Kind != device.CUDA.String() {
		return nil
	}
	members := b.group.Members()
	for r, p := range b.peers {
		for s, q := range b.peers[:r] {
			if members[r].Process == members[s].Process && !b.substitute {
				return fmt.Errorf("ranks %d and %d share a process, and UCX moves GPU memory between processes only; start a process for "+
					"each rank: %w", s, r, errs.ErrUnsupported)
			}
			if p.UUID == q.UUID && !(p.Share && q.Share) {
				return errs.Invalid(op, "device", fmt.Sprintf("%s on rank %d and on rank %d", p.UUID, s, r),
					"a device for each rank: set device or local-rank, or allow the sharing with share-device (SYMMEM_SHARE_DEVICE=true)")
			}
		}
	}
	return nil
}

// agreeVersion refuses libraries of several versions: neither NIXL nor UCX promises that they understand each other. A library that does not say its version
// goes with every other.
func agreeVersion(peers []member) error {
	versions := make([]string, len(peers))
	known := ""
	differ := false
	for r, p := range peers {
		versions[r] = cmp.Or(p.Version, "unknown")
		if p.Version != "" {
			differ = differ || known != "" && p.Version != known
			known = p.Version
		}
	}
	if differ {
		return &group.MismatchError{What: "version of NIXL (install the same on every host, or name it in " + nixl.LibraryEnv + ")", Values: versions}
	}
	return nil
}
