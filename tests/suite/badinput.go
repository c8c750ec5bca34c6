package suite

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// badInputCases: what is wrong is refused with the value and what is allowed, and nothing is left behind.
func badInputCases() []Case {
	return []Case{
		{Name: "bad_input/shapes", Run: badShapesCase},
		{Name: "bad_input/arguments", Run: badArgumentsCase},
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
		t, err := e.R.Empty(ctx, dtype, shape...)
		if err == nil {
			err = errors.Join(errors.New("no error"), t.Close(ctx))
		}
		return err
	}
	return errors.Join(
		wantArgument("a negative dimension", try(tensor.Float32, 3, -1), "-1", "shape[1]"),
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
	scalar, err := e.R.Empty(ctx, tensor.Float32)
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

func beforeRendezvousCase(ctx context.Context, e *Env) error {
	t, err := e.R.Empty(ctx, tensor.Float32, 10)
	if err != nil {
		return err
	}
	first := func(_ any, err error) error { return err }
	for what, err := range map[string]error{
		"Remote": first(t.Remote(0)), "Multicast": first(t.Multicast()), "Contiguous": first(t.Contiguous()), "PeerTable": first(t.PeerTable()),
		"EnableMulticast": t.EnableMulticast(ctx),
		"Put":             t.Put(e.S, 0, t), "Get": t.Get(e.S, 0, t), "Signal": t.Signal(e.S, 0, 0), "Wait": t.Wait(e.S, 0, 0), "Barrier": t.Barrier(e.S, 0),
	} {
		if err := wantError(what, err, backend.ErrNoRendezvous); err != nil {
			return err
		}
	}
	if err := tensor.Write(t.Local(), []float32{1, 2}, 3); err != nil {
		return fmt.Errorf("local access before rendezvous: %w", err)
	}
	return t.Close(ctx)
}

func afterCloseCase(ctx context.Context, e *Env) error {
	for _, rendezvous := range []bool{false, true} {
		t, err := e.R.Empty(ctx, tensor.Float32, 10)
		if err != nil {
			return err
		}
		if rendezvous {
			if err := t.Rendezvous(ctx); err != nil {
				return err
			}
		}
		local := t.Local()
		if err := t.Close(ctx); err != nil {
			return err
		}
		first := func(_ any, err error) error { return err }
		for what, err := range map[string]error{
			"Err": t.Err(), "Remote": first(t.Remote(0)), "Multicast": first(t.Multicast()), "EnableMulticast": t.EnableMulticast(ctx), "Contiguous": first(t.Contiguous()),
			"PeerTable": first(t.PeerTable()), "Put": t.Put(e.S, 0, t), "Get": t.Get(e.S, 0, t), "Signal": t.Signal(e.S, 0, 0),
			"Wait": t.Wait(e.S, 0, 0), "Barrier": t.Barrier(e.S, 0), "Slice": first(t.Slice(0, 1)), "Sub": first(t.Sub(0, 1)),
			"Read": tensor.Read(local, make([]float32, 1), 0), "Write": tensor.Write(local, make([]float32, 1), 0), "Close": t.Close(ctx),
		} {
			if err := wantError(what+" after Close", err, symmem.ErrClosed); err != nil {
				return err
			}
		}
	}
	return nil
}

func badRegisterCase(ctx context.Context, e *Env) error {
	if !e.R.Capabilities().Register {
		_, err := e.R.FromPtr(ctx, device.Ptr(4096), tensor.Float32, 4)
		return wantError("FromPtr", err, symmem.ErrUnsupported, e.R.Capabilities().Why["register"])
	}
	_, err := e.R.FromPtr(ctx, 0, tensor.Float32, 4)
	return wantArgument("FromPtr(nil)", err)
}

// tooLargeCase asks for more memory than any machine has: an error, and then a smaller allocation works.
func tooLargeCase(ctx context.Context, e *Env) error {
	t, err := e.R.Empty(ctx, tensor.Uint8, 1<<52)
	if err == nil {
		return errors.Join(errors.New("4 PiB were allocated"), t.Close(ctx))
	}
	if err := wantError("4 PiB", err, backend.ErrNoMemory); err != nil {
		return err
	}
	return worksAfterwards(ctx, e)
}
