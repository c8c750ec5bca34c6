package config

import (
	"reflect"

	"github.com/symmem/symmem/internal/options"
)

// Source says where a value came from. At most one field is set; the zero Source is the default.
type Source struct {
	File    string // the path of the configuration file
	Env     string // the environment variable: "SYMMEM_RANK"
	Flag    string // the flag: "--rank"
	Program bool   // the program itself gave the value
}

// String describes the source in a few words, as error messages and tables print it.
func (s Source) String() string {
	switch {
	case s.File != "":
		return "file " + s.File
	case s.Env != "":
		return "variable " + s.Env
	case s.Flag != "":
		return "flag " + s.Flag
	case s.Program:
		return "the program"
	}
	return "default"
}

// Source returns where the value of a key ("world-size") came from. A value that was changed after loading came from the program.
// A key that does not exist has the zero Source.
func (c Config) Source(key string) Source {
	value, defaults := c.Value(key), Default()
	if value == nil {
		return Source{}
	}
	if c.loaded != nil {
		if from, ok := c.loaded.of[key]; ok && reflect.DeepEqual(value, from.value) {
			return from.source
		}
	}
	if reflect.DeepEqual(value, defaults.Value(key)) {
		return Source{}
	}
	return Source{Program: true}
}

// origins are the values that a Config was loaded with and their sources, by key.
type origins struct {
	of map[string]origin
}

type origin struct {
	source Source
	value  any // as it was loaded; another value now means that the program has changed it
}

// remember notes where each value of c came from.
func (c *Config) remember(sources map[string]Source) {
	c.loaded = &origins{of: make(map[string]origin, len(specs))}
	for _, s := range specs {
		c.loaded.of[s.name] = origin{source: sources[s.name], value: s.value(c)}
	}
	for _, d := range options.All() {
		c.loaded.of[d.Key()] = origin{source: sources[d.Key()], value: c.option(d)}
	}
}
