// Package process holds what a process gets from outside, in one value, so that tests can make one too.
package process

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// Process is what the command was started with. Nobody changes it.
type Process struct {
	Args     []string // without the name of the program; the first is the sub-command
	In       io.Reader
	Out, Err io.Writer
	Environ  []string // NAME=value; of several with one name the last counts
}

// Getenv reads a variable of the environment. It is "" if there is none.
func (p *Process) Getenv(name string) string {
	value := ""
	for _, entry := range p.Environ {
		if n, v, ok := strings.Cut(entry, "="); ok && n == name {
			value = v
		}
	}
	return value
}

// Say tells the user what goes on, as one line on the standard error.
func (p *Process) Say(format string, args ...any) {
	fmt.Fprintf(p.Err, "symmem: "+format+"\n", args...)
}

// PrintJSON writes v to the standard output as JSON, indented for people.
func (p *Process) PrintJSON(v any) error {
	e := json.NewEncoder(p.Out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Executable is the path of this executable, to start ranks and probes from.
func Executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this executable, to start ranks from: %w", err)
	}
	return path, nil
}
