package config

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/internal/options"
)

// The values of Config.Multicast.
const (
	MulticastAuto = "auto" // multicast where it works, unless a known switch of another library forbids it
	MulticastOn   = "on"   // opening is an error, which says why, where there can be no multicast
	MulticastOff  = "off"  // no multicast call is made at all
)

// The values of Config.UnprotectedNetwork.
const (
	UnprotectedWarn   = "warn"   // data may go over it, and a warning in the log says who can reach it
	UnprotectedAllow  = "allow"  // data may go over it: the network is closed to others
	UnprotectedRefuse = "refuse" // what would open it is an error
)

// NetDevicesAll stands in Config.NetDevices for every device.
const NetDevicesAll = "all"

// BackendAuto stands in Config.Backend for all backends, the best that works first.
const BackendAuto = "auto"

// The bounds of Config.Channels.
const (
	minChannels = 1
	maxChannels = 1024
)

// minLiveness is the least Config.LivenessTimeout, which package group takes: a rank that is not scheduled for a moment is not lost.
const minLiveness = 100 * time.Millisecond

// Config holds every setting. Start from [Default], [Load] or [FromViper] and change what you like. The zero Config holds no settings; it
// stands for what Load finds where a Config is used ([Config.Resolve]). One in which only some fields were set is not valid, since 0 is a rank.
//
// It is plain data: copy it and change its fields freely (a copy shares the lists). It may be read by several
// goroutines at once. It prints and logs without the token.
type Config struct {
	// Backend lists the names of backends in order of preference. "auto" stands for all others, and only as the last.
	Backend []string `mapstructure:"backend"`

	// Rank is the number of this process in the group, from 0; -1 leaves it to the launcher.
	Rank int `mapstructure:"rank"`
	// WorldSize is the number of ranks in the group; 0 leaves it to the launcher.
	WorldSize int `mapstructure:"world-size"`
	// LocalRank is the number of this process among those of the same host, from 0; -1 leaves it to the launcher.
	LocalRank int `mapstructure:"local-rank"`
	// LocalWorldSize is the number of ranks on this host; 0 leaves it to the launcher.
	LocalWorldSize int `mapstructure:"local-world-size"`
	// Launcher is the name of the launcher to believe; "" finds it out.
	Launcher string `mapstructure:"launcher"`

	// RendezvousAddr is the host:port of the rendezvous service, which rank 0 hosts unless RendezvousServed; "" takes it from the launcher.
	RendezvousAddr string `mapstructure:"rendezvous-addr"`
	// RendezvousServed says that the rendezvous service at RendezvousAddr runs outside of the ranks, as symmem run and symmem rendezvous host it; the
	// same on every rank. Then rank 0 joins it as the others do, and the job can lose rank 0.
	RendezvousServed bool `mapstructure:"rendezvous-served"`
	// RendezvousFD is the descriptor of a socket that already listens at RendezvousAddr and that rank 0 has inherited;
	// -1 if there is none.
	RendezvousFD int `mapstructure:"rendezvous-fd"`
	// RendezvousStore is the URL of a store in which a rendezvous service outside of the ranks keeps the state of the job, as symmem rendezvous does;
	// ranks do not use it. It may have a password.
	RendezvousStore Secret `mapstructure:"rendezvous-store"`
	// Job names the job, so that ranks of two jobs never meet in one group; "" takes it from the launcher.
	Job string `mapstructure:"job"`
	// Restart counts how often the job was restarted; ranks of an earlier attempt are refused.
	Restart int `mapstructure:"restart"`
	// Token is the secret that the ranks of the job share.
	Token Secret `mapstructure:"token"`

	// Timeout bounds every collective call that the caller's context does not bound sooner.
	Timeout time.Duration `mapstructure:"timeout"`
	// KernelTimeout bounds each wait in device work.
	KernelTimeout time.Duration `mapstructure:"kernel-timeout"`
	// LivenessTimeout is how long a rank whose connection still stands may be silent, at least 100 milliseconds: when it is over, the others know that it is lost.
	LivenessTimeout time.Duration `mapstructure:"liveness-timeout"`

	// Device is the index or the UUID of the device to use; "" chooses by the local rank. "host" is the CPU, for backends that can
	// work on it as well as on GPUs (nixl).
	Device string `mapstructure:"device"`
	// ShareDevice allows several ranks on one device. Without it they are an error, since kernels of two ranks that wait for
	// each other may never run at the same time on one device. Backend nccl can share one from NCCL 2.30.3 on.
	ShareDevice bool `mapstructure:"share-device"`
	// Multicast says whether multicast addresses are used: auto, on or off.
	Multicast string `mapstructure:"multicast"`
	// NetDevices names the network devices that data may go over between hosts, as UCX does: "eth0", "mlx5_0:1". Empty takes the one
	// that leads to the rendezvous service; "all", alone, takes every one. It is for backend nixl.
	NetDevices []string `mapstructure:"net-devices"`
	// UnprotectedNetwork says what to do where data would go over a network, loopback included, without authentication and
	// encryption: warn, allow or refuse.
	UnprotectedNetwork string `mapstructure:"unprotected-network"`
	// Channels is the number of channels that the program itself has for signal, wait and barrier, from 1 to 1024.
	Channels int `mapstructure:"channels"`
	// MaxBlocks is the most blocks that the kernel of any plan takes on a CUDA device, to leave room for other work; of ranks that differ, the least
	// holds for all. 0 is no bound besides that there is room for a second plan like it.
	MaxBlocks int `mapstructure:"max-blocks"`
	// RankOrder keeps what Auto takes to forms that combine the ranks' elements in the order of the ranks, in plans and in collectives without plans: a result then has the same bits whatever
	// the size, tables, hosts and multicast. Where there is no such form, as between hosts on backend nccl, it is ErrUnsupported. The same on every rank.
	RankOrder bool `mapstructure:"rank-order"`
	// Tuning is the file of a table, made by the command symmem tune, that says which forms of collectives are the fastest here; the same on every rank. "" takes
	// the table that this module has for the GPU, or estimates one. See package kernels/tuning.
	Tuning string `mapstructure:"tuning"`
	// LogLevel is debug, info, warn or error; "" logs nothing.
	LogLevel string `mapstructure:"log-level"`

	// BackendOptions are the options of single backends that were set, by key: "nccl-window". A backend declares its options when it is
	// registered, that is when its package is imported; Keys lists them with the settings. A copy of the Config shares the map.
	BackendOptions map[string]string `mapstructure:"-"`

	// loaded remembers what Load found, for Source. It is never written after that, so copies may share it.
	loaded *origins
}

// Default returns the settings of a program that says nothing. It reads neither the environment nor a file: that is [Load].
func Default() Config {
	return Config{
		Backend:            []string{BackendAuto},
		Rank:               -1,
		LocalRank:          -1,
		RendezvousFD:       -1,
		Timeout:            60 * time.Second,
		KernelTimeout:      2 * time.Minute,
		LivenessTimeout:    10 * time.Second,
		Multicast:          MulticastAuto,
		UnprotectedNetwork: UnprotectedWarn,
		Channels:           64,
	}
}

// Value returns the value of a key ("world-size"), of the type that its field has; for an option of a backend ("nccl-window") a string; nil for
// a key that does not exist.
func (c Config) Value(key string) any {
	if s := lookup(key); s != nil {
		return s.value(&c)
	}
	if d := options.Lookup(key); d != nil {
		return c.option(d)
	}
	return nil
}

// Level returns LogLevel as log/slog has it. ok is false when nothing is to be logged.
func (c Config) Level() (level slog.Level, ok bool) {
	switch c.LogLevel {
	case "debug":
		return slog.LevelDebug, true
	case "info":
		return slog.LevelInfo, true
	case "warn":
		return slog.LevelWarn, true
	case "error":
		return slog.LevelError, true
	}
	return 0, false
}

// String returns all keys and values in one line, without the token.
func (c Config) String() string {
	var b strings.Builder
	for i, s := range specs {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s=%s", s.name, text(s.value(&c)))
	}
	for _, d := range options.All() {
		fmt.Fprintf(&b, " %s=%s", d.Key(), c.option(d))
	}
	return b.String()
}

// LogValue returns a group of all keys and values for log/slog, without the token.
func (c Config) LogValue() slog.Value {
	attrs := make([]slog.Attr, 0, len(specs))
	for _, s := range specs {
		value := s.value(&c)
		switch v := value.(type) {
		case Secret, []string:
			attrs = append(attrs, slog.String(s.name, text(v)))
		default:
			attrs = append(attrs, slog.Any(s.name, v))
		}
	}
	for _, d := range options.All() {
		attrs = append(attrs, slog.String(d.Key(), c.option(d)))
	}
	return slog.GroupValue(attrs...)
}

// text returns a value as a user would write it.
func text(value any) string {
	switch v := value.(type) {
	case []string:
		return strings.Join(v, ",")
	case string:
		return v
	}
	return fmt.Sprint(value)
}

// normalise brings texts into the one form that Validate and the users of the Config know.
func (c *Config) normalise() {
	for _, list := range []*[]string{&c.Backend, &c.NetDevices} {
		var names []string
		for _, entry := range *list {
			for name := range strings.SplitSeq(entry, ",") {
				if name = strings.TrimSpace(name); name != "" {
					names = append(names, name)
				}
			}
		}
		*list = slices.Clip(names)
	}
	for _, s := range []*string{&c.Launcher, &c.Multicast, &c.UnprotectedNetwork, &c.LogLevel} {
		*s = strings.ToLower(*s)
	}
}
