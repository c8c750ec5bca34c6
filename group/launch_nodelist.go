package group

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// parseNodeList returns the first hosts, at most limit of them, of a list as Slurm writes it: "node[001-004,007],host2". Numbers keep their leading
// zeros. The rest of the list, after the last host that is returned, is not parsed.
func parseNodeList(list string, limit int) ([]string, error) {
	var hosts []string
	rest := strings.TrimSpace(list)
	for len(hosts) < limit {
		entry, after, more := cutNodeEntry(rest)
		err := expandNodes("", entry, func(host string) bool {
			hosts = append(hosts, host)
			return len(hosts) < limit
		})
		if err != nil {
			return nil, errs.Invalid("reading a list of hosts", "entry", strconv.Quote(clipNode(entry)), err.Error())
		}
		if !more {
			break
		}
		rest = after
	}
	return hosts, nil
}

// maxNodeName is the length of the longest name of a host, in bytes.
const maxNodeName = 253

// cutNodeEntry cuts the list at its first comma outside of brackets.
func cutNodeEntry(list string) (entry, after string, more bool) {
	depth := 0
	for i := range len(list) {
		switch list[i] {
		case '[':
			depth++
		case ']':
			depth--
		case ',':
			if depth == 0 {
				return list[:i], list[i+1:], true
			}
		}
	}
	return list, "", false
}

// expandNodes calls yield for each host that entry stands for, with prefix before it, until yield returns false. The leftmost
// brackets change slowest, as in Slurm.
func expandNodes(prefix, entry string, yield func(host string) bool) error {
	open := strings.IndexByte(entry, '[')
	if open < 0 {
		host := prefix + entry
		if !isNodeName(host) {
			return errors.New("a name of letters, digits, dots, dashes and underscores, with ranges of numbers in brackets")
		}
		yield(host)
		return nil
	}
	length := strings.IndexByte(entry[open:], ']')
	if length < 0 {
		return errors.New("a closing bracket for every opening one")
	}
	if prefix += entry[:open]; len(prefix) > maxNodeName {
		return fmt.Errorf("names of at most %d bytes", maxNodeName)
	}
	ranges, rest := entry[open+1:open+length], entry[open+length+1:]
	for part := range strings.SplitSeq(ranges, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		from, err := nodeNumber(low)
		if err != nil {
			return err
		}
		to, err := nodeNumber(high)
		if err != nil {
			return err
		}
		if to < from {
			return errors.New("ranges from the lower to the higher number")
		}
		for n := from; n <= to; n++ {
			stopped := false
			err := expandNodes(fmt.Sprintf("%s%0*d", prefix, len(low), n), rest, func(host string) bool {
				stopped = !yield(host)
				return !stopped
			})
			if err != nil || stopped {
				return err
			}
		}
	}
	return nil
}

// nodeNumber reads a number in brackets.
func nodeNumber(text string) (uint64, error) {
	n, err := strconv.ParseUint(text, 10, 48)
	if err != nil || len(text) > 15 {
		return 0, errors.New("numbers of at most 15 digits in brackets, like [001-004,007]")
	}
	return n, nil
}

// isNodeName reports whether name can be a host's.
func isNodeName(name string) bool {
	return name != "" && len(name) <= maxNodeName && !strings.ContainsFunc(name, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '.' || r == '-' || r == '_')
	})
}

// clipNode keeps an error message short.
func clipNode(text string) string {
	const most = 80
	if len(text) > most {
		return text[:most] + "..."
	}
	return text
}
