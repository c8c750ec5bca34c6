package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// turn is a mutex for collective calls. They get it in the order in which they have asked, and need not wait for it longer than their contexts last. One
// that gives up keeps its place: when that comes the others are told, who would else take the rank's next call for this one.
type turn struct {
	mu    sync.Mutex
	queue []*place // whose turn it is, and those that wait behind
}

// place is a call's place in the queue of a turn.
type place struct {
	turn *turn
	what string
	come chan struct{} // closed when its turn has come
}

// join takes a place behind all others. leave gives it up, and ends the turn if that has come.
func (t *turn) join(what string) *place {
	p := &place{turn: t, what: what, come: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = append(t.queue, p)
	if len(t.queue) == 1 {
		close(p.come)
	}
	return p
}

func (p *place) leave() {
	t := p.turn
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.queue, p)
	t.queue = slices.Delete(t.queue, i, i+1)
	if i == 0 && len(t.queue) > 0 {
		close(t.queue[0].come)
	}
}

// wait waits for the turn, until ctx ends: then the error is a [*TurnError] of what, and the place is kept. A turn that has come is taken whatever has become of ctx.
func (p *place) wait(ctx context.Context, what string) error {
	select {
	case <-p.come:
		return nil
	default:
	}
	began := time.Now()
	select {
	case <-p.come:
		return nil
	case <-ctx.Done():
	}
	t := p.turn
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queue[0] == p {
		return nil // just now
	}
	return &TurnError{Op: what, Behind: t.queue[0].what, Waited: time.Since(began), Err: ctx.Err()}
}

// held reports whether anybody has the turn.
func (t *turn) held() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.queue) > 0
}

// held is what the context of a call in its turn says: that calls made with it need not wait for that turn.
type held struct {
	gaveUp error       // of the call
	over   atomic.Bool // the turn has ended: the context was kept
}

// heldKey is the key of a turn's held in contexts.
type heldKey struct{ of *turn }

// endedKey is the key, in contexts of a turn and of turns in it, of when a call has found that the context has ended: see tellBy.
type endedKey struct{}

// within gives the turn's held of a context: nil outside of the turn.
func (t *turn) within(ctx context.Context) *held {
	if h, ok := ctx.Value(heldKey{t}).(*held); ok && !h.over.Load() {
		return h
	}
	return nil
}

// do makes a call in its turn. If ctx ends before that comes, do returns a [*TurnError], and the call is made in its turn all the same, with that error as gaveUp
// and a context that does not end: it then tells the others in its first step that this rank cannot take part, and waits for no device. Calls that a call makes with
// its context are part of it, and have given up if it has.
func (t *turn) do(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error) error {
	if h := t.within(ctx); h != nil {
		return call(ctx, h.gaveUp)
	}
	return t.doAt(ctx, what, call, t.join(what))
}

// doAt is do at places that the call has, one of them in the turn: it is made when all of them have come, and leaves them.
func (t *turn) doAt(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error, places ...*place) error {
	within := func(ctx context.Context, gaveUp error) error {
		h := &held{gaveUp: gaveUp}
		defer func() {
			h.over.Store(true)
			for _, p := range places {
				p.leave()
			}
		}()
		ctx = context.WithValue(ctx, heldKey{t}, h)
		if ctx.Value(endedKey{}) == nil {
			ctx = context.WithValue(ctx, endedKey{}, new(atomic.Pointer[time.Time]))
		}
		return call(ctx, gaveUp)
	}
	for _, p := range places {
		if gaveUp := p.wait(ctx, what); gaveUp != nil {
			go func() {
				for _, p := range places {
					<-p.come
				}
				_ = within(context.WithoutCancel(ctx), gaveUp) // whoever called has its error
			}()
			return gaveUp
		}
	}
	return within(ctx, nil)
}

// InTurn makes several collective calls one: they come between two others of this rank's, as each does alone, and no other comes between them. All of them take the
// context that call is given, and only the goroutine that call is on makes them: one of [group.Heard], since the others go on from each of them to the next. It blocks until the rank's earlier collective
// calls have ended. What says in errors what it is. Collective, as call is.
//
// If ctx ends before then, InTurn returns a [*TurnError] at once. Its place is kept: when it comes, call is called on another goroutine with that error as gaveUp, nil otherwise, and has to come
// to the first of its steps that the other ranks are in, with gaveUp as this rank's failure. Calls of the memory do so themselves. InTurn in a call of InTurn is part of that.
func (m *Memory) InTurn(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error) error {
	if err := m.made("InTurn"); err != nil {
		return err
	}
	if err := errors.Join(errs.Given("InTurn", "ctx", ctx, "a context"), errs.Given("InTurn", "call", call, "a function")); err != nil {
		return err
	}
	return m.collective.do(group.Heard(ctx), what, call)
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
