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

// Merge returns the table newer with those rules of t that newer has none for: not for the collective, ranks and dtype, with multicast or without.
func (t *Table) Merge(newer *Table) *Table {
	merged := *newer
	merged.Rules = slices.Clone(newer.Rules)
	for _, r := range t.Rules {
		same := func(n Rule) bool {
			return n.Collective == r.Collective && n.Ranks == r.Ranks && n.Multicast == r.Multicast
		}
		if len(r.DTypes) == 0 {
			if slices.ContainsFunc(newer.Rules, func(n Rule) bool { return same(n) && len(n.DTypes) == 0 }) {
				continue
			}
		} else {
			r.DTypes = slices.DeleteFunc(slices.Clone(r.DTypes), func(d string) bool {
				return slices.ContainsFunc(newer.Rules, func(n Rule) bool { return same(n) && slices.Contains(n.DTypes, d) })
			})
			if len(r.DTypes) == 0 {
				continue
			}
		}
		merged.Rules = append(merged.Rules, r)
	}
	return &merged
}

// For returns the rules of the set as a table for just so many ranks, which answers as the set does where all forms can be had: what a table has behind another one that has a rule for it is left out.
func (s *Set) For(ranks int) *Table {
	all := &Table{Version: Version}
	for _, collective := range Collectives() {
		// The rules that count, and for which dtypes.
		var casts, plain []*Rule
		serves := map[*Rule][]string{}
		add := func(list *[]*Rule, r *Rule, dtype string) {
			if serves[r] == nil {
				*list = append(*list, r)
			}
			serves[r] = append(serves[r], dtype)
		}
		cast := 0 // dtypes that have a rule for memory with multicast addresses
		for _, dtype := range DTypes() {
			first := true
			for r := range s.Rules(collective, ranks, dtype) {
				if !r.Multicast {
					add(&plain, r, dtype)
					break // what is behind it is never asked
				}
				if first {
					add(&casts, r, dtype)
					first = false
					cast++
				}
			}
		}
		for _, r := range slices.Concat(casts, plain) {
			rule := *r
			rule.Ranks, rule.AndMore = ranks, false
			if len(r.DTypes) > 0 {
				rule.DTypes = slices.DeleteFunc(slices.Clone(r.DTypes), func(d string) bool { return !slices.Contains(serves[r], d) })
			} else if r.Multicast && cast < len(DTypes()) {
				rule.DTypes = serves[r] // for others a rule without multicast comes before
			}
			all.Rules = append(all.Rules, rule)
		}
	}
	return all
}
