package suite

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// badInputCases: what is wrong is refused with the value and what is allowed, and nothing is left behind.
func badInputCases() []Case {
	return []Case{
		{Name: "bad_input/shapes", Run: badShapesCase},
		{Name: "bad_input/arguments", Run: badArgumentsCase},
		{Name: "bad_input/nil", Needs: []string{"transfers"}, Run: nilCase},
		{Name: "bad_input/foreign_stream", Needs: []string{"transfers"}, Run: foreignStreamCase},
		{Name: "bad_input/names", Needs: []string{"transfers"}, Run: namesCase},
		{Name: "bad_input/before_rendezvous", Run: beforeRendezvousCase},
		{Name: "bad_input/after_close", Run: afterCloseCase},
		{Name: "bad_input/register", Run: badRegisterCase},
		{Name: "bad_input/too_large", Run: tooLargeCase},
	}
}

func badShapesCase(ctx context.Context, e *Env) error {
	if e.R.Capabilities().CollectiveAllocate {
		return nil
	}
	try := func(dtype tensor.DType, shape ...int64) error {
		t, err := e.R.Zeros(ctx, dtype, shape...)
		if err == nil {
			err = errors.Join(errors.New("no error"), t.Close(ctx))
		}
		return err
	}
	return errors.Join(
		wantArgument("a negative dimension", try(tensor.Float32, 3, -1), "-1", "shape[1]", "0 or more"),
		wantArgument("a negative dimension of what has no elements", try(tensor.Float32, 0, -1), "-1", "shape[1]", "0 or more"),
		wantArgument("a product that overflows", try(tensor.Float32, math.MaxInt64/2, 3)),
		wantArgument("bytes that overflow", try(tensor.Float64, math.MaxInt64/4)),
		wantArgument("many large dimensions", try(tensor.Int8, 1<<31, 1<<31, 1<<31)),
		wantArgument("no dtype", try(0, 1), "DType(0)"),
		wantArgument("an unknown dtype", try(99, 1), "DType(99)"),
	)
}

func badArgumentsCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 10, 4)
	if err != nil {
		return err
	}
	scalar, err := e.R.Zeros(ctx, tensor.Float32)
	if err != nil {
		return err
	}
	w, channels := e.R.WorldSize(), e.R.Memory().Channels()
	first := func(_ any, err error) error { return err }
	err = errors.Join(
		wantArgument("Remote(-1)", first(t.Remote(-1)), "-1"),
		wantArgument("Remote(size)", first(t.Remote(w)), fmt.Sprint(w)),
		wantArgument("Signal to -1", t.Signal(e.S, -1, 0), "-1"),
		wantArgument("Signal to size", t.Signal(e.S, w, 0), fmt.Sprint(w)),
		wantArgument("Wait for size", t.Wait(e.S, w, 0), fmt.Sprint(w)),
		wantArgument("channel -1", t.Signal(e.S, 0, -1), "-1"),
		wantArgument("channel beyond the last", t.Wait(e.S, 0, channels), fmt.Sprint(channels)),
		wantArgument("barrier channel beyond the last", t.Barrier(e.S, channels), fmt.Sprint(channels)),
		wantArgument("Slice from -1", first(t.Slice(-1, 3)), "-1"),
		wantArgument("Slice beyond the end", first(t.Slice(0, 11)), "11"),
		wantArgument("Slice backwards", first(t.Slice(5, 4)), "4"),
		wantArgument("Slice of a scalar", first(scalar.Slice(0, 0))),
		wantArgument("Sub at -1", first(t.Sub(-1, 1)), "-1"),
		wantArgument("Sub beyond the end", first(t.Sub(39, 2))),
		wantArgument("Sub of a negative shape", first(t.Sub(0, -2)), "-2"),
		wantArgument("Sub that overflows", first(t.Sub(0, math.MaxInt64, 2))),
		wantArgument("Index of a scalar", first(scalar.Local().Index(0))),
		wantArgument("Index beyond the end", first(t.Local().Index(10)), "10"),
		wantArgument("Read as another type", tensor.Read(t.Local(), make([]int32, 1), 0), "i32", "f32"),
		wantArgument("Read beyond the end", tensor.Read(t.Local(), make([]float32, 2), 39), "39"),
		wantArgument("Read at -1", tensor.Read(t.Local(), make([]float32, 1), -1), "-1"),
		wantArgument("Write beyond the end", tensor.Write(t.Local(), make([]float32, 41), 0), "41"),
	)
	return errors.Join(err, closeAll(ctx, scalar, t))
}

// nilCase: what is nil, as such or as a nil pointer of the right type, is refused by name.
func nilCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 10)
	if err != nil {
		return err
	}
	x, err := tensor.PrepareTransfer(backend.Write, e.R.Rank(), tensor.Pair{Local: t, Remote: t})
	if err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return err
	}
	m, me := e.R.Memory(), e.R.Rank()
	w, _, err := t.Window()
	if err != nil {
		return err
	}
	first := func(_ any, err error) error { return err }
	made := func(_ *tensor.Tensor, err error) error { return err }
	var checks []error
	add := func(what string, err error, arg string) {
		checks = append(checks, wantArgument(what, err, arg+" is nil"))
	}
	typed, _ := reflect.Zero(reflect.TypeOf(e.S)).Interface().(device.Stream)
	for what, s := range map[string]device.Stream{"no stream": nil, "a nil stream": typed} {
		add("Put on "+what, t.Put(s, me, t), "stream")
		add("Get on "+what, t.Get(s, me, t), "stream")
		add("PutSignal on "+what, t.PutSignal(s, me, t, 0), "stream")
		add("PutSignalWait on "+what, t.PutSignalWait(s, me, t, me, 0), "stream")
		add("Signal on "+what, t.Signal(s, me, 0), "stream")
		add("Wait on "+what, t.Wait(s, me, 0), "stream")
		add("Barrier on "+what, t.Barrier(s, 0), "stream")
		add("Post on "+what, x.Post(s), "stream")
		add("WaitOn on "+what, x.WaitOn(s), "stream")
		add("Run on "+what, plan.Run(s), "stream")
		add("Copy on "+what, m.Copy(s, backend.Write, me, w, 0, t.Ptr(), 4), "stream")
	}
	for what, none := range map[string]tensor.SymmetricTensor{"nothing": nil, "a nil tensor": (*tensor.Tensor)(nil)} {
		add("Put of "+what, t.Put(e.S, me, none), "src")
		add("PutSignal of "+what, t.PutSignal(e.S, me, none, 0), "src")
		add("PutSignalWait of "+what, t.PutSignalWait(e.S, me, none, me, 0), "src")
		add("Get to "+what, t.Get(e.S, me, none), "dst")
		add("a transfer from "+what, first(tensor.PrepareTransfer(backend.Write, me, tensor.Pair{Local: none, Remote: t})), "pairs[0].Local")
		add("a transfer to "+what, first(tensor.PrepareTransfer(backend.Write, me, tensor.Pair{Local: t, Remote: none})), "pairs[0].Remote")
		add("an all-reduce of "+what, first(kernels.NewAllReduce(ctx, none, kernels.Sum, nil)), "t")
	}
	add("Copy without window", m.Copy(e.S, backend.Write, me, nil, 0, t.Ptr(), 4), "window")
	add("PutSignal of memory without window", m.PutSignal(e.S, me, nil, 0, t.Ptr(), 4, 0), "window")
	add("PutSignalWait of memory without window", m.PutSignalWait(e.S, me, nil, 0, t.Ptr(), 4, me, 0), "window")
	add("Free of nothing", m.Free(ctx, nil), "allocation")
	add("Zeros without memory", made(tensor.Zeros(ctx, nil, tensor.Float32, 1)), "memory")
	add("ZerosNamed without memory", made(tensor.ZerosNamed(ctx, nil, "x", tensor.Float32, 1)), "memory")
	add("FromPtr without memory", made(tensor.FromPtr(ctx, nil, t.Ptr(), tensor.Float32, 1)), "memory")
	add("Read without view", tensor.Read(nil, make([]float32, 1), 0), "view")
	add("Write without view", tensor.Write(nil, make([]float32, 1), 0), "view")
	add("ReadAll without view", first(tensor.ReadAll[float32](nil)), "view")
	var none context.Context
	add("Zeros without context", made(e.R.Zeros(none, tensor.Float32, 1)), "ctx")
	add("FromPtr without context", made(e.R.FromPtr(none, t.Ptr(), tensor.Float32, 1)), "ctx")
	add("Rendezvous without context", t.Rendezvous(none), "ctx")
	add("EnableMulticast without context", t.EnableMulticast(none), "ctx")
	add("Close of a tensor without context", t.Close(none), "ctx")
	add("Close of a plan without context", plan.Close(none), "ctx")
	add("an all-reduce without context", first(kernels.NewAllReduce(none, t, kernels.Sum, nil)), "ctx")
	add("Wait for a transfer without context", x.Wait(none), "ctx")
	add("Sub without context", first(e.R.Sub(none, []int{me})), "ctx")
	add("Barrier without context", e.R.Barrier(none), "ctx")
	add("Close of a rank without context", e.R.Close(none), "ctx")
	add("Close of memory without context", m.Close(none), "ctx")
	add("Synchronize without context", e.S.Synchronize(none), "ctx")
	if err := errors.Join(checks...); err != nil {
		return err
	}
	// All of it goes on as if nothing had been.
	if err := errors.Join(plan.Run(e.S), e.S.Synchronize(ctx), plan.Close(ctx), x.Close(), t.Close(ctx)); err != nil {
		return err
	}
	return worksAfterwards(ctx, e)
}

// foreignStreamCase: work on streams of another rank's device than the memory's is refused.
func foreignStreamCase(ctx context.Context, e *Env) error {
	cfg := config.Default()
	cfg.Backend = []string{"host"}
	others, err := symmem.OpenLocal(ctx, 1, cfg, nil)
	if err != nil {
		return err
	}
	other := others[0]
	s, err := other.NewStream()
	if err != nil {
		return errors.Join(err, other.Close(ctx))
	}
	t, err := e.mapped(ctx, tensor.Float32, 10)
	if err != nil {
		return err
	}
	x, err := tensor.PrepareTransfer(backend.Write, e.R.Rank(), tensor.Pair{Local: t, Remote: t})
	if err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return err
	}
	me := e.R.Rank()
	err = errors.Join(
		wantArgument("Put", t.Put(s, me, t), "stream"), wantArgument("Get", t.Get(s, me, t), "stream"),
		wantArgument("Signal", t.Signal(s, me, 0), "stream"), wantArgument("Wait", t.Wait(s, me, 0), "stream"), wantArgument("Barrier", t.Barrier(s, 0), "stream"),
		wantArgument("Post", x.Post(s), "stream"), wantArgument("Run", plan.Run(s), "stream"),
		x.Post(e.S), wantArgument("WaitOn", x.WaitOn(s), "stream"), e.S.Synchronize(ctx),
	)
	return errors.Join(err, s.Close(), x.Close(), closeAll(ctx, other, plan, t))
}

// namesCase: the name of a tensor is in the errors of it and of what is made of it.
func namesCase(ctx context.Context, e *Env) error {
	const name = "suite: ledger"
	first := func(_ any, err error) error { return err }
	m, me, size := e.R.Memory(), e.R.Rank(), e.R.WorldSize()
	t, err := tensor.ZerosNamed(ctx, m, name, tensor.Float32, 10)
	if err != nil {
		return err
	}
	slice, err := t.Slice(2, 8)
	if err != nil {
		return err
	}
	view := slice.Local()
	want := func(what string, err, is error) error { return wantError(what, err, is, strconv.Quote(name)) }
	checks := []error{
		want("Remote before rendezvous", first(t.Remote(0)), errs.ErrNoRendezvous), want("Put before rendezvous", slice.Put(e.S, me, slice), errs.ErrNoRendezvous),
	}
	if err := errors.Join(t.Rendezvous(ctx), slice.Rendezvous(ctx)); err != nil {
		return err
	}
	checks = append(checks,
		want("Remote", first(t.Remote(size)), symmem.ErrInvalid), want("Remote of a slice", first(slice.Remote(-1)), symmem.ErrInvalid),
		want("Slice", first(t.Slice(3, 11)), symmem.ErrInvalid), want("Sub", first(slice.Sub(7, 1)), symmem.ErrInvalid),
		want("Put of another size", t.Put(e.S, me, slice), symmem.ErrInvalid), want("Put of nothing", t.Put(e.S, me, nil), symmem.ErrInvalid),
		want("PutSignal of another size", slice.PutSignal(e.S, me, t, 0), symmem.ErrInvalid), want("PutSignal on no channel", slice.PutSignal(e.S, me, slice, -1), symmem.ErrInvalid),
		want("PrepareTransfer of another size", first(tensor.PrepareTransfer(backend.Write, me, tensor.Pair{Local: t, Remote: slice})), symmem.ErrInvalid),
		want("PrepareTransfer to a rank that does not exist", first(tensor.PrepareTransfer(backend.Write, size, tensor.Pair{Local: slice, Remote: slice})), symmem.ErrInvalid),
		want("HostSlice", first(tensor.HostSlice[int8](view)), symmem.ErrInvalid),
		want("Get from a rank that does not exist", t.Get(e.S, size, t), symmem.ErrInvalid),
		want("Signal", t.Signal(e.S, size, 0), symmem.ErrInvalid), want("Wait", slice.Wait(e.S, 0, -1), symmem.ErrInvalid), want("Barrier", t.Barrier(e.S, -1), symmem.ErrInvalid),
		want("Read", tensor.Read(view, make([]float32, 7), 0), symmem.ErrInvalid), want("Write", tensor.Write(view, []int8{1}, 0), symmem.ErrInvalid),
	)
	if _, err := t.Multicast(); err != nil {
		wanted := symmem.ErrUnsupported
		if e.R.Capabilities().Multicast {
			wanted = errs.ErrNoMulticast
		}
		checks = append(checks, want("Multicast", err, wanted))
	}
	if _, err := t.Contiguous(); err != nil {
		checks = append(checks, want("Contiguous", err, symmem.ErrUnsupported))
	}
	if err := t.Close(ctx); err != nil {
		return err
	}
	checks = append(checks, want("Err", t.Err(), symmem.ErrClosed), want("Err of a slice", slice.Err(), symmem.ErrClosed), want("Close", t.Close(ctx), symmem.ErrClosed),
		want("Read after Close", tensor.Read(view, make([]float32, 1), 0), symmem.ErrClosed))
	_, err = tensor.ZerosNamed(ctx, m, name, tensor.Uint8, 1<<52)
	checks = append(checks, want("4 PiB", err, errs.ErrNoMemory))
	_, err = tensor.ZerosNamed(ctx, m, name, tensor.Uint8, -1)
	return errors.Join(append(checks, want("a negative shape", err, symmem.ErrInvalid))...)
}

func beforeRendezvousCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Float32, 10)
	if err != nil {
		return err
	}
	slice, err := t.Slice(2, 8)
	if err != nil {
		return err
	}
	for _, x := range []tensor.SymmetricTensor{t, slice} {
		refusals := everyRefusal(ctx, e, x)
		refusals["EnableMulticast"] = x.EnableMulticast(ctx)
		for what, err := range refusals {
			if err := wantError(fmt.Sprintf("%s of %s", what, x), err, errs.ErrNoRendezvous); err != nil {
				return err
			}
		}
	}
	if err := tensor.Write(t.Local(), []float32{1, 2}, 3); err != nil {
		return fmt.Errorf("local access before rendezvous: %w", err)
	}
	return t.Close(ctx)
}

func afterCloseCase(ctx context.Context, e *Env) error {
	for _, rendezvous := range []bool{false, true} {
		t, err := e.R.Zeros(ctx, tensor.Float32, 10)
		if err != nil {
			return err
		}
		if rendezvous {
			if err := t.Rendezvous(ctx); err != nil {
				return err
			}
		}
		slice, err := t.Slice(2, 8)
		if err != nil {
			return err
		}
		views := []*tensor.View{t.Local(), slice.Local()}
		if err := t.Close(ctx); err != nil {
			return err
		}
		first := func(_ any, err error) error { return err }
		for i, x := range []tensor.SymmetricTensor{t, slice} {
			refusals := everyRefusal(ctx, e, x)
			for what, err := range map[string]error{
				"Err": x.Err(), "EnableMulticast": x.EnableMulticast(ctx), "Slice": first(x.Slice(0, 1)), "Sub": first(x.Sub(0, 1)),
				"Read": tensor.Read(views[i], make([]float32, 1), 0), "Write": tensor.Write(views[i], make([]float32, 1), 0),
				"HostSlice": first(tensor.HostSlice[float32](views[i])), "Close": x.Close(ctx),
			} {
				refusals[what] = err
			}
			for what, err := range refusals {
				if err := wantError(fmt.Sprintf("%s of %s after Close", what, x), err, symmem.ErrClosed); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func badRegisterCase(ctx context.Context, e *Env) error {
	if !e.R.Capabilities().Register {
		_, err := e.R.FromPtr(ctx, device.Ptr(4096), tensor.Float32, 4)
		_, odd := e.R.FromPtr(ctx, device.Ptr(4097), tensor.Float32, 4)
		return errors.Join(wantError("FromPtr", err, symmem.ErrUnsupported, e.R.Capabilities().Why["register"]), wantArgument("FromPtr of an odd address", odd, "0x1001", "4 bytes"))
	}
	_, err := e.R.FromPtr(ctx, 0, tensor.Float32, 4)
	_, odd := e.R.FromPtr(ctx, device.Ptr(4098), tensor.Float32, 4)
	return errors.Join(wantArgument("FromPtr(nil)", err), wantArgument("FromPtr of an odd address", odd, "0x1002", "4 bytes"))
}

// tooLargeCase asks for more memory than any machine has: an error, and then a smaller allocation works.
func tooLargeCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Uint8, 1<<52)
	if err == nil {
		return errors.Join(errors.New("4 PiB were allocated"), t.Close(ctx))
	}
	if err := wantError("4 PiB", err, errs.ErrNoMemory); err != nil {
		return err
	}
	return worksAfterwards(ctx, e)
}
