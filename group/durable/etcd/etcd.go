// Package etcd keeps the state of a rendezvous service in etcd. Import it for its effect:
//
//	import _ "github.com/symmem/symmem/group/durable/etcd"
//
// and give [group.Options].Store, or symmem rendezvous --rendezvous-store, a URL:
//
//	etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/symmem
//	etcd://[fd00::1]:2379,[fd00::2]:2379,[fd00::3]:2379/symmem
//	etcd://user:password@etcd.example.com:2379/symmem
//	etcds://etcd.example.com:2379/symmem?cacert=ca.pem&cert=client.pem&key=client-key.pem
//
// The scheme etcds uses TLS, with the system's certificates where there is no cacert. The path is the prefix of all keys, "symmem" if there is none;
// below it every attempt of every job has a place of its own. The characters #, /, ? and @ of a password are written %23, %2F, %3F and %40. All keys of a job belong to a lease, so that etcd forgets them some time after the last
// service has ended. It counts that time itself, whatever the clocks of other hosts say. A service that opens the place of another takes it: every
// change is made on the condition that the place is still the service's own.
//
// It needs etcd 3.4 or newer.
//
// [group.Options]: https://pkg.go.dev/github.com/symmem/symmem/group#Options
package etcd

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/internal/errs"
)

func init() {
	durable.Register("etcd", open)
	durable.Register("etcds", open)
}

// What etcd takes in one request, by default: 128 operations and 1.5 MiB. Values that are longer are kept in parts.
const (
	maxOps   = 100
	maxBytes = 1 << 20
	partSize = 512 << 10
)

// A value that is kept begins with a byte that says how.
const (
	whole   = 'w' // the value follows
	inParts = 'p' // the name of its parts follows, and their number
)

// page is how many keys are read at a time.
const page = 64

// pause is the time between two attempts of what may be tried again.
const pause = 200 * time.Millisecond

// attemptTime is how long one attempt may take.
const attemptTime = 3 * time.Second

// store is the place of one attempt of a job. Below its prefix are:
//
//	owner      who may change it, and how often that one has
//	state/K    what is kept
//	part/N/I   parts of long values
type store struct {
	client *clientv3.Client
	where  string // the URL without secrets
	prefix string
	owner  string
	lease  clientv3.LeaseID
	logger *slog.Logger

	stop context.CancelFunc
	work sync.WaitGroup

	parts   map[string][2]string // by key: the name and number of the parts that are kept now
	unused  []clientv3.Op        // that remove parts of values which are gone
	changes int                  // that have been made
}

// mark is the value of owner after so many changes.
func (s *store) mark(changes int) string { return fmt.Sprintf("%s/%d", s.owner, changes) }

func (s *store) ownerKey() string { return s.prefix + "owner" }
func (s *store) stateKey() string { return s.prefix + "state/" }
func (s *store) partKey(name string, i int) string {
	return fmt.Sprintf("%spart/%s/%08d", s.prefix, name, i)
}

// open takes the place of a job.
func open(ctx context.Context, u *url.URL, opts durable.Options) (durable.Store, error) {
	config, root, err := parse(u)
	if err != nil {
		return nil, err
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	config.Context = life
	s := &store{
		where: u.Redacted(), prefix: root + "/" + hex.EncodeToString([]byte(opts.Name)) + "/", owner: rand.Text(), logger: opts.Logger, stop: stop,
		parts: map[string][2]string{},
	}
	deadline, bounded := ctx.Deadline()
	if bounded {
		config.DialTimeout = time.Until(deadline)
	}
	// With a user the client asks for a token at once, and waits for that.
	if s.client, err = clientv3.New(*config); err != nil {
		stop()
		return nil, s.failure("opening", err)
	}
	if err := s.take(ctx, opts.TTL); err != nil {
		return nil, errors.Join(s.failure("taking the place of the job", err), s.Close())
	}
	return s, nil
}

// parse reads the URL of a store.
func parse(u *url.URL) (*clientv3.Config, string, error) {
	const op = "opening a store"
	bad := func(what, value, allowed string) (*clientv3.Config, string, error) {
		return nil, "", errs.Invalid(op, what, strconv.Quote(value), allowed)
	}
	config := &clientv3.Config{
		Logger: zap.NewNop(), DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 5 * time.Second,
		MaxCallSendMsgSize: 8 << 20,
		DialOptions:        []grpc.DialOption{grpc.WithUserAgent("symmem")},
	}
	scheme := "http://"
	if u.Scheme == "etcds" {
		scheme = "https://"
	}
	for host := range strings.SplitSeq(u.Host, ",") {
		one, err := url.Parse(scheme + host)
		if err != nil || one.Hostname() == "" || one.Port() == "" {
			return bad("the address of etcd", host, "host:port, and several with commas between them")
		}
		config.Endpoints = append(config.Endpoints, scheme+host)
	}
	config.Username = u.User.Username()
	config.Password, _ = u.User.Password()
	if config.Username != "" && config.Password == "" {
		return bad("the password for etcd", "", "one for the user "+strconv.Quote(config.Username)+": etcd://USER:PASSWORD@HOST:PORT/PREFIX")
	}
	query := u.Query()
	for name := range query {
		if name != "cacert" && name != "cert" && name != "key" || u.Scheme != "etcds" {
			return bad("a part of the store's URL", name, "cacert, cert and key, each with a file, after etcds://")
		}
	}
	if u.Scheme == "etcds" {
		var err error
		if config.TLS, err = certificates(query.Get("cacert"), query.Get("cert"), query.Get("key")); err != nil {
			return nil, "", err
		}
	}
	root := strings.Trim(u.Path, "/")
	if root == "" {
		root = "symmem"
	}
	return config, root, nil
}

// certificates reads the files of TLS, each of which may be "". It is ErrInvalid if one cannot be read, or is none.
func certificates(cacert, cert, key string) (*tls.Config, error) {
	const op = "opening a store"
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if cacert != "" {
		text, err := os.ReadFile(cacert)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errs.Invalid(op, "cacert", strconv.Quote(cacert), "a file that can be read"), err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, errs.Invalid(op, "cacert", strconv.Quote(cacert), "a file with a certificate in PEM")
		}
	}
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errs.Invalid(op, "cert and key", fmt.Sprintf("%q and %q", cert, key), "the files of a certificate and of its key, in PEM"), err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// ownedBy is the condition that the place has the owner of kv still, however many changes that one makes meanwhile: a service with much to do can be
// replaced too.
func (s *store) ownedBy(kv *mvccpb.KeyValue) []clientv3.Cmp {
	owner, _, marked := strings.Cut(string(kv.Value), "/")
	if !marked { // nothing of this package has made it
		return []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(s.ownerKey()), "=", kv.ModRevision)}
	}
	value := clientv3.Value(s.ownerKey())
	return []clientv3.Cmp{clientv3.Compare(value, ">", owner+"/"), clientv3.Compare(value, "<", owner+string('/'+1))}
}

// take makes this process the one that may change the place, and keeps the job's lease alive: that of the service before, or a new one.
func (s *store) take(ctx context.Context, ttl time.Duration) error {
	return s.retry(ctx, func(ctx context.Context) error {
		found, err := s.client.Get(ctx, s.ownerKey())
		if err != nil {
			return err
		}
		s.lease = clientv3.NoLease
		same := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(s.ownerKey()), "=", 0)}
		if len(found.Kvs) > 0 {
			kv := found.Kvs[0]
			s.lease, same = clientv3.LeaseID(kv.Lease), s.ownedBy(kv)
		}
		if s.lease != clientv3.NoLease {
			if _, err := s.client.KeepAliveOnce(ctx, s.lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
				s.lease = clientv3.NoLease // it has just ended, and everything with it
			} else if err != nil {
				return err
			}
		}
		if s.lease == clientv3.NoLease {
			granted, err := s.client.Grant(ctx, max(1, int64(ttl/time.Second)))
			if err != nil {
				return err
			}
			s.lease = granted.ID
		}
		// An attempt that was given up may come through later: it finds another owner then.
		owned, err := s.client.Txn(ctx).If(same...).
			Then(clientv3.OpPut(s.ownerKey(), s.mark(0), clientv3.WithLease(s.lease))).Commit()
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return status.Error(codes.Unavailable, err.Error()) // again
		case err != nil:
			return err
		case !owned.Succeeded:
			return status.Error(codes.Unavailable, "another has taken the place meanwhile") // again
		}
		life, stop := context.WithCancel(context.WithoutCancel(ctx))
		beats, err := s.client.KeepAlive(life, s.lease)
		if err != nil {
			stop()
			return err
		}
		before := s.stop
		s.stop = func() { stop(); before() }
		lease := s.lease
		s.work.Go(func() { s.keepAlive(life, lease, beats) })
		return nil
	})
}

// keepAlive keeps a lease alive until life ends, or the lease has; then the next change says so. The client gives up for good when etcd has not answered for as long as
// the lease lasts, but an etcd that comes back gives its leases their whole time again.
func (s *store) keepAlive(life context.Context, lease clientv3.LeaseID, beats <-chan *clientv3.LeaseKeepAliveResponse) {
	for {
		for range beats {
		}
		for again := true; again; {
			select {
			case <-life.Done():
				return
			case <-time.After(pause):
			}
			within, cancel := context.WithTimeout(life, attemptTime)
			_, err := s.client.KeepAliveOnce(within, lease)
			cancel()
			if errors.Is(err, rpctypes.ErrLeaseNotFound) {
				return
			}
			if err == nil {
				beats, err = s.client.KeepAlive(life, lease)
			}
			again = err != nil
		}
	}
}

// Load returns all that is kept.
func (s *store) Load(ctx context.Context) (map[string][]byte, error) {
	for {
		kept, err := s.load(ctx)
		if err == nil {
			return kept, nil
		}
		if errors.Is(err, rpctypes.ErrCompacted) { // what was read a part of is too old by now
			select {
			case <-time.After(pause):
				continue
			case <-ctx.Done():
			}
		}
		return nil, s.failure("reading the state of the job", err)
	}
}

// load reads all that is kept at one revision.
func (s *store) load(ctx context.Context) (map[string][]byte, error) {
	kept := map[string][]byte{}
	clear(s.parts)
	end := clientv3.GetPrefixRangeEnd(s.stateKey())
	revision := int64(0)
	for from, more := s.stateKey(), true; more; {
		r, err := s.get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return nil, err
		}
		revision = r.Header.Revision
		for _, kv := range r.Kvs {
			key := strings.TrimPrefix(string(kv.Key), s.stateKey())
			if kept[key], err = s.value(ctx, key, kv.Value, revision); err != nil {
				return nil, err
			}
			from = string(kv.Key) + "\x00"
		}
		more = r.More
	}
	return kept, nil
}

// get reads once, in as many attempts as it takes: the state of a large job is more than can be read in the time of one.
func (s *store) get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	var r *clientv3.GetResponse
	var compacted error // the same attempt would not help
	err := s.retry(ctx, func(ctx context.Context) (err error) {
		if r, err = s.client.Get(ctx, key, opts...); errors.Is(err, rpctypes.ErrCompacted) {
			compacted = err
			return nil
		}
		return err
	})
	return r, cmp.Or(err, compacted)
}

// errDamaged is a value that nothing of this package has made.
var errDamaged = errors.New("a value that is no value of a rendezvous service")

// value returns what is kept by text under key.
func (s *store) value(ctx context.Context, key string, text []byte, revision int64) ([]byte, error) {
	switch {
	case len(text) > 0 && text[0] == whole:
		return text[1:], nil
	case len(text) == 0 || text[0] != inParts:
		return nil, fmt.Errorf("%w: key %q", errDamaged, key)
	}
	name, count, _ := strings.Cut(string(text[1:]), "/")
	n, err := strconv.Atoi(count)
	if err != nil {
		return nil, fmt.Errorf("%w: key %q: %w", errDamaged, key, err)
	}
	s.parts[key] = [2]string{name, count}
	var value []byte
	for i := range n {
		r, err := s.get(ctx, s.partKey(name, i), clientv3.WithRev(revision))
		if err != nil {
			return nil, err
		}
		if len(r.Kvs) != 1 {
			return nil, fmt.Errorf("%w: key %q lacks part %d of %d", errDamaged, key, i, n)
		}
		value = append(value, r.Kvs[0].Value...)
	}
	return value, nil
}

// Commit makes changes.
func (s *store) Commit(ctx context.Context, groups [][]durable.Change) error {
	var ops []clientv3.Op
	size := 0
	flush := func() error {
		if len(ops) == 0 {
			return nil
		}
		err := s.txn(ctx, ops)
		ops, size = nil, 0
		return err
	}
	fail := func(err error) error { return s.failure("keeping the state of the job", err) }
	if len(groups) == 0 {
		if err := s.own(ctx); err != nil {
			return fail(err)
		}
		return nil
	}
	seen := map[string]bool{} // a transaction changes a key once
	for _, changes := range groups {
		var these []clientv3.Op
		n, again := 0, false
		for _, c := range changes {
			more, bytes, err := s.ops(ctx, c)
			if err != nil {
				return fail(err)
			}
			these, n = append(these, more...), n+bytes
			again = again || seen[c.Key] || c.All
		}
		if len(ops)+len(these) > maxOps || size+n > maxBytes || again {
			if err := flush(); err != nil {
				return fail(err)
			}
			clear(seen)
		}
		for _, c := range changes {
			seen[c.Key] = true
			if c.All { // nothing may follow that it would take
				seen = map[string]bool{}
			}
		}
		ops, size = append(ops, these...), size+n
		for _, c := range changes {
			if c.All {
				if err := flush(); err != nil {
					return fail(err)
				}
				break
			}
		}
	}
	if err := flush(); err != nil {
		return fail(err)
	}
	if err := s.dropUnused(ctx); err != nil {
		return fail(err)
	}
	return nil
}

// dropUnused removes the parts of values that are gone, which may be more than etcd takes at once. What is left of them if this process ends before goes
// with the job.
func (s *store) dropUnused(ctx context.Context) error {
	for len(s.unused) > 0 {
		n := min(len(s.unused), maxOps)
		if err := s.txn(ctx, s.unused[:n:n]); err != nil {
			return err
		}
		s.unused = s.unused[n:]
	}
	return nil
}

// ops returns the operations of a change, and about how many bytes they are. It writes the parts of a long value, which nothing refers to yet.
func (s *store) ops(ctx context.Context, c durable.Change) ([]clientv3.Op, int, error) {
	key := s.stateKey() + c.Key
	if c.All {
		for have := range s.parts {
			if strings.HasPrefix(have, c.Key) {
				s.unused = append(s.unused, s.dropParts(have)...)
			}
		}
		return []clientv3.Op{clientv3.OpDelete(key, clientv3.WithPrefix())}, len(key), nil
	}
	ops := s.dropParts(c.Key)
	switch {
	case c.Value == nil:
		return append(ops, clientv3.OpDelete(key)), len(key), nil
	case len(c.Value) <= partSize:
		return append(ops, clientv3.OpPut(key, string(append([]byte{whole}, c.Value...)), clientv3.WithLease(s.lease))), len(key) + len(c.Value), nil
	}
	name, count := rand.Text(), 0
	for rest := c.Value; len(rest) > 0; count++ {
		n := min(len(rest), partSize)
		if err := s.txn(ctx, []clientv3.Op{clientv3.OpPut(s.partKey(name, count), string(rest[:n]), clientv3.WithLease(s.lease))}); err != nil {
			return nil, 0, err
		}
		rest = rest[n:]
	}
	s.parts[c.Key] = [2]string{name, strconv.Itoa(count)}
	head := fmt.Sprintf("%c%s/%d", inParts, name, count)
	return append(ops, clientv3.OpPut(key, head, clientv3.WithLease(s.lease))), len(key) + len(head), nil
}

// dropParts removes the parts of the value that is kept under a key.
func (s *store) dropParts(key string) []clientv3.Op {
	have, long := s.parts[key]
	if !long {
		return nil
	}
	delete(s.parts, key)
	return []clientv3.Op{clientv3.OpDelete(s.prefix+"part/"+have[0]+"/", clientv3.WithPrefix())}
}

// What may have become of a place.
var (
	errReplaced  = errors.New("the place of the job has another owner")
	errForgotten = errors.New("the place of the job is empty: its lease has ended")
)

// txn makes operations, once, if the place is still this process's. An attempt that was given up may come through later, so each counts the changes up.
func (s *store) txn(ctx context.Context, ops []clientv3.Op) error {
	before, after := s.mark(s.changes), s.mark(s.changes+1)
	ops = append(ops, clientv3.OpPut(s.ownerKey(), after, clientv3.WithLease(s.lease)))
	return s.retry(ctx, func(ctx context.Context) error {
		r, err := s.client.Txn(ctx).If(clientv3.Compare(clientv3.Value(s.ownerKey()), "=", before)).Then(ops...).Else(clientv3.OpGet(s.ownerKey())).Commit()
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return errForgotten
		case err != nil:
			return err
		case !r.Succeeded && len(r.Responses[0].GetResponseRange().Kvs) == 0:
			return errForgotten
		case !r.Succeeded && string(r.Responses[0].GetResponseRange().Kvs[0].Value) != after:
			return errReplaced
		}
		s.changes++
		return nil
	})
}

// own says whether the place is still this process's.
func (s *store) own(ctx context.Context) error {
	return s.retry(ctx, func(ctx context.Context) error {
		r, err := s.client.Get(ctx, s.ownerKey())
		switch {
		case err != nil:
			return err
		case len(r.Kvs) == 0:
			return errForgotten
		case string(r.Kvs[0].Value) != s.mark(s.changes):
			return errReplaced
		}
		return nil
	})
}

// Clear removes all that is kept, with the lease that it belongs to.
func (s *store) Clear(ctx context.Context) error {
	if err := s.txn(ctx, []clientv3.Op{clientv3.OpDelete(s.prefix+"state/", clientv3.WithPrefix()), clientv3.OpDelete(s.prefix+"part/", clientv3.WithPrefix())}); err != nil {
		return s.failure("removing the state of the job", err)
	}
	if _, err := s.client.Revoke(ctx, s.lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return s.failure("removing the state of the job", err)
	}
	return nil
}

// Close lets go of the store.
func (s *store) Close() error {
	s.stop()
	err := s.client.Close()
	s.work.Wait()
	if errors.Is(err, context.Canceled) { // it has just been stopped
		return nil
	}
	return err
}

// retry calls f until it succeeds, ctx ends, or another attempt would not help. No attempt takes all the time: etcd may be electing a leader, or the
// host that was asked may be gone and another one there.
func (s *store) retry(ctx context.Context, f func(ctx context.Context) error) error {
	for attempt := 1; ; attempt++ {
		one, cancel := context.WithTimeout(ctx, attemptTime)
		err := f(one)
		cancel()
		if err == nil || !passing(err) || ctx.Err() != nil {
			return err
		}
		s.logger.Debug("etcd", "attempt", attempt, "error", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// passing reports whether an error may be gone at the next attempt.
func passing(err error) bool {
	if errors.Is(err, rpctypes.ErrTooManyRequests) { // it has much to do
		return true
	}
	switch code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unknown:
		return !errors.Is(err, errReplaced) && !errors.Is(err, errForgotten) && !errors.Is(err, errDamaged)
	}
	return false
}

// code returns gRPC's code of an error.
func code(err error) codes.Code {
	if errors.Is(err, context.DeadlineExceeded) {
		return codes.DeadlineExceeded
	}
	if coded, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return coded.Code()
	}
	return status.Code(err)
}

// failure names what is wrong.
func (s *store) failure(op string, err error) error {
	condition := durable.Unreachable
	switch c := code(err); {
	case errors.Is(err, errReplaced):
		condition, err = durable.Replaced, nil
	case errors.Is(err, errForgotten):
		condition, err = durable.Forgotten, nil
	case errors.Is(err, errDamaged):
		condition = durable.Damaged
	case errors.Is(err, rpctypes.ErrNoSpace):
		condition = durable.Full
	case errors.Is(err, rpctypes.ErrTooManyRequests): // it is not full
	case c == codes.Unauthenticated, c == codes.PermissionDenied, errors.Is(err, rpctypes.ErrAuthFailed), errors.Is(err, rpctypes.ErrUserEmpty),
		c == codes.InvalidArgument && strings.Contains(err.Error(), "authentication"), c == codes.FailedPrecondition && strings.Contains(err.Error(), "authentication"):
		condition = durable.Denied
	case c == codes.ResourceExhausted:
		condition = durable.Full
	}
	return &durable.StoreError{Op: op, URL: s.where, Condition: condition, Err: err}
}
