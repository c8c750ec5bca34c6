package native

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/device/cuda"
)

// undo lists how to undo what was done, in the order in which it was done.
type undo []undoStep

type undoStep struct {
	do func() error
	// unmaps says that the step takes a mapping away. Steps before it that have kept set cannot be taken while it is there.
	unmaps bool
	kept   string // what stays instead
}

// add notes how to undo the step that was just done.
func (u *undo) add(step func() error) { *u = append(*u, undoStep{do: step}) }

// addUnmap is add for a mapping, whose undoing may fail like any other, and then it is still there.
func (u *undo) addUnmap(step func() error) { *u = append(*u, undoStep{do: step, unmaps: true}) }

// addUnmapped is add for what can be undone only when the mappings that were made after it are gone; otherwise kept, which says what it is, stays until
// the process ends: addresses that are mapped must not be given to anybody else.
func (u *undo) addUnmapped(kept string, step func() error) {
	*u = append(*u, undoStep{do: step, kept: kept})
}

// giveBack undoes everything with the device's context current, and without if the device was closed before and has no work left: the driver's calls for virtual memory need none, and the
// memory would stay until the process ends.
func (b *Backend) giveBack(u *undo) error {
	err := b.device.WithContext(u.run)
	if len(*u) > 0 && b.device.Over() {
		return u.run()
	}
	return err
}

// run undoes everything, the last step first, and forgets it. A failure does not stop the others: everything that can be undone is. The device's
// context is current.
func (u *undo) run() error {
	steps := *u
	*u = nil
	var err error
	mapped := false
	for i := len(steps) - 1; i >= 0; i-- {
		var failed error
		if s := steps[i]; mapped && s.kept != "" {
			failed = fmt.Errorf("%s until the process ends, since something is still mapped", s.kept)
		} else {
			failed = s.do()
			mapped = mapped || s.unmaps && failed != nil
		}
		if errors.Is(err, cuda.ErrContextLost) && (errors.Is(failed, cuda.ErrContextLost) || mapped && steps[i].kept != "") {
			continue // a lost context fails every call; once is enough
		}
		err = errors.Join(err, failed)
	}
	return err
}
