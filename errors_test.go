package symmem_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ofErrors is what a package has for errors, in its own code.
type ofErrors struct {
	name      string               // of the package
	sentinels map[string]ast.Expr  // what each exported Err... is made of
	types     map[string]string    // exported names of error types, and what an alias stands for: "errs.LoadError"
	hidden    map[string]token.Pos // error types that are not exported
}

// errorsOfModule reads every package that a program can come to meet errors of.
func errorsOfModule(t *testing.T) map[string]*ofErrors {
	t.Helper()
	found := map[string]*ofErrors{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			name := d.Name()
			if path != "." && (strings.HasPrefix(name, ".") || slices.Contains([]string{"testdata", "tests", "cmd", "examples", "bench", "docs", "ptxvm"}, name)) { // these are for tests, or stand above
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		room := filepath.ToSlash(filepath.Dir(path))
		p := found[room]
		if p == nil {
			p = &ofErrors{name: f.Name.Name, sentinels: map[string]ast.Expr{}, types: map[string]string{}, hidden: map[string]token.Pos{}}
			found[room] = p
		}
		p.read(f)
		return nil
	})
	require.NoError(t, err)
	return found
}

func (p *ofErrors) read(f *ast.File) {
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.ValueSpec:
					for i, name := range s.Names {
						if d.Tok == token.VAR && strings.HasPrefix(name.Name, "Err") && i < len(s.Values) {
							p.sentinels[name.Name] = s.Values[i]
						}
					}
				case *ast.TypeSpec:
					if s.Assign.IsValid() && strings.HasSuffix(s.Name.Name, "Error") && s.Name.IsExported() {
						p.types[s.Name.Name] = selector(s.Type)
					}
				}
			}
		case *ast.FuncDecl:
			if d.Recv == nil || d.Name.Name != "Error" || d.Type.Params.NumFields() != 0 {
				continue
			}
			of := d.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			name := of.(*ast.Ident).Name
			if ast.IsExported(name) {
				p.types[name] = ""
			} else {
				p.hidden[name] = d.Pos()
			}
		}
	}
}

// selector returns "errs.ErrClosed" of such an expression, and else nothing.
func selector(e ast.Expr) string {
	if s, ok := e.(*ast.SelectorExpr); ok {
		if x, ok := s.X.(*ast.Ident); ok {
			return x.Name + "." + s.Sel.Name
		}
	}
	return ""
}

const homeOfErrors = "internal/errs"

var typeName = regexp.MustCompile(`\b[a-z]+\.[A-Z]\w*Error\b|\bcuda\.Error\b`)

// TestRootNamesEverySentinel: each condition is made once, in one package, has a code in which ranks tell each other of it, and a name in
// the root.
func TestRootNamesEverySentinel(t *testing.T) {
	rooms := errorsOfModule(t)
	home, root := rooms[homeOfErrors], rooms["."]
	require.GreaterOrEqual(t, len(home.sentinels), 16)
	codes, err := os.ReadFile(homeOfErrors + "/codes.go")
	require.NoError(t, err)
	for name := range home.sentinels {
		assert.Equal(t, "errs."+name, selector(root.sentinels[name]), "the root does not name %s", name)
		assert.Regexp(t, `(?m)^\t\d+:\s+`+name+`,$`, string(codes), "%s has no code: ranks cannot tell each other of it", name)
	}
	for room, p := range rooms {
		if room == homeOfErrors {
			continue
		}
		for name, value := range p.sentinels {
			_, own, ok := strings.Cut(selector(value), ".")
			assert.True(t, ok && own == name, "%s makes %s itself: a sentinel belongs into package errs, under that name", room, name)
			assert.Contains(t, home.sentinels, name, "%s names %s, which package errs does not have", room, name)
		}
	}
}

// TestEveryErrorTypeIsListed: whoever reads the root's documentation finds every type for errors.As, and no package hides one that users
// can meet.
func TestEveryErrorTypeIsListed(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	_, listed, ok := strings.Cut(string(doc), "// # Errors\n")
	listed, _, _ = strings.Cut(listed, "// # ")
	require.True(t, ok)
	rooms := errorsOfModule(t)
	public := map[string]bool{} // what the public packages name, as "errs.LoadError"
	for room, p := range rooms {
		if internal(room) {
			continue
		}
		for name, of := range p.types {
			public[of] = true
			list := typeName.FindAllString(listed, -1)
			assert.True(t, slices.Contains(list, p.name+"."+name) || slices.Contains(list, of), "the package comment of the root does not list %s.%s", p.name, name)
		}
	}
	inside := map[string]string{
		"config.formError":      "it is taken apart; what users get is an ArgumentError",
		"cuda.unavailableError": "it carries nothing but ErrUnavailable and the reason, to which it unwraps",
		"group.otherWorldError": "it refuses a rank of another world size; users get a RefusedError, or a StoreError with its words",
		"nixl.isleError":        "it words what the ranks of an island got with the numbers of the whole group, and says only that; users get what it wraps",
		"nvshmem.giveBackError": "it tells Close whose failure it was, and says only that; users get what it wraps",
		"futex.TimeoutError":    "it is os.ErrDeadlineExceeded, in a device.WaitError or device.WorkError that says for whom was waited",
	}
	seen := map[string]bool{}
	for room, p := range rooms {
		for name := range p.hidden {
			seen[p.name+"."+name] = true
			assert.Contains(t, inside, p.name+"."+name, "%s has an error type that nobody else can name", room)
		}
		if !internal(room) {
			continue
		}
		for name, of := range p.types {
			full := p.name + "." + name
			seen[full] = true
			if of == "" && inside[full] == "" {
				assert.True(t, public[full], "no public package names %s", full)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(inside)) {
		assert.True(t, seen[name], "%s is not there any more", name)
	}
	for _, name := range typeName.FindAllString(listed, -1) { // the list has nothing that is not there
		room, typ, _ := strings.Cut(name, ".")
		assert.True(t, slices.ContainsFunc(slices.Collect(maps.Values(rooms)), func(p *ofErrors) bool {
			_, ok := p.types[typ]
			return ok && p.name == room
		}), "the package comment lists %s, which is not there", name)
	}
}

func internal(room string) bool {
	return strings.HasPrefix(room, "internal/") || strings.Contains(room, "/internal/")
}

// TestAllowedListsValues: in a refused argument "allowed" lists what is allowed; what to do next is advice, which stands apart.
func TestAllowedListsValues(t *testing.T) {
	advice := regexp.MustCompile(`;|SYMMEM_|\b(set|unset|start|use|make|correct|import|free|close|split) `)
	seen := 0
	for _, room := range []string{".", "config", "group", "backend", "tensor"} {
		entries, err := os.ReadDir(room)
		require.NoError(t, err)
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
				continue
			}
			files := token.NewFileSet()
			f, err := parser.ParseFile(files, filepath.Join(room, e.Name()), nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				of := selector(call.Fun)
				if name, ok := call.Fun.(*ast.Ident); ok {
					of = name.Name
				}
				at, ok := map[string]int{"errs.Invalid": 3, "errs.Advised": 3, "invalid": 3, "refuse": 2, "advise": 2}[of]
				if !ok || at >= len(call.Args) {
					return true
				}
				ast.Inspect(call.Args[at], func(n ast.Node) bool {
					if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
						seen++
						if advice.MatchString(text.Value) {
							t.Errorf("%s: %s is advice, and not what is allowed", files.Position(text.Pos()), text.Value)
						}
					}
					return true
				})
				return true
			})
		}
	}
	require.Greater(t, seen, 40)
}
