package cheader

import (
	"fmt"
	"slices"
	"strings"
)

// Options says what is read.
type Options struct {
	Files   []string          // one after the other
	Folders []string          // where files that they include may be; others, as those of the system, are left out
	Defines map[string]string // macros that are there from the beginning
	Prelude string            // C that comes before the files: types of headers that are not there
}

// Header is what was read.
type Header struct {
	macros  *preprocessor
	parser  *parser
	partial bool // it does not have all that the header has
}

// Func is a function, with the sizes of its arguments and its result in bytes. void is 0 bytes; an unknown type is -1.
type Func struct {
	Result int64
	Args   []int64
}

// system is what headers take from those of the system.
const system = `
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned uint32_t; typedef long int64_t; typedef unsigned long uint64_t;
typedef unsigned long size_t; typedef long ssize_t; typedef long ptrdiff_t; typedef long intptr_t; typedef unsigned long uintptr_t;
`

// Read reads headers. A file that is not there is an error; what is in it and not understood is none.
func Read(o Options) (*Header, error) {
	p := &preprocessor{folders: o.Folders, macros: make(map[string]macro), read: make(map[string]bool)}
	for name, value := range map[string]string{"__linux__": "1", "__x86_64__": "1", "__LP64__": "1", "INT_MAX": "2147483647",
		"INT_MIN": "(-2147483647-1)", "SIZE_MAX": "-1"} {
		p.macros[name] = macro{body: tokens(value)}
	}
	for name, value := range o.Defines {
		p.macros[name] = macro{body: tokens(value)}
	}
	if err := p.text(system+o.Prelude, ""); err != nil {
		return nil, err
	}
	for _, path := range o.Files {
		if err := p.file(path); err != nil {
			return nil, fmt.Errorf("reading a header: %w", err)
		}
	}
	h := &Header{macros: p, parser: newParser(p.out)}
	h.parser.all()
	return h, nil
}

// Const returns the value of an enumerator, or of a macro that is a whole number. Unsigned values are those of 64 bits.
func (h *Header) Const(name string) (int64, bool) {
	if v, ok := h.parser.enumerators[name]; ok {
		return v, true
	}
	if m, ok := h.macros.macros[name]; !ok || m.params != nil {
		return 0, false
	}
	return h.eval(h.macros.expand([]token{{text: name}}))
}

// Element returns a value in a macro that initialises a struct, by its number from 0, counting what is in inner brackets too.
func (h *Header) Element(name string, i int) (int64, bool) {
	if m, ok := h.macros.macros[name]; !ok || m.params != nil {
		return 0, false
	}
	var one []token
	depth, n := 0, 0
	for _, t := range h.macros.expand([]token{{text: name}}) {
		switch t.text {
		case "(":
			depth++
		case ")":
			depth--
		case "{", "}":
			continue
		case ",":
			if depth == 0 {
				if n == i {
					return h.eval(one)
				}
				one, n = nil, n+1
				continue
			}
		}
		one = append(one, t)
	}
	if n != i {
		return 0, false
	}
	return h.eval(one)
}

// eval returns the value of an expression.
func (h *Header) eval(in []token) (int64, bool) {
	e := *h.parser
	e.in, e.at = in, 0
	v, err := e.value()
	return v, err == nil
}

// Size returns how many bytes a type takes: a typedef, or "struct tag".
func (h *Header) Size(name string) (int64, bool) {
	t := h.parser.lookup(name)
	if t == nil || t.size < 0 {
		return 0, false
	}
	return t.size, true
}

// Offset returns where in a struct a field is, and how many bytes it takes. The field of a struct in it has a dot before it.
func (h *Header) Offset(name, field string) (offset, size int64, ok bool) {
	t := h.parser.lookup(name)
	for _, one := range strings.Split(field, ".") {
		if t == nil || t.size < 0 {
			return 0, 0, false
		}
		i := slices.IndexFunc(t.fields, func(f member) bool { return f.name == one })
		if i < 0 {
			return 0, 0, false
		}
		offset, t = offset+t.fields[i].offset, t.fields[i].of
	}
	return offset, t.size, true
}

// AddFuncs adds the functions of another header that this one lacks.
func (h *Header) AddFuncs(of *Header) {
	for name, f := range of.parser.functions {
		if _, has := h.parser.functions[name]; !has {
			h.parser.functions[name] = f
		}
	}
}

// Func returns a function that the headers declare.
func (h *Header) Func(name string) (Func, bool) {
	f, ok := h.parser.functions[name]
	return f, ok
}
