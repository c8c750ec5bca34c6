package backendtest

import (
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// Calls stands between one rank and the native libraries below it: it counts the calls by name, and lets one of them go wrong. Calls that are
// made through no wrapper of it are not seen. It is safe for use by several goroutines.
type Calls struct {
	mu     sync.Mutex
	counts map[string]int
	codes  map[string][]Code
	strike *strike
	polls  []string // names of calls that ask again and again: of several without another call between them, one is counted
	latest string
	places map[string][]place // unless nil, takes where each call was made
}

// place is where a call was made: the innermost return addresses, those of the tables between included. Calls of one place and name do the same at
// another time.
type place [14]uintptr

// Code is a result of a native call that says that it has failed.
type Code struct {
	Name  string // as the library's documentation has it
	Value int
	// Lasting: after the call that gave it, every later one through the same table gives it too, as from a context that is lost.
	Lasting bool
}

// strike is what befalls a call: the nth of its name that is made at the place. How often a call is made elsewhere before it may differ from run to run,
// since some ask again and again whether something is done.
type strike struct {
	call string
	at   place
	nth  int
	code Code // if it is to fail
	// before, unless nil, is run first; the call does its work after it unless dead is set.
	before func()
	dead   bool

	came   int // calls at the place so far
	struck bool
	under  []string // the functions that the call was made under, "native.(*finding).try", the innermost first
}

func newCalls(polls []string) *Calls {
	return &Calls{counts: map[string]int{}, codes: map[string][]Code{}, polls: polls}
}

// Enter is the beginning of the native call of that name, which may fail with one of the codes. If it is to fail, the answer is true, with what it
// fails of; the call must then do nothing. It may block, if the call is to hang. Nil Calls let all go on.
func (c *Calls) Enter(name string, codes ...Code) (Code, bool) {
	if c == nil {
		return Code{}, false
	}
	c.mu.Lock()
	again := c.latest == name && slices.Contains(c.polls, name)
	c.latest = name
	if !again {
		c.counts[name]++
		if c.places != nil {
			var at place
			runtime.Callers(2, at[:])
			c.places[name] = append(c.places[name], at)
		}
	}
	c.codes[name] = codes
	s := c.strike
	if s == nil {
		c.mu.Unlock()
		return Code{}, false
	}
	hit := false
	if !again && !s.struck && s.call == name {
		var at place
		if runtime.Callers(2, at[:]); at == s.at {
			s.came++
			hit = s.came == s.nth
		}
	}
	lasting := s.struck && s.code.Lasting && slices.Contains(codes, s.code)
	s.struck = s.struck || hit
	if hit {
		s.under = callers()
	}
	c.mu.Unlock()
	switch {
	case hit && s.before != nil:
		s.before()
		if s.dead && len(codes) > 0 {
			return codes[0], true
		}
		return Code{}, s.dead
	case hit || lasting:
		return s.code, true
	}
	return Code{}, false
}

// Table puts the Calls before every function of the table that p points to: a struct whose function fields have the tag key with the symbol's name.
// Functions that do not return one integer are left as they are, as are those whose names except says. The names that are counted are without the
// version of a symbol ("_v2").
func (c *Calls) Table(p any, key string, codes []Code, except ...string) {
	if c == nil {
		return
	}
	v := reflect.ValueOf(p).Elem()
	for i := range v.NumField() {
		tag, ok := v.Type().Field(i).Tag.Lookup(key)
		f := v.Field(i)
		if !ok || f.IsNil() || f.Type().NumOut() != 1 || !f.Type().Out(0).ConvertibleTo(reflect.TypeFor[int]()) || f.Type().Out(0).Kind() == reflect.String {
			continue
		}
		name, _, _ := strings.Cut(tag, ",")
		if at := strings.LastIndex(name, "_v"); at > 0 {
			name = name[:at]
		}
		if slices.Contains(except, name) {
			continue
		}
		own := reflect.ValueOf(f.Interface())
		f.Set(reflect.MakeFunc(f.Type(), func(args []reflect.Value) []reflect.Value {
			if code, refused := c.Enter(name, codes...); refused {
				return []reflect.Value{reflect.ValueOf(code.Value).Convert(f.Type().Out(0))}
			}
			return own.Call(args)
		}))
	}
}

// set says what is to befall a call; nil lets all go on.
func (c *Calls) set(s *strike) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.strike = s
}

// struck reports whether it has befallen one.
func (c *Calls) struck() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.strike != nil && c.strike.struck
}

// under are the functions that the call it has befallen was made under.
func (c *Calls) under() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.strike == nil {
		return nil
	}
	return c.strike.under
}

// literal is how the name of a function ends that stands inside of another, or that the compiler made of one: it counts as the other.
var literal = regexp.MustCompile(`(\.(func|gowrap|deferwrap)?[0-9]+|-fm|-range[0-9]+)+$`)

// callers are the functions that the caller runs under, each with the name of its package, the innermost first.
func callers() []string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	var names []string
	for {
		frame, more := frames.Next()
		name := frame.Function[strings.LastIndexByte(frame.Function, '/')+1:]
		names = append(names, literal.ReplaceAllString(name, ""))
		if !more {
			return names
		}
	}
}
