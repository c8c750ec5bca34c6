package errs

import (
	"cmp"
	"context"
	"reflect"
)

// IsNil reports whether v is nil, or a nil pointer or function in an interface.
func IsNil(v any) bool {
	if v == nil {
		return true
	}
	p := reflect.ValueOf(v)
	return (p.Kind() == reflect.Pointer || p.Kind() == reflect.Func) && p.IsNil()
}

// Given returns nil if v, the argument arg of op, is not nil, and otherwise an ArgumentError that says what it should be: "a stream".
func Given(op, arg string, v any, what string) error {
	if IsNil(v) {
		return Invalid(op, arg, nil, what)
	}
	return nil
}

// WithContext is for a collective call: where ctx is nil the rank takes part all the same, so that the others are told, with a context that does not end and the
// refusal as its failure, unless it has one already. The group bounds what it waits for.
func WithContext(op string, ctx context.Context, failure error) (context.Context, error) {
	if missing := Given(op, "ctx", ctx, "a context"); missing != nil {
		return context.Background(), cmp.Or(failure, missing)
	}
	return ctx, failure
}
