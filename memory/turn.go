package memory

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// turn is a mutex for collective calls. They get it in the order in which they have asked, and need not wait for it longer than their contexts last. One
// that gives up keeps its place: when that comes the others are told, who would else take the rank's next call for this one.
type turn struct {
	mu    sync.Mutex
	holds string // what has it; "" if nothing does
	queue []*inQueue
}

// inQueue is a call that waits for its turn.
type inQueue struct {
	what string
	come chan struct{} // closed when its turn has come; guarded by the turn's mu, as what follows is
	has  bool
	late func() // does its part, in its turn, after it gave up; nil before
}

// lock waits for the turn of what, until ctx ends; then the error is a [*TurnError]. late, unless nil, is then called with that error in the turn, on another
// goroutine. A turn that nobody has is taken whatever has become of ctx. unlock ends it.
func (t *turn) lock(ctx context.Context, what string, late func(gaveUp error)) error {
	t.mu.Lock()
	if t.holds == "" {
		t.holds = what
		t.mu.Unlock()
		return nil
	}
	began := time.Now()
	q := &inQueue{what: what, come: make(chan struct{})}
	t.queue = append(t.queue, q)
	t.mu.Unlock()
	select {
	case <-q.come:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.has {
		return nil // just now
	}
	gaveUp := &TurnError{Op: what, Behind: t.holds, Waited: time.Since(began), Err: ctx.Err()}
	if late == nil {
		t.queue = slices.DeleteFunc(t.queue, func(other *inQueue) bool { return other == q })
	} else {
		q.late = func() { late(gaveUp) }
	}
	return gaveUp
}

// unlock gives the turn to the next.
func (t *turn) unlock() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) == 0 {
		t.holds = ""
		return
	}
	q := t.queue[0]
	t.queue = slices.Delete(t.queue, 0, 1)
	t.holds, q.has = q.what, true
	if q.late != nil {
		go func() {
			defer t.unlock()
			q.late()
		}()
		return
	}
	close(q.come)
}

// held reports whether anybody has the turn.
func (t *turn) held() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.holds != ""
}

// held is what the context of a call in its turn says: that calls made with it need not wait for that turn.
type held struct {
	gaveUp error       // of the call
	over   atomic.Bool // the turn has ended: the context was kept
}

// heldKey is the key of a turn's held in contexts.
type heldKey struct{ of *turn }

// do makes a call in its turn. If ctx ends before that comes, do returns a [*TurnError], and the call is made in its turn all the same, with that error as gaveUp
// and a context that does not end: it then tells the others in its first step that this rank cannot take part, and waits for no device. Calls that a call makes with
// its context are part of it, and have given up if it has.
func (t *turn) do(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error) error {
	if h, ok := ctx.Value(heldKey{t}).(*held); ok && !h.over.Load() {
		return call(ctx, h.gaveUp)
	}
	within := func(ctx context.Context, gaveUp error) error {
		h := &held{gaveUp: gaveUp}
		defer h.over.Store(true)
		return call(context.WithValue(ctx, heldKey{t}, h), gaveUp)
	}
	err := t.lock(ctx, what, func(gaveUp error) { _ = within(context.WithoutCancel(ctx), gaveUp) }) // whoever called has its error
	if err != nil {
		return err
	}
	defer t.unlock()
	return within(ctx, nil)
}

// InTurn makes several collective calls one: they come between two others of this rank's, as each does alone, and no other comes between them. All of them take the
// context that call is given, and only the goroutine that call is on makes them. It blocks until the rank's earlier collective calls have ended. What says in errors what it is. Collective, as call is.
//
// If ctx ends before then, InTurn returns a [*TurnError] at once. Its place is kept: when it comes, call is called on another goroutine with that error as gaveUp, nil otherwise, and has to come
// to the first of its steps that the other ranks are in, with gaveUp as this rank's failure. Calls of the memory do so themselves. InTurn in a call of InTurn is part of that.
func (m *Memory) InTurn(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error) error {
	if err := errs.Given("InTurn", "ctx", ctx, "a context"); err != nil {
		return err
	}
	return m.collective.do(ctx, what, call)
}

// inTurn is do for a call that makes something, which one that gave up does not.
func inTurn[T any](ctx context.Context, t *turn, what string, call func(ctx context.Context, gaveUp error) (T, error)) (T, error) {
	var made T
	err := t.do(ctx, what, func(ctx context.Context, gaveUp error) error {
		x, err := call(ctx, gaveUp)
		if gaveUp == nil {
			made = x
		}
		return err
	})
	return made, err
}

// TurnError says that a call gave up before it began, because an earlier collective call of the same rank was still under way. A collective call that
// gives up keeps its place in the order of the rank's calls: when that comes, the other ranks get a [*group.VoteError] that names this rank and says so, and the
// ranks are in step. It unwraps to the error of the context that ended.
type TurnError struct {
	Op     string        // the call that gave up
	Behind string        // the call that was under way
	Waited time.Duration // how long it had waited
	Err    error         // the error of the context that ended
}

// Error says which call gave up, behind which, and after how long.
func (e *TurnError) Error() string {
	waited := e.Waited.Round(time.Millisecond)
	return fmt.Sprintf("%s: gave up after %v behind an earlier call of this rank that is still under way (%s): %v", e.Op, waited, e.Behind, e.Err)
}

// Unwrap returns the context's error.
func (e *TurnError) Unwrap() error { return e.Err }
