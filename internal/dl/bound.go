package dl

import "context"

// Bound runs call, which may block inside a library for ever, on a goroutine of its own, and returns its result, or a [*StuckError] if ctx ends
// first. The goroutine then stays behind until the call returns, which closes the error's Ended.
func Bound[T any](ctx context.Context, library, what string, call func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done, ended := make(chan result, 1), make(chan struct{})
	go func() {
		defer close(ended)
		value, err := call()
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done: // both were there
		return r.value, r.err
	default:
		var none T
		return none, &StuckError{Library: library, What: what, Err: context.Cause(ctx), Ended: ended}
	}
}
