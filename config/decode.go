package config

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/viper"

	"github.com/symmem/symmem/internal/errs"
)

// op is the operation that refused values name.
const op = "configuration"

// decode makes a Config of what v holds, checks it and notes the sources. v holds the keys of settings only, each with a value; take adds the
// options of backends.
func decode(v *viper.Viper, sources map[string]Source, take func(*Config) []error) (Config, error) {
	var c Config
	bad := take(&c)
	err := v.UnmarshalExact(&c, viper.DecodeHook(hook), func(d *mapstructure.DecoderConfig) { d.WeaklyTypedInput = false })
	if err != nil {
		// A value of the wrong form is reported once, as that; in its place the default stands for the other checks.
		defaults := Default()
		failures := decodeErrors(err)
		if len(failures) == 0 {
			return Config{}, fmt.Errorf("reading the configuration: %w", err)
		}
		for _, failure := range failures {
			s := lookup(failure.Name())
			if s == nil {
				return Config{}, fmt.Errorf("reading the configuration: %w", err)
			}
			reflect.ValueOf(s.field(&c)).Elem().Set(reflect.ValueOf(s.value(&defaults)))
			value := shown(s.secret(), v.Get(s.name))
			bad = append(bad, fmt.Errorf("%s: %w", sources[s.name], errs.Invalid(op, s.name, value, allowedForm(failure))))
		}
	}
	c.normalise()
	c.remember(sources)
	if err := errors.Join(append(bad, c.problems()...)...); err != nil {
		return Config{}, err
	}
	return c, nil
}

// shown returns a value for an error: no secret, and nothing that may hold one, as keys and values do that were indented too far.
func shown(secret bool, value any) any {
	if secret {
		return redacted
	}
	switch reflect.ValueOf(value).Kind() {
	case reflect.Map, reflect.Struct:
		return "keys and values"
	case reflect.Slice, reflect.Array:
		if _, names := value.([]string); !names {
			return "a list"
		}
	}
	return value
}

// decodeErrors collects the failures of single fields from the tree of errors that the decoder gives.
func decodeErrors(err error) []*mapstructure.DecodeError {
	switch e := err.(type) { //nolint:errorlint // the whole tree is walked
	case *mapstructure.DecodeError:
		return []*mapstructure.DecodeError{e}
	case interface{ Unwrap() []error }:
		var all []*mapstructure.DecodeError
		for _, err := range e.Unwrap() {
			all = append(all, decodeErrors(err)...)
		}
		return all
	case interface{ Unwrap() error }:
		return decodeErrors(e.Unwrap())
	}
	return nil
}

// formError says what form a value must have.
type formError struct{ allowed string }

func (e *formError) Error() string { return "allowed: " + e.allowed }

// allowedForm returns the form that a value should have had.
func allowedForm(err error) string {
	if form, ok := errors.AsType[*formError](err); ok {
		return form.allowed
	}
	return err.Error()
}

// hook converts a value to the type of its field, or refuses it. It takes the place of the decoder's own conversions, which
// make 1 of true, 0 of "", 8 of "010" and 60 nanoseconds of 60.
func hook(from, to reflect.Value) (any, error) {
	raw := from.Interface()
	switch to.Interface().(type) {
	case bool:
		return truth(raw)
	case int:
		return wholeNumber(raw)
	case time.Duration:
		return duration(raw)
	case string:
		if s, ok := raw.(string); ok {
			return strings.TrimSpace(s), nil
		}
		return nil, &formError{"a text, a number in quotes"}
	case []string:
		return list(raw)
	case Secret:
		switch s := raw.(type) {
		case Secret:
			return s, nil
		case string:
			return NewSecret(strings.TrimSpace(s)), nil
		}
		return nil, &formError{"a text, a number in quotes"}
	}
	return raw, nil
}

// truth converts what a file, a variable, a flag or a program may give for a yes or no.
func truth(raw any) (bool, error) {
	switch b := raw.(type) {
	case bool:
		return b, nil
	case string:
		switch strings.ToLower(strings.TrimSpace(b)) {
		case "true", "1":
			return true, nil
		case "false", "0":
			return false, nil
		}
	}
	return false, &formError{"true or false"}
}

// wholeNumber converts what a file, a variable, a flag or a program may give for a number.
func wholeNumber(raw any) (int, error) {
	form := &formError{"a whole decimal number"}
	switch n := reflect.ValueOf(raw); n.Kind() {
	case reflect.String:
		i, err := strconv.Atoi(strings.TrimSpace(n.String()))
		if err != nil {
			return 0, form
		}
		return i, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if _, ok := raw.(time.Duration); ok || n.Int() < math.MinInt || n.Int() > math.MaxInt {
			return 0, form
		}
		return int(n.Int()), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if n.Uint() > math.MaxInt {
			return 0, form
		}
		return int(n.Uint()), nil
	case reflect.Float64:
		// A viper that read JSON has every number as a float64; beyond 2^53 such a number is no longer exact.
		if f := n.Float(); f == math.Trunc(f) && math.Abs(f) <= 1<<53 {
			return int(f), nil
		}
	}
	return 0, form
}

// duration converts what may be given for a duration. A number without a unit is refused: whoever writes 60 means seconds,
// and the type would take it for nanoseconds.
func duration(raw any) (time.Duration, error) {
	switch d := raw.(type) {
	case time.Duration:
		return d, nil
	case string:
		parsed, err := time.ParseDuration(strings.TrimSpace(d))
		if err == nil {
			return parsed, nil
		}
	}
	return 0, &formError{"a duration with its unit, like 90s or 2m"}
}

// list converts what may be given for a list of names. normalise splits the entries at commas.
func list(raw any) ([]string, error) {
	switch l := raw.(type) {
	case string:
		return []string{l}, nil
	case []string:
		return append([]string{}, l...), nil
	case []any:
		entries := make([]string, len(l))
		for i, entry := range l {
			s, ok := entry.(string)
			if !ok {
				return nil, &formError{fmt.Sprintf("a list of names (entry %d is none)", i)}
			}
			entries[i] = s
		}
		return entries, nil
	}
	return nil, &formError{"a list of names, or names with commas between them"}
}
