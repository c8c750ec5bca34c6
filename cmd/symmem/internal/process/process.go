// Package process holds what a process is started with, in one value that tests can make too.
package process

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// Process is what the command was started with. It is read-only.
type Process struct {
	Args     []string // without the name of the program; the first is the sub-command
	In       io.Reader
	Out, Err io.Writer
	Environ  []string // NAME=value; of several with one name the last counts
}

// Getenv returns a variable of the environment, "" if it is not set.
func (p *Process) Getenv(name string) string {
	value := ""
	for _, entry := range p.Environ {
		if n, v, ok := strings.Cut(entry, "="); ok && n == name {
			value = v
		}
	}
	return value
}

// Say prints a line for the user on the standard error.
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

// Executable returns the path of this executable, which ranks and probes are started from.
func Executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this executable, to start ranks from: %w", err)
	}
	return path, nil
}
