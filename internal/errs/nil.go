package errs

import "reflect"

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
