package cheader

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unsafe"
)

// Env names the environment variable with the folder that headers are in: those of version 12.4.127 of cuda in cuda-12.4.127 there.
const Env = "SYMMEM_HEADERS"

// recordEnv makes [Run] write the records.
const recordEnv = "HEADERS_RECORD"

// Check compares a binding with one version of a header.
type Check struct {
	// Version is that of the header.
	Version string

	t       testing.TB
	library string
	facts   *facts
}

// Run runs check for each version of the headers of a library that is recorded in testdata, as LIBRARY-VERSION.txt, and, if [Env] is
// set, for each that is in that folder, read by read, and compares the record with it. At least one version is recorded.
func Run(t *testing.T, library string, read func(folder string) (*Header, error), check func(c *Check)) {
	t.Helper()
	records, err := filepath.Glob(filepath.Join("testdata", library+"-*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	recording := os.Getenv(recordEnv) != ""
	if len(records) == 0 && !recording {
		t.Fatalf("no header of %s is recorded in testdata", library)
	}
	for _, path := range records {
		if recording {
			break
		}
		version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), library+"-"), ".txt")
		t.Run(version, func(t *testing.T) {
			f, err := recorded(path)
			if err != nil {
				t.Fatal(err)
			}
			check(&Check{Version: version, t: t, library: library, facts: f})
		})
	}
	root := os.Getenv(Env)
	if root == "" {
		return
	}
	folders, err := filepath.Glob(filepath.Join(root, library+"-*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(folders) == 0 {
		t.Errorf("%s is %s, and no headers of %s are there", Env, root, library)
	}
	for _, folder := range folders {
		version := strings.TrimPrefix(filepath.Base(folder), library+"-")
		t.Run(version+" itself", func(t *testing.T) {
			h, err := read(folder)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", library+"-"+version+".txt")
			was, err := recorded(path)
			if err != nil && (h.partial || !recording) {
				t.Fatal(err)
			}
			f := &facts{header: h, answers: make(map[string]string)}
			if h.partial {
				f.rest = was
			}
			check(&Check{Version: version, t: t, library: library, facts: f})
			if h.partial && 2*len(f.answers) < len(was.answers) {
				t.Errorf("only %d of %d facts are in %s", len(f.answers), len(was.answers), folder)
			}
			if recording && !h.partial {
				text := fmt.Sprintf("What the headers of %s %s say; see package cheader. Recorded by HEADERS_RECORD=1 HEADERS=all bash .ci/run headers.\n%s",
					library, version, f)
				if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
					t.Fatal(err)
				}
				return
			}
			for question, answer := range f.answers {
				if had := was.answers[question]; had != answer {
					t.Errorf("%s: the header has %s, and the record %q", question, answer, had)
				}
			}
			for question := range was.answers {
				if _, ok := f.answers[question]; !ok && !h.partial {
					t.Errorf("%s: the record has it, and nobody asks", question)
				}
			}
		})
	}
}

// compare reports what differs.
func (c *Check) compare(what, want string, known bool, have string) {
	c.t.Helper()
	switch {
	case !known:
		c.t.Errorf("%s: the record of %s %s does not have it, and here it is %s; HEADERS_RECORD=1 HEADERS=all bash .ci/run headers records it",
			what, c.library, c.Version, have)
	case want != have:
		c.t.Errorf("%s: the header of %s %s has %s, and here it is %s", what, c.library, c.Version, want, have)
	}
}

// HasElement reports whether the header has such an element, for those that came with a version.
func (c *Check) HasElement(name string, i int) bool {
	v, ok := c.facts.element(name, i)
	return ok && v != none
}

// Const compares a macro or an enumerator.
func (c *Check) Const(name string, have int64) {
	c.t.Helper()
	want, ok := c.facts.constant(name)
	c.compare(name, want, ok, fmt.Sprint(have))
}

// Element compares a value in a macro that initialises a struct, by its number from 0.
func (c *Check) Element(name string, i int, have int64) {
	c.t.Helper()
	want, ok := c.facts.element(name, i)
	c.compare(fmt.Sprintf("element %d of %s", i, name), want, ok, fmt.Sprint(have))
}

// NoFunc reports a function that the header has already.
func (c *Check) NoFunc(name string) {
	c.t.Helper()
	want, ok := c.facts.function(name)
	c.compare(name, want, ok, none)
}

// Size compares the bytes of a type.
func (c *Check) Size(name string, have int64) {
	c.t.Helper()
	want, ok := c.facts.size(name)
	c.compare("the size of "+name, want, ok, fmt.Sprint(have))
}

// Field compares a field of a struct.
func (c *Check) Field(name, field string, offset, size int64) {
	c.t.Helper()
	want, ok := c.facts.field(name, field)
	c.compare(name+"."+field, want, ok, place(offset, size))
}

// Struct compares the size of a struct, and each of its fields, that a tag c gives the header's name for; an array may stand for
// several fields, with commas between their names. A field without a tag must be padding: "_".
func (c *Check) Struct(name string, of reflect.Type) {
	c.t.Helper()
	c.Size(name, int64(of.Size()))
	if of.Kind() != reflect.Struct {
		return
	}
	for i := range of.NumField() {
		f := of.Field(i)
		tag := f.Tag.Get("c")
		if tag == "" && f.Name != "_" {
			c.t.Errorf("%s.%s has no tag c with the header's name for it", of, f.Name)
		}
		if tag == "" {
			continue
		}
		names := strings.Split(tag, ",")
		each := int64(f.Type.Size()) / int64(len(names))
		for i, one := range names {
			c.Field(name, one, int64(f.Offset)+int64(i)*each, each)
		}
	}
}

// Func compares a function's arguments and result with those of a function of Go.
func (c *Check) Func(name string, of reflect.Type) {
	c.t.Helper()
	have := Func{Args: []int64{}}
	for i := range of.NumIn() {
		have.Args = append(have.Args, bytes(of.In(i)))
	}
	if of.NumOut() == 1 {
		have.Result = bytes(of.Out(0))
	}
	want, ok := c.facts.function(name)
	c.compare(name, want, ok, have.String())
}

// bytes returns how much a value takes when it is passed; strings go as pointers.
func bytes(t reflect.Type) int64 {
	if t.Kind() == reflect.String {
		return int64(unsafe.Sizeof(uintptr(0)))
	}
	return int64(t.Size())
}
