package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// stages are where a rank tells what it does next, and waits for leave to do so.
var stages = []string{"join", "allocate", "rendezvous", "exchange", "plan", "run", "sub_group", "close"}

// conditions are what callers may ask an error for.
var conditions = []struct {
	name string
	is   error
}{
	{"unavailable", symmem.ErrUnavailable}, {"unsupported", symmem.ErrUnsupported}, {"mismatch", symmem.ErrMismatch},
	{"peer lost", symmem.ErrPeerLost}, {"no memory", errs.ErrNoMemory}, {"closed", symmem.ErrClosed}, {"invalid", symmem.ErrInvalid},
	{"deadline", context.DeadlineExceeded},
}

// said is a message of a rank to the test.
type said struct {
	Stage string // what it does next; startStage and endStage apart

	Listener   int      // at startStage: the descriptor of its trap, or 0
	Error      string   // at endStage: what went wrong, or ""
	In         string   // the stage that it went wrong in
	Conditions []string // what the error is
	Names      []int    // the ranks that the error names, by its types
	Told       bool     // the error says what another rank has told: a vote
	FileLimit  bool     // the error is a *group.FileLimitError
	Connect    bool     // the error is a *group.ConnectError, which names the service's address
	Goroutines int      // how many are left that were not there before
}

// The first and the last message.
const (
	startStage = "start"
	endStage   = "end"
	againStage = "end again" // of the second time
)

// Environment of a worker.
const (
	workerVariable = "SYMMEM_TEST_CHAOS_WORKER"
	trapVariable   = "SYMMEM_TEST_CHAOS_TRAP"
	filesVariable  = "SYMMEM_TEST_CHAOS_FILES"
	againVariable  = "SYMMEM_TEST_CHAOS_AGAIN"
	briefVariable  = "SYMMEM_TEST_CHAOS_BRIEF" // the job has fewer tensors
	everyCall      = "*"                       // of trapVariable

	controlFile = 3 // the descriptor that a worker talks to the test over
)

// work is the main function of a worker, which talks to the test over descriptor 3: a line for each message, and a byte in answer.
func work() int {
	control := os.NewFile(controlFile, "control")
	answer := make([]byte, 1)
	tell := func(s said) error {
		line, err := json.Marshal(s)
		if err != nil {
			return err
		}
		// Not by write, which may be trapped. The socket has room for a line.
		if err := unix.Send(int(control.Fd()), append(line, '\n'), 0); err != nil {
			return err
		}
		_, err = io.ReadFull(control, answer)
		return err
	}
	if err := prepared(tell); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1
	}
	return 0
}

// prepared prepares the process for what is going to befall it, and runs the job.
func prepared(tell func(said) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), worldTimeout)
	defer cancel()
	cfg, err := config.Load(nil)
	if err != nil {
		return err
	}
	// The runtime's own descriptors, which it opens at first use and cannot do without.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	if err := errors.Join(r.SetDeadline(time.Now()), r.Close(), w.Close()); err != nil {
		return err
	}
	first := said{Stage: startStage}
	if name := os.Getenv(trapVariable); name != "" {
		traps := slices.DeleteFunc(every(), func(c *call) bool { return c.name != name && name != everyCall })
		if first.Listener, err = trap(traps); err != nil {
			return err
		}
	}
	if err := tell(first); err != nil {
		return err
	}
	if first.Listener != 0 {
		if err := unix.Close(first.Listener); err != nil {
			return err
		}
	}
	if limit := os.Getenv(filesVariable); limit != "" {
		n, err := strconv.ParseUint(limit, 10, 64)
		if err != nil {
			return err
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	before := runtime.NumGoroutine()
	text := os.Getenv(againVariable)
	tensors := jobTensors
	if os.Getenv(briefVariable) != "" {
		tensors = briefTensors
	}
	run := func(cfg config.Config, end string) error {
		stage := ""
		err := job(ctx, cfg, tensors, func(s string) error {
			if stage = s; end != endStage {
				return nil
			}
			return tell(said{Stage: s})
		})
		last := said{Stage: end, In: stage}
		last.describe(err)
		for range 100 {
			if last.Goroutines = max(runtime.NumGoroutine()-before, 0); last.Goroutines == 0 {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		return tell(last)
	}
	if err := run(cfg, endStage); err != nil || text == "" {
		return err
	}
	var p place
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	cfg.Rank, cfg.LocalRank, cfg.WorldSize, cfg.LocalWorldSize = p.Rank, p.Rank, p.Size, p.Size
	cfg.RendezvousAddr, cfg.RendezvousFD, cfg.Timeout, cfg.KernelTimeout = p.Addr, p.FD, longTimeout, longTimeout
	return run(cfg, againStage)
}

// describe fills in what an error is.
func (s *said) describe(err error) {
	if err == nil {
		return
	}
	s.Error = err.Error()
	for _, c := range conditions {
		if errors.Is(err, c.is) {
			s.Conditions = append(s.Conditions, c.name)
		}
	}
	if e, ok := errors.AsType[*group.VoteError](err); ok {
		s.Told = true
		for _, f := range e.Failures {
			s.Names = append(s.Names, f.Rank)
		}
	}
	if e, ok := errors.AsType[*group.PeerLostError](err); ok {
		s.Names = append(s.Names, e.Rank)
	}
	// A rank that gave up waiting and those that it told are in one condition.
	missing, gaveUp := errors.AsType[*group.MissingRanksError](err)
	if gaveUp {
		s.Names = append(s.Names, missing.Missing...)
	}
	abandoned, told := errors.AsType[*group.AbandonedError](err)
	if told {
		s.Names = append(append(s.Names, abandoned.Rank), abandoned.Missing...)
	}
	if gaveUp || told {
		// Of those that were told, only some had come to the end of their own contexts.
		s.Conditions = slices.DeleteFunc(s.Conditions, func(c string) bool { return c == "deadline" })
		s.Conditions = append(s.Conditions, "gave up")
	}
	if e, ok := errors.AsType[*backend.RefusedError](err); ok {
		for _, r := range e.Refusals {
			s.Names = append(s.Names, r.Rank)
		}
	}
	_, s.FileLimit = errors.AsType[*group.FileLimitError](err)
	_, s.Connect = errors.AsType[*group.ConnectError](err)
}

// The sizes of the job: tensors that are open at the same time, and their elements.
const (
	jobTensors  = 12
	jobElements = 20_000

	briefTensors = 5 // where each call is attacked, fewer do
)

// job is what the ranks do: each thing that a user does, in turn. A rank that gets an error leaves.
func job(ctx context.Context, cfg config.Config, most int, stage func(string) error) (err error) {
	if err := stage("join"); err != nil {
		return err
	}
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
		if closed := r.Close(ctx); err == nil {
			err = closed
		}
	}()
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	defer func() {
		if closed := s.Close(); err == nil {
			err = closed
		}
	}()
	var tensors []*tensor.Tensor
	for i := range most {
		if i == 0 {
			if err := stage("allocate"); err != nil {
				return err
			}
		}
		t, err := r.Zeros(ctx, tensor.Float32, jobElements)
		if err != nil {
			return err
		}
		tensors = append(tensors, t)
		if i == 0 {
			if err := stage("rendezvous"); err != nil {
				return err
			}
		}
		if err := t.Rendezvous(ctx); err != nil {
			return err
		}
	}
	if err := stage("exchange"); err != nil {
		return err
	}
	if err := exchange(ctx, r, s, tensors[0], tensors[1]); err != nil {
		return err
	}
	if err := stage("plan"); err != nil {
		return err
	}
	var plans []*kernels.Plan
	for i, alg := range []kernels.Algorithm{kernels.OneShot, kernels.TwoShot, kernels.Transfers} {
		p, err := kernels.NewAllReduce(ctx, tensors[2+i], kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
		if err != nil {
			return err
		}
		plans = append(plans, p)
	}
	if err := stage("run"); err != nil {
		return err
	}
	for i, p := range plans {
		if err := reduce(ctx, r, s, p, tensors[2+i]); err != nil {
			return err
		}
	}
	if err := stage("sub_group"); err != nil {
		return err
	}
	if err := inSubGroup(ctx, r, s); err != nil {
		return err
	}
	if err := stage("close"); err != nil {
		return err
	}
	for _, p := range plans {
		if err := p.Close(ctx); err != nil {
			return err
		}
	}
	for _, t := range tensors {
		if err := t.Close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// exchange puts this rank's number to every peer's place for it, behind which there is a barrier.
func exchange(ctx context.Context, r *symmem.Rank, s device.Stream, src, dst *tensor.Tensor) error {
	if err := tensor.Write(src.Local(), []float32{float32(r.Rank() + 1)}, 0); err != nil {
		return err
	}
	one, err := src.Sub(0, 1)
	if err != nil {
		return err
	}
	place, err := dst.Sub(int64(r.Rank()), 1)
	if err != nil {
		return err
	}
	for peer := range r.WorldSize() {
		if err := place.Put(s, peer, one); err != nil {
			return err
		}
	}
	if err := errors.Join(dst.Barrier(s, 0), s.Synchronize(ctx)); err != nil {
		return err
	}
	got := make([]float32, r.WorldSize())
	if err := tensor.Read(dst.Local(), got, 0); err != nil {
		return err
	}
	for peer, v := range got {
		if v != float32(peer+1) {
			return fmt.Errorf("rank %d put %d, and %v came: %w", peer, peer+1, v, errWrong)
		}
	}
	return nil
}

// errWrong is data that is not what was sent. Nothing that befalls a process may lead to it.
var errWrong = errors.New("wrong data")

// reduce runs a plan twice on ones.
func reduce(ctx context.Context, r *symmem.Rank, s device.Stream, p *kernels.Plan, t *tensor.Tensor) error {
	ones := slices.Repeat([]float32{1}, jobElements)
	if err := tensor.Write(t.Local(), ones, 0); err != nil {
		return err
	}
	if err := errors.Join(p.Run(s), p.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	got, err := tensor.ReadAll[float32](t.Local())
	if err != nil {
		return err
	}
	want := float32(r.WorldSize() * r.WorldSize())
	for i, v := range got {
		if v != want {
			return fmt.Errorf("element %d of %s is %v, not %v: %w", i, p, v, want, errWrong)
		}
	}
	return nil
}

// inSubGroup exchanges in a group made of all ranks.
func inSubGroup(ctx context.Context, r *symmem.Rank, s device.Stream) (err error) {
	ranks := make([]int, r.WorldSize())
	for i := range ranks {
		ranks[i] = i
	}
	sub, err := r.Sub(ctx, ranks)
	if err != nil {
		return err
	}
	defer func() {
		if closed := sub.Close(ctx); err == nil {
			err = closed
		}
	}()
	var pair [2]*tensor.Tensor
	for i := range pair {
		if pair[i], err = sub.Zeros(ctx, tensor.Float32, 10); err != nil {
			return err
		}
		if err = pair[i].Rendezvous(ctx); err != nil {
			return err
		}
	}
	if err := exchange(ctx, sub, s, pair[0], pair[1]); err != nil {
		return err
	}
	return errors.Join(pair[0].Close(ctx), pair[1].Close(ctx))
}
