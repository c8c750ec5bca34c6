package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/all" // as the command has them
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	_ "github.com/symmem/symmem/group/durable/etcd" // likewise
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

const (
	// commandVar makes this binary the command itself: what it starts again as a rank, and what tests start.
	commandVar = "SYMMEM_TEST_COMMAND"
	// roleVar makes this binary a program that `symmem run` starts.
	roleVar = "SYMMEM_TEST_ROLE"
	// brokenVar lets the broken backends below be used.
	brokenVar = "SYMMEM_TEST_BROKEN"
	// stallVar lets the probe of the backend "stalls" not return.
	stallVar = "SYMMEM_TEST_STALL"
)

func TestMain(m *testing.M) {
	for name, b := range map[string]broken{
		"absent": {}, "dies": {open: true}, "hangs": {open: true, hang: true}, "crashes": {crash: true},
	} {
		backend.Register(name, b)
	}
	backend.Register("exits", exits{broken{open: true}})
	backend.Register("picky", picky{})
	backend.Register("stalls", stalls{})
	for name, b := range map[string]shelved{"shelved": {}, "shelfcrash": {crash: true}} {
		backend.Register(name, b)
	}
	kernels.RegisterAllReduce(ownForm)
	if os.Getenv(roleVar) != "" {
		role := idleRank
		if os.Getenv(roleVar) == "outlive" {
			role = outliveRank
		}
		if err := role(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(commandVar) != "" {
		Main()
	}
	goleak.VerifyTestMain(m)
}

// broken is a backend that is not there, or that does harm.
type broken struct{ open, hang, crash bool }

func (b broken) Probe(context.Context, *backend.Env) (backend.Capabilities, error) {
	if os.Getenv(brokenVar) == "" {
		return backend.Capabilities{}, fmt.Errorf("libabsent.so is not there; install it: %w", errs.ErrUnavailable)
	}
	if b.crash {
		fmt.Fprintln(os.Stderr, "last words")
		os.Exit(9)
	}
	if !b.open {
		return backend.Capabilities{}, fmt.Errorf("libabsent.so is not there; install it: %w", errs.ErrUnavailable)
	}
	return backend.Capabilities{PeerPointers: true}, nil
}

// shelved is a backend that is not there and tells of its libraries, or does harm when it looks at them.
type shelved struct {
	broken
	crash bool
}

func (s shelved) Libraries(context.Context, *backend.Env) []backend.Library {
	if s.crash && os.Getenv(brokenVar) != "" {
		fmt.Fprintln(os.Stderr, "dropped from the shelf")
		os.Exit(9)
	}
	fmt.Println("a library that talks")
	return []backend.Library{
		{Name: "Good", State: "usable", Path: "/lib/libgood.so.1", Version: "1.2", Details: []backend.Detail{{Name: "plugins", Value: "three"}}},
		{Name: "Old", State: "unusable", Path: "/lib/libold.so.1", Version: "0.1", Reason: "it is for CUDA 11", Fix: "install a newer one"},
		{Name: "Gone", State: "missing", Fix: "install gone", Tried: []string{"/lib/libgone.so (no such file)", "libgone.so (not found)"}},
	}
}

// Open does the harm on rank 1 and waits on the others.
func (b broken) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	if env.Group.Rank() == 1 {
		if !b.hang {
			os.Exit(9)
		}
		select {} //nolint:staticcheck // it hangs, whatever its context says
	}
	return nil, fmt.Errorf("nothing to open: %w", errs.ErrUnsupported)
}

// picky is a backend that has the devices 0 to 3, or up to another one that its option names.
type picky struct{ broken }

func (picky) Options() []backend.Option {
	return []backend.Option{{Name: "last-device", Default: "3", Values: []string{"3", "4", "5"}, Usage: "last device that there is"}}
}

func (picky) Takes(any) bool { return false }

func (picky) Probe(_ context.Context, env *backend.Env) (backend.Capabilities, error) {
	last, err := env.Option("picky", "last-device")
	if err != nil {
		return backend.Capabilities{}, err
	}
	switch {
	case os.Getenv(brokenVar) == "":
		return backend.Capabilities{}, fmt.Errorf("libabsent.so is not there; install it: %w", errs.ErrUnavailable)
	case env.Device > last:
		return backend.Capabilities{}, fmt.Errorf("device %s is not there: %w", env.Device, errs.ErrUnavailable)
	}
	return backend.Capabilities{PeerPointers: true}, nil
}

// Unprotected makes picky one that the setting unprotected-network may refuse.
func (picky) Unprotected() string { return "picky opens a port to anybody" }

// Preflight has nothing to find: that picky has it lets verify try picky before it starts ranks.
func (picky) Preflight(context.Context, *backend.Env) error { return nil }

// stalls is a backend whose library never returns.
type stalls struct{ broken }

func (s stalls) Probe(ctx context.Context, env *backend.Env) (backend.Capabilities, error) {
	if os.Getenv(stallVar) != "" {
		time.Sleep(time.Hour)
	}
	return s.broken.Probe(ctx, env)
}

func (stalls) Preflight(context.Context, *backend.Env) error { return nil }

// exits is a backend whose library ends the process that starts it.
type exits struct{ broken }

func (exits) Preflight(context.Context, *backend.Env) error {
	fmt.Fprintln(os.Stderr, "aborting due to error")
	os.Exit(255)
	return nil
}

// openRank opens the rank that the environment says.
func openRank(ctx context.Context) (*symmem.Rank, error) {
	cfg, err := config.Load(nil)
	if err != nil {
		return nil, err
	}
	return symmem.Open(ctx, cfg, nil)
}

// idleRank is a rank of a job that holds symmetric memory and waits to be ended.
func idleRank() error {
	ctx := context.Background()
	r, err := openRank(ctx)
	if err != nil {
		return err
	}
	t, err := r.Zeros(ctx, tensor.Float32, 1<<20)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	fmt.Println("ready", os.Getenv("SYMMEM_RENDEZVOUS_ADDR"))
	if os.Getenv(roleVar) == "exit" {
		if err := t.Close(ctx); err != nil {
			return err
		}
		return r.Close(ctx)
	}
	select {} //nolint:staticcheck // until a signal ends it
}

// outliveRank is a rank of a job whose rank 0 is killed in a collective call, and which then goes on among those that are left.
func outliveRank() error {
	ctx := context.Background()
	r, err := openRank(ctx)
	if err != nil {
		return err
	}
	if err := r.Barrier(ctx); err != nil {
		return err
	}
	if r.Rank() == 0 {
		self, err := os.FindProcess(os.Getpid())
		if err != nil {
			return err
		}
		return self.Kill()
	}
	err = r.Barrier(ctx)
	var lost *group.PeerLostError
	if !errors.As(err, &lost) || lost.Rank != 0 {
		return fmt.Errorf("a barrier without rank 0: %w", err)
	}
	var rest []int
	for rank := 1; rank < r.WorldSize(); rank++ {
		rest = append(rest, rank)
	}
	sub, err := r.Sub(ctx, rest)
	if err != nil {
		return err
	}
	if err := sub.Barrier(ctx); err != nil {
		return err
	}
	fmt.Println("went on with", sub.WorldSize())
	if err := sub.Close(ctx); err != nil {
		return err
	}
	_ = r.Close(ctx) // a rank of it is lost
	return nil
}

// environ returns this process's environment for the command, and more: without settings, without what a launcher has set that runs the tests themselves, and on every machine one
// without native libraries, so that the backends are those of this test and host. The race detector would hold up the end of each process.
func environ(more ...string) []string {
	launched := map[string]bool{}
	for _, l := range group.Launchers(os.Getenv, nil) {
		for _, v := range l.Found {
			name, _, _ := strings.Cut(v, "=")
			launched[name] = true
		}
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return strings.HasPrefix(v, "SYMMEM_") && !strings.HasPrefix(v, "SYMMEM_TEST_") || launched[name]
	})
	for _, name := range options.LibraryVariables() {
		env = append(env, name+"=/no/such/library")
	}
	return append(append(env, commandVar+"=1", "GORACE=atexit_sleep_ms=0"), more...)
}

// result is how a command ended.
type result struct {
	status   int
	out, err string
}

// call runs the command in this process.
func call(t *testing.T, stdin string, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var out, errOut syncBuffer
	status := run(ctx, args, strings.NewReader(stdin), &out, &errOut, env)
	require.NoError(t, ctx.Err(), "the command took too long: %s", errOut.String())
	return result{status: status, out: out.String(), err: errOut.String()}
}

// syncBuffer is a buffer that several goroutines use.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
