package machine

// Limit is a bound of the system that symmetric memory can run into.
type Limit struct {
	Name    string `json:"name"`
	Value   string `json:"value"`            // for people: "64.0 MiB", "unlimited"
	Number  int64  `json:"number"`           // in bytes, or a count; -1 is unlimited
	Meaning string `json:"meaning"`          // what it bounds
	Advice  string `json:"advice,omitempty"` // what to do, where it may be too low
}

// unlimited is the Number of something that has no limit.
const unlimited = -1
