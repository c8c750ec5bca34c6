// Package durable is what keeps the state of a rendezvous service outside of its process, so that another process can go on in its place. A kind of store is
// a package of its own, which a program imports for its effect; package group takes the store by its URL ([group.Options].Store):
//
//	import _ "github.com/symmem/symmem/group/durable/etcd"
//
// The service is the only one that speaks to the store. The ranks speak to the service, as they do to one without a store.
//
// [group.Options]: https://pkg.go.dev/github.com/symmem/symmem/group#Options
package durable

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// Change is one change of what is kept.
type Change struct {
	Key   string // any bytes but "" and NUL
	Value []byte // what is put there; nil removes what is there
	All   bool   // remove all keys that begin with Key
}

// Store keeps keys and values for one job. It has one user: whoever opens the same store after it takes it away, and then every call of this one is
// ErrReplaced. Its methods are called by one goroutine. Each ends with its context, at the latest a moment later, and returns an [*StoreError].
type Store interface {
	// Load returns all that is kept.
	Load(ctx context.Context) (map[string][]byte, error)
	// Commit makes changes, each group of them wholly or not at all, and the groups in their order. After nil they outlive this process. After an
	// error nobody knows which of the groups were made, but these are the first ones. Without changes it only says whether the store is still this one's.
	Commit(ctx context.Context, groups [][]Change) error
	// Clear removes all that is kept: the job is over.
	Clear(ctx context.Context) error
	// Close lets go of the store, and leaves what is kept.
	Close() error
}

// Options are what a Store is opened with.
type Options struct {
	// Name tells jobs apart that are kept in one place. It may have any bytes.
	Name string
	// TTL is how long what is kept outlives the last process that had the store open. The store counts it, not this process's clock.
	TTL time.Duration
	// Logger takes events; never nil.
	Logger *slog.Logger
}

// Opener opens a store of one kind. The URL has that kind's scheme.
type Opener func(ctx context.Context, u *url.URL, opts Options) (Store, error)

var (
	mu      sync.Mutex
	openers = map[string]Opener{}
)

// Register makes a kind of store known by the scheme of its URLs. It is for the init of a store's package, and panics if the scheme is taken.
func Register(scheme string, open Opener) {
	mu.Lock()
	defer mu.Unlock()
	if openers[scheme] != nil {
		panic("durable: two stores have the scheme " + strconv.Quote(scheme))
	}
	openers[scheme] = open
}

// Schemes returns the schemes of all kinds that are known, in alphabetical order.
func Schemes() []string {
	mu.Lock()
	defer mu.Unlock()
	return slices.Sorted(maps.Keys(openers))
}

// Open opens the store of a URL such as etcd://10.0.0.1:2379,10.0.0.2:2379/symmem. It is ErrInvalid if that is no URL, or of a kind that this program
// has not; other errors are the kind's own, [*StoreError] among them.
func Open(ctx context.Context, text string, opts Options) (Store, error) {
	u, open, err := find(text)
	if err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return open(ctx, u, opts)
}

// Check looks at the URL of a store without opening that. It is ErrInvalid if that is no URL, or of a kind that this program has not; what else a kind wants of its URLs Open says.
func Check(text string) error {
	_, _, err := find(text)
	return err
}

// find reads the URL of a store, and finds what opens its kind.
func find(text string) (*url.URL, Opener, error) {
	const op = "opening a store"
	u, err := parse(text)
	switch {
	case err == nil && misplaced(u):
		return nil, nil, errs.Invalid(op, "the store", strconv.Quote(Redacted(text)),
			"a URL such as etcd://USER:PASSWORD@10.0.0.1:2379/symmem, with %23, %2F, %3F and %40 for the characters #, /, ? and @")
	case err != nil || u.Scheme == "" || u.Host == "":
		return nil, nil, errs.Invalid(op, "the store", strconv.Quote(Redacted(text)), "a URL such as etcd://10.0.0.1:2379,10.0.0.2:2379/symmem")
	}
	mu.Lock()
	open := openers[u.Scheme]
	mu.Unlock()
	if open == nil {
		return nil, nil, errs.Advised(op, "the kind of the store", strconv.Quote(u.Scheme), strings.Join(Schemes(), ", "),
			"a program that is to have another imports its package, such as github.com/symmem/symmem/group/durable/etcd")
	}
	return u, open, nil
}

// parse is [url.Parse] for URLs with several hosts as well, with commas between them, which it takes for one: it has them only where none is an IPv6 address in brackets.
func parse(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	scheme, rest, more := strings.Cut(text, "://")
	if err == nil || !more {
		return u, err
	}
	authority, behind := rest, ""
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		authority, behind = rest[:end], rest[end:]
	}
	at := strings.LastIndexByte(authority, '@') + 1
	user, hosts := authority[:at], strings.Split(authority[at:], ",")
	for _, host := range hosts {
		one, failed := url.Parse(scheme + "://" + user + host + behind)
		if failed != nil {
			return nil, err
		}
		u = one
	}
	u.Host = strings.Join(hosts, ",")
	return u, nil
}

// Redacted returns a URL without the secret that it may have. Where it is not certain what of it is one, it returns none of it.
func Redacted(text string) string {
	u, err := parse(text)
	switch {
	case err != nil:
		return "a text that is no URL"
	case misplaced(u):
		return "a URL whose user and password are not where they belong"
	}
	return u.Redacted()
}

// misplaced reports whether something that may be a user and a password is not taken for that: the scheme is missing before it, or it has a character that ends
// it, such as the # in etcd://user:pass#word@host.
func misplaced(u *url.URL) bool {
	rest := *u
	rest.User = nil
	return strings.Contains(rest.String(), "@")
}

// Condition is what is wrong with a store.
type Condition int

// The conditions of a store.
const (
	Unreachable Condition = iota + 1 // it does not answer, or not in time
	Full                             // it takes no more
	Denied                           // it does not let this program in
	Replaced                         // another process has taken it
	Forgotten                        // it was away for so long that it has forgotten the job
	Damaged                          // what is kept there cannot be read
)

// String returns the condition in a few words.
func (c Condition) String() string {
	switch c {
	case Unreachable:
		return "it does not answer in time"
	case Full:
		return "it is full"
	case Denied:
		return "it does not let this program in"
	case Replaced:
		return "another service has taken it"
	case Forgotten:
		return "it has forgotten the job"
	case Damaged:
		return "what is kept there cannot be read"
	}
	return fmt.Sprintf("Condition(%d)", int(c))
}

// advice says what to do.
func (c Condition) advice() string {
	switch c {
	case Unreachable:
		return "see whether it runs, and whether its address is right"
	case Full:
		return "make room there, such as by compaction and defragmentation, and disarm its alarm"
	case Denied:
		return "see the user, the password and the certificates that it is opened with, and what that user may do"
	case Replaced:
		return "only one service may run for an attempt of a job"
	case Forgotten, Damaged:
		return "start the job again as another attempt, which is kept apart"
	}
	return ""
}

// StoreError says what is wrong with a store. It is ErrUnavailable.
type StoreError struct {
	Op        string    // what was done: "keeping the state of the job"
	URL       string    // without secrets
	Condition Condition // what is wrong, for programs
	Err       error     // what the store, or the network, said; may be nil
}

// Error says what was done, where, what is wrong and what to do.
func (e *StoreError) Error() string {
	text := fmt.Sprintf("%s in %s: %v", e.Op, e.URL, e.Condition)
	if e.Err != nil {
		text += fmt.Sprintf(" (%v)", e.Err)
	}
	return text + "; " + e.Condition.advice()
}

// Is reports that a StoreError is ErrUnavailable.
func (e *StoreError) Is(target error) bool { return target == errs.ErrUnavailable }

// Unwrap returns what the store said.
func (e *StoreError) Unwrap() error { return e.Err }
