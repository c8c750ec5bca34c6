package ptxvm

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Module is a PTX file that was parsed and decoded. It does not change, and is safe for concurrent use.
type Module struct {
	file   string
	lines  []string
	funcs  []*Function
	byName map[string]*Function
	shared map[string]variable
	global map[string]variable
	bytes  int // of shared memory
}

// variable is one in memory.
type variable struct{ offset, size int }

// Param is a parameter of a kernel.
type Param struct{ Size, Align int }

// Function is a kernel or a function that kernels call.
type Function struct {
	Name       string
	Entry      bool    // it is a kernel
	Params     []Param // in order
	MaxThreads int     // of a block, 0 if the module does not say
	Cluster    int     // blocks of a cluster, which are neighbours along x; 1 if the module does not say. A launch has whole clusters

	module   *Module
	number   int
	params   map[string]variable // of the formal parameters: of a kernel in its launch, of others in the frame, in bytes
	formals  []variable          // in order, the returned value's not among them
	returns  []variable
	paramB   int // bytes of a kernel's parameters
	body     []statement
	defined  bool
	clusters bool // .reqnctapercluster

	code   []instr
	at     []int32 // lines of the instructions
	access []access
	consts []uint64
	calls  []call
	frame  int // words of a frame: constants, registers, parameters
	words  int // where parameters begin
	stack  int // words that a thread needs, with all that it calls
}

// Function finds a kernel by its name; nil if there is none.
func (m *Module) Function(name string) *Function {
	if f := m.byName[name]; f != nil && f.Entry && f.defined {
		return f
	}
	return nil
}

// Functions lists the kernels, in the order of the file.
func (m *Module) Functions() []*Function {
	var out []*Function
	for _, f := range m.funcs {
		if f.Entry && f.defined {
			out = append(out, f)
		}
	}
	return out
}

// Shared is how many bytes of shared memory a block of any kernel of the module takes.
func (m *Module) Shared() int { return m.bytes }

func (m *Module) place(line int) Place {
	p := Place{File: m.file, Line: line}
	if line >= 1 && line <= len(m.lines) {
		p.Instruction = strings.TrimSpace(m.lines[line-1])
	}
	return p
}

// Parse reads and decodes a PTX file. It fails with an [*Error] at the first thing that is not PTX as this machine knows it.
func Parse(file string, text []byte) (_ *Module, err error) {
	m := &Module{
		file: file, lines: strings.Split(string(text), "\n"), byName: map[string]*Function{}, shared: map[string]variable{}, global: map[string]variable{},
	}
	p := &parser{module: m}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case *Error:
			err = r
		default:
			panic(r)
		}
	}()
	p.scan(string(text))
	p.file()
	for _, f := range m.funcs {
		if f.defined {
			decode(f)
		}
	}
	for _, f := range m.funcs {
		if f.Entry {
			f.stack = f.depth(nil)
		}
	}
	return m, nil
}

// depth is how many words the frames of f and of all that it calls take. Calls in a circle have no such number.
func (f *Function) depth(above []*Function) int {
	deepest := 0
	above = append(above, f)
	for i, in := range f.code {
		if in.op != opCall {
			continue
		}
		g := f.calls[in.imm].to
		if slices.Contains(above, g) {
			panic(&Error{Place: f.module.place(int(f.at[i])), Err: fmt.Errorf("a function that calls itself: %w", ErrUnsupported)})
		}
		deepest = max(deepest, g.depth(above))
	}
	return f.frame + deepest
}

// statement is an instruction, a label, a declaration or a brace, as written.
type statement struct {
	line  int
	kind  byte // 'i', ':', '{', '}', 'r' registers, 'p' parameters
	name  string
	guard string // of an instruction: a register, or nothing
	not   bool
	ops   []operand
	typ   string // of a declaration
	count int    // of registers, or bytes of parameters
}

// operand is one as written.
type operand struct {
	kind byte // 'w' word (register, name), 'n' number, '{' list, '[' address, '(' list of a call, '|' two destinations, '!' negated register
	word string
	num  uint64
	flt  byte // 'f' or 'd' if the number was a float's bits
	list []operand
	off  int64
}

type token struct {
	text string
	line int
	kind byte // 'w' word, 's' string, 'p' punctuation
}

type parser struct {
	module *Module
	tokens []token
	at     int
}

func (p *parser) fail(line int, condition error, format string, a ...any) {
	panic(&Error{Place: p.module.place(line), Err: fmt.Errorf("%s: %w", fmt.Sprintf(format, a...), condition)})
}

func wordByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '$' || c == '%' || c == '.'
}

func (p *parser) scan(s string) {
	line := 1
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c == '\n':
			line++
			i++
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case strings.HasPrefix(s[i:], "//"):
			for i < len(s) && s[i] != '\n' {
				i++
			}
		case strings.HasPrefix(s[i:], "/*"):
			end := strings.Index(s[i:], "*/")
			if end < 0 {
				p.fail(line, ErrSyntax, "a comment that does not end")
			}
			line += strings.Count(s[i:i+end], "\n")
			i += end + 2
		case c == '"':
			end := strings.IndexAny(s[i+1:], "\"\n")
			if end < 0 || s[i+1+end] != '"' {
				p.fail(line, ErrSyntax, "a string that does not end")
			}
			p.tokens = append(p.tokens, token{s[i+1 : i+1+end], line, 's'})
			i += end + 2
		case wordByte(c):
			j := i
			for j < len(s) && (wordByte(s[j]) || strings.HasPrefix(s[j:], "::")) {
				if s[j] == ':' {
					j++
				}
				j++
			}
			p.tokens = append(p.tokens, token{s[i:j], line, 'w'})
			i = j
		case strings.IndexByte("{}()[],;:+-|!@=<>", c) >= 0:
			p.tokens = append(p.tokens, token{s[i : i+1], line, 'p'})
			i++
		default:
			p.fail(line, ErrSyntax, "unexpected %q", c)
		}
	}
}

func (p *parser) peek() token {
	if p.at < len(p.tokens) {
		return p.tokens[p.at]
	}
	return token{line: len(p.module.lines)}
}

func (p *parser) next() token {
	t := p.peek()
	if t.kind == 0 {
		p.fail(t.line, ErrSyntax, "the file ends in the middle")
	}
	p.at++
	return t
}

func (p *parser) take(text string) bool {
	if t := p.peek(); t.text == text && t.kind != 's' {
		p.at++
		return true
	}
	return false
}

func (p *parser) expect(text string) {
	if t := p.peek(); !p.take(text) {
		p.fail(t.line, ErrSyntax, "%q where %q is expected", t.text, text)
	}
}

func (p *parser) word() token {
	t := p.next()
	if t.kind != 'w' {
		p.fail(t.line, ErrSyntax, "%q where a name is expected", t.text)
	}
	return t
}

func (p *parser) number() int {
	t := p.word()
	n, err := strconv.ParseInt(strings.TrimSuffix(t.text, "U"), 0, 32)
	if err != nil || n < 0 {
		p.fail(t.line, ErrSyntax, "%q where a number is expected", t.text)
	}
	return int(n)
}

func (p *parser) file() {
	for p.peek().kind != 0 {
		t := p.next()
		switch t.text {
		case ";", ".visible", ".extern", ".weak", ".common":
		case ".version", ".address_size":
			if n := p.word(); t.text == ".address_size" && n.text != "64" {
				p.fail(t.line, ErrUnsupported, "addresses of %s bits", n.text)
			}
		case ".target":
			for p.word(); p.take(","); {
				p.word()
			}
		case ".pragma":
			p.next()
			p.expect(";")
		case ".file", ".loc":
			p.skipLine(t.line)
		case ".global", ".const":
			p.variable(p.module.global, new(int))
		case ".shared":
			p.variable(p.module.shared, &p.module.bytes)
		case ".entry", ".func":
			p.function(t.text == ".entry")
		default:
			p.fail(t.line, ErrUnsupported, "%q", t.text)
		}
	}
}

func (p *parser) skipLine(line int) {
	for t := p.peek(); t.kind != 0 && t.line == line; t = p.peek() {
		p.at++
	}
}

var sizes = map[string]int{
	"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
	"b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1,
}

// declared is what stands behind the state space: alignment, type, name and bounds.
func (p *parser) declared() (name token, typ string, size, align int) {
	for {
		t := p.word()
		switch {
		case t.text == ".align":
			align = p.number()
			if align <= 0 || align&(align-1) != 0 || align > 4096 {
				p.fail(t.line, ErrSyntax, "alignment of %d", align)
			}
			continue
		case t.text == ".ptr":
			continue
		case t.text == ".global" || t.text == ".shared" || t.text == ".const" || t.text == ".local":
			continue // of .ptr
		case strings.HasPrefix(t.text, "."):
			typ = t.text[1:]
			if size = sizes[typ]; size == 0 {
				p.fail(t.line, ErrUnsupported, "type %s", t.text)
			}
			align = max(align, size)
			continue
		}
		if size == 0 {
			p.fail(t.line, ErrSyntax, "%s has no type", t.text)
		}
		name = t
		break
	}
	for p.take("[") {
		n := p.number()
		if size *= n; n == 0 || size > 1<<24 {
			p.fail(name.line, ErrUnsupported, "%s has no size that is allowed", name.text)
		}
		p.expect("]")
	}
	return name, typ, size, align
}

func (p *parser) variable(into map[string]variable, offset *int) {
	name, _, size, align := p.declared()
	if p.take("=") {
		for t := p.peek(); t.text != ";"; t = p.peek() {
			p.next()
		}
	}
	p.expect(";")
	*offset = (*offset + align - 1) / align * align
	into[name.text] = variable{*offset, size}
	*offset += size
}

// list is formal parameters.
func (p *parser) list(f *Function, into *[]variable, offset *int) {
	if p.take(")") {
		return
	}
	for {
		p.expect(".param")
		name, _, size, align := p.declared()
		to := align
		if !f.Entry {
			to = 8 // of other functions they are words of the frame
		}
		*offset = (*offset + to - 1) / to * to
		v := variable{*offset, size}
		*offset += size
		f.params[name.text] = v
		*into = append(*into, v)
		if f.Entry {
			f.Params = append(f.Params, Param{Size: size, Align: align})
		}
		if !p.take(",") {
			break
		}
	}
	p.expect(")")
}

func (p *parser) function(entry bool) {
	f := &Function{Entry: entry, Cluster: 1, module: p.module, params: map[string]variable{}}
	if p.take("(") {
		p.list(f, &f.returns, &f.paramB)
	}
	name := p.word()
	f.Name = name.text
	explicit := 0 // line
	if p.take("(") {
		p.list(f, &f.formals, &f.paramB)
	}
	for {
		t := p.next()
		switch t.text {
		case ".maxntid", ".reqntid":
			f.MaxThreads = p.number()
			for p.take(",") {
				f.MaxThreads *= p.number()
			}
			continue
		case ".minnctapersm", ".maxnreg", ".maxclusterrank": // the last bounds sizes that a launch gives, and no launch does
			p.number()
			continue
		case ".explicitcluster":
			explicit = t.line
			continue
		case ".reqnctapercluster":
			p.cluster(f, t.line)
			continue
		case ".noreturn":
			continue
		case ".pragma":
			p.next()
			p.expect(";")
			continue
		case ";":
			if p.module.byName[f.Name] == nil {
				p.add(f)
			}
			return
		case "{":
		default:
			p.fail(t.line, ErrUnsupported, "%q", t.text)
		}
		break
	}
	if explicit != 0 && !f.clusters {
		p.fail(explicit, ErrUnsupported, "%s has clusters whose size launches give, and no .reqnctapercluster", f.Name)
	}
	f.defined = true
	if old := p.module.byName[f.Name]; old != nil {
		if old.defined {
			p.fail(name.line, ErrSyntax, "%s for the second time", f.Name)
		}
		f.number = old.number
		*old = *f // calls decoded later find it
		f = old
	} else {
		p.add(f)
	}
	for depth := 1; depth > 0; {
		t := p.next()
		switch {
		case t.text == "{":
			depth++
			f.body = append(f.body, statement{line: t.line, kind: '{'})
		case t.text == "}":
			depth--
			f.body = append(f.body, statement{line: t.line, kind: '}'})
		case t.text == ";":
		case t.text == ".reg":
			p.registers(f, t.line)
		case t.text == ".param":
			n, typ, size, _ := p.declared()
			p.expect(";")
			f.body = append(f.body, statement{line: t.line, kind: 'p', name: n.text, typ: typ, count: size})
		case t.text == ".shared":
			p.variable(p.module.shared, &p.module.bytes)
		case t.text == ".pragma":
			p.next()
			p.expect(";")
		case t.text == ".loc" || t.text == ".file":
			p.skipLine(t.line)
		case t.text == "@":
			s := statement{kind: 'i', not: p.take("!")}
			s.guard = p.word().text
			p.instruction(f, s, p.word())
		case t.kind == 'w' && p.take(":"):
			f.body = append(f.body, statement{line: t.line, kind: ':', name: t.text})
		case t.kind == 'w' && t.text[0] != '.':
			p.instruction(f, statement{kind: 'i'}, t)
		default:
			p.fail(t.line, ErrUnsupported, "%q", t.text)
		}
	}
}

// mostCluster is the most blocks that a cluster has on any device.
const mostCluster = 16

// cluster is the size of a kernel's clusters.
func (p *parser) cluster(f *Function, line int) {
	n := [3]int{p.number(), 1, 1}
	for i := 1; i < 3 && p.take(","); i++ {
		n[i] = p.number()
	}
	switch {
	case n[0] == 0 || n[1] == 0 || n[2] == 0:
		p.fail(line, ErrSyntax, "clusters of %d, %d, %d blocks", n[0], n[1], n[2])
	case n[1] != 1 || n[2] != 1 || n[0] > mostCluster:
		p.fail(line, ErrUnsupported, "clusters of %d, %d, %d blocks, not of up to %d along x", n[0], n[1], n[2], mostCluster)
	}
	f.Cluster, f.clusters = n[0], true
}

func (p *parser) add(f *Function) {
	f.number = len(p.module.funcs)
	p.module.funcs = append(p.module.funcs, f)
	p.module.byName[f.Name] = f
}

func (p *parser) registers(f *Function, line int) {
	typ := strings.TrimPrefix(p.word().text, ".")
	if sizes[typ] == 0 {
		p.fail(line, ErrUnsupported, "registers of type .%s", typ)
	}
	for {
		s := statement{line: line, kind: 'r', name: p.word().text, typ: typ, count: -1}
		if p.take("<") {
			s.count = p.number()
			p.expect(">")
			if s.count > 1<<20 {
				p.fail(line, ErrUnsupported, "%d registers", s.count)
			}
		}
		f.body = append(f.body, s)
		if !p.take(",") {
			break
		}
	}
	p.expect(";")
}

func (p *parser) instruction(f *Function, s statement, opcode token) {
	s.line, s.name = opcode.line, opcode.text
	for !p.take(";") {
		if len(s.ops) > 0 {
			p.expect(",")
		}
		s.ops = append(s.ops, p.operand())
	}
	f.body = append(f.body, s)
}

func (p *parser) operand() operand {
	t := p.next()
	switch {
	case t.text == "{" || t.text == "(":
		o, end := operand{kind: t.text[0]}, "}"
		if t.text == "(" {
			end = ")"
		}
		for !p.take(end) {
			if len(o.list) > 0 {
				p.expect(",")
			}
			o.list = append(o.list, p.operand())
		}
		return o
	case t.text == "[":
		base := p.operand()
		o := operand{kind: '[', list: []operand{base}}
		if p.take("+") {
			n := p.operand()
			if n.kind != 'n' {
				p.fail(t.line, ErrSyntax, "an offset that is no number")
			}
			o.off = int64(n.num)
		}
		p.expect("]")
		return o
	case t.text == "!":
		return operand{kind: '!', word: p.word().text}
	case t.text == "-":
		o := p.operand()
		if o.kind != 'n' {
			p.fail(t.line, ErrSyntax, "a sign before what is no number")
		}
		o.num = -o.num
		return o
	case t.kind == 'w' && t.text[0] >= '0' && t.text[0] <= '9':
		return p.literal(t)
	case t.kind == 'w':
		o := operand{kind: 'w', word: t.text}
		if p.take("|") {
			return operand{kind: '|', list: []operand{o, {kind: 'w', word: p.word().text}}}
		}
		return o
	}
	p.fail(t.line, ErrSyntax, "%q where an operand is expected", t.text)
	return operand{}
}

func (p *parser) literal(t token) operand {
	s := t.text
	if len(s) > 2 && s[0] == '0' {
		bits := map[byte]int{'f': 32, 'F': 32, 'd': 64, 'D': 64}[s[1]]
		if bits != 0 {
			n, err := strconv.ParseUint(s[2:], 16, bits)
			if err != nil || len(s) != 2+bits/4 {
				p.fail(t.line, ErrSyntax, "%q is no float", s)
			}
			return operand{kind: 'n', num: n, flt: map[int]byte{32: 'f', 64: 'd'}[bits]}
		}
	}
	if n, err := strconv.ParseUint(strings.TrimSuffix(s, "U"), 0, 64); err == nil {
		return operand{kind: 'n', num: n}
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil {
		p.fail(t.line, ErrSyntax, "%q is no number", s)
	}
	return operand{kind: 'n', num: math.Float64bits(x), flt: 'd'}
}
