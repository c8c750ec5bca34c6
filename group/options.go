package group

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"time"

	"github.com/symmem/symmem/group/durable"
)

// MaxWorldSize is the most ranks that a job may have.
const MaxWorldSize = 16384

// MaxPorts is the most ports that a rendezvous service may be looked for at.
const MaxPorts = 64

// MinToken is the least number of bytes of a token that may be used on addresses other than loopback.
const MinToken = 16

// Options say which rank of which job this process is and where the ranks meet. Nil is a world of one rank.
type Options struct {
	// Rank is this rank's number in the world, from 0.
	Rank int
	// WorldSize is the number of ranks in the world, at most MaxWorldSize. Zero means 1.
	WorldSize int
	// LocalRank is this rank's number among those of its host. The package only passes it on, in Member.
	LocalRank int
	// Addr is where the rendezvous service is reached, "host:port". Rank 0 listens there, unless it has a Listener or the job is Served. Where nobody knows the host's name yet, it is
	// looked up again, for the Timeout, if there is a Token: without one it has to be known as this host's.
	Addr string
	// Ports is how many ports, from that of Addr on, the service may be at, for an address that another program may have taken: rank 0 listens on the first
	// that is free, and the others look at each of them, and go on where somebody else answers, or nobody says a word. An answer that may be of their own service as well,
	// such as that the token is wrong, they take for the last word when some seconds have passed. Give it together with a Job that no other job has; the same on
	// every rank, at most [MaxPorts]. Zero means 1: who answers at Addr is the service, or this rank has come to the wrong place.
	Ports int
	// Listener is a listening socket for rank 0, or for Serve or ServeJobs, to serve on instead of Addr. Join, Serve and ServeJobs take it over and close it.
	Listener net.Listener
	// Served says that Serve or ServeJobs serves the rendezvous at Addr, so that rank 0 joins there as the others do; the same on every rank.
	Served bool
	// Job names the job, so that a rank that strays into another job's service is refused.
	Job string
	// Restart counts how often the job was started again, so that a rank of an earlier attempt is refused.
	Restart int
	// Token is the job's secret. With a token, connections are encrypted and both sides prove that they know it. Without one, or with one of fewer
	// than MinToken bytes, the service listens and is looked for on loopback addresses only; without one any user of the host can join there. Make it
	// at random: someone who answers at Addr in place of the service cannot use the proof that clients send, but can test guessed tokens against it
	// for as long as they like.
	Token string
	// TLS, used only with a token, replaces the self-signed certificate that rank 0, or Serve, makes for the job. It uses it as a
	// server, the others as clients: Certificates, ClientAuth and ClientCAs, or RootCAs and ServerName. At least TLS 1.3 is used.
	TLS *tls.Config
	// Timeout bounds Join and each collective call whose context does not end sooner. Zero is 60 seconds.
	Timeout time.Duration
	// LivenessTimeout is how long a rank (or, for the others, the service) may be silent, at least 100 ms: when it is over, the others know that the rank is lost.
	// To be in time, it counts as lost up to a sixteenth of that before, at most 250 ms; heartbeats are sent four times in it or more often. A service whose state is
	// kept is looked for then, and lost if it is not found. A connection that breaks is noticed at once. Time in which the process that watches did not get to run does
	// not count. How long ranks may be silent is for the process to say that serves, and how long the service may be is for each rank; both sides learn it of each
	// other, and send heartbeats as often as the shorter one needs. A rank that is stopped while it joins counts as lost after the service's Timeout and
	// LivenessTimeout. Zero is 10 seconds.
	LivenessTimeout time.Duration
	// Store, for Serve and ServeJobs alone, is the URL of a store that keeps the state of the job, such as etcd://10.0.0.1:2379/symmem, so that a service that is started
	// again goes on with it. The program imports the kind's package: [github.com/symmem/symmem/group/durable/etcd]. "" keeps nothing.
	Store string
	// Stay, for ServeJobs alone, goes on where no job is left, until the context ends.
	Stay bool
	// BootID pretends that this rank runs on another machine. "" is the truth.
	BootID string
	// Logger takes the rank's events: ranks that come, leave or are lost, refusals. Nil is silence.
	Logger *slog.Logger

	limits *limits // nil is defaultLimits
}

func (o *Options) bounds() *limits {
	if o.limits == nil {
		return &defaultLimits
	}
	return o.limits
}

// addrs returns where the service may be, in the order in which it looks for a free port.
func (o *Options) addrs() []string {
	addrs := []string{o.Addr}
	if o.Ports > 1 {
		host, port, _ := net.SplitHostPort(o.Addr) // as checked
		first, _ := parseLaunchPort(port)
		for n := first + 1; n < first+o.Ports; n++ {
			addrs = append(addrs, net.JoinHostPort(host, strconv.Itoa(n)))
		}
	}
	return addrs
}

// where says where the service may be.
func (o *Options) where() string { return places(o.Addr, o.Ports) }

// server says whose process the service is in.
func (o *Options) server() string {
	if o.Served {
		return "the rendezvous service"
	}
	return "rank 0, which serves the rendezvous"
}

// minLivenessTimeout keeps a scheduling hiccup from looking like death.
const minLivenessTimeout = 100 * time.Millisecond

// longestTimeout is what longer timeouts count as: some 18 years.
const longestTimeout time.Duration = math.MaxInt64 / 16

// checked returns a copy of the options with the defaults filled in, or says what is wrong with them.
func (o *Options) checked() (*Options, error) { return o.checkedFor("Join") }

// checkedFor is checked with the name of the call for errors.
func (o *Options) checkedFor(op string) (*Options, error) {
	if o == nil {
		o = &Options{}
	}
	c := *o
	if c.WorldSize == 0 {
		c.WorldSize = 1
	}
	if c.Ports == 0 {
		c.Ports = 1
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.LivenessTimeout == 0 {
		c.LivenessTimeout = defaultLivenessTimeout
	}
	// Some of them are added up. Whoever wants no bound gives the longest duration that there is.
	c.Timeout, c.LivenessTimeout = min(c.Timeout, longestTimeout), min(c.LivenessTimeout, longestTimeout)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case c.WorldSize < 0 || c.WorldSize > MaxWorldSize:
		return nil, invalid(op, "WorldSize", c.WorldSize, fmt.Sprintf("1 to %d", MaxWorldSize))
	case c.Rank < 0 || c.Rank >= c.WorldSize:
		return nil, invalid(op, "Rank", c.Rank, fmt.Sprintf("0 to %d in a world of %d", c.WorldSize-1, c.WorldSize))
	case c.Ports < 0 || c.Ports > MaxPorts:
		return nil, invalid(op, "Ports", c.Ports, fmt.Sprintf("1 to %d, or 0 for 1", MaxPorts))
	case c.Restart < 0:
		return nil, invalid(op, "Restart", c.Restart, "0 or more")
	case c.Timeout < 0:
		return nil, invalid(op, "Timeout", c.Timeout, "more than 0, or 0 for the default")
	case c.LivenessTimeout < minLivenessTimeout:
		return nil, invalid(op, "LivenessTimeout", c.LivenessTimeout, fmt.Sprintf("at least %v, or 0 for the default", minLivenessTimeout))
	case c.Listener != nil && c.Rank != 0:
		return nil, invalid(op, "Listener", c.Listener.Addr(), "none on ranks other than 0, which serves for all")
	case c.Listener != nil && c.Served:
		return nil, invalid(op, "Listener", c.Listener.Addr(), "none where the rendezvous is served already")
	case c.TLS != nil && c.Token == "":
		return nil, invalid(op, "TLS", "set without a token", "certificates together with Options.Token")
	case c.Store != "" && op == "Join":
		return nil, invalid(op, "Store", durable.Redacted(c.Store), "none but for Serve and ServeJobs: the ranks do not speak to it")
	case c.Stay && op != "ServeJobs":
		return nil, invalid(op, "Stay", c.Stay, "false but for ServeJobs")
	case op == "ServeJobs" && (o.WorldSize != 0 || o.Job != "" || o.Restart != 0):
		return nil, invalid(op, "WorldSize, Job and Restart", fmt.Sprintf("%d, %s and %d", o.WorldSize, quoteJob(o.Job), o.Restart), "none: each job has its own")
	case len(c.Job) > maxText:
		return nil, invalid(op, "len(Job)", len(c.Job), fmt.Sprintf("at most %d bytes", maxText))
	case (c.WorldSize > 1 || c.Served || op != "Join") && c.Listener == nil && c.Addr == "":
		return nil, invalid(op, "Addr", `""`, "the host:port of the rendezvous service, the same on every rank")
	}
	if c.Addr != "" {
		_, port, err := net.SplitHostPort(c.Addr)
		if err != nil {
			return nil, invalid(op, "Addr", c.Addr, "host:port")
		}
		if n, ok := parseLaunchPort(port); c.Ports > 1 && (!ok || n+c.Ports-1 > math.MaxUint16) {
			return nil, invalid(op, "Addr", c.Addr, fmt.Sprintf("host:port with a port from 1 to %d, as Ports is %d", math.MaxUint16-c.Ports+1, c.Ports))
		}
	}
	c.BootID = clip(c.BootID)
	return &c, nil
}
