package group

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/internal/testneed"
)

// ownEtcd starts a server for this test alone.
func ownEtcd(t *testing.T, flags ...string) *etcdServer {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		testneed.Missing(t, "etcd", err)
	}
	dir, err := os.MkdirTemp("", "etcd")
	require.NoError(t, err)
	s, err := startEtcd(dir, freePort(t), freePort(t), flags...)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.kill()
		require.NoError(t, os.RemoveAll(dir))
	})
	return s
}

func openStore(t *testing.T, url, name string, ttl time.Duration) durable.Store {
	t.Helper()
	s, err := durable.Open(testContext(t), url, durable.Options{Name: name, TTL: ttl})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func requireCondition(t *testing.T, err error, want durable.Condition) {
	t.Helper()
	var failed *durable.StoreError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, want, failed.Condition, failed.Error())
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotContains(t, failed.Error(), "secret")
}

// TestStoreKeeps: a store gives back what was put there, of any size, after whatever order of changes, and keeps jobs apart.
func TestStoreKeeps(t *testing.T) {
	eachStore(t, func(t *testing.T, url string) {
		ctx := testContext(t)
		name := "a job/\x00\xff" + uniqueJob()
		s := openStore(t, url, name, time.Minute)
		other := openStore(t, url, name+"2", time.Minute)
		long := []byte(strings.Repeat("long", 1<<20))
		value := func(key string, text []byte) durable.Change { return durable.Change{Key: key, Value: text} }
		require.NoError(t, s.Commit(ctx, [][]durable.Change{
			{value("a/1", []byte("one")), value("a/2", []byte{})},
			{value("long", long)},
			{value("a/1", []byte("two"))},
			{{Key: "a/", All: true}, value("b", []byte("b"))},
			{value("a/3", []byte("three"))},
			{{Key: "b"}},
			{value("long", long[1:])},
			{value("c\xff\x01", []byte("odd"))},
		}))
		var many [][]durable.Change
		want := map[string][]byte{"a/3": []byte("three"), "long": long[1:], "c\xff\x01": []byte("odd")}
		for i := range 500 {
			key := fmt.Sprintf("many/%d", i)
			want[key] = []byte(key)
			many = append(many, []durable.Change{value(key, []byte(key))})
		}
		require.NoError(t, s.Commit(ctx, many))
		require.NoError(t, other.Commit(ctx, [][]durable.Change{{value("theirs", []byte("x"))}}))
		again := openStore(t, url, name, time.Minute)
		kept, err := again.Load(ctx)
		require.NoError(t, err)
		require.Equal(t, want, kept)
		requireCondition(t, s.Commit(ctx, [][]durable.Change{{value("late", []byte("x"))}}), durable.Replaced)

		require.NoError(t, again.Commit(ctx, [][]durable.Change{{{Key: "long"}}, {{Key: "many/", All: true}}}))
		kept, err = again.Load(ctx)
		require.NoError(t, err)
		require.Len(t, kept, 2)
		require.NoError(t, again.Clear(ctx))
		kept, err = openStore(t, url, name, time.Minute).Load(ctx)
		require.NoError(t, err)
		require.Empty(t, kept)
		kept, err = other.Load(ctx)
		require.NoError(t, err)
		require.Len(t, kept, 1)
	})
}

// TestStoreTakenFromBusyOwner: a store is taken over while its owner makes one change after the other, and at once.
func TestStoreTakenFromBusyOwner(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, url string) {
		ctx := testContext(t)
		name := uniqueJob()
		change := [][]durable.Change{{{Key: "k", Value: []byte("x")}}}
		var before chan error // how the owner before ended
		for range 20 {        // to fall between two changes each time would be luck
			owner := openStore(t, url, name, time.Minute)
			if before != nil {
				requireCondition(t, <-before, durable.Replaced)
			}
			ended, at := make(chan error, 1), make(chan struct{})
			go func() {
				err := owner.Commit(ctx, change)
				close(at)
				for err == nil {
					err = owner.Commit(ctx, change)
				}
				ended <- err
			}()
			<-at
			before = ended
		}
		openStore(t, url, name, time.Minute)
		requireCondition(t, <-before, durable.Replaced)
	})
}

// TestManyLongValuesAtOnce: more long values end together than etcd takes operations in one transaction, and leave nothing behind.
func TestManyLongValuesAtOnce(t *testing.T) {
	t.Parallel() // it waits for etcd, most of the time
	server := ownEtcd(t)
	ctx := testContext(t)
	s := openStore(t, server.url, uniqueJob(), time.Minute)
	const many = 150
	long := make([]byte, 520<<10)
	for i := range many {
		require.NoError(t, s.Commit(ctx, [][]durable.Change{{{Key: fmt.Sprintf("of/g/key/%d", i), Value: long}}}))
	}
	require.Greater(t, server.keys(t), 3*many)
	require.NoError(t, s.Commit(ctx, [][]durable.Change{
		{{Key: "group/g"}, {Key: "of/g/", All: true}, {Key: "of/h/key", Value: long}},
		{{Key: "after", Value: []byte("x")}},
	}))
	kept, err := s.Load(ctx)
	require.NoError(t, err)
	require.Equal(t, map[string][]byte{"of/h/key": long, "after": []byte("x")}, kept)
	const left = 1 + 3 + 1 // the owner, a long value in two parts, and a short one
	require.Eventually(t, func() bool { return server.keys(t) == left }, 10*time.Second, 50*time.Millisecond, "the lease of the probe ends too")
}

// TestEtcdKeepsNothingElse: a job that is over leaves no key in etcd, long values and all.
func TestEtcdKeepsNothingElse(t *testing.T) {
	t.Parallel() // it waits, most of the time
	server := ownEtcd(t)
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: server.url})
	groups := s.join()
	requireNone(t, onAll(groups, func(g *Group) error {
		if err := g.Store().Set(ctx, fmt.Sprint("long", g.Rank()), make([]byte, 3<<20)); err != nil {
			return err
		}
		if err := g.Store().Set(ctx, fmt.Sprint("long", g.Rank()), make([]byte, 2<<20)); err != nil {
			return err
		}
		_, err := g.AllGather(ctx, "large", make([]byte, 1<<20))
		return err
	}))
	require.NoError(t, s.endAndStart())
	requireNone(t, onAll(groups, func(g *Group) error {
		long, err := g.Store().Get(ctx, fmt.Sprint("long", 1-g.Rank()))
		if err == nil && len(long) != 2<<20 {
			err = fmt.Errorf("%d bytes", len(long))
		}
		return err
	}))
	require.Positive(t, server.keys(t))
	s.finish(ctx, groups)
	require.Eventually(t, func() bool { return server.keys(t) == 0 }, 10*time.Second, 50*time.Millisecond, "the lease of the probe ends too")
}

// keys counts the keys in the server, by its own client.
func (s *etcdServer) keys(t *testing.T) int {
	t.Helper()
	return strings.Count(s.ctl(t, "get", "", "--prefix", "--keys-only"), "\n") / 2 // each with an empty line
}

// ctl runs etcd's own client.
func (s *etcdServer) ctl(t *testing.T, args ...string) string {
	t.Helper()
	program := "etcdctl"
	if _, err := exec.LookPath(program); err != nil {
		testneed.Missing(t, "etcd", err)
	}
	cmd := exec.CommandContext(testContext(t), program, append([]string{"--endpoints", strings.TrimPrefix(s.url, "etcd://")}, args...)...)
	cmd.Env = append(os.Environ(), "ETCDCTL_API=3")
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		t.Fatalf("etcdctl %v: %s", args, exit.Stderr)
	}
	require.NoError(t, err)
	return string(out)
}

// TestEtcdFull: an etcd that takes no more ends the service with an error that says so, and when there is room again, the next service goes on.
func TestEtcdFull(t *testing.T) {
	t.Parallel() // it waits, most of the time
	server := ownEtcd(t, "--quota-backend-bytes", fmt.Sprint(8<<20))
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: server.url})
	groups := s.join()
	require.NoError(t, groups[0].Store().Set(ctx, "before", []byte("kept")))
	filled := make(chan error, 1)
	go func() {
		var err error
		for i := 0; err == nil && i < 64; i++ {
			short, cancel := context.WithTimeout(ctx, 3*time.Second)
			err = groups[0].Store().Set(short, "fill", make([]byte, 1<<20))
			cancel()
		}
		filled <- err
	}()
	requireCondition(t, s.wait(), durable.Full)
	require.ErrorIs(t, <-filled, context.DeadlineExceeded, "nobody hangs")
	require.NoError(t, groups[1].Err(), "ranks look for the next service")

	var status []struct {
		Status struct {
			Header struct{ Revision int64 }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(server.ctl(t, "endpoint", "status", "--write-out=json")), &status))
	server.ctl(t, "compact", fmt.Sprint(status[0].Status.Header.Revision))
	server.ctl(t, "defrag")
	server.ctl(t, "alarm", "disarm")
	s.start(nil)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "again") }))
	before, err := groups[1].Store().Get(ctx, "before")
	require.NoError(t, err)
	require.Equal(t, "kept", string(before))
	s.finish(ctx, groups)
}

// TestEtcdSlow: an etcd that stops for a while holds the job up; one that stops for too long ends the service with an error that says so.
func TestEtcdSlow(t *testing.T) {
	t.Parallel() // it waits, most of the time
	server := ownEtcd(t)
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: server.url, LivenessTimeout: time.Second, Timeout: 30 * time.Second})
	groups := s.join()
	require.NoError(t, server.cmd.Process.Signal(syscall.SIGSTOP))
	go func() {
		time.Sleep(2 * time.Second)
		_ = server.cmd.Process.Signal(syscall.SIGCONT)
	}()
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "slow") }))

	require.NoError(t, server.cmd.Process.Signal(syscall.SIGSTOP))
	ends := make(chan []error, 1)
	go func() { ends <- onAll(groups, func(g *Group) error { return g.Barrier(ctx, "too slow") }) }()
	requireCondition(t, s.wait(), durable.Unreachable)
	require.NoError(t, server.cmd.Process.Signal(syscall.SIGCONT))
	s.start(nil)
	requireNone(t, <-ends)
	s.finish(ctx, groups)
}

// restarted gives what starts an etcd, and starts it again at the same address with what it has kept.
func restarted(t *testing.T) (start func() *etcdServer) {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		testneed.Missing(t, "etcd", err)
	}
	dir, client, peer := t.TempDir(), freePort(t), freePort(t)
	return func() *etcdServer {
		t.Helper()
		server, err := startEtcd(dir, client, peer)
		require.NoError(t, err)
		return server
	}
}

// TestEtcdStartedAgain: an etcd that is killed and started again holds the job up, and has kept its state.
func TestEtcdStartedAgain(t *testing.T) {
	t.Parallel() // it waits, most of the time
	start := restarted(t)
	server := start()
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: server.url})
	groups := s.join()
	require.NoError(t, groups[0].Store().Set(ctx, "k", []byte("v")))
	server.kill()
	ends := make(chan []error, 1)
	go func() { ends <- onAll(groups, func(g *Group) error { return g.Barrier(ctx, "meanwhile") }) }()
	server = start()
	defer func() { server.kill() }()
	requireNone(t, <-ends)
	require.NoError(t, s.endAndStart())
	v, err := groups[1].Store().Get(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "v", string(v))
	s.finish(ctx, groups)
}

// TestEtcdAwayForLong: an etcd that is away for longer than it keeps what nobody comes back for, and comes back, keeps what the store has for as long as that is open.
func TestEtcdAwayForLong(t *testing.T) {
	t.Parallel() // it waits, most of the time
	start := restarted(t)
	server := start()
	ctx := testContext(t)
	const ttl = 4 * time.Second
	s, err := durable.Open(ctx, server.url, durable.Options{Name: "job", TTL: ttl})
	require.NoError(t, err)
	change := func(value string) [][]durable.Change {
		return [][]durable.Change{{{Key: "k", Value: []byte(value)}}}
	}
	require.NoError(t, s.Commit(ctx, change("before")))
	server.kill()
	time.Sleep(ttl + 3*time.Second)
	server = start()
	defer func() { server.kill() }()
	require.NoError(t, s.Commit(ctx, change("behind")))
	time.Sleep(2*ttl + time.Second)
	kept, err := s.Load(ctx)
	require.NoError(t, err)
	require.Equal(t, map[string][]byte{"k": []byte("behind")}, kept)
	require.NoError(t, s.Commit(ctx, change("in the end")))
	require.NoError(t, s.Close())
}

// TestEtcdRefuses: an etcd that is not there, or does not let the service in, is an error that says so, in bounded time and without the password.
func TestEtcdRefuses(t *testing.T) {
	t.Parallel() // it waits, most of the time
	server := ownEtcd(t)
	for _, args := range [][]string{
		{"user", "add", "root:secret"}, {"user", "grant-role", "root", "root"}, {"user", "add", "poor:secret"},
		{"auth", "enable"},
	} {
		server.ctl(t, args...)
	}
	at := strings.TrimPrefix(server.url, "etcd://")
	for name, tt := range map[string]struct {
		url  string
		want durable.Condition
	}{
		"wrong password":    {"etcd://root:secretive@" + at, durable.Denied},
		"no password":       {"etcd://" + at, durable.Denied},
		"not allowed":       {"etcd://poor:secret@" + at, durable.Denied},
		"nobody there":      {fmt.Sprintf("etcd://127.0.0.1:%d", freePort(t)), durable.Unreachable},
		"no TLS there":      {"etcds://" + at, durable.Unreachable},
		"nobody for a user": {fmt.Sprintf("etcd://root:secret@127.0.0.1:%d", freePort(t)), durable.Unreachable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			err := Serve(testContext(t), &Options{WorldSize: 2, Listener: listenLoopback(t), Store: tt.url, LivenessTimeout: 3 * time.Second}) // etcd takes long to look at a password
			requireCondition(t, err, tt.want)
			require.Less(t, time.Since(began), time.Minute)
		})
	}
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: "etcd://root:secret@" + at})
	groups := s.join()
	require.NoError(t, s.endAndStart())
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "let in") }))
	s.finish(ctx, groups)
}

// TestEtcdForgets: what nobody comes back for is forgotten by etcd, and a service that was away for as long is told so.
func TestEtcdForgets(t *testing.T) {
	t.Parallel() // it waits, most of the time
	server := ownEtcd(t)
	ctx := testContext(t)
	s, err := durable.Open(ctx, server.url, durable.Options{Name: "job", TTL: 5 * time.Second}) // for which no machine stands still
	require.NoError(t, err)
	change := [][]durable.Change{{{Key: "k", Value: []byte("v")}}}
	require.NoError(t, s.Commit(ctx, change))
	time.Sleep(12 * time.Second) // it is alive, and so is what it keeps
	require.NoError(t, s.Commit(ctx, change))
	require.NoError(t, s.Close())
	require.Eventually(t, func() bool { return server.keys(t) == 0 }, 20*time.Second, 100*time.Millisecond)
	again := openStore(t, server.url, "job", time.Minute)
	kept, err := again.Load(ctx)
	require.NoError(t, err)
	require.Empty(t, kept)
	server.ctl(t, "del", "", "--prefix")
	requireCondition(t, again.Commit(ctx, change), durable.Forgotten)
}

// TestEtcdURLs: what is no URL of an etcd is refused before anything is asked.
func TestEtcdURLs(t *testing.T) {
	for url, says := range map[string]string{
		"etcd://host":                      `the address of etcd is "host"`,
		"etcd://,host:1/x":                 `the address of etcd is ""`,
		"etcd://user@host:1/x":             "the password for etcd",
		"etcd://host:1/x?cert=a":           "after etcds://",
		"etcds://host:1/x?colour=a":        `"colour"`,
		"etcds://host:1/x?cacert=/no/such": "/no/such",
		"etcds://host:1/x?cert=/no/such":   "/no/such",
		"etcds://host:1/x?key=/no/such":    "/no/such",
		"etcd://":                          "a URL such as",
		"://":                              "a URL such as",
	} {
		_, err := durable.Open(testContext(t), url, durable.Options{Name: "n", TTL: time.Second})
		require.ErrorContains(t, err, says, url)
		require.ErrorIs(t, err, ErrInvalid, url)
	}
}
