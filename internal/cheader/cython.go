package cheader

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// The lines of a Cython declaration file, as NVIDIA generates them from its headers.
var (
	cythonComment = regexp.MustCompile(`#.*`)
	cythonQuoted  = regexp.MustCompile(`\s*(?:"[^"]*"|'[^']*')`) // the name in C, which is the same
	cythonOpen    = regexp.MustCompile(`^(?:ctypedef|cdef) (enum|struct|union) (\w+):$`)
	cythonType    = regexp.MustCompile(`^\s*ctypedef (.+) (\w+)$`)
	cythonFunc    = regexp.MustCompile(`^cdef (.+\)) except.*$`)
)

// ReadCython reads a declaration file of Cython (.pxd) that was generated from a header, for libraries whose headers come in large packages
// only. It has no macros, and not everything else: what it lacks, nobody has to compare.
func ReadCython(path string) (*Header, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading declarations: %w", err)
	}
	var c strings.Builder
	c.WriteString("typedef unsigned char _cyb_bool;\n")
	kind := ""
	for _, line := range strings.Split(string(text), "\n") {
		line = strings.TrimRight(cythonQuoted.ReplaceAllString(cythonComment.ReplaceAllString(line, ""), ""), " ")
		if line == "" {
			continue
		}
		if kind != "" && strings.HasPrefix(line, " ") {
			end := ";"
			if kind == "enum" {
				end = ","
			}
			fmt.Fprintln(&c, line+end)
			continue
		}
		if kind != "" {
			fmt.Fprintln(&c, "};")
			kind = ""
		}
		if m := cythonOpen.FindStringSubmatch(line); m != nil {
			kind = m[1]
			fmt.Fprintf(&c, "typedef %s %s %s; %s %s {\n", kind, m[2], m[2], kind, m[2])
		} else if m := cythonType.FindStringSubmatch(line); m != nil {
			fmt.Fprintf(&c, "typedef %s %s;\n", m[1], m[2])
		} else if m := cythonFunc.FindStringSubmatch(line); m != nil {
			fmt.Fprintln(&c, m[1]+";")
		}
	}
	if kind != "" {
		fmt.Fprintln(&c, "};")
	}
	h, err := Read(Options{Prelude: c.String()})
	if err == nil {
		h.partial = true
	}
	return h, err
}
