// Mutants breaks the module on purpose, one small change at a time, and says which of them no test notices.
//
//	go run ./tests/mutants [-run REGEXP] [-list]
//
// Each mutant of the list is one replacement in one file. The change is never written to the tree: the go command takes it from an
// overlay. Tests run from the narrowest that should notice to the widest, until one fails; a mutant that all of them pass is a survivor,
// and the exit status is 1. So it is when a mutant does not compile, its text is not found exactly once, or its tests need more time than
// they have without it too, so that their end would prove nothing: mend the list then.
//
// A survivor means that a test is missing, or that the change makes no difference; then it does not belong into the list. The list takes
// some three hours on two processors, so it is for whoever changes what is in it, and not for every build.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// mutant is one change.
type mutant struct {
	file     string // from the root of the module
	old, new string // old is in the file once
	why      string // what the change breaks
	tests    []stage
}

// stage is tests that should notice a mutant.
type stage struct {
	dir   string // of the package
	tests string // a regular expression, as go test's -run has it
	limit time.Duration
}

// The bounds of a stage's tests, several times what they take: a mutant with which they do not end was noticed, if they do without it.
const (
	usual = 30 * time.Second
	long  = 3 * time.Minute
)

func main() {
	run := flag.String("run", "", "run only mutants whose file and description match this regular `expression`")
	list := flag.Bool("list", false, "list the mutants and run none")
	flag.Parse()
	survived, err := mutate(*run, *list)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
	}
	if err != nil || survived > 0 {
		os.Exit(1)
	}
}

func mutate(run string, list bool) (survived int, err error) {
	chosen, err := regexp.Compile(run)
	if err != nil {
		return 0, err
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return 0, fmt.Errorf("looking for the module: %w", err)
	}
	dir := strings.TrimSpace(string(root))
	temp, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(temp)
	noticed := 0
	var broken []error
	for _, m := range mutants {
		name := m.file + ": " + m.why
		if !chosen.MatchString(name) {
			continue
		}
		if list {
			fmt.Println(name)
			continue
		}
		began := time.Now()
		by, err := m.try(dir, temp)
		took := time.Since(began).Round(100 * time.Millisecond)
		switch {
		case err != nil:
			broken = append(broken, fmt.Errorf("%s: %w", name, err))
			fmt.Printf("BROKEN    %6s  %s: %v\n", took, name, err)
		case by == "":
			survived++
			fmt.Printf("SURVIVED  %6s  %s\n", took, name)
		default:
			noticed++
			fmt.Printf("noticed   %6s  %s: %s\n", took, name, by)
		}
	}
	if !list {
		fmt.Printf("%d noticed, %d survived, %d broken\n", noticed, survived, len(broken))
	}
	return survived, errors.Join(broken...)
}

// try gives the first test that fails with the mutant, or "" if none does.
func (m mutant) try(dir, temp string) (string, error) {
	path := filepath.Join(dir, filepath.FromSlash(m.file))
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if n := bytes.Count(text, []byte(m.old)); n != 1 {
		return "", fmt.Errorf("%q is in the file %d times and not once", m.old, n)
	}
	changed := filepath.Join(temp, filepath.Base(path))
	if err := os.WriteFile(changed, bytes.Replace(text, []byte(m.old), []byte(m.new), 1), 0o600); err != nil {
		return "", err
	}
	overlay := filepath.Join(temp, "overlay.json")
	blob, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, blob, 0o600); err != nil {
		return "", err
	}
	if out, err := goCommand(dir, "build", "-overlay", overlay, "./"+filepath.ToSlash(filepath.Dir(m.file))); err != nil {
		return "", fmt.Errorf("it does not compile: %s", bytes.TrimSpace(out))
	}
	binary, built := filepath.Join(temp, "tests.exe"), ""
	for _, s := range m.tests {
		if s.dir != built {
			if out, err := goCommand(dir, "test", "-overlay", overlay, "-vet=off", "-c", "-o", binary, "./"+s.dir); err != nil {
				return "", fmt.Errorf("the tests in %s do not compile: %s", s.dir, bytes.TrimSpace(out))
			}
			built = s.dir
		}
		by, hung, err := s.run(dir, binary)
		if hung {
			err = s.ends(dir, temp)
		}
		if by != "" || err != nil {
			return by, err
		}
	}
	return "", nil
}

// ended are the stages of which it is known that their tests end in time without a mutant.
var ended = map[stage]bool{}

// ends fails unless the stage's tests end in time without a mutant.
func (s stage) ends(dir, temp string) error {
	if ended[s] {
		return nil
	}
	binary := filepath.Join(temp, "unchanged.exe")
	if out, err := goCommand(dir, "test", "-vet=off", "-c", "-o", binary, "./"+s.dir); err != nil {
		return fmt.Errorf("the tests in %s do not compile: %s", s.dir, bytes.TrimSpace(out))
	}
	switch by, hung, err := s.run(dir, binary); {
	case err != nil:
		return err
	case hung:
		return fmt.Errorf("the tests in %s that match %q take more than %s without it too: name fewer", s.dir, s.tests, s.limit)
	case by != "":
		return fmt.Errorf("the tests in %s that match %q fail without it too: %s", s.dir, s.tests, by)
	}
	ended[s] = true
	return nil
}

func goCommand(dir string, args ...string) ([]byte, error) {
	c := exec.Command("go", args...)
	c.Dir = dir
	return c.CombinedOutput()
}

// run runs the tests of a stage until the first failure and says what that was, and whether it was that they did not end in time.
func (s stage) run(dir, binary string) (by string, hung bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*s.limit)
	defer cancel()
	c := exec.CommandContext(ctx, binary, "-test.short", "-test.v", "-test.failfast", "-test.timeout", s.limit.String(), "-test.run", s.tests)
	c.Dir = filepath.Join(dir, filepath.FromSlash(s.dir))
	c.Env = append(os.Environ(), "SYMMEM_TEST_REQUIRE=host")
	out, err := c.StdoutPipe()
	if err != nil {
		return "", false, err
	}
	c.Stderr = c.Stdout
	if err := c.Start(); err != nil {
		return "", false, err
	}
	ran := false
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		line := lines.Text()
		ran = ran || strings.HasPrefix(line, "=== RUN")
		if !failure.MatchString(line) {
			continue
		}
		said := strings.TrimSpace(line)
		if by == "" {
			by = said
			time.AfterFunc(time.Second, cancel) // the rest may hang
		} else if test, _, _ := strings.Cut(by, " ("); strings.HasPrefix(said, test+"/") {
			by = said // the sub-test that it was, which comes behind
		}
	}
	hung = strings.HasPrefix(by, "panic: test timed out") || by == "" && ctx.Err() != nil
	err = c.Wait()
	switch {
	case by == "" && err != nil:
		by = err.Error()
	case by == "" && !ran:
		return "", false, fmt.Errorf("no test in %s matches %q", s.dir, s.tests)
	}
	said := []rune(by)
	return string(said[:min(len(said), 140)]), hung, nil
}

// failure is a line of a test binary that tells of one: a test's end, a panic.
var failure = regexp.MustCompile(`^\s*(--- FAIL: \S+|panic: .*|fatal error: .*)`)
