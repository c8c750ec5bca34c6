// Package fromenv makes a backend's own options of what every backend is opened with.
package fromenv

import (
	"fmt"
	"os"
	"reflect"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
)

// Options returns the options of a backend, of the struct type T: those that the program gave (env.Given, a *T) or new ones. Each field that is still
// zero and has the name of a field of env gets the value of that field. Opened and Parent, if env has them, always come from env. Getenv is never
// nil. name is the backend's. The error is ErrInvalid, if env has options of another backend, or a device or a parent of another type.
func Options[T any](name string, env *backend.Env) (*T, error) {
	o := new(T)
	if env.Given != nil {
		given, ok := env.Given.(*T)
		if !ok {
			return nil, errs.Invalid(name+".New", "options", fmt.Sprintf("of type %T", env.Given), fmt.Sprintf("of type %T", o))
		}
		if given != nil {
			*o = *given
		}
	}
	to, from := reflect.ValueOf(o).Elem(), reflect.ValueOf(*env)
	for i := range from.NumField() {
		field := from.Type().Field(i).Name
		value, into := from.Field(i), to.FieldByName(field)
		if !into.IsValid() {
			continue // not of this backend
		}
		if value.Kind() != reflect.Interface {
			if into.IsZero() {
				into.Set(value)
			}
			continue
		}
		// An open device, or a parent: in a sub-group those that the program has named are not its.
		if value.IsNil() {
			continue
		}
		if value = value.Elem(); !value.Type().AssignableTo(into.Type()) {
			return nil, errs.Invalid(name+".New", field, fmt.Sprintf("of type %s", value.Type()), fmt.Sprintf("of type %s", into.Type()))
		}
		into.Set(value)
	}
	if getenv, ok := to.FieldByName("Getenv").Addr().Interface().(*func(string) string); ok && *getenv == nil {
		*getenv = os.Getenv
	}
	return o, nil
}

// Text sets o to the value of an option of the named backend, unless o has a value already.
func Text(o *string, name string, env *backend.Env, option string) error {
	if *o != "" {
		return nil
	}
	var err error
	*o, err = env.Option(name, option)
	return err
}

// Library returns the declaration of the option that names a native library.
func Library(what string) backend.Option {
	return backend.Option{Name: "library", Usage: "file of " + what + ", or the folder it is in; empty looks where the loader and Python's package managers keep it"}
}
