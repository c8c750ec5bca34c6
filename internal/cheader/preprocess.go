package cheader

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// token is a word of C. hide are the macros that it came out of, which are not expanded in it again.
type token struct {
	text string
	hide *hidden
}

// hidden is a list of macros.
type hidden struct {
	name string
	next *hidden
}

func (h *hidden) has(name string) bool {
	for ; h != nil; h = h.next {
		if h.name == name {
			return true
		}
	}
	return false
}

// macro is what was defined; params is nil of one that takes no arguments.
type macro struct {
	params []string
	body   []token
}

// word is the pattern of a token: a name, a number, a string or a character, an operator.
var word = regexp.MustCompile(`[A-Za-z_]\w*|\.?[0-9](?:[eEpP][+-]|[\w.'])*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|##|<<|>>|<=|>=|==|!=|&&|\|\||->|::|\.\.\.|\S`)

// isName reports whether a token is one.
func isName(s string) bool {
	return s != "" && (s[0] == '_' || s[0] >= 'A' && s[0] <= 'Z' || s[0] >= 'a' && s[0] <= 'z')
}

func tokens(line string) []token {
	var all []token
	for _, s := range word.FindAllString(line, -1) {
		all = append(all, token{text: s})
	}
	return all
}

// preprocessor turns files into tokens.
type preprocessor struct {
	folders []string // where included files may be
	macros  map[string]macro
	read    map[string]bool
	out     []token
	pending []token // lines since the last directive
}

// text is what ends comments and joins lines.
var (
	comments  = regexp.MustCompile(`(?s)"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/`)
	directive = regexp.MustCompile(`^\s*#\s*(\w*)\s*(.*)$`)
	defined   = regexp.MustCompile(`\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))`)
	include   = regexp.MustCompile(`^["<]([^">]+)[">]`)
	define    = regexp.MustCompile(`^(\w+)(\(([^)]*)\))?\s*(.*)$`)
)

// file reads a file and what it includes of the folders; other files are not there, as those of the system.
func (p *preprocessor) file(path string) error {
	if p.read[path] {
		return nil // headers guard themselves, and nothing is defined twice
	}
	p.read[path] = true
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := p.text(string(source), filepath.Dir(path)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// text reads source, whose own folder is beside.
func (p *preprocessor) text(source, beside string) error {
	source = strings.ReplaceAll(strings.ReplaceAll(source, "\r", ""), "\\\n", " ")
	source = comments.ReplaceAllStringFunc(source, func(s string) string {
		if s[0] == '"' {
			return s
		}
		return " "
	})
	// Of each #if that is open: whether it is being read, and whether one of its branches has been.
	type branch struct{ on, taken, outer bool }
	var open []branch
	on := true
	for _, line := range strings.Split(source, "\n") {
		m := directive.FindStringSubmatch(line)
		if m == nil {
			if on {
				p.pending = append(p.pending, tokens(line)...)
			}
			continue
		}
		p.flush()
		name, rest := m[1], m[2]
		switch name {
		case "if", "ifdef", "ifndef":
			yes := false
			if on {
				switch name {
				case "if":
					yes = p.condition(rest)
				default:
					_, has := p.macros[strings.TrimSpace(rest)]
					yes = has == (name == "ifdef")
				}
			}
			open = append(open, branch{on: yes, taken: yes, outer: on})
			on = on && yes
		case "elif", "else":
			if len(open) == 0 {
				return fmt.Errorf("#%s without #if", name)
			}
			b := &open[len(open)-1]
			b.on = b.outer && !b.taken && (name == "else" || p.condition(rest))
			b.taken = b.taken || b.on
			on = b.on
		case "endif":
			if len(open) == 0 {
				return fmt.Errorf("#endif without #if")
			}
			on = open[len(open)-1].outer
			open = open[:len(open)-1]
		case "define":
			if m := define.FindStringSubmatch(rest); on && m != nil {
				d := macro{body: tokens(m[4])}
				if m[2] != "" {
					d.params = []string{}
					for _, s := range strings.Split(m[3], ",") {
						if s = strings.TrimSpace(s); s != "" {
							d.params = append(d.params, s)
						}
					}
				}
				p.macros[m[1]] = d
			}
		case "undef":
			if on {
				delete(p.macros, strings.TrimSpace(rest))
			}
		case "include":
			if m := include.FindStringSubmatch(rest); on && m != nil {
				for _, folder := range append([]string{beside}, p.folders...) {
					if path := filepath.Join(folder, m[1]); isFile(path) {
						if err := p.file(path); err != nil {
							return err
						}
						break
					}
				}
			}
		}
	}
	p.flush()
	if len(open) > 0 {
		return fmt.Errorf("%d #if without #endif", len(open))
	}
	return nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// flush expands the lines since the last directive.
func (p *preprocessor) flush() {
	p.out = append(p.out, p.expand(p.pending)...)
	p.pending = p.pending[:0]
}

// condition returns what an #if says; names that are not defined are 0.
func (p *preprocessor) condition(text string) bool {
	text = defined.ReplaceAllStringFunc(text, func(s string) string {
		m := defined.FindStringSubmatch(s)
		if _, has := p.macros[m[1]+m[2]]; has {
			return "1"
		}
		return "0"
	})
	e := &parser{in: p.expand(tokens(text)), names: func(string) (int64, bool) { return 0, true }}
	v, err := e.value()
	return err == nil && v != 0
}

// expand replaces macros.
func (p *preprocessor) expand(in []token) []token {
	var out []token
	in = append([]token(nil), in...)
	for len(in) > 0 {
		t := in[0]
		in = in[1:]
		m, ok := p.macros[t.text]
		if !ok || t.hide.has(t.text) {
			out = append(out, t)
			continue
		}
		var args map[string][]token
		if m.params != nil {
			if len(in) == 0 || in[0].text != "(" {
				out = append(out, t)
				continue
			}
			args, in = arguments(m.params, in)
		}
		hide := &hidden{t.text, t.hide}
		body := p.substitute(m.body, args, hide)
		in = append(body, in...)
	}
	return out
}

// arguments takes the arguments of a macro from in, which begins with "(".
func arguments(params []string, in []token) (map[string][]token, []token) {
	args := make(map[string][]token)
	depth, n := 0, 0
	var one []token
	end := func() {
		if n < len(params) && params[n] != "..." {
			args[params[n]] = one
		} else {
			args["__VA_ARGS__"] = append(args["__VA_ARGS__"], one...)
		}
		one, n = nil, n+1
	}
	for i, t := range in {
		switch t.text {
		case "(":
			if depth++; depth == 1 {
				continue
			}
		case ")":
			if depth--; depth == 0 {
				end()
				return args, in[i+1:]
			}
		case ",":
			if depth == 1 {
				end()
				continue
			}
		}
		one = append(one, t)
	}
	return args, nil
}

// substitute returns the body of a macro with its arguments.
func (p *preprocessor) substitute(body []token, args map[string][]token, hide *hidden) []token {
	var out []token
	for i := 0; i < len(body); i++ {
		t := body[i]
		pasted := i > 0 && body[i-1].text == "##" || i+1 < len(body) && body[i+1].text == "##"
		var these []token
		if a, ok := args[t.text]; ok && pasted {
			these = a
		} else if ok {
			these = p.expand(a)
		} else if t.text != "##" {
			these = []token{{t.text, hide}}
		} else {
			continue
		}
		if i > 1 && body[i-1].text == "##" && len(out) > 0 && len(these) > 0 {
			out[len(out)-1] = token{out[len(out)-1].text + these[0].text, hide}
			these = these[1:]
		}
		out = append(out, these...)
	}
	return out
}
