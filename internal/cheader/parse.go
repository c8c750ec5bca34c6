package cheader

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ctype is a type of C; its size is -1 if it is not known.
type ctype struct {
	size, align int64
	fields      []member // of a struct or a union
}

// member is a field of a struct.
type member struct {
	name   string
	offset int64
	of     *ctype
}

var (
	unknown = &ctype{size: -1, align: 1}
	pointer = &ctype{size: 8, align: 8}
	integer = &ctype{size: 4, align: 4}
)

// errSyntax is what the parser does not understand.
var errSyntax = errors.New("this is not understood")

// parser reads declarations and expressions.
type parser struct {
	in          []token
	at          int
	types       map[string]*ctype // typedefs by name, others as "struct tag"
	enumerators map[string]int64
	functions   map[string]Func
	names       func(string) (int64, bool) // what a name in an expression is
}

func newParser(in []token) *parser {
	p := &parser{in: in, types: make(map[string]*ctype), enumerators: make(map[string]int64), functions: make(map[string]Func)}
	p.names = func(s string) (int64, bool) { v, ok := p.enumerators[s]; return v, ok }
	return p
}

func (p *parser) peek() string {
	if p.at < len(p.in) {
		return p.in[p.at].text
	}
	return ""
}

func (p *parser) next() string {
	s := p.peek()
	p.at++
	return s
}

func (p *parser) take(s string) bool {
	if p.peek() == s {
		p.at++
		return true
	}
	return false
}

// must panics unless s comes; all and value recover.
func (p *parser) must(s string) {
	if !p.take(s) {
		panic(errSyntax)
	}
}

// balanced steps over brackets and what is in them.
func (p *parser) balanced() {
	depth := 0
	for p.at < len(p.in) {
		switch p.next() {
		case "(", "[", "{":
			depth++
		case ")", "]", "}":
			if depth--; depth == 0 {
				return
			}
		}
	}
}

// all reads every declaration, and steps over those that are not understood.
func (p *parser) all() {
	for p.at < len(p.in) {
		switch p.peek() {
		case ";", "}":
			p.at++
			continue
		case "extern":
			if p.at+1 < len(p.in) && strings.HasPrefix(p.in[p.at+1].text, `"`) {
				p.at += 2
				p.take("{")
				continue
			}
		}
		begin := p.at
		if p.try(p.declaration) != nil {
			p.at = begin
			p.skip()
		}
	}
}

// try calls f and returns what it panicked with, if that is errSyntax.
func (p *parser) try(f func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			if v != errSyntax {
				panic(v)
			}
			err = errSyntax
		}
	}()
	f()
	return nil
}

// skip steps over one declaration.
func (p *parser) skip() {
	for p.at < len(p.in) {
		switch p.peek() {
		case ";", "}":
			p.at++
			return
		case "(", "[":
			p.balanced()
		case "{":
			p.balanced()
			p.take(";")
			return
		default:
			p.at++
		}
	}
}

// declaration reads one: types, functions, or anything else.
func (p *parser) declaration() {
	isType := false
	base := p.specifiers(&isType)
	if p.take(";") {
		return
	}
	for {
		d := p.declarator(base)
		switch {
		case d.name == "":
			panic(errSyntax)
		case isType && d.isFunc:
			p.types[d.name] = unknown
		case isType:
			// A struct that was only named before is known by now, or later.
			p.types[d.name] = d.of
		case d.isFunc:
			p.functions[d.name] = Func{Result: d.of.size, Args: d.args}
		}
		if p.take("=") {
			for p.at < len(p.in) && p.peek() != ";" && p.peek() != "," {
				if p.peek() == "{" || p.peek() == "(" {
					p.balanced()
				} else {
					p.at++
				}
			}
		}
		if p.take(",") {
			continue
		}
		if p.peek() == "{" && d.isFunc {
			p.balanced()
			return
		}
		p.must(";")
		return
	}
}

// qualifiers are words that change nothing about sizes.
var qualifiers = []string{"const", "volatile", "extern", "static", "inline", "__inline__", "__inline", "register", "restrict", "__restrict__",
	"__restrict", "_Noreturn", "constexpr", "__extension__"}

// attributes are words with brackets behind them that change nothing about sizes.
var attributes = []string{"__attribute__", "__declspec", "_Alignas", "alignas", "__align__"}

// builtin are the words that types of C are made of.
var builtin = []string{"void", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "bool", "_Bool"}

// ignore steps over qualifiers and attributes.
func (p *parser) ignore() {
	for {
		switch s := p.peek(); {
		case slices.Contains(attributes, s):
			if s != "__attribute__" && s != "__declspec" {
				panic(errSyntax) // an alignment is not known here
			}
			p.at++
			p.balanced()
		case slices.Contains(qualifiers, s) || strings.HasPrefix(s, "__") && strings.HasSuffix(s, "__") && s != "__int128":
			p.at++
		default:
			return
		}
	}
}

// specifiers reads what stands before a declarator. A typedef sets isType.
func (p *parser) specifiers(isType *bool) *ctype {
	var words []string
	var t *ctype
	for {
		p.ignore()
		switch s := p.peek(); {
		case s == "typedef" && isType != nil:
			p.at++
			*isType = true
		case s == "struct" || s == "union":
			t = p.record()
		case s == "enum":
			t = p.enum()
		case slices.Contains(builtin, s):
			words = append(words, p.next())
		case isName(s) && t == nil && len(words) == 0:
			p.at++
			if t = p.lookup(s); t == nil {
				t = unknown
			}
		case t == nil && len(words) == 0:
			panic(errSyntax)
		default:
			if t == nil {
				t = ofWords(words)
			}
			return t
		}
	}
}

// ofWords returns the type that words of C mean.
func ofWords(words []string) *ctype {
	has := func(s string) bool { return slices.Contains(words, s) }
	size := int64(4)
	switch {
	case has("void"):
		return &ctype{size: 0, align: 1}
	case has("char") || has("bool") || has("_Bool"):
		size = 1
	case has("short"):
		size = 2
	case has("double") && has("long"):
		size = 16
	case has("double") || has("long"):
		size = 8
	}
	return &ctype{size: size, align: size}
}

// lookup returns a type by its name; one of C++ is a struct without the word. Nil is none.
func (p *parser) lookup(name string) *ctype {
	for _, n := range []string{name, "struct " + name, "union " + name, "enum " + name} {
		if t := p.types[n]; t != nil {
			return t
		}
	}
	return nil
}

// enum reads an enumeration.
func (p *parser) enum() *ctype {
	p.must("enum")
	p.ignore()
	name := ""
	if isName(p.peek()) {
		name = p.next()
	}
	p.ignore()
	of := integer
	if name != "" && p.types["enum "+name] != nil {
		of = p.types["enum "+name]
	}
	if p.take(":") { // C++ and C23 may say of what size
		of = p.specifiers(nil)
	}
	if !p.take("{") {
		return of
	}
	value := int64(0)
	for !p.take("}") {
		one := p.next()
		if !isName(one) {
			panic(errSyntax)
		}
		p.ignore()
		if p.take("=") {
			value = p.ternary()
		}
		p.enumerators[one] = value
		value++
		if !p.take(",") && p.peek() != "}" {
			panic(errSyntax)
		}
	}
	p.ignore()
	if name != "" {
		p.types["enum "+name] = of
	}
	return of
}

// record reads a struct or a union.
func (p *parser) record() *ctype {
	kind := p.next()
	p.ignore()
	t := &ctype{size: -1, align: 1}
	if isName(p.peek()) {
		name := kind + " " + p.next()
		// A name stands for the same type before and after its fields are known.
		if p.types[name] == nil {
			p.types[name] = t
		}
		t = p.types[name]
	}
	if p.peek() != "{" {
		return t
	}
	begin := p.at
	if p.try(func() { p.fields(t, kind == "union") }) != nil {
		t.size, t.fields = -1, nil
		p.at = begin
		p.balanced()
	}
	p.ignore()
	return t
}

// fields reads the fields of a struct, and lays them out.
func (p *parser) fields(t *ctype, union bool) {
	p.must("{")
	var fields []member
	size, align, bits := int64(0), int64(1), int64(0) // bits is where the next bit field goes
	known := true
	place := func(of *ctype) int64 {
		if of.size < 0 {
			known = false
			return 0
		}
		align = max(align, of.align)
		if union {
			size = max(size, of.size)
			return 0
		}
		at := up(size, of.align)
		size = at + of.size
		bits = 8 * size
		return at
	}
	for !p.take("}") {
		base := p.specifiers(nil)
		if p.take(";") { // an unnamed struct, whose fields are this one's
			at := place(base)
			for _, f := range base.fields {
				fields = append(fields, member{f.name, at + f.offset, f.of})
			}
			continue
		}
		for {
			d := p.declarator(base)
			switch {
			case d.isFunc:
				panic(errSyntax)
			case p.take(":"):
				width, unit := p.ternary(), 8*base.size
				if union || unit <= 0 || width < 0 || width > unit {
					panic(errSyntax)
				}
				if width == 0 || bits/unit != (bits+width-1)/unit {
					bits = up(bits, unit)
				}
				bits += width
				size, align = max(size, (bits+7)/8), max(align, base.align)
			default:
				fields = append(fields, member{d.name, place(d.of), d.of})
			}
			if !p.take(",") {
				break
			}
		}
		p.must(";")
	}
	t.size, t.align, t.fields = up(size, align), align, fields
	if !known {
		t.size = -1
	}
}

func up(n, align int64) int64 { return (n + align - 1) / align * align }

// declared is what a declarator says.
type declared struct {
	name   string
	of     *ctype // of a function what it gives
	isFunc bool
	args   []int64
}

// declarator reads a name with what is around it. A parameter may have no name.
func (p *parser) declarator(base *ctype) declared {
	d := declared{of: base}
	for {
		p.ignore()
		if !p.take("*") && !p.take("&") {
			break
		}
		d.of = pointer
	}
	if p.peek() == "(" { // a pointer to a function or to an array
		p.at++
		p.ignore()
		p.must("*")
		p.ignore()
		d.of = pointer
		if isName(p.peek()) {
			d.name = p.next()
		}
		if p.peek() == "[" {
			panic(errSyntax)
		}
		p.must(")")
		if p.peek() != "(" && p.peek() != "[" {
			panic(errSyntax)
		}
		p.balanced()
		return d
	}
	if isName(p.peek()) {
		d.name = p.next()
	}
	var counts []int64
	for p.take("[") {
		n := int64(0)
		if p.peek() != "]" {
			n = p.ternary()
		}
		p.must("]")
		counts = append(counts, n)
	}
	for _, n := range slices.Backward(counts) {
		if d.of.size < 0 {
			d.of = unknown
			break
		}
		d.of = &ctype{size: n * d.of.size, align: d.of.align, fields: d.of.fields}
	}
	if len(counts) == 0 && p.take("(") {
		d.isFunc = true
		d.args = p.params()
	}
	p.ignore()
	return d
}

// params reads the parameters of a function, to the bracket at the end.
func (p *parser) params() []int64 {
	args := []int64{}
	if p.take(")") {
		return args
	}
	for {
		if p.take("...") {
			p.must(")")
			return append(args, -1)
		}
		begin := p.at
		base := p.specifiers(nil)
		d := p.declarator(base)
		size := d.of.size
		if d.isFunc || slices.ContainsFunc(p.in[begin:p.at], func(t token) bool { return t.text == "[" }) {
			size = pointer.size
		}
		if p.take("=") {
			for p.peek() != "," && p.peek() != ")" && p.at < len(p.in) {
				p.at++
			}
		}
		if size != 0 { // (void) is none
			args = append(args, size)
		}
		if p.take(")") {
			return args
		}
		p.must(",")
	}
}

// value is an expression of whole numbers, to the end.
func (p *parser) value() (v int64, err error) {
	err = p.try(func() { v = p.ternary() })
	if err == nil && p.at < len(p.in) {
		err = fmt.Errorf("%q is left over", p.peek())
	}
	return v, err
}

func (p *parser) ternary() int64 {
	v := p.binary(0)
	if !p.take("?") {
		return v
	}
	yes := p.ternary()
	p.must(":")
	no := p.ternary()
	if v != 0 {
		return yes
	}
	return no
}

// levels are the operators with two sides, those that bind least first.
var levels = [][]string{{"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<", ">", "<=", ">="}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"}}

func (p *parser) binary(level int) int64 {
	if level == len(levels) {
		return p.unary()
	}
	v := p.binary(level + 1)
	for slices.Contains(levels[level], p.peek()) {
		op := p.next()
		w := p.binary(level + 1)
		v = apply(op, v, w)
	}
	return v
}

func apply(op string, v, w int64) int64 {
	truth := func(b bool) int64 {
		if b {
			return 1
		}
		return 0
	}
	switch op {
	case "||":
		return truth(v != 0 || w != 0)
	case "&&":
		return truth(v != 0 && w != 0)
	case "|":
		return v | w
	case "^":
		return v ^ w
	case "&":
		return v & w
	case "==":
		return truth(v == w)
	case "!=":
		return truth(v != w)
	case "<":
		return truth(v < w)
	case ">":
		return truth(v > w)
	case "<=":
		return truth(v <= w)
	case ">=":
		return truth(v >= w)
	case "<<":
		return v << uint(w&63)
	case ">>":
		return v >> uint(w&63)
	case "+":
		return v + w
	case "-":
		return v - w
	case "*":
		return v * w
	}
	if w == 0 {
		panic(errSyntax)
	}
	if op == "/" {
		return v / w
	}
	return v % w
}

func (p *parser) unary() int64 {
	s := p.next()
	switch {
	case s == "-":
		return -p.unary()
	case s == "+":
		return p.unary()
	case s == "~":
		return ^p.unary()
	case s == "!":
		if p.unary() == 0 {
			return 1
		}
		return 0
	case s == "sizeof":
		p.must("(")
		t := p.declarator(p.specifiers(nil)).of
		p.must(")")
		if t.size < 0 {
			panic(errSyntax)
		}
		return t.size
	case s == "(":
		if next := p.peek(); slices.Contains(builtin, next) || next == "struct" || p.types[next] != nil { // a cast
			p.declarator(p.specifiers(nil))
			p.must(")")
			return p.unary()
		}
		v := p.ternary()
		p.must(")")
		return v
	case s != "" && s[0] >= '0' && s[0] <= '9':
		v, err := strconv.ParseUint(strings.TrimRight(s, "uUlL"), 0, 64)
		if err != nil {
			panic(errSyntax)
		}
		return int64(v)
	case isName(s) && p.names != nil:
		if v, ok := p.names(s); ok {
			if p.peek() == "(" { // of a macro that is not defined, in an #if
				p.balanced()
			}
			return v
		}
	}
	panic(errSyntax)
}
