package tuning

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// The bounds of files.
const (
	maxFileBytes = 16 << 20
	maxRanks     = 1 << 16
	maxBlocks    = 1 << 16
	maxLapBytes  = 1 << 20
	lapAlign     = 128
)

// Read reads the table in a file, and returns the file's bytes with it. The error is that of the operating system (fs.ErrNotExist), or ErrInvalid: an *ArgumentError of
// package symmem with the file, the field, its value, what is allowed there and what to do; several of them where several things are wrong.
func Read(path string) (*Table, []byte, error) {
	// A pipe or a terminal might never begin, or never end.
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		p := &problems{file: path}
		p.add("file", info.Mode().Type().String(), "a regular file")
		return nil, nil, p.err()
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("opening a tuning table: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, fmt.Errorf("reading the tuning table %s: %w", path, err)
	}
	t, err := Parse(path, text)
	return t, text, err
}

// Parse is Read for the bytes of a file that is called name.
func Parse(name string, text []byte) (*Table, error) {
	p := &problems{file: name}
	if len(text) > maxFileBytes {
		p.add("size", "more than 16 MiB", "at most 16 MiB")
		return nil, p.err()
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var t Table
	if err := d.Decode(&t); err != nil {
		p.decoding(text, err)
		return nil, p.err()
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		p.add("end", "more behind the table", "one table and nothing else")
	}
	t.Name = name
	t.check(p)
	if err := p.err(); err != nil {
		return nil, err
	}
	return &t, nil
}

// problems collects what is wrong with a file.
type problems struct {
	file string
	all  []error
}

// advice is what to do about a file that is refused.
const advice = "mend the file, or make it anew with symmem tune, or leave the setting tuning empty"

func (p *problems) add(field string, value any, allowed string) {
	p.all = append(p.all, errs.Advised("the tuning table "+p.file, field, value, allowed, advice))
}

func (p *problems) err() error {
	const most = 10 // a file of which everything is wrong is wrong in one way
	if len(p.all) > most {
		p.all = append(p.all[:most:most], fmt.Errorf("and %d more", len(p.all)-most))
	}
	return errors.Join(p.all...)
}

// decoding adds an error of the decoder.
func (p *problems) decoding(text []byte, err error) {
	line := func(offset int64) string {
		return fmt.Sprintf("line %d", 1+bytes.Count(text[:min(max(offset, 0), int64(len(text)))], []byte("\n")))
	}
	const unknown = "json: unknown field "
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		p.add(line(syntax.Offset), strings.TrimPrefix(syntax.Error(), "json: "), "JSON")
	} else if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		p.add(fmt.Sprintf("%s (%s)", kind.Field, line(kind.Offset)), "a JSON "+kind.Value, "a value of type "+kind.Type.String())
	} else if size, ok := errors.AsType[*errs.ArgumentError](err); ok {
		p.add("up_to or lap_bytes", size.Value, size.Allowed)
	} else if name, ok := strings.CutPrefix(err.Error(), unknown); ok {
		p.add("field", name, "version, devices, link, machine, date, driver, command, notes, rules; of a rule collective, ranks, and_more, dtypes, multicast, source, steps; "+
			"of a step up_to, whole_vectors, form, blocks, lap_bytes")
	} else {
		p.add("file", err.Error(), "a whole table in JSON")
	}
}

func (t *Table) check(p *problems) {
	if t.Version != Version {
		p.add("version", t.Version, fmt.Sprintf("%d, the only one that this release knows", Version))
		return
	}
	if len(t.Devices) == 0 || slices.Contains(t.Devices, "") {
		p.add("devices", fmt.Sprintf("%q", t.Devices), "the names of devices, or any")
	}
	if !slices.Contains(Links(), t.Link) {
		p.add("link", fmt.Sprintf("%q", t.Link), strings.Join(Links(), ", "))
		return
	}
	if _, err := time.Parse(time.DateOnly, t.Date); t.Date != "" && err != nil {
		p.add("date", fmt.Sprintf("%q", t.Date), "a day, like 2026-11-23")
	}
	if len(t.Rules) == 0 {
		p.add("rules", "none", "at least one")
	}
	for i := range t.Rules {
		t.checkRule(p, i)
	}
}

// checkRule checks one rule by itself, and that none before it is for the same.
func (t *Table) checkRule(p *problems, i int) {
	r := &t.Rules[i]
	at := func(field string) string { return fmt.Sprintf("rules[%d].%s", i, field) }
	forms := Forms(r.Collective, t.Link)
	if forms == nil {
		p.add(at("collective"), fmt.Sprintf("%q", r.Collective), strings.Join(Collectives(), ", "))
		return
	}
	if r.Ranks < 2 || r.Ranks > maxRanks {
		p.add(at("ranks"), r.Ranks, fmt.Sprintf("2 to %d", maxRanks))
	}
	for k, d := range r.DTypes {
		if !slices.Contains(DTypes(), d) || slices.Contains(r.DTypes[:k], d) {
			p.add(at("dtypes"), fmt.Sprintf("%q", r.DTypes), "of "+strings.Join(DTypes(), ", ")+", each once, or none for all others")
			break
		}
	}
	if r.Source != Measured && r.Source != Estimated {
		p.add(at("source"), fmt.Sprintf("%q", r.Source), Measured+" or "+Estimated)
	}
	for k := range t.Rules[:i] {
		o := &t.Rules[k]
		same := len(r.DTypes) == 0 && len(o.DTypes) == 0 || slices.ContainsFunc(r.DTypes, func(d string) bool { return slices.Contains(o.DTypes, d) })
		if same && o.Collective == r.Collective && o.Ranks == r.Ranks && o.Multicast == r.Multicast {
			p.add(fmt.Sprintf("rules[%d]", i), fmt.Sprintf("%s between %d ranks of %q", r.Collective, r.Ranks, r.DTypes), fmt.Sprintf("what rules[%d] is not for already", k))
			break
		}
	}
	if len(r.Steps) == 0 {
		p.add(at("steps"), "none", "at least one, the last without up_to")
	}
	before := Size(0)
	for k, s := range r.Steps {
		at := func(field string) string { return fmt.Sprintf("rules[%d].steps[%d].%s", i, k, field) }
		switch last := k == len(r.Steps)-1; {
		case last && (s.UpTo != 0 || s.WholeVectors):
			p.add(at("up_to"), fmt.Sprintf("%s, whole vectors %t", s.UpTo, s.WholeVectors), "nothing for the last step, which serves every message that is left")
		case !last && (s.UpTo < before || s.UpTo == before && !(k > 0 && r.Steps[k-1].WholeVectors && !s.WholeVectors)):
			p.add(at("up_to"), s.UpTo, fmt.Sprintf("more than %s, that of the step before, or as much for what is not whole vectors", before))
		}
		before = s.UpTo
		switch {
		case !slices.Contains(forms, s.Form):
			p.add(at("form"), fmt.Sprintf("%q", s.Form), fmt.Sprintf("of %s over %s: %s", r.Collective, t.Link, strings.Join(forms, ", ")))
		case NeedsMulticast(s.Form) && !r.Multicast:
			p.add(at("form"), s.Form, "such a form only in a rule with multicast")
		}
		if s.Blocks < 0 || s.Blocks > maxBlocks {
			p.add(at("blocks"), s.Blocks, fmt.Sprintf("0 for as many as are of use, to %d", maxBlocks))
		}
		if s.LapBytes != 0 && (s.Form != Flow || s.LapBytes%lapAlign != 0 || s.LapBytes > maxLapBytes) {
			p.add(at("lap_bytes"), s.LapBytes, fmt.Sprintf("a multiple of %d bytes up to %s, of the form %s", lapAlign, Size(maxLapBytes), Flow))
		}
	}
}
