package config

import (
	"fmt"
	"reflect"

	"github.com/symmem/symmem/internal/options"
)

// SourceKind is the kind of place that a value came from.
type SourceKind int

// The kinds of source, the weakest first.
const (
	SourceDefault  SourceKind = iota // nobody gave a value
	SourceFile                       // the configuration file
	SourceEnv                        // an environment variable
	SourceFlag                       // a flag of the command line
	SourceExplicit                   // the program itself
)

// String returns the name of the kind in one word.
func (k SourceKind) String() string {
	switch k {
	case SourceDefault:
		return "default"
	case SourceFile:
		return "file"
	case SourceEnv:
		return "env"
	case SourceFlag:
		return "flag"
	case SourceExplicit:
		return "explicit"
	}
	return fmt.Sprintf("SourceKind(%d)", int(k))
}

// Source says where a value came from.
type Source struct {
	Kind SourceKind
	Name string // the file's path, the variable or the flag ("--rank"); "" for the other kinds
}

// String says where a value came from in a few words, as error messages and tables print it.
func (s Source) String() string {
	switch s.Kind {
	case SourceFile:
		return "file " + s.Name
	case SourceEnv:
		return "variable " + s.Name
	case SourceFlag:
		return "flag " + s.Name
	case SourceExplicit:
		return "the program"
	}
	return s.Kind.String()
}

// Source says where the value of a key ("world-size") came from. A value that was changed after loading came from the program.
// A key that does not exist has SourceDefault.
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
	return Source{Kind: SourceExplicit}
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
