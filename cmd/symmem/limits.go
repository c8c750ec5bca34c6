package main

import "fmt"

// limit is a bound of the system that symmetric memory can run into.
type limit struct {
	Name    string `json:"name"`
	Value   string `json:"value"`            // for people: "64.0 MiB", "unlimited"
	Number  int64  `json:"number"`           // in bytes, or a count; -1 is unlimited
	Meaning string `json:"meaning"`          // what it bounds
	Advice  string `json:"advice,omitempty"` // what to do, where it may be too low
}

// unlimited is the number of a limit that is none.
const unlimited = -1

// byteText gives a number of bytes for people.
func byteText(n int64) string {
	if n == unlimited {
		return "unlimited"
	}
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/(1<<10), 0
	for value >= 1<<10 && unit < len(units)-1 {
		value /= 1 << 10
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}
