package futex

import (
	"fmt"
	"runtime"
	"structs"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/internal/errs"
)

// WordSize is the size of a [Word] in bytes.
const WordSize = 8

const (
	// A wait looks at the word so many times before it sleeps: firstLoads times at once, then in rounds of roundLoads with a yield to other
	// goroutines before each round. Altogether 1 to 2 us, which is about what going to sleep and being woken costs the two sides: a longer look would
	// cost more than it saves when the writer waits for this very core.
	firstLoads      = 800
	roundLoads      = 800
	impatientRounds = 4
	// With a processor for each waiter nobody else needs this one, so a wait looks for 20 to 30 us: with less, ranks that come to an exchange a
	// little apart would put each other to sleep again and again. See Patience.
	patientRounds = 80

	// The sleep of a Word is cut into slices only to check the Bound, since every writer also wakes.
	firstSlice = 20 * time.Millisecond
	lastSlice  = 100 * time.Millisecond

	// The sleep of a plain word must also find a write that came with no wake-up.
	firstPlainSlice = 50 * time.Microsecond
	lastPlainSlice  = time.Millisecond
)

// Word is a 32-bit counter in memory that several processes may map, with a count of its sleepers beside it. It takes 8 bytes, its layout is fixed,
// and at rest it is all zeros, so that fresh memory is a valid Word. Values are compared modulo 2^32: they may wrap, as long as no waiter is 2^31
// behind.
//
// All methods may be called by any number of goroutines and processes at once. A process that dies in a wait leaves the
// count of sleepers too high, which costs later writers a system call each and does no other harm.
type Word struct {
	_        structs.HostLayout
	value    uint32
	sleepers uint32
}

// At returns the Word at the start of b, which must have 8 bytes at least and be aligned to 8 bytes. It changes nothing in b;
// the Word is good for as long as that memory is mapped.
func At(b []byte) (*Word, error) {
	if len(b) < WordSize {
		return nil, errs.Invalid("futex.At", "len(b)", len(b), fmt.Sprintf("at least %d bytes", WordSize))
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	if uintptr(p)%WordSize != 0 {
		return nil, errs.Invalid("futex.At", "address", fmt.Sprintf("%p", p), fmt.Sprintf("a multiple of %d", WordSize))
	}
	return (*Word)(p), nil
}

// Load returns the value. What was written before the Store or Add that it observes is visible afterwards.
func (w *Word) Load() uint32 { return atomic.LoadUint32(&w.value) }

// Store sets the value and wakes all sleepers, with a system call only if there are any. What the caller wrote before is visible to everybody who
// observes the value.
func (w *Word) Store(v uint32) {
	atomic.StoreUint32(&w.value, v)
	if atomic.LoadUint32(&w.sleepers) != 0 {
		wakeAll(&w.value)
	}
}

// Add adds delta to the value and returns the sum; otherwise it is like Store.
func (w *Word) Add(delta uint32) uint32 {
	v := atomic.AddUint32(&w.value, delta)
	if atomic.LoadUint32(&w.sleepers) != 0 {
		wakeAll(&w.value)
	}
	return v
}

// WaitAtLeast waits until the value is v or beyond it, modulo 2^32: int32(value-v) >= 0. It returns nil then, a [*TimeoutError] at the bound's
// deadline, or the error of the bound's Err. When the value is there already, the bound is not checked. It allocates nothing unless it fails.
func (w *Word) WaitAtLeast(v uint32, bound Bound) error {
	if reached(atomic.LoadUint32(&w.value), v) {
		return nil
	}
	return w.wait(v, bound)
}

// wait is WaitAtLeast after a first look that did not find the value.
func (w *Word) wait(v uint32, bound Bound) error {
	if spin(&w.value, v, bound.Patience) {
		return nil
	}
	for slice := firstSlice; ; slice = min(2*slice, lastSlice) {
		sleep, err := bound.next(slice, v, atomic.LoadUint32(&w.value))
		if err != nil {
			return err
		}
		// A writer changes the value first and then looks for sleepers; this side counts itself first and then looks at the value. So either the
		// writer wakes it, or the futex sees a changed value and does not sleep.
		atomic.AddUint32(&w.sleepers, 1)
		have := atomic.LoadUint32(&w.value)
		if !reached(have, v) {
			err = Wait(&w.value, have, sleep)
			have = atomic.LoadUint32(&w.value)
		}
		atomic.AddUint32(&w.sleepers, ^uint32(0))
		if reached(have, v) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Publish sets the plain word at addr to v and wakes all who sleep in [WaitAtLeast] for it, with a system call in every case. What the caller wrote
// before is visible to everybody who observes v.
func Publish(addr *uint32, v uint32) {
	atomic.StoreUint32(addr, v)
	wakeAll(addr)
}

// WaitAtLeast waits until the plain word at addr is v or beyond it, as [Word.WaitAtLeast] does. It also ends, up to a
// millisecond late, when the word was written by something that wakes nobody.
func WaitAtLeast(addr *uint32, v uint32, bound Bound) error {
	if reached(atomic.LoadUint32(addr), v) || spin(addr, v, bound.Patience) {
		return nil
	}
	for slice := firstPlainSlice; ; slice = min(2*slice, lastPlainSlice) {
		have := atomic.LoadUint32(addr)
		if reached(have, v) {
			return nil
		}
		sleep, err := bound.next(slice, v, have)
		if err != nil {
			return err
		}
		if err := Wait(addr, have, sleep); err != nil {
			return err
		}
	}
}

// reached reports whether have is want or beyond it, modulo 2^32.
func reached(have, want uint32) bool { return int32(have-want) >= 0 }

// spin looks at the word for a microsecond or two, or for as long as p has found to pay, and reports whether it reached v.
func spin(addr *uint32, v uint32, p *Patience) bool {
	for range firstLoads {
		if reached(atomic.LoadUint32(addr), v) {
			return true
		}
	}
	rounds, loads := p.looks()
	for round := range rounds {
		// Sleeping in the kernel keeps the processor of this goroutine from others until the scheduler takes it away, so ready goroutines, perhaps
		// the writer among them, go first.
		runtime.Gosched()
		for range loads {
			if reached(atomic.LoadUint32(addr), v) {
				p.paid(round)
				return true
			}
		}
	}
	p.vain(rounds)
	return false
}

// looks returns how many rounds of looking this wait may take, and how often each looks at the word.
func (p *Patience) looks() (rounds, loads int) {
	// Where goroutines run one at a time, the writer cannot run while this one looks, unless it is in a process that has another processor. Who gives
	// Patience knows that; the other goroutines of this process have their turns between the rounds all the same.
	if p == nil && (runtime.NumCPU() == 1 || runtime.GOMAXPROCS(0) == 1) {
		return impatientRounds, 1
	}
	return p.rounds(), roundLoads
}

// wakeAll wakes every sleeper at addr. The kernel refuses only addresses in memory without futexes, such as that of a mapped device. Nobody can sleep
// there either, since Wait is refused in the same way and returns the error, so there is none to report here.
func wakeAll(addr *uint32) { _, _ = Wake(addr, All) }
