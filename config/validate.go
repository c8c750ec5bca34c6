package config

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/symmem/symmem/internal/errs"
)

// Validate checks every value and how they go together. It returns all that is wrong in one error, which is ErrInvalid. Each wrong value is
// an *ArgumentError in it, with the key, the value and what is allowed, after the place that it came from.
func (c Config) Validate() error { return errors.Join(c.problems()...) }

// deviceForm is an index or what vendors make of a UUID (GPU-5a1e..., MIG-...). Package device/cuda knows which exist.
var deviceForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z._:/-]{0,127}$`)

// The bounds of texts, in bytes.
const (
	maxJob    = 255
	maxSecret = 4096
	maxPath   = 4096
)

// problems returns all that is wrong with the values.
func (c Config) problems() []error {
	if missing := c.leftOut(); len(missing) > 0 {
		return []error{errs.Advised(op, "Config", "a literal without "+strings.Join(missing, ", "), "one that Default, Load or FromViper gave, with any of its fields changed",
			"start from config.Default(), or leave it all zero to have what Load finds")}
	}
	var all []error
	advise := func(key string, value any, allowed, advice string) {
		all = append(all, fmt.Errorf("%s: %w", c.Source(key), errs.Advised(op, key, value, allowed, advice)))
	}
	refuse := func(key string, value any, allowed string) { advise(key, value, allowed, "") }

	if problem := backendProblem(c.Backend); problem != "" {
		refuse("backend", strings.Join(c.Backend, ","), problem)
	}

	if c.Rank < -1 {
		refuse("rank", c.Rank, "0 or more, or -1 to ask the launcher")
	}
	if c.WorldSize < 0 {
		refuse("world-size", c.WorldSize, "1 or more, or 0 to ask the launcher")
	}
	if c.WorldSize > 0 && c.Rank >= c.WorldSize {
		refuse("rank", c.Rank, fmt.Sprintf("0 to %d, since world-size is %d (%s)", c.WorldSize-1, c.WorldSize, c.Source("world-size")))
	}
	if c.LocalRank < -1 {
		refuse("local-rank", c.LocalRank, "0 or more, or -1 to ask the launcher")
	}
	if c.LocalWorldSize < 0 {
		refuse("local-world-size", c.LocalWorldSize, "1 or more, or 0 to ask the launcher")
	}
	if c.LocalWorldSize > 0 && c.LocalRank >= c.LocalWorldSize {
		refuse("local-rank", c.LocalRank, fmt.Sprintf("0 to %d, since local-world-size is %d (%s)",
			c.LocalWorldSize-1, c.LocalWorldSize, c.Source("local-world-size")))
	}
	if c.WorldSize > 0 && c.LocalWorldSize > c.WorldSize {
		refuse("local-world-size", c.LocalWorldSize, fmt.Sprintf("1 to %d, since world-size is %d (%s)",
			c.WorldSize, c.WorldSize, c.Source("world-size")))
	}
	if !printable(c.Launcher) {
		refuse("launcher", strconv.Quote(c.Launcher), "the name of a launcher, or nothing to find it out")
	}

	if c.RendezvousAddr != "" && !isHostPort(c.RendezvousAddr) {
		refuse("rendezvous-addr", strconv.Quote(c.RendezvousAddr),
			"host:port with a port from 1 to 65535, like node1:29400 or [::1]:29400")
	}
	if c.RendezvousServed && c.RendezvousFD != -1 {
		refuse("rendezvous-fd", c.RendezvousFD, "-1, for none, where rendezvous-served says that another process serves")
	}
	if c.RendezvousFD < 3 && c.RendezvousFD != -1 {
		refuse("rendezvous-fd", c.RendezvousFD, "3 or more (0 to 2 are the standard streams), or -1 for none")
	}
	if len(c.Job) > maxJob || !printable(c.Job) {
		refuse("job", quoteClipped(c.Job), fmt.Sprintf("at most %d bytes of UTF-8, all of them printable", maxJob))
	}
	if c.Restart < 0 {
		refuse("restart", c.Restart, "0 or more")
	}
	for _, key := range []string{"token", "rendezvous-store"} {
		secret, _ := c.Value(key).(Secret)
		switch text := secret.Reveal(); {
		case text == redacted:
			advise(key, redacted, "the secret itself", "this is what a printed configuration shows in its place")
		case len(text) > maxSecret:
			refuse(key, fmt.Sprintf("a text of %d bytes", len(text)), fmt.Sprintf("at most %d bytes", maxSecret))
		case !printable(text):
			refuse(key, secret, "printable characters only, in UTF-8")
		}
	}

	for _, key := range []string{"timeout", "kernel-timeout"} {
		if d, ok := c.Value(key).(time.Duration); !ok || d <= 0 {
			refuse(key, d, "more than 0, like 90s")
		}
	}
	if c.LivenessTimeout < minLiveness {
		refuse("liveness-timeout", c.LivenessTimeout, fmt.Sprintf("%v or more, like 10s", minLiveness))
	}

	if c.Device != "" && !deviceForm.MatchString(c.Device) {
		refuse("device", strconv.Quote(c.Device), "an index from 0, a UUID, or nothing to choose by the local rank")
	}
	if !slices.Contains([]string{MulticastAuto, MulticastOn, MulticastOff}, c.Multicast) {
		refuse("multicast", strconv.Quote(c.Multicast), "auto, on or off")
	}
	if problem := netDevicesProblem(c.NetDevices); problem != "" {
		refuse("net-devices", strings.Join(c.NetDevices, ","), problem)
	}
	if !slices.Contains([]string{UnprotectedWarn, UnprotectedAllow, UnprotectedRefuse}, c.UnprotectedNetwork) {
		refuse("unprotected-network", strconv.Quote(c.UnprotectedNetwork), "warn, allow or refuse")
	}
	if c.Channels < minChannels || c.Channels > maxChannels {
		refuse("channels", c.Channels, fmt.Sprintf("%d to %d", minChannels, maxChannels))
	}
	if c.MaxBlocks < 0 {
		refuse("max-blocks", c.MaxBlocks, "0 for no bound, or more")
	}
	if len(c.Tuning) > maxPath || !printable(c.Tuning) {
		refuse("tuning", quoteClipped(c.Tuning), fmt.Sprintf("the name of a file, at most %d bytes, all of them printable, or nothing", maxPath))
	}
	if _, ok := c.Level(); !ok && c.LogLevel != "" {
		refuse("log-level", strconv.Quote(c.LogLevel), "debug, info, warn or error, or nothing for silence")
	}
	return append(all, c.optionProblems()...)
}

// netDeviceForm is the name of a network interface (eth0), or of another network device with its port (mlx5_0:1).
var netDeviceForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z._@:-]{0,63}$`)

// netDevicesProblem says what a list of network devices should have been, or nothing if it is right.
func netDevicesProblem(names []string) string {
	for i, name := range names {
		switch {
		case !netDeviceForm.MatchString(name):
			return fmt.Sprintf("one name an entry, like eth0 or mlx5_0:1 (entry %d is %q)", i, name)
		case slices.Contains(names[:i], name):
			return fmt.Sprintf("each name once (%s is there twice)", name)
		case name == NetDevicesAll && len(names) > 1:
			return fmt.Sprintf("%s only alone: it stands for every device", NetDevicesAll)
		}
	}
	return ""
}

// backendProblem says what a list of backends should have been, or nothing if it is right.
func backendProblem(names []string) string {
	if len(names) == 0 {
		return "at least one name, or " + BackendAuto
	}
	for i, name := range names {
		switch {
		case name == "" || !printable(name) || strings.ContainsAny(name, ", "):
			return fmt.Sprintf("one name an entry, without blanks and commas (entry %d is %q)", i, name)
		case slices.Contains(names[:i], name):
			return fmt.Sprintf("each name once (%s is there twice)", name)
		case name == BackendAuto && i < len(names)-1:
			return fmt.Sprintf("%s only as the last: it stands for all that is not named before it", BackendAuto)
		}
	}
	return ""
}

// isHostPort reports whether addr names a host and a port that others can connect to.
func isHostPort(addr string) bool {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" || !printable(host) || strings.ContainsAny(host, " /") {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// quoteClipped quotes a text of any length, not more than is worth reading.
func quoteClipped(s string) string {
	const longest = 80
	if len(s) <= longest {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q… (%d bytes)", s[:longest], len(s))
}

// printable reports whether s has nothing in it that a terminal or a header would not show.
func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
