package config

import (
	"reflect"
	"slices"
	"strings"

	"github.com/symmem/symmem/internal/options"
	"github.com/symmem/symmem/internal/typo"
)

// envPrefix begins every variable of this library.
const envPrefix = options.Prefix

// Key describes one setting.
type Key struct {
	Name    string // as in the file and, after two dashes, as a flag: "world-size"
	Env     string // the environment variable: "SYMMEM_WORLD_SIZE"
	Default string // the default as a user would write it; "" if it is empty
	Usage   string // what it is, in one phrase
	Backend string // the backend whose option it is; "" for a setting of symmem
}

// Keys lists every key: the settings in the order of the fields of [Config], then the options of the backends that are in this program.
func Keys() []Key {
	defaults := Default()
	keys := make([]Key, len(specs))
	for i, s := range specs {
		keys[i] = Key{Name: s.name, Env: s.env(), Default: text(s.value(&defaults)), Usage: s.usage}
	}
	for _, d := range options.All() {
		keys = append(keys, optionKey(d))
	}
	return keys
}

// spec is a key with the place of its value.
type spec struct {
	name  string
	usage string
	field func(*Config) any // a pointer to the field
}

// value returns the field's value.
func (s *spec) value(c *Config) any {
	value := reflect.ValueOf(s.field(c)).Elem().Interface()
	if list, ok := value.([]string); ok {
		return slices.Clone(list) // what is changed later must not change what was remembered
	}
	return value
}

// secret reports whether the value must not be printed.
func (s *spec) secret() bool {
	_, secret := s.field(new(Config)).(*Secret)
	return secret
}

// env returns the name of the key's environment variable.
func (s *spec) env() string {
	return options.Env(s.name)
}

// specs holds every key, in the order of Config's fields.
var specs = []*spec{
	{"backend", "backends in order of preference, with commas between them; auto takes the best that works",
		func(c *Config) any { return &c.Backend }},
	{"rank", "number of this process in the group, from 0; -1 asks the launcher",
		func(c *Config) any { return &c.Rank }},
	{"world-size", "number of ranks in the group; 0 asks the launcher",
		func(c *Config) any { return &c.WorldSize }},
	{"local-rank", "number of this process on its host, from 0; -1 asks the launcher",
		func(c *Config) any { return &c.LocalRank }},
	{"local-world-size", "number of ranks on this host; 0 asks the launcher",
		func(c *Config) any { return &c.LocalWorldSize }},
	{"launcher", "launcher to believe, by name; empty finds it out",
		func(c *Config) any { return &c.Launcher }},
	{"rendezvous-addr", "host:port of the rendezvous service of rank 0; empty asks the launcher",
		func(c *Config) any { return &c.RendezvousAddr }},
	{"rendezvous-served", "whether the rendezvous service runs outside of the ranks, so that rank 0 joins it as the others do; true or false",
		func(c *Config) any { return &c.RendezvousServed }},
	{"rendezvous-fd", "descriptor of a listening socket that rank 0 has inherited for the rendezvous service; -1 is none",
		func(c *Config) any { return &c.RendezvousFD }},
	{"rendezvous-store", "where symmem rendezvous keeps the state of its jobs, so that one that is started again goes on with them: etcd://HOST:PORT/PREFIX; " +
		"with a password in it prefer " + envPrefix + "RENDEZVOUS_STORE; empty keeps nothing",
		func(c *Config) any { return &c.RendezvousStore }},
	{"job", "id of the job; empty asks the launcher",
		func(c *Config) any { return &c.Job }},
	{"restart", "how often the job was restarted",
		func(c *Config) any { return &c.Restart }},
	{"token", "secret of the job; others can see a command line, so prefer " + envPrefix + "TOKEN",
		func(c *Config) any { return &c.Token }},
	{"timeout", "bound of every collective call",
		func(c *Config) any { return &c.Timeout }},
	{"kernel-timeout", "bound of each wait in device work",
		func(c *Config) any { return &c.KernelTimeout }},
	{"liveness-timeout", "silence after which a connected rank counts as lost",
		func(c *Config) any { return &c.LivenessTimeout }},
	{"device", "index or UUID of the device, or host for memory of the CPU (nixl); empty chooses by the local rank",
		func(c *Config) any { return &c.Device }},
	{"share-device", "allow several ranks on one device, true or false",
		func(c *Config) any { return &c.ShareDevice }},
	{"multicast", "use of multicast addresses: auto, on or off",
		func(c *Config) any { return &c.Multicast }},
	{"net-devices", "network devices that data may go over between hosts (nixl), with commas between them; empty takes the one that leads to " +
		"the rendezvous service, all takes every one",
		func(c *Config) any { return &c.NetDevices }},
	{"unprotected-network", "data over networks without authentication and encryption: warn logs who can reach it, allow, or refuse",
		func(c *Config) any { return &c.UnprotectedNetwork }},
	{"channels", "channels that the program has for signal, wait and barrier, from 1 to 1024",
		func(c *Config) any { return &c.Channels }},
	{"max-blocks", "most blocks that the kernel of any plan takes on a CUDA device, to leave room for other work; 0 for no bound of its own",
		func(c *Config) any { return &c.MaxBlocks }},
	{"rank-order", "auto takes only forms that combine in the order of the ranks, whose bits depend on nothing but the inputs, true or false",
		func(c *Config) any { return &c.RankOrder }},
	{"tuning", "file of a table that symmem tune has made, with the forms that are the fastest; empty takes the one that comes with symmem, or an estimate",
		func(c *Config) any { return &c.Tuning }},
	{"log-level", "debug, info, warn or error; empty logs nothing",
		func(c *Config) any { return &c.LogLevel }},
}

// lookup returns the spec of a key, or nil.
func lookup(name string) *spec {
	for _, s := range specs {
		if s.name == name {
			return s
		}
	}
	return nil
}

// nearest returns the candidate that takes the fewest changes of single letters to become name, "" if name is like none of them.
func nearest(name string, candidates []string) string {
	best, fewest := "", -1
	for _, candidate := range candidates {
		// What all variables begin with makes no two of them alike.
		n, like := typo.Slips(strings.TrimPrefix(name, envPrefix), strings.TrimPrefix(candidate, envPrefix))
		if like && (fewest < 0 || n < fewest) {
			best, fewest = candidate, n
		}
	}
	return best
}
