package suite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// lifetimeCases are about what lives how long, and that nothing is left.
func lifetimeCases(kind device.Kind, backend string, world int, short bool) []Case {
	rounds, before, after := 1000, time.Second, 2*time.Second
	if short {
		rounds, before, after = 100, 100*time.Millisecond, 100*time.Millisecond
	}
	var cases []Case
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		if alg.NeedsMulticast() || !kernels.Supported(kind, alg, tensor.Float32, kernels.Sum, world) {
			continue
		}
		cases = append(cases, Case{Name: fmt.Sprintf("lifetime/delayed/%s", alg), Needs: needsOn(kind, alg), Run: func(ctx context.Context, e *Env) error {
			r := reduction{alg, tensor.Float32, kernels.Sum, false, 4099, delayed, false}
			o, err := newOperands(ctx, e, r)
			if err != nil {
				return err
			}
			p, err := o.plan(ctx, r)
			if err != nil {
				return err
			}
			return delayedCase(ctx, e, r, o, p, before, after)
		}})
	}
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		// What a GPU runs of a graph by itself cannot be kept from running.
		if alg.Backend() != "" || kind != device.Host || !kernels.Supported(kind, alg, tensor.Float32, kernels.Sum, world) {
			continue
		}
		cases = append(cases, Case{Name: fmt.Sprintf("lifetime/closed_plan_graph/%s", alg), Needs: append(needsOn(kind, alg), "graphs"),
			Run: func(ctx context.Context, e *Env) error { return closedPlanGraphCase(ctx, e, alg) }})
	}
	if !short && world <= 4 {
		cases = append(cases, Case{Name: "lifetime/large_workspace", Run: largeWorkspaceCase})
	}
	return append(cases,
		Case{Name: fmt.Sprintf("lifetime/rounds/%d", rounds), Run: func(ctx context.Context, e *Env) error { return roundsCase(ctx, e, rounds) }},
		Case{Name: "lifetime/plans", Needs: needsOf(kernels.Auto), Run: plansCase},
		Case{Name: "lifetime/busy_close", Run: busyCloseCase},
		Case{Name: "lifetime/busy_close_alone", Run: busyCloseAloneCase},
	)
}

// largeWorkspaceCase takes as much workspace as only large plans do, which goes when they do, and takes it again: it is there, and zeros,
// each time, and what was made before goes on. Where there is no memory for it, that is said on every rank.
func largeWorkspaceCase(ctx context.Context, e *Env) error {
	const bytes = 257 << 20
	m := e.R.Memory()
	small, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "suite: small", Bytes: 4096})
	if err != nil {
		return err
	}
	for range 2 {
		large, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "suite: large", Bytes: bytes})
		if none, ok := errors.AsType[*memory.WorkspaceError](err); ok && none.Bytes >= bytes {
			return errors.Join(dirty(e, small, 0), small.Close(ctx))
		}
		if err != nil {
			return err
		}
		for _, at := range []int64{0, bytes / 2, bytes - 64} {
			err = errors.Join(err, dirty(e, large, at))
		}
		// Nobody takes away what others still look at.
		if err := errors.Join(err, large.Close(ctx), m.TrimWorkspace(ctx)); err != nil {
			return err
		}
	}
	return errors.Join(dirty(e, small, 0), small.Close(ctx), m.TrimWorkspace(ctx))
}

// dirty looks for 64 zeros in this rank's part of a workspace, and leaves something else.
func dirty(e *Env, c *memory.Workspace, at int64) error {
	p, err := c.Peer(e.R.Rank())
	if err != nil {
		return err
	}
	b := make([]byte, 64)
	if err := e.R.Device().CopyToHost(b, p.Add(at)); err != nil {
		return err
	}
	if have := slices.IndexFunc(b, func(v byte) bool { return v != 0 }); have >= 0 {
		return fmt.Errorf("byte %d of a new workspace is %d", at+int64(have), b[have])
	}
	for i := range b {
		b[i] = byte(i) + 1
	}
	return e.R.Device().CopyFromHost(p.Add(at), b)
}

// roundsCase allocates, makes the rendezvous and closes again and again, and looks for what has become more.
func roundsCase(ctx context.Context, e *Env, rounds int) error {
	once := func(i int) error {
		t, err := e.mapped(ctx, tensor.Float32, int64(1+i%5000))
		if err != nil {
			return err
		}
		return t.Close(ctx)
	}
	for i := range 20 { // whatever is made once is made now
		if err := once(i); err != nil {
			return err
		}
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	before, err := usage()
	if err != nil {
		return err
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	for i := range rounds {
		if err := once(i); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
	}
	// Ranks that share this process are in the same count: all must have come here, and none gone on.
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	err = before.settles()
	return errors.Join(err, e.R.Barrier(ctx))
}

// plansCase makes many plans: the workspace is given back.
func plansCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 2000)
	if err != nil {
		return err
	}
	forms := []kernels.Algorithm{kernels.Transfers}
	if e.R.Capabilities().PeerPointers {
		forms = append(forms, kernels.OneShot, kernels.TwoShot)
	}
	for i := range 50 {
		var plans []*kernels.Plan
		for j := range 3 {
			part, err := t.Sub(0, int64(1+(i*31+j*700)%2000))
			if err != nil {
				return err
			}
			p, err := kernels.NewAllReduce(ctx, part, kernels.Sum, &kernels.AllReduceOptions{Algorithm: forms[(i+j)%len(forms)]})
			if err != nil {
				return err
			}
			plans = append(plans, p)
		}
		if err := errors.Join(plans[1].Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		for _, j := range []int{1, 0, 2} {
			if err := plans[j].Close(ctx); err != nil {
				return err
			}
		}
	}
	return t.Close(ctx)
}

// busyCloseCase closes a tensor that the device still works on, with a context that ends before: nothing is taken from under
// the work, and closing again works.
func busyCloseCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 1000)
	if err != nil {
		return err
	}
	src, err := e.R.Zeros(ctx, tensor.Int64, 1000)
	if err != nil {
		return err
	}
	hold, release := holdUp()
	if err := errors.Join(e.S.HostFunc(hold), t.Put(e.S, e.R.Rank(), src)); err != nil {
		release()
		return err
	}
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	err = t.Close(short)
	cancel()
	usable := t.Err()
	release()
	if err := wantError("closing a busy tensor", err, context.DeadlineExceeded); err != nil {
		return err
	}
	if usable != nil {
		return fmt.Errorf("a tensor whose Close was refused cannot be used: %w", usable)
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return fmt.Errorf("the work on a tensor whose Close was refused: %w", err)
	}
	if err := errors.Join(t.Put(e.S, e.R.Rank(), src), e.S.Synchronize(ctx)); err != nil {
		return fmt.Errorf("new work on a tensor whose Close was refused: %w", err)
	}
	if err := t.Close(ctx); err != nil {
		return fmt.Errorf("closing again: %w", err)
	}
	if err := wantError("closing a third time", t.Close(ctx), symmem.ErrClosed); err != nil {
		return err
	}
	return src.Close(ctx)
}

// busyCloseAloneCase closes tensors that had no rendezvous, and that only this rank knows, while the device still works on them: nothing is
// taken from under the work, without any other rank, whether the tensor's memory is its own or adopted.
func busyCloseAloneCase(ctx context.Context, e *Env) error {
	const n = 1000
	try := func(what string, t *tensor.Tensor) error {
		if err := closeUnderCopy(ctx, e, t); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	t, err := e.R.Zeros(ctx, tensor.Uint8, n)
	if err != nil {
		return err
	}
	other, err := e.R.Zeros(ctx, tensor.Uint8, n)
	if err != nil {
		return err
	}
	// Rank 0 closes while it waits for the others, in a rendezvous to which they come only then.
	const key = "suite: closed alone"
	met := make(chan error, 1)
	if e.R.Rank() == 0 {
		go func() { met <- other.Rendezvous(ctx) }()
		time.Sleep(time.Millisecond)
		err = errors.Join(try("without rendezvous", t), e.R.Group().Store().Set(ctx, key, nil))
	} else if _, err = e.R.Group().Store().Get(ctx, key); err == nil {
		met <- other.Rendezvous(ctx)
		err = try("without rendezvous", t)
	}
	if err := errors.Join(err, <-met, other.Close(ctx)); err != nil {
		return err
	}
	if !e.R.Capabilities().Register {
		return nil
	}
	p, free, err := adoptable(ctx, e, n)
	if err != nil || p.IsNil() {
		return err
	}
	if t, err = e.R.FromPtr(ctx, p, tensor.Uint8, n); err != nil {
		return err
	}
	return errors.Join(try("adopted", t), free())
}

// closeUnderCopy closes t, which had no rendezvous, while a copy from it is queued: with a context that ends too soon, which is refused, and
// then with one that does not, which waits.
func closeUnderCopy(ctx context.Context, e *Env, t *tensor.Tensor) error {
	want := pattern(e.R.Rank(), 1, t.Bytes())
	if err := writeBytes(t.Local(), want); err != nil {
		return err
	}
	dst, free, err := private(e, t.Bytes())
	if err != nil {
		return err
	}
	hold, release := holdUp()
	if err := errors.Join(e.S.HostFunc(hold), e.S.Copy(dst, t.Ptr(), t.Bytes())); err != nil {
		release()
		return err
	}
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	err = t.Close(short)
	cancel()
	usable := t.Err()
	if err := wantError("closing a busy tensor", err, context.DeadlineExceeded); err != nil {
		release()
		return err
	}
	if usable != nil {
		release()
		return fmt.Errorf("a tensor whose Close was refused cannot be used: %w", usable)
	}
	timer := time.AfterFunc(30*time.Millisecond, release)
	err = t.Close(ctx)
	if timer.Stop() {
		release()
		return fmt.Errorf("a tensor was closed while a copy from it was queued (%v)", err)
	}
	if err != nil {
		return fmt.Errorf("closing again: %w", err)
	}
	if err := wantError("closing a third time", t.Close(ctx), symmem.ErrClosed); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return fmt.Errorf("a copy from a tensor that was closed meanwhile: %w", err)
	}
	got := make([]byte, len(want))
	if err := e.R.Device().CopyToHost(got, dst); err != nil {
		return err
	}
	return errors.Join(sameBytes(tensor.Uint8, got, want), free())
}

// closedPlanGraphCase launches graphs of which a plan, a tensor of it or its group was closed: an error of the stream, and the plan that has
// its workspace now is not disturbed.
func closedPlanGraphCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	all := make([]int, e.R.WorldSize())
	for i := range all {
		all[i] = i
	}
	r := reduction{alg, tensor.Float32, kernels.Sum, true, 50_000, graph, false}
	for _, what := range []string{"plan", "tensor", "group"} {
		sub, err := e.R.Sub(ctx, all)
		if err != nil {
			return err
		}
		env := &Env{R: sub, S: e.S, Rand: e.Rand}
		o, err := newOperands(ctx, env, r)
		if err != nil {
			return err
		}
		p, err := o.plan(ctx, r)
		if err != nil {
			return err
		}
		if err := e.S.BeginCapture(); err != nil {
			return err
		}
		err = p.Run(e.S)
		g, endErr := e.S.EndCapture()
		if err := errors.Join(err, endErr, g.Launch(e.S), e.S.Synchronize(ctx), o.check(ctx, env, r)); err != nil {
			return err
		}
		switch what {
		case "plan":
			err = p.Close(ctx)
		case "tensor":
			err = o.Close(ctx)
		case "group":
			err, env = sub.Close(ctx), e
		}
		if err != nil {
			return err
		}
		other, err := newOperands(ctx, env, r)
		if err != nil {
			return err
		}
		next, err := other.plan(ctx, r)
		if err != nil {
			return err
		}
		for range 3 {
			err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx))
			if err := wantError("a graph with a plan after its "+what+" was closed", err, symmem.ErrClosed); err != nil {
				return err
			}
			e.Skew()
			if err := errors.Join(next.Run(e.S), next.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return fmt.Errorf("another plan after the %s was closed: %w", what, err)
			}
			if err := other.check(ctx, env, r); err != nil {
				return fmt.Errorf("another plan after the %s was closed: %w", what, err)
			}
		}
		if err := errors.Join(g.Close(), next.Close(ctx), other.Close(ctx)); err != nil {
			return err
		}
		switch what {
		case "plan":
			err = closeAll(ctx, o, sub)
		case "tensor":
			err = closeAll(ctx, p, sub)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
