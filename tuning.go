package symmem

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
)

// tuned is what a rank keeps of the tables that its group has agreed on, for sub-groups.
type tuned struct {
	file   *tuning.Table // that the setting names; nil for none
	digest string
	speed  *tuning.Speed // that the group has measured; nil for none
	sub    bool          // of a sub-group, which does without a file that is not for it
}

// tuningRecord is what the ranks compare before they take a table.
type tuningRecord struct {
	Device    string          `json:"device"`
	UUID      string          `json:"uuid"`
	Host      bool            `json:"host"`
	Links     map[string]bool `json:"links,omitempty"` // to other GPUs that the rank sees, by UUID: whether they carry atomic operations
	Pointers  bool            `json:"pointers"`
	Multicast bool            `json:"multicast"`
	File      string          `json:"file,omitempty"`
	Digest    string          `json:"digest,omitempty"`
	Failed    bool            `json:"failed,omitempty"` // the file could not be read: this rank tells why in the next step
}

// linked is what CUDA devices tell about their links.
type linked interface{ PeerLinks() map[string]bool }

// readTuning reads the file of the setting tuning.
func readTuning(path string) (*tuned, error) {
	if path == "" {
		return &tuned{}, nil
	}
	t, text, err := tuning.Read(path)
	if err != nil {
		return &tuned{}, err
	}
	return &tuned{file: t, digest: fmt.Sprintf("%x", sha256.Sum256(text))}, nil
}

// agree gives m the tables that all ranks of its group then have: the file, where the setting names one, the shipped table of the GPU, or a model of what is measured. Collective.
// failure is why this rank has no file, and the error the same on every rank.
func (t *tuned) agree(ctx context.Context, m *memory.Memory, failure error, log *slog.Logger) error {
	g := m.Group()
	d, c := m.Device(), m.Backend().Capabilities()
	mine := tuningRecord{Device: d.Name(), UUID: d.UUID(), Host: d.Kind() == device.Host, Pointers: c.PeerPointers, Multicast: c.Multicast, Digest: t.digest, Failed: failure != nil}
	if t.file != nil {
		mine.File = t.file.Name
	}
	if l, ok := d.(linked); ok && g.Size() > 1 {
		mine.Links = l.PeerLinks()
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	blobs, err := g.AllGather(ctx, "tables of the fastest forms", blob)
	if err != nil {
		return err
	}
	all := make([]tuningRecord, len(blobs))
	failed := false
	for r, b := range blobs {
		if err := json.Unmarshal(b, &all[r]); err != nil {
			return fmt.Errorf("reading the tuning of rank %d: %w", r, err)
		}
		failed = failed || all[r].Failed
	}
	if failed {
		return g.Vote(ctx, "reading the table that the setting tuning names", failure)
	}
	if err := sameTables(all); err != nil {
		return err
	}
	set, link, err := t.tables(all)
	if err != nil {
		return err
	}
	if set.measure && t.speed == nil {
		speed, err := kernels.MeasureSpeed(ctx, m)
		err = g.Vote(ctx, "measuring the links", err) // a rank alone may have failed, in closing what it measured with
		switch _, voted := errors.AsType[*group.VoteError](err); {
		case err == nil:
			t.speed = &speed
		case voted:
			log.Warn("the links could not be measured; auto chooses as on H200", "error", err)
		default:
			return err
		}
	}
	if set.measure && t.speed != nil {
		set.Tables = append(set.Tables, tuning.Model(link, g.Size(), *t.speed, set.Multicast))
	}
	if !set.complete {
		set.Tables = append(set.Tables, tuning.Default(mine.Host).Tables...)
	}
	m.SetTuning(&set.Set)
	log.Info("forms of collectives are chosen", "by", set.Names(), "rank", g.Rank())
	return nil
}

// sameTables compares the ranks' files.
func sameTables(all []tuningRecord) error {
	for _, r := range all {
		if r.Digest == all[0].Digest {
			continue
		}
		var values []string
		for _, r := range all {
			value := "no file"
			if r.Digest != "" {
				value = fmt.Sprintf("%s, whose SHA-256 begins with %.12s", r.File, r.Digest)
			}
			values = append(values, value)
		}
		return &group.MismatchError{What: "the table that the setting tuning names", Values: values}
	}
	return nil
}

// tableSet is the tables of a group, and what is still to be done about them.
type tableSet struct {
	tuning.Set
	measure  bool // a model is wanted
	complete bool // some table answers every question
}

// tables finds the tables for devices. It depends on the records alone, and so is alike on every rank.
func (t *tuned) tables(all []tuningRecord) (*tableSet, string, error) {
	set := &tableSet{}
	set.Multicast = len(all) > 1
	pointers := true
	for _, r := range all {
		set.Multicast, pointers = set.Multicast && r.Multicast, pointers && r.Pointers
	}
	link := linkOf(all)
	set.Link = link
	names := devicesOf(all)
	if t.file != nil {
		if err := t.fits(names, link, len(all)); err == nil {
			set.Tables = append(set.Tables, t.file)
			set.complete = t.file.Complete(len(all))
		} else if !t.sub {
			return nil, "", err
		}
	}
	shipped := tuning.Shipped(names[0], link)
	for _, name := range names {
		if shipped != nil && !shipped.For(name, link) {
			shipped = nil
		}
	}
	if shipped != nil {
		set.Tables = append(set.Tables, shipped)
		set.complete = set.complete || shipped.Complete(len(all))
	}
	set.measure = !set.complete && !all[0].Host && pointers && len(all) > 1
	if link == "" {
		link = tuning.LinkNVLink // whose kernels are those of all GPUs
	}
	return set, link, nil
}

// fits says why the file is not for a group.
func (t *tuned) fits(names []string, link string, ranks int) error {
	const advice = "measure this machine with symmem tune, name the file of another table, or leave the setting tuning empty"
	op := "the tuning table " + t.file.Name
	for _, name := range names {
		if !t.file.For(name, "") && !t.file.For(name, t.file.Link) {
			return errs.Advised(op, "devices", fmt.Sprintf("%q", t.file.Devices), fmt.Sprintf("a table for %q, which this group has", names), advice)
		}
	}
	if link != "" && link != t.file.Link {
		return errs.Advised(op, "link", t.file.Link, link+", which joins the devices of this group", advice)
	}
	if ranks > 1 && !t.file.Covers(ranks) {
		return errs.Advised(op, "rules", "without any for "+fmt.Sprint(ranks)+" ranks", fmt.Sprintf("rules for %d ranks, which this group has", ranks), advice)
	}
	return nil
}

// devicesOf lists the names of the ranks' devices, each once.
func devicesOf(all []tuningRecord) (names []string) {
	seen := map[string]bool{}
	for _, r := range all {
		if !seen[r.Device] {
			names = append(names, r.Device)
		}
		seen[r.Device] = true
	}
	return names
}

// linkOf is the kind of the slowest link between devices; "" where nobody knows of any.
func linkOf(all []tuningRecord) string {
	if all[0].Host {
		return tuning.LinkHost
	}
	link := ""
	for _, a := range all {
		for _, b := range all {
			atomics, known := a.Links[b.UUID]
			switch {
			case !known || a.UUID == b.UUID:
			case !atomics:
				return tuning.LinkPCIe
			default:
				link = tuning.LinkNVLink
			}
		}
	}
	return link
}

// tune reads and agrees on the tables of a new rank. Collective.
func tune(ctx context.Context, m *memory.Memory, path string, log *slog.Logger) (*tuned, error) {
	t, failure := readTuning(path)
	if err := t.agree(ctx, m, failure, log); err != nil {
		return nil, fmt.Errorf("choosing tables of the fastest forms: %w", err)
	}
	return t, nil
}

// tuneSub agrees on the tables of a sub-group, whose ranks have the file of its parent's. Collective.
func tuneSub(ctx context.Context, parent *tuned, m *memory.Memory, log *slog.Logger) (*tuned, error) {
	t := *parent
	t.sub = true
	if err := t.agree(ctx, m, nil, log); err != nil {
		return nil, fmt.Errorf("choosing tables of the fastest forms: %w", err)
	}
	return &t, nil
}
