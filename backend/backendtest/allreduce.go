package backendtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
)

// allReduce runs the library's own all-reduces, two plans of each, at offsets, in place and out of place.
func allReduce(ctx context.Context, h Harness, r *rank) error {
	library, ok := r.Backend.(backend.AllReducer)
	if ok != (len(h.AllReduces) > 0) {
		return fmt.Errorf("the library has all-reduces: %t, and the harness names %v", ok, h.AllReduces)
	}
	if !ok {
		return nil
	}
	const count, at, bytes = 100, 256, 4096
	size, me := r.group.Size(), r.group.Rank()
	for _, form := range h.AllReduces {
		in, inMap, err := r.mapped(ctx, bytes)
		if err != nil {
			return err
		}
		out, outMap, err := r.mapped(ctx, bytes)
		if err != nil {
			return err
		}
		s, err := r.Device().NewStream()
		if err != nil {
			return err
		}
		var plans [2]backend.PreparedAllReduce
		for i, to := range []backend.Allocation{out, in} {
			plans[i], err = library.PrepareAllReduce(ctx, &backend.AllReduce{
				Name: form, In: in, Out: to, InOffset: at, OutOffset: at, Count: count, DType: "f32", Op: "sum",
			})
			// As the caller does: a rank that fails tells the others.
			if err := r.group.Vote(ctx, "preparing "+form, err); err != nil {
				return err
			}
		}
		for round := range 3 {
			for i, from := range []backend.Allocation{out, in} {
				// Around the elements there is what nobody may touch, other than what is in the input.
				around := [2]float32{-7, -9}
				inputs, outputs := floats(bytes/4, around[1]), floats(bytes/4, around[0])
				for e := range count {
					putFloat(inputs, at/4+e, float32(me+1+e+round))
				}
				if err := errors.Join(r.Device().CopyFromHost(in.Ptr(), inputs), r.Device().CopyFromHost(out.Ptr(), outputs)); err != nil {
					return err
				}
				if err := errors.Join(r.group.Barrier(ctx, "filled"), plans[i].Enqueue(s), s.Synchronize(ctx)); err != nil {
					return fmt.Errorf("%s, plan %d, round %d: %w", form, i, round, err)
				}
				got := make([]byte, bytes)
				if err := r.Device().CopyToHost(got, from.Ptr()); err != nil {
					return err
				}
				for e := range bytes / 4 {
					want := around[i]
					if k := e - at/4; k >= 0 && k < count {
						want = float32(size*(size+1)/2 + size*(k+round))
					}
					if sum := math.Float32frombits(binary.LittleEndian.Uint32(got[4*e:])); sum != want {
						return fmt.Errorf("%s, plan %d, round %d: element %d is %v and not %v", form, i, round, e, sum, want)
					}
				}
				if err := r.group.Barrier(ctx, "looked"); err != nil {
					return err
				}
			}
		}
		for _, p := range plans {
			err = errors.Join(err, p.Close())
		}
		if err := errors.Join(err, s.Close(), r.done(ctx, out, outMap), r.done(ctx, in, inMap)); err != nil {
			return err
		}
	}
	return nil
}

// floats are n times v, in memory.
func floats(n int, v float32) []byte {
	b := make([]byte, 4*n)
	for i := range n {
		putFloat(b, i, v)
	}
	return b
}

func putFloat(b []byte, i int, v float32) {
	binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(v))
}

// allReduceErrors: what the library does not have is ErrUnsupported on every rank, and the next one works.
func allReduceErrors(ctx context.Context, h Harness, r *rank) error {
	library, ok := r.Backend.(backend.AllReducer)
	if !ok || len(h.AllReduces) == 0 {
		return nil // allReduce says what is wrong then
	}
	a, m, err := r.mapped(ctx, 4096)
	if err != nil {
		return err
	}
	good := backend.AllReduce{Name: h.AllReduces[0], In: a, Out: a, Count: 10, DType: "f32", Op: "sum"}
	for _, bad := range []func(x *backend.AllReduce){
		func(x *backend.AllReduce) { x.Name = "no such form" },
		func(x *backend.AllReduce) { x.DType = "no such type" },
		func(x *backend.AllReduce) { x.Op = "no such operation" },
	} {
		x := good
		bad(&x)
		p, err := library.PrepareAllReduce(ctx, &x)
		if err == nil {
			return errors.Join(fmt.Errorf("%+v was prepared", x), p.Close())
		}
		if !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("what the library has not is not ErrUnsupported: %w", err)
		}
		// A rank that fails at once must not leave the others behind.
		if err := r.group.Vote(ctx, "preparing what is not there", nil); err != nil {
			return err
		}
	}
	p, err := library.PrepareAllReduce(ctx, &good)
	if err := r.group.Vote(ctx, "preparing "+good.Name, err); err != nil {
		return err
	}
	return errors.Join(p.Close(), r.done(ctx, a, m))
}
