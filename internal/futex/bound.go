package futex

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// Bound says when a wait gives up. The zero Bound never does; that is for waits whose word is sure to be written.
type Bound struct {
	// Deadline ends the wait with a [*TimeoutError]; the zero time is no deadline.
	Deadline time.Time
	// Err, unless nil, is called before the first sleep and between sleeps, each of which lasts 100 ms at most. If it returns an error, the wait ends
	// with that error. It must be quick. A method value allocates, so keep the func for repeated waits.
	Err func() error
	// Patience, unless nil, lets the wait look at the word some ten times longer before it sleeps, as long as that has paid. It is for waiters that
	// should each have a processor of their own, where sleeping and waking would cost more than waiting. That may be the only one of the process: then
	// its other goroutines run between the looks, a third of a microsecond apart.
	Patience *Patience
}

// Patience remembers for one waiter, from wait to wait, how long it pays to look at a word before sleeping: less after each wait that looked in vain,
// because the writer had no processor meanwhile, and more again after those that did not. The zero Patience is fully patient. It may be used by
// several goroutines at once.
type Patience struct {
	less  atomic.Int32  // of patientRounds
	waits atomic.Uint32 // that did not end at the first look
}

// probeEvery is how often a wait looks as long as it may, one wait in so many, to find out whether that pays again.
const probeEvery = 64

// rounds returns how many rounds of looking this wait may take.
func (p *Patience) rounds() int {
	if p == nil {
		return impatientRounds
	}
	if p.waits.Add(1)%probeEvery == 0 {
		return patientRounds
	}
	return patientRounds - int(p.less.Load())
}

// paid notes that the word came in a round of looking.
func (p *Patience) paid(round int) {
	if p == nil {
		return
	}
	if less := p.less.Load(); less > 0 {
		p.less.Store(max(min(less, int32(patientRounds-2*round-impatientRounds)), 0))
	}
}

// vain notes that a wait looked for that many rounds and had to sleep all the same.
func (p *Patience) vain(rounds int) {
	if p != nil && rounds > impatientRounds {
		p.less.Store(int32(patientRounds - max(rounds/2, impatientRounds)))
	}
}

// TimeoutError is a wait that the deadline of its [Bound] ended. It is os.ErrDeadlineExceeded.
type TimeoutError struct {
	Want uint32 // what the word had to reach
	Have uint32 // what it was in the end
}

// Error says what bounds such waits, and how far the word was.
func (e *TimeoutError) Error() string {
	return fmt.Sprintf("it did not come within the time that the setting kernel-timeout gives (the word is at %d, and not at %d)", e.Have, e.Want)
}

// Is reports that a TimeoutError is os.ErrDeadlineExceeded.
func (e *TimeoutError) Is(target error) bool { return target == os.ErrDeadlineExceeded }

// Timeout reports true, as net.Error has it.
func (e *TimeoutError) Timeout() bool { return true }

// next returns the length of the next sleep: slice, or less where the deadline is nearer. It returns an error when the wait
// is over; have is the word's value for its text.
func (b *Bound) next(slice time.Duration, want, have uint32) (time.Duration, error) {
	if b.Err != nil {
		if err := b.Err(); err != nil {
			return 0, err
		}
	}
	if b.Deadline.IsZero() {
		return slice, nil
	}
	left := time.Until(b.Deadline)
	if left <= 0 {
		return 0, &TimeoutError{Want: want, Have: have}
	}
	return min(slice, left), nil
}
