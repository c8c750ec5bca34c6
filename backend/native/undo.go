package native

import (
	"errors"

	"github.com/symmem/symmem/device/cuda"
)

// undo lists how to undo what was done, in the order in which it was done.
type undo []func() error

// add notes how to undo the step that was just done.
func (u *undo) add(step func() error) { *u = append(*u, step) }

// run undoes everything, the last step first, and forgets it. A failure does not stop the others: everything that can be undone is. The device's
// context is current.
func (u *undo) run() error {
	steps := *u
	*u = nil
	var err error
	for i := len(steps) - 1; i >= 0; i-- {
		failed := steps[i]()
		if errors.Is(err, cuda.ErrContextLost) && errors.Is(failed, cuda.ErrContextLost) {
			continue // a lost context fails every call; once is enough
		}
		err = errors.Join(err, failed)
	}
	return err
}
