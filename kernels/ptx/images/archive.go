package images

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strconv"
	"strings"
)

// archive is what kernels/gen/archive.py wrote, which says how a line is coded.
type archive struct {
	templates []string
	modules   map[string]module
	parts     []part
}

// module is one PTX file.
type module struct {
	crc   uint32
	parts []int // in the order of the text
}

// part is one function.
type part struct {
	own   string // the kernel's name, where a template has the byte own
	label int
	code  []byte
}

// What a byte of a template stands for, if it is not itself: kinds[b-1] and a number, or the kernel's name.
var kinds = [...]string{"%p", "%rs", "%r", "%rd", "%f", "%fd", "$L__BB"}

const (
	kindLabel = len(kinds)
	own       = len(kinds) + 1
)

// Templates below shortTemplates take one byte.
const shortTemplates = 192

// What is in front of a register or label; firstKnown and more say how many others of its kind were named since.
const (
	newNext = iota
	newJump
	knownFar
	firstKnown
)

var errDamaged = errors.New("the archive is damaged")

// open reads an archive. The stream's checksum has been compared when the content is looked at.
func open(compressed []byte) (*archive, error) {
	z, err := zlib.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(z)
	if err != nil {
		return nil, err
	}
	r := reader{rest: content}
	a := &archive{
		templates: strings.Split(strings.TrimSuffix(string(r.bytes()), "\n"), "\n"),
		modules:   map[string]module{},
	}
	for range r.count() {
		name := string(r.bytes())
		m := module{crc: binary.LittleEndian.Uint32(r.next(4))}
		for range r.count() {
			m.parts = append(m.parts, r.number())
		}
		a.modules[name] = m
	}
	for range r.count() {
		a.parts = append(a.parts, part{own: string(r.bytes()), label: r.number(), code: r.bytes()})
	}
	if r.short || len(r.rest) > 0 {
		return nil, errDamaged
	}
	return a, nil
}

// image is the text of a file.
func (a *archive) image(file string) ([]byte, error) {
	m, ok := a.modules[file]
	if !ok {
		return nil, fmt.Errorf("there is no %s", file)
	}
	var text []byte
	for _, i := range m.parts {
		if i >= len(a.parts) {
			return nil, errDamaged
		}
		var err error
		if text, err = a.append(text, a.parts[i]); err != nil {
			return nil, err
		}
	}
	if crc32.ChecksumIEEE(text) != m.crc {
		return nil, errDamaged
	}
	return text, nil
}

// append writes a function's text.
func (a *archive) append(text []byte, p part) ([]byte, error) {
	var recent [len(kinds)][]int // the numbers of a kind, that named last first
	var last [len(kinds)]int     // the number of a kind that was new last
	r := reader{rest: p.code}
	for len(r.rest) > 0 {
		t := int(r.next(1)[0])
		if t >= shortTemplates {
			t = shortTemplates + (t-shortTemplates)<<8 + int(r.next(1)[0])
		}
		if t >= len(a.templates) {
			return nil, errDamaged
		}
		for _, c := range []byte(a.templates[t]) {
			switch {
			case int(c) > own:
				text = append(text, c)
				continue
			case int(c) == own:
				text = append(text, p.own...)
				continue
			case c == 0:
				return nil, errDamaged
			}
			kind := c - 1
			known := recent[kind]
			since, n := 0, 0
			switch b := int(r.next(1)[0]); b {
			case newNext, newJump:
				n = last[kind] + 1
				if b == newJump {
					by := r.number()
					n += by>>1 ^ -(by & 1)
				}
				last[kind] = n
				known = append(known, n)
				since = len(known) - 1
			case knownFar:
				since = r.number()
			default:
				since = b - firstKnown
			}
			if since >= len(known) {
				return nil, errDamaged
			}
			n = known[since]
			copy(known[1:since+1], known)
			known[0] = n
			recent[kind] = known
			text = append(text, kinds[kind]...)
			if int(c) == kindLabel {
				text = append(strconv.AppendInt(text, int64(p.label), 10), '_')
			}
			text = strconv.AppendInt(text, int64(n), 10)
		}
		text = append(text, '\n')
	}
	if r.short {
		return nil, errDamaged
	}
	return text, nil
}

// reader takes numbers and strings off the front. Once they were short all are zero.
type reader struct {
	rest  []byte
	short bool
}

func (r *reader) next(n int) []byte {
	if n > len(r.rest) {
		r.rest, r.short = nil, true
		return make([]byte, min(n, 4))
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return slices.Clip(b)
}

func (r *reader) number() int {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 || n > 1<<31-1 {
		r.rest, r.short = nil, true
		return 0
	}
	r.rest = r.rest[size:]
	return int(n)
}

// count is a number of things of at least one byte each.
func (r *reader) count() int {
	if n := r.number(); n <= len(r.rest) {
		return n
	}
	r.rest, r.short = nil, true
	return 0
}

func (r *reader) bytes() []byte { return r.next(r.number()) }
