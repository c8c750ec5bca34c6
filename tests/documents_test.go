package tests

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/symmem/symmem/internal/testneed"
)

// block is a fenced block of a document.
type block struct {
	lang, text string
	line       int // of the fence, from 1
}

// blocksOf returns the fenced blocks of a document, those in lists without their indent.
func blocksOf(t *testing.T, page string) (blocks []block) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	fence := regexp.MustCompile("^( *)```([a-z]*)$")
	var open *block
	indent := ""
	for i, line := range strings.Split(string(text), "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case open == nil && m != nil:
			open, indent = &block{lang: m[2], line: i + 1}, m[1]
		case open == nil:
			require.NotContains(t, line, "```", "%s:%d", page, i+1)
		case m != nil && m[2] == "":
			blocks = append(blocks, *open)
			open = nil
		default:
			open.text += strings.TrimPrefix(line, indent) + "\n"
		}
	}
	require.Nil(t, open, "%s: a block has no end", page)
	return blocks
}

// documents lists the pages of docs, and the others that users read.
func documents(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	if len(pages) == 0 {
		skipWithout(t, "checkout", "this is not run in a checkout: the documents are not here")
	}
	return append(pages, "../README.md", "../CONTRIBUTING.md", "../SECURITY.md")
}

// TestDocuments compiles and vets the programs that each page of docs shows, and runs the commands with what they print. Blocks of Go begin
// with the name of their file; those of one page are one module. Blocks of cuda do too: each is in testdata/PAGE, with the PTX that was
// compiled from it, which is put beside the programs. In blocks of console, lines that begin with "$ " are commands, and
// the others what they print, in any order: "…" stands for any text, and alone in a line for any lines.
func TestDocuments(t *testing.T) {
	t.Parallel()
	command := sync.OnceValues(func() (string, error) { // the folder that symmem is in
		dir := t.TempDir()
		out, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "symmem"), "../cmd/symmem").CombinedOutput()
		if err != nil {
			err = errors.New(string(out))
		}
		return dir, err
	})
	for _, page := range documents(t) {
		if filepath.Base(page) == "README.md" { // TestReadmeProgram
			continue
		}
		var programs, kernels, consoles []block
		for _, b := range blocksOf(t, page) {
			switch b.lang {
			case "go":
				programs = append(programs, b)
			case "cuda":
				kernels = append(kernels, b)
			case "console":
				consoles = append(consoles, b)
			}
		}
		if programs == nil && consoles == nil {
			continue
		}
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			requireBackend(t, "host") // the commands start ranks
			dir := t.TempDir()
			for _, k := range kernels {
				compiled(t, page, k, dir)
			}
			if programs != nil {
				moduleOf(t, page, programs, dir)
			}
			if consoles == nil {
				return
			}
			bin, err := command()
			require.NoError(t, err)
			port := freePort(t)
			for _, b := range consoles {
				runConsole(t, page, b, dir, bin, port)
			}
		})
	}
}

// documentEnviron is the environment of programs and commands of documents: nothing is set, and nothing comes from the network.
func documentEnviron(more ...string) []string {
	return append(append(ownEnviron(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "NO_COLOR=1"), more...)
}

//go:generate python3 ../kernels/gen/gen.py --compile testdata/own-kernel/mean.cu

// compiled puts the PTX of a CUDA source into dir, which go generate has made of the file that is the same.
func compiled(t *testing.T, page string, b block, dir string) {
	t.Helper()
	name := fileOf(t, page, b, ".cu")
	source := filepath.Join("testdata", strings.TrimSuffix(filepath.Base(page), ".md"), name)
	text, err := os.ReadFile(source)
	require.NoError(t, err)
	require.Equal(t, string(text), b.text, "%s:%d shows %s, which is compiled", page, b.line, source)
	image, err := os.ReadFile(strings.TrimSuffix(source, ".cu") + ".ptx")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, strings.TrimSuffix(name, ".cu")+".ptx"), image, 0o600))
}

// fileOf is the name of the file that a block begins with.
func fileOf(t *testing.T, page string, b block, suffix string) string {
	t.Helper()
	first, _, _ := strings.Cut(b.text, "\n")
	name, ok := strings.CutPrefix(first, "// ")
	require.True(t, ok && filepath.IsLocal(name) && strings.HasSuffix(name, suffix), "%s:%d begins with no name of a file", page, b.line)
	return name
}

// moduleOf makes dir a module of a page's programs, which stands on this checkout, and holds it to gofmt, the compiler and vet.
func moduleOf(t *testing.T, page string, programs []block, dir string) {
	t.Helper()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	mod, err := os.ReadFile("../go.mod")
	require.NoError(t, err)
	own := regexp.MustCompile("(?m)^module .*$").ReplaceAllLiteralString(string(mod), "module example.com/program\n\n"+
		"require github.com/symmem/symmem v0.0.0\n\nreplace github.com/symmem/symmem => "+strconv.Quote(root))
	sum, err := os.ReadFile("../go.sum")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(own), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sum, 0o600))
	for _, b := range programs {
		path := filepath.Join(dir, filepath.FromSlash(fileOf(t, page, b, ".go")))
		require.NoFileExists(t, path, "%s:%d", page, b.line)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(b.text), 0o600))
	}
	for _, check := range [][]string{{"gofmt", "-d", "."}, {"go", "vet", "./..."}} {
		cmd := exec.CommandContext(t.Context(), check[0], check[1:]...)
		cmd.Dir, cmd.Env = dir, documentEnviron()
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s: %v: %s", page, check, out)
		require.Empty(t, string(out), "%s: %v", page, check)
	}
}

// freePort returns a port of loopback that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	_, port, err := net.SplitHostPort(testneed.FreeAddress(t))
	require.NoError(t, err)
	return port
}

// shownPort is the port that documents name. Tests take a free one in its place.
const shownPort = "29400"

// runConsole runs the commands of a block and compares what they print.
func runConsole(t *testing.T, page string, b block, dir, bin, port string) {
	t.Helper()
	var commands, wants []string
	for line := range strings.Lines(b.text) {
		if c, ok := strings.CutPrefix(line, "$ "); ok {
			commands, wants = append(commands, c), append(wants, "")
			continue
		}
		require.NotEmpty(t, commands, "%s:%d begins with no command", page, b.line)
		wants[len(wants)-1] += line
	}
	for i, c := range commands {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		cmd := exec.CommandContext(ctx, "bash", "-c", strings.ReplaceAll(c, shownPort, port))
		cmd.Dir, cmd.Env = dir, documentEnviron("PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"))
		cmd.WaitDelay = 5 * time.Second
		endWithParent(cmd)
		out, err := cmd.CombinedOutput() // commands that fail are shown too
		cancel()
		var exit *exec.ExitError
		if err != nil {
			require.ErrorAs(t, err, &exit, "%s:%d: %s%s", page, b.line, c, out)
		}
		assert.NoError(t, compare(wants[i], strings.ReplaceAll(string(out), port, shownPort)), "%s:%d: $ %s", page, b.line, c)
	}
}

// compare returns an error if a command has not printed what was shown.
func compare(want, got string) error {
	lines := func(text string) []string {
		return slices.DeleteFunc(strings.Split(text, "\n"), func(l string) bool { return strings.TrimSpace(l) == "" })
	}
	var patterns []*regexp.Regexp
	rest := false // other lines may be there
	for _, w := range lines(want) {
		if w == "…" {
			rest = true
			continue
		}
		parts := strings.Split(strings.TrimSpace(w), "…")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		patterns = append(patterns, regexp.MustCompile("^"+strings.Join(parts, ".*")+"$"))
	}
	printed := lines(got)
	for _, p := range patterns {
		if !slices.ContainsFunc(printed, func(l string) bool { return p.MatchString(strings.TrimSpace(l)) }) {
			return errors.New("no line is " + p.String() + " in:\n" + got)
		}
	}
	for _, l := range printed {
		if !rest && !slices.ContainsFunc(patterns, func(p *regexp.Regexp) bool { return p.MatchString(strings.TrimSpace(l)) }) {
			return errors.New("not shown is the line " + l)
		}
	}
	return nil
}

// TestCompare: what is compared are whole lines, all of them unless the document says that there are others.
func TestCompare(t *testing.T) {
	for _, tt := range []struct {
		want, got string
		same      bool
	}{
		{"", "", true},
		{"", "a\n", false},
		{"a\n", "", false},
		{"a\nb\n", "b\na\n", true},
		{"a …\n…\n", "a b\nc\n", true},
		{"a …\n", "a b\nc\n", false},
		{"a\n", "ab\n", false},
	} {
		assert.Equal(t, tt.same, compare(tt.want, tt.got) == nil, "%q, %q", tt.want, tt.got)
	}
}

// TestDocumentedErrors: what documents show as text are messages of this module, with "…" for values: what is between them is in the
// module's own literals.
func TestDocumentedErrors(t *testing.T) {
	var literals strings.Builder
	pages := documents(t)
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != ".." && (strings.HasPrefix(name, ".") || name == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, whole := literal(e)
			if text != "" {
				literals.WriteString(text + "\n")
			}
			return !whole
		})
		return nil
	}))
	all, found := literals.String(), 0
	for _, page := range pages {
		for _, b := range blocksOf(t, page) {
			if b.lang != "text" {
				continue
			}
			for line := range strings.Lines(b.text) {
				longest := 0
				for part := range strings.SplitSeq(strings.TrimSpace(line), "…") {
					if part = strings.TrimSpace(part); len(part) > 3 {
						assert.True(t, strings.Contains(all, part), "%s:%d: no message has %q", page, b.line, part)
						longest = max(longest, len(part))
					}
				}
				assert.Greater(t, longest, 6, "%s:%d says too little: %s", page, b.line, line)
				found++
			}
		}
	}
	assert.Greater(t, found, 10, "messages in the documents")
}

// literal returns the text of a literal, or of literals with + between them; whole reports that the expression is nothing else.
func literal(e ast.Expr) (text string, whole bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		if e.Op != token.ADD {
			return "", false
		}
		left, one := literal(e.X)
		right, other := literal(e.Y)
		return left + right, one && other
	}
	return "", false
}

// TestDocumentLinks: links between documents lead somewhere.
func TestDocumentLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fenced := regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	found := 0
	for _, page := range documents(t) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
			to, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(to, "://") {
				continue
			}
			path := page
			if to != "" {
				path = filepath.Join(filepath.Dir(page), filepath.FromSlash(to))
			}
			if assert.FileExists(t, path, "%s: %s", page, m[0]) && anchor != "" {
				assert.Contains(t, anchors(t, path), anchor, "%s: %s", page, m[0])
			}
			found++
		}
	}
	assert.Greater(t, found, 10, "links between documents")
}

// anchors lists what links may name in a document: its headings.
func anchors(t *testing.T, page string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		name := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// TestArchitecture: the packages that the page and its drawing name are there, every package is on the page, and arrows lead downwards.
func TestArchitecture(t *testing.T) {
	documents(t)
	page, err := os.ReadFile("../docs/architecture.md")
	require.NoError(t, err)
	drawing, err := os.ReadFile("../docs/architecture.svg")
	require.NoError(t, err)

	drawn := 0
	for _, m := range regexp.MustCompile(`font-weight="bold">([^<]*)<`).FindAllStringSubmatch(string(drawing), -1) {
		names := []string{m[1]}
		if before, list, ok := strings.Cut(strings.TrimSuffix(m[1], "}"), "{"); ok {
			names = nil
			for name := range strings.SplitSeq(list, ", ") {
				names = append(names, before+name)
			}
		} else if strings.HasSuffix(m[1], " (the root)") {
			names = []string{"."}
		} else {
			names = strings.Split(m[1], ", ")
		}
		for _, name := range names {
			assert.DirExists(t, filepath.Join("..", filepath.FromSlash(name)), m[1])
			drawn++
		}
	}
	assert.Greater(t, drawn, 20)
	arrows := regexp.MustCompile(`<line x1="\d+" y1="(\d+)" x2="\d+" y2="(\d+)"`).FindAllStringSubmatch(string(drawing), -1)
	require.Greater(t, len(arrows), 15)
	for _, a := range arrows {
		from, err := strconv.Atoi(a[1])
		require.NoError(t, err)
		to, err := strconv.Atoi(a[2])
		require.NoError(t, err)
		assert.Greater(t, to, from, a[0])
	}

	// Names in the first column that are not whole paths stand behind the folder of the first one.
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| ([^|]*`[^|]*) \\|").FindAllStringSubmatch(string(page), -1) {
		first := ""
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(m[1], -1) {
			path := name[1]
			if first == "" {
				first = path
			} else if !strings.Contains(path, "/") {
				path = first[:strings.LastIndex(first, "/")+1] + path
			}
			listed[path] = true
		}
	}
	for _, path := range slices.Sorted(maps.Keys(listed)) {
		if path != "symmem" { // the root
			assert.DirExists(t, filepath.Join("..", filepath.FromSlash(path)), "docs/architecture.md lists it")
		}
	}
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if name := filepath.Base(path); err == nil && path != ".." && (strings.HasPrefix(name, ".") || name == "testdata") {
				return filepath.SkipDir
			}
			return err
		}
		within, err := filepath.Rel("..", filepath.Dir(path))
		within = filepath.ToSlash(within)
		if err != nil || !strings.HasSuffix(path, ".go") || within == "." || strings.HasPrefix(within, "examples/") || strings.HasPrefix(within, "group/internal/") {
			return err
		}
		assert.True(t, listed[within], "%s is not in the table of docs/architecture.md", within)
		listed[within] = true
		return nil
	}))
}
