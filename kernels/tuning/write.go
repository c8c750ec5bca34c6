package tuning

import (
	"bytes"
	"encoding/json"
	"slices"
)

// Text returns the table as a file has it: each rule begins a line, and so does each step.
func (t *Table) Text() ([]byte, error) {
	head := *t
	head.Rules = []Rule{}
	text, err := indented(head)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.Write(bytes.TrimSuffix(text, []byte("[]\n}\n")))
	b.WriteString("[\n")
	for i, r := range t.Rules {
		steps := r.Steps
		r.Steps = []Step{}
		rule, err := line(r)
		if err != nil {
			return nil, err
		}
		b.WriteString("    ")
		b.Write(bytes.TrimSuffix(rule, []byte("[]}")))
		b.WriteString("[\n")
		for k, s := range steps {
			step, err := line(s)
			if err != nil {
				return nil, err
			}
			b.WriteString("      ")
			b.Write(step)
			b.WriteString(comma(k, len(steps)))
		}
		b.WriteString("    ]}" + comma(i, len(t.Rules)))
	}
	b.WriteString("  ]\n}\n")
	return b.Bytes(), nil
}

func comma(i, n int) string {
	if i < n-1 {
		return ",\n"
	}
	return "\n"
}

// indented is v as JSON for people.
func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(v)
	return b.Bytes(), err
}

// line is v as JSON in one line.
func line(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSpace(b.Bytes()), err
}

// Merge takes the rules of newer into the table, in place of those for the same collective, ranks and dtypes. Of all else newer's counts.
func (t *Table) Merge(newer *Table) *Table {
	merged := *newer
	merged.Rules = slices.Clone(newer.Rules)
	for _, r := range t.Rules {
		clash := slices.ContainsFunc(newer.Rules, func(n Rule) bool {
			return n.Collective == r.Collective && n.Ranks == r.Ranks && n.Multicast == r.Multicast && (len(n.DTypes) == 0 && len(r.DTypes) == 0 ||
				slices.ContainsFunc(n.DTypes, func(d string) bool { return slices.Contains(r.DTypes, d) }))
		})
		if !clash {
			merged.Rules = append(merged.Rules, r)
		}
	}
	return &merged
}
