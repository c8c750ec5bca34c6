package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
)

// option returns the value of a backend's option, the default if none was set.
func (c *Config) option(d *options.Declared) string {
	if value := c.BackendOptions[d.Key()]; value != "" {
		return value
	}
	return d.Default
}

// setOption sets a backend's option to what a source gives.
func (c *Config) setOption(d *options.Declared, value string) {
	if c.BackendOptions == nil {
		c.BackendOptions = map[string]string{}
	}
	c.BackendOptions[d.Key()] = value
}

// optionKey describes a backend's option.
func optionKey(d *options.Declared) Key {
	return Key{Name: d.Key(), Env: d.Env(), Default: d.Default, Usage: "backend " + d.Backend + ": " + d.Usage, Backend: d.Backend}
}

// optionText converts what a file or a program may give for a backend's option.
func optionText(raw any) (string, error) {
	switch v := raw.(type) {
	case string:
		return strings.TrimSpace(v), nil
	case bool:
		return strconv.FormatBool(v), nil
	case time.Duration:
		return v.String(), nil
	}
	if n, err := wholeNumber(raw); err == nil {
		return strconv.Itoa(n), nil
	}
	return "", &formError{"a text, a whole number, or true or false"}
}

// givenOption is what one source gives for an option.
type givenOption struct {
	source Source
	value  any // nil for nothing
}

// takeOption sets an option to the value of the first source that has one, and notes that source. An empty text is no value.
func (c *Config) takeOption(d *options.Declared, sources map[string]Source, given ...givenOption) error {
	for _, g := range given {
		if g.value == nil {
			continue
		}
		value, err := optionText(g.value)
		if err != nil {
			return fmt.Errorf("%s: %w", g.source, errs.Invalid(op, d.Key(), shown(false, g.value), allowedForm(err)))
		}
		if value != "" {
			c.setOption(d, value)
			sources[d.Key()] = g.source
			return nil
		}
	}
	return nil
}

// optionProblems returns everything that is wrong with the options of backends.
func (c *Config) optionProblems() []error {
	var all []error
	for _, key := range slices.Sorted(maps.Keys(c.BackendOptions)) {
		value := c.BackendOptions[key]
		d := options.Lookup(key)
		if d == nil {
			all = append(all, fmt.Errorf("%s: %w", Source{Program: true}, errs.Advised(op, "backend option", withoutSecret(key), "the options of backends that are in this program",
				advice(key, optionKeys(), func(near string) string { return near + " is the nearest that is known" }))))
			continue
		}
		if err := d.Problem(op, key, value); err != nil && value != "" {
			all = append(all, fmt.Errorf("%s: %w", c.Source(key), err))
		}
	}
	return all
}

// optionKeys lists the keys of all options.
func optionKeys() []string {
	var keys []string
	for _, d := range options.All() {
		keys = append(keys, d.Key())
	}
	return keys
}

// advice says what to do about a key or a variable that nobody knows: say words the advice with the nearest known one. If it may be an option of a
// backend that is not in this program, the advice says so.
func advice(name string, known []string, say func(near string) string) string {
	var all []string
	if b := absent(name); b != "" {
		all = append(all, fmt.Sprintf("there is no backend %s in this program: if it is meant for one, import its package (%s has all of this module)", b,
			"github.com/symmem/symmem/backend/all"))
	}
	if near := nearest(name, known); near != "" {
		all = append(all, say(near))
	}
	return strings.Join(all, "; ")
}

// absent returns the backend that the first word of a key or a variable names, if that backend is not in this program and no setting begins with the
// word.
func absent(name string) string {
	key := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, envPrefix), "_", "-"))
	word, _, two := strings.Cut(key, "-")
	if !two || !options.GoodName(word) || options.Owner(key) != "" {
		return ""
	}
	for _, r := range options.Reserved {
		if first, _, _ := strings.Cut(r, "-"); first == word {
			return ""
		}
	}
	return word
}
