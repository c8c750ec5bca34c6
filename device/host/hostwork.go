package host

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

const (
	// The worker asks a run this often, with a yield to other goroutines in between, before it sleeps between questions.
	eagerPolls = 200
	// The sleeps double from the first to the last, so that many streams that wait leave the processors to those that work.
	firstNap = 20 * time.Microsecond
	lastNap  = 500 * time.Microsecond
)

// workKernel runs a HostWork on the goroutine of a stream.
type workKernel struct{ work device.HostWork }

// HostWork enqueues w. The stream's goroutine asks it for its progress, at first without pause and then with pauses of up to
// half a millisecond.
func (s *Stream) HostWork(w device.HostWork) error {
	if w == nil {
		return errs.Invalid("HostWork", "w", nil, "work")
	}
	return s.enqueue(&op{kind: opWork, what: w})
}

func (k workKernel) RunKernel() (err error) {
	returned := false
	defer func() {
		if f, ok := k.work.(device.HostWorkFailer); ok && (err != nil || !returned) {
			if !returned {
				err = errNotReturned
			}
			f.Failed(err)
		}
	}()
	err = k.run()
	returned = true
	return err
}

// errNotReturned is work that panicked, or that ended the stream's goroutine.
var errNotReturned = errors.New("it did not return")

// run runs the work to its end.
func (k workKernel) run() error {
	run, err := k.work.Start()
	if err != nil || run == nil {
		return err
	}
	nap := firstNap
	for polls := 0; ; polls++ {
		if ended, err := run.Poll(); ended || err != nil {
			return err
		}
		if polls < eagerPolls {
			runtime.Gosched()
			continue
		}
		futex.Doze(nap)
		nap = min(2*nap, lastNap)
	}
}

func (k workKernel) String() string {
	if named, ok := k.work.(fmt.Stringer); ok {
		return named.String()
	}
	return fmt.Sprintf("%T", k.work)
}
