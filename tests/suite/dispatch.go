package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// dispatchCases: all-to-alls whose counts are read when they run.
func dispatchCases(kind device.Kind) []Case {
	var cases []Case
	for _, alg := range kernels.CollectiveAlgorithms("NewAllToAllV", kind) {
		forms := needsOf(alg)
		if alg == kernels.Transfers {
			forms = []string{Puts} // it gets nothing
		}
		add := func(name string, run func(ctx context.Context, e *Env, alg kernels.Algorithm) error, needs ...string) {
			cases = append(cases, Case{Name: fmt.Sprintf("all_to_all_v/%s/%s", alg, name), Needs: append(slices.Clone(forms), needs...), Run: func(ctx context.Context, e *Env) error {
				return run(ctx, e, alg)
			}})
		}
		add("counts", countsCase)
		add("delayed", delayedDispatch)
		add("replay", replayDispatch, "graphs")
		add("refused", refusedDispatch)
	}
	return append(cases, Case{Name: "all_to_all_v/errors", Needs: []string{Puts}, Run: dispatchErrors})
}

// dispatch is the tensors of an all-to-all with counts, and what goes where in a run. Input and output are parts of larger tensors.
type dispatch struct {
	e          *Env
	dtype      tensor.DType
	rows, room int64
	width      int64 // elements of a row
	displaced  bool

	wholes           [2]*tensor.Tensor
	in, out          tensor.SymmetricTensor
	counts, received *tensor.Tensor
}

const dispatchLead = 3 // rows in front of input and output

func newDispatch(ctx context.Context, e *Env, d dispatch) (*dispatch, error) {
	d.e = e
	w := int64(e.R.WorldSize())
	for i, rows := range []int64{d.rows, d.room} {
		whole, err := e.mapped(ctx, d.dtype, rows+2*dispatchLead, d.width)
		if err != nil {
			return nil, err
		}
		d.wholes[i] = whole
	}
	shape := []int64{w}
	if d.displaced {
		shape = []int64{2, w}
	}
	var errs [4]error
	d.in, errs[0] = d.part(0, d.rows)
	d.out, errs[1] = d.part(1, d.room)
	d.counts, errs[2] = e.mapped(ctx, tensor.Int64, shape...)
	d.received, errs[3] = e.mapped(ctx, tensor.Int64, 2, w)
	return &d, errors.Join(errs[:]...)
}

// part is rows of one of the larger tensors.
func (d *dispatch) part(i int, rows int64) (tensor.SymmetricTensor, error) {
	return d.wholes[i].Sub(dispatchLead*d.width, rows, d.width)
}

func (d *dispatch) Close(ctx context.Context) error {
	return closeAll(ctx, d.received, d.counts, d.wholes[1], d.wholes[0])
}

func (d *dispatch) plan(ctx context.Context, alg kernels.Algorithm) (*kernels.Plan, error) {
	return kernels.NewAllToAllV(ctx, d.in, d.out, d.counts, d.received, &kernels.Options{Algorithm: alg, FirstEpoch: 1<<32 - 2})
}

// sends is how many rows rank has for each in a run, and where they begin: alike on every rank that asks. In some runs everything is for one.
func (d *dispatch) sends(run, rank int) (counts, places []int64) {
	w := d.e.R.WorldSize()
	left := min(d.rows, d.room/int64(w))
	at := int64(0)
	for q := range w {
		n := int64(run*7+rank*5+q*3) % (left + 1)
		switch {
		case run%4 == 1 && q == (rank+run)%w:
			n = left
		case run%4 == 1, run%4 == 3 && rank%2 == 0:
			n = 0
		}
		left -= n
		if d.displaced {
			at = (d.rows - n) * int64((run+q)%3) / 2
		}
		counts, places = append(counts, n), append(places, at)
		at += n
	}
	return counts, places
}

// inputOf is rank's input in a run.
func (d *dispatch) inputOf(run, rank int) []byte {
	b := make([]byte, d.rows*d.width*d.dtype.Bytes())
	for i := range b {
		b[i] = byte(run*29 + rank*53 + i*7 + i/251)
	}
	return b
}

// fill writes counts, which spoil may change, and inputs, and poison to everything else.
func (d *dispatch) fill(run int, spoil func(counts, places []int64)) error {
	counts, places := d.sends(run, d.e.R.Rank())
	if spoil != nil {
		spoil(counts, places)
	}
	if d.displaced {
		counts = append(counts, places...)
	}
	whole := poisoned(d.wholes[0].Bytes())
	copy(whole[dispatchLead*d.width*d.dtype.Bytes():], d.inputOf(run, d.e.R.Rank()))
	return errors.Join(writeBytes(d.wholes[0].Local(), whole), writeBytes(d.wholes[1].Local(), poisoned(d.wholes[1].Bytes())),
		writeBytes(d.counts.Local(), numbers(counts)), writeBytes(d.received.Local(), poisoned(d.received.Bytes())))
}

func numbers(all []int64) (b []byte) {
	for _, n := range all {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// want is output and received after a run, within poison.
func (d *dispatch) want(run int) (whole, received []byte) {
	rank, w := d.e.R.Rank(), d.e.R.WorldSize()
	whole = poisoned(d.wholes[1].Bytes())
	copy(whole[dispatchLead*d.width*d.dtype.Bytes():], d.rowsOf(run, run))
	told := make([]int64, 2*w)
	at := int64(0)
	for r := range w {
		counts, _ := d.sends(run, r)
		told[r], told[w+r] = counts[rank], at
		at += counts[rank]
	}
	return whole, numbers(told)
}

// rowsOf is what this rank receives in a run, of the inputs of that or of another one.
func (d *dispatch) rowsOf(run, inputs int) (rows []byte) {
	row := d.width * d.dtype.Bytes()
	for r := range d.e.R.WorldSize() {
		counts, places := d.sends(run, r)
		rank := d.e.R.Rank()
		rows = append(rows, d.inputOf(inputs, r)[places[rank]*row:][:counts[rank]*row]...)
	}
	return rows
}

// check compares all that there is after a run, or that nothing has changed after one that was refused.
func (d *dispatch) check(run int, refused bool) error {
	want, told := d.want(run)
	if refused {
		want, told = poisoned(int64(len(want))), poisoned(int64(len(told)))
	}
	got, err := readBytes(d.wholes[1].Local())
	if err != nil {
		return err
	}
	received, err := readBytes(d.received.Local())
	if err != nil {
		return err
	}
	if err := errors.Join(sameBytes(d.dtype, got, want), sameBytes(tensor.Int64, received, told)); err != nil {
		return fmt.Errorf("run %d of %d to %d rows of %d %s, displaced %t: %w", run, d.rows, d.room, d.width, d.dtype, d.displaced, err)
	}
	return nil
}

// countsCase: runs of one plan with other counts each, of rows of every alignment.
func countsCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	w := int64(e.R.WorldSize())
	all := []dispatch{
		{dtype: tensor.Int8, rows: 37, room: 20 * w, width: 3}, {dtype: tensor.BFloat16, rows: 64, room: 16 * w, width: 128, displaced: true},
		{dtype: tensor.Float32, rows: 9, room: 9 * w, width: 5}, {dtype: tensor.Float64, rows: 1, room: w, width: 1, displaced: true},
	}
	if !e.Short {
		all = append(all, dispatch{dtype: tensor.BFloat16, rows: 300, room: 100 * w, width: 1024}, dispatch{dtype: tensor.Uint8, rows: 70_001, room: 30_000 * w, width: 1, displaced: true})
	}
	for _, x := range all {
		d, err := newDispatch(ctx, e, x)
		if err != nil {
			return err
		}
		p, err := d.plan(ctx, alg)
		if err != nil {
			return err
		}
		for run := range 5 {
			e.Skew()
			// Nobody fills an output that a peer has begun to write.
			if err := errors.Join(d.fill(run, nil), e.R.Barrier(ctx), p.Run(e.S), e.S.Synchronize(ctx), d.check(run, false), e.R.Barrier(ctx)); err != nil {
				return err
			}
		}
		if err := errors.Join(p.Close(ctx), d.Close(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// delayedDispatch enqueues a run, and closes everything before the device has begun; the counts are there only when it has.
func delayedDispatch(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	d, err := newDispatch(ctx, e, dispatch{dtype: tensor.Float32, rows: 50, room: 30 * int64(e.R.WorldSize()), width: 16})
	if err != nil {
		return err
	}
	p, err := d.plan(ctx, alg)
	if err != nil {
		return err
	}
	counts, freeCounts, err := private(e, d.counts.Bytes())
	if err != nil {
		return err
	}
	kept, freeKept, err := private(e, d.wholes[1].Bytes())
	if err != nil {
		return err
	}
	rows, _ := d.sends(2, e.R.Rank())
	spoil := func(counts, _ []int64) { // what is there until then
		for q := range counts {
			counts[q] = -7
		}
	}
	if err := errors.Join(d.fill(2, spoil), e.R.Device().CopyFromHost(counts, numbers(rows)), e.R.Barrier(ctx)); err != nil {
		return err
	}
	hold, release := holdUp()
	err = errors.Join(e.S.HostFunc(hold), e.S.HostFunc(func() { time.Sleep(delay / 5) }), e.S.Copy(d.counts.Ptr(), counts, d.counts.Bytes()), p.Run(e.S),
		e.S.Copy(kept, d.wholes[1].Ptr(), d.wholes[1].Bytes()))
	release()
	if err != nil {
		return err
	}
	want, _ := d.want(2)
	bytes, dtype := d.wholes[1].Bytes(), d.dtype
	if err := errors.Join(p.Close(ctx), d.Close(ctx), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	got := make([]byte, bytes)
	return errors.Join(e.R.Device().CopyToHost(got, kept), sameBytes(dtype, got, want), freeKept(), freeCounts())
}

// replayDispatch replays one graph, whose counts are others each time, without the host in between.
func replayDispatch(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	const runs = 6
	d, err := newDispatch(ctx, e, dispatch{dtype: tensor.Float32, rows: 40, room: 20 * int64(e.R.WorldSize()), width: 4})
	if err != nil {
		return err
	}
	p, err := d.plan(ctx, alg)
	if err != nil {
		return err
	}
	counts, freeCounts, err := private(e, runs*d.counts.Bytes())
	if err != nil {
		return err
	}
	received, freeReceived, err := private(e, runs*d.received.Bytes())
	if err != nil {
		return err
	}
	outs, freeOuts, err := private(e, runs*d.out.Bytes())
	if err != nil {
		return err
	}
	for run := range runs {
		rows, _ := d.sends(run, e.R.Rank())
		if err := e.R.Device().CopyFromHost(counts.Add(int64(run)*d.counts.Bytes()), numbers(rows)); err != nil {
			return err
		}
	}
	g, err := e.capture(func() error { return p.Run(e.S) })
	if err != nil {
		return err
	}
	if err := errors.Join(d.fill(0, nil), e.R.Barrier(ctx)); err != nil {
		return err
	}
	late := func() { time.Sleep(time.Millisecond) }
	for run := range runs {
		var err error
		if (run+e.R.Rank())%3 == 0 {
			err = e.S.HostFunc(late)
		}
		err = errors.Join(err, e.S.Copy(d.counts.Ptr(), counts.Add(int64(run)*d.counts.Bytes()), d.counts.Bytes()), g.Launch(e.S))
		if (run+e.R.Rank())%3 == 1 {
			err = errors.Join(err, e.S.HostFunc(late)) // peers come to the next run before this one's output is looked at
		}
		err = errors.Join(err,
			e.S.Copy(received.Add(int64(run)*d.received.Bytes()), d.received.Ptr(), d.received.Bytes()), e.S.Copy(outs.Add(int64(run)*d.out.Bytes()), d.out.Ptr(), d.out.Bytes()))
		if err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	var wrong error
	for run := range runs {
		_, want := d.want(run)
		got, out := make([]byte, len(want)), make([]byte, d.out.Bytes())
		err := errors.Join(e.R.Device().CopyToHost(got, received.Add(int64(run)*d.received.Bytes())), e.R.Device().CopyToHost(out, outs.Add(int64(run)*d.out.Bytes())))
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Int64, got, want); err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("run %d: %w", run, err))
		}
		rows := d.rowsOf(run, 0) // behind them is what earlier runs have left
		if err := sameBytes(d.dtype, out[:len(rows)], rows); err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("run %d, output: %w", run, err))
		}
	}
	return errors.Join(wrong, g.Close(), freeOuts(), freeReceived(), freeCounts(), p.Close(ctx), d.Close(ctx))
}

// refusedDispatch: counts that are none, and rows that do not fit, are the same error on every rank; nothing is written, and another plan works.
func refusedDispatch(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	rank, w := e.R.Rank(), e.R.WorldSize()
	last := w - 1
	const rows = 24
	for i, c := range []struct {
		displaced bool
		room      int64
		spoil     func(counts, places []int64)
		want      kernels.CountsError
	}{
		{spoil: func(n, _ []int64) {
			if rank == last {
				n[0] = -1
			}
		}, want: kernels.CountsError{Rank: last, Negative: true, Most: rows}},
		{spoil: func(n, _ []int64) {
			if rank == 0 {
				clear(n)
				n[last] = rows + 1
			}
		}, want: kernels.CountsError{To: last, Most: rows}},
		{spoil: func(n, _ []int64) {
			if rank == 0 {
				n[0] = 1 << 62
			}
		}, want: kernels.CountsError{Most: rows}},
		{displaced: true, spoil: func(n, at []int64) {
			if rank == last {
				n[last], at[last] = 2, rows-1
			}
		}, want: kernels.CountsError{Rank: last, To: last, Most: rows}},
		{displaced: true, spoil: func(n, at []int64) {
			if rank == 0 {
				n[last], at[last] = 1, -1
			}
		}, want: kernels.CountsError{To: last, Negative: true, Most: rows}},
		{room: rows*int64(w) - 1, spoil: func(n, _ []int64) { // the last row of the last rank
			clear(n)
			n[last] = rows
		}, want: kernels.CountsError{Rank: last, To: -1, Rows: rows * int64(w), Most: rows*int64(w) - 1}},
	} {
		if c.room == 0 {
			c.room = 12 * int64(w)
		}
		d, err := newDispatch(ctx, e, dispatch{dtype: tensor.Float32, rows: rows, room: c.room, width: 8, displaced: c.displaced})
		if err != nil {
			return err
		}
		s, err := e.R.NewStream()
		if err != nil {
			return err
		}
		p, err := d.plan(ctx, alg)
		if err != nil {
			return err
		}
		if err := errors.Join(d.fill(i, c.spoil), e.R.Barrier(ctx), p.Run(s)); err != nil {
			return err
		}
		said := s.Synchronize(ctx)
		again := p.Run(s)
		said = errors.Join(said, again)
		what := fmt.Sprintf("counts that are wrong in way %d", i)
		if err := errors.Join(wantError(what, said, symmem.ErrInvalid), wantError("a run after "+what, again, symmem.ErrInvalid)); err != nil {
			return err
		}
		bad, ok := errors.AsType[*kernels.CountsError](said)
		if !ok {
			return fmt.Errorf("%s: %w is no CountsError", what, said)
		}
		if c.want.Op = bad.Op; *bad != c.want {
			return fmt.Errorf("%s: %+v and not %+v", what, *bad, c.want)
		}
		if err := errors.Join(d.check(i, true), e.R.Barrier(ctx), p.Close(ctx)); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		_ = s.Close() // it may tell what it was told before
		if p, err = d.plan(ctx, alg); err != nil {
			return err
		}
		if err := errors.Join(d.fill(i, nil), e.R.Barrier(ctx), p.Run(e.S), e.S.Synchronize(ctx), d.check(i, false), e.R.Barrier(ctx), p.Close(ctx), d.Close(ctx)); err != nil {
			return fmt.Errorf("after %s: %w", what, err)
		}
	}
	return nil
}

// dispatchErrors: what a constructor refuses, on every rank alike, with the value and what is allowed; and it works afterwards.
func dispatchErrors(ctx context.Context, e *Env) error {
	w, rank := int64(e.R.WorldSize()), e.R.Rank()
	d, err := newDispatch(ctx, e, dispatch{dtype: tensor.Float32, rows: 8, room: 8 * w, width: 4})
	if err != nil {
		return err
	}
	refused := func(in, out, counts, received tensor.SymmetricTensor, opts *kernels.Options) error {
		p, err := kernels.NewAllToAllV(ctx, in, out, counts, received, opts)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	of := func(dtype tensor.DType, shape ...int64) *tensor.Tensor {
		t, tErr := e.mapped(ctx, dtype, shape...)
		err = errors.Join(err, tErr)
		return t
	}
	ints, longer, narrow := of(tensor.Int32, w), of(tensor.Int64, w+1), of(tensor.Float32, 8*w, 3)
	halves := of(tensor.BFloat16, 8*w, 4)
	fresh, freshErr := e.R.Zeros(ctx, tensor.Int64, w)
	within, withinErr := d.wholes[0].Sub(dispatchLead*d.width, d.rows, d.width)
	if err := errors.Join(err, freshErr, withinErr); err != nil {
		return err
	}
	err = errors.Join(
		wantArgument("no tensors", refused(nil, nil, nil, nil, nil)),
		wantArgument("no counts", refused(d.in, d.out, nil, d.received, nil), "counts"),
		wantArgument("nowhere to tell", refused(d.in, d.out, d.counts, nil, nil), "received"),
		wantArgument("the zero Tensor", refused(d.in, d.out, &tensor.Tensor{}, d.received, nil)),
		wantError("no rendezvous", refused(d.in, d.out, fresh, d.received, nil), symmem.ErrNoRendezvous),
		wantArgument("counts of 32 bits", refused(d.in, d.out, ints, d.received, nil), "i32", "i64"),
		wantArgument("too many counts", refused(d.in, d.out, longer, d.received, nil), fmt.Sprint(w+1), "counts"),
		wantArgument("nowhere to tell offsets", refused(d.in, d.out, d.counts, longer, nil), "received"),
		wantArgument("rows that are shorter", refused(d.in, narrow, d.counts, d.received, nil), "out", "4"),
		wantArgument("another dtype", refused(d.in, halves, d.counts, d.received, nil), "bf16"),
		wantArgument("in place", refused(d.in, within, d.counts, d.received, nil), "apart"),
		wantArgument("counts that are overwritten", refused(d.in, d.out, d.received, d.received, nil), "apart"),
		wantArgument("an unknown form", refused(d.in, d.out, d.counts, d.received, &kernels.Options{Algorithm: 99}), "99"),
		wantError("a form that it has not", refused(d.in, d.out, d.counts, d.received, &kernels.Options{Algorithm: kernels.TwoShotFlow}), symmem.ErrUnsupported),
		wantArgument("a negative bound", refused(d.in, d.out, d.counts, d.received, &kernels.Options{MaxBlocks: -1}), "MaxBlocks"),
	)
	if err != nil {
		return err
	}
	if w > 1 {
		other, err := d.part(1, d.room-1)
		if err != nil {
			return err
		}
		outs := []tensor.SymmetricTensor{d.out, other}
		counts := []tensor.SymmetricTensor{d.counts, nil}
		last := min(rank/int(w-1), 1)
		if err := errors.Join(wantError("outputs that differ", refused(d.in, outs[last], d.counts, d.received, nil), symmem.ErrMismatch),
			wantError("one rank without counts", refused(d.in, d.out, counts[last], d.received, nil), symmem.ErrInvalid)); err != nil {
			return err
		}
	}
	p, err := d.plan(ctx, kernels.Auto)
	if err != nil {
		return err
	}
	err = errors.Join(d.fill(0, nil), e.R.Barrier(ctx), p.Run(e.S), e.S.Synchronize(ctx), d.check(0, false), e.R.Barrier(ctx), p.Close(ctx))
	if err != nil {
		return fmt.Errorf("after what was refused: %w", err)
	}
	if err := errors.Join(wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed), closeAll(ctx, ints, longer, narrow, halves), d.Close(ctx)); err != nil {
		return err
	}
	return errors.Join(wantError("closed tensors", refused(d.in, d.out, d.counts, d.received, nil), symmem.ErrClosed), fresh.Close(ctx))
}

// barrierCases: barriers as plans.
func barrierCases(kind device.Kind, backend string) []Case {
	var cases []Case
	for _, alg := range append(kernels.CollectiveAlgorithms("NewBarrier", kind), kernels.LibraryCollectives("NewBarrier", backend)...) {
		cases = append(cases, Case{Name: fmt.Sprintf("barrier_plan/%s", alg), Needs: append(needsOf(alg), "graphs"), Run: func(ctx context.Context, e *Env) error {
			return barrierPlanCase(ctx, e, alg)
		}})
	}
	return append(cases, Case{Name: "barrier_plan/errors", Needs: needsOf(kernels.Auto), Run: barrierErrors})
}

// barrierPlanCase: what a late rank writes before a barrier is there behind it on all others, in runs and from a graph.
func barrierPlanCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	rank, w := e.R.Rank(), e.R.WorldSize()
	const runs = 10
	x, err := e.mapped(ctx, tensor.Int64, runs)
	if err != nil {
		return err
	}
	mine, err := e.mapped(ctx, tensor.Int64, runs)
	if err != nil {
		return err
	}
	var values []int64
	for i := range runs {
		values = append(values, int64(1000+i))
	}
	kept, free, err := private(e, 8*runs)
	if err != nil {
		return err
	}
	p, err := kernels.NewBarrier(ctx, e.R.Memory(), &kernels.Options{Algorithm: alg, FirstEpoch: 1<<32 - 4})
	if err != nil {
		return err
	}
	if p.Algorithm() != alg {
		return fmt.Errorf("%s was asked for and %s came", alg, p.Algorithm())
	}
	if err := errors.Join(writeBytes(mine.Local(), numbers(values)), e.R.Barrier(ctx)); err != nil {
		return err
	}
	g, err := e.capture(func() error { return p.Run(e.S) })
	if err != nil {
		return err
	}
	for i := range runs {
		// Every rank's copy of x has a value from the rank before, which is late now and then.
		if err := e.S.HostFunc(func() { time.Sleep(time.Duration((i+rank)%3) * time.Millisecond) }); err != nil {
			return err
		}
		part, partErr := x.Sub(int64(i), 1)
		from, fromErr := mine.Sub(int64(i), 1)
		if err := errors.Join(partErr, fromErr); err != nil {
			return err
		}
		if w > 1 {
			err = part.Put(e.S, (rank+1)%w, from)
		} else {
			err = e.S.Copy(part.Ptr(), from.Ptr(), from.Bytes())
		}
		run := func() error { return p.Run(e.S) }
		if i%2 == 1 {
			run = func() error { return g.Launch(e.S) }
		}
		if err := errors.Join(err, run(), e.S.Copy(kept.Add(8*int64(i)), part.Ptr(), part.Bytes())); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	got := make([]byte, 8*runs)
	if err := errors.Join(e.R.Device().CopyToHost(got, kept), free(), sameBytes(tensor.Int64, got, numbers(values))); err != nil {
		return err
	}
	// Nobody comes past it before the last has come.
	hold, release := holdUp()
	if rank == w-1 {
		err = e.S.HostFunc(hold)
	}
	if err := errors.Join(err, p.Run(e.S), e.R.Barrier(ctx)); err != nil {
		release()
		return err
	}
	time.Sleep(5 * time.Millisecond)
	done, err := e.S.Query()
	err = errors.Join(err, e.R.Barrier(ctx))
	release()
	if err == nil && done && w > 1 {
		err = fmt.Errorf("rank %d has come past the barrier, and rank %d has not come to it", rank, w-1)
	}
	return errors.Join(err, e.S.Synchronize(ctx), g.Close(), p.Close(ctx), mine.Close(ctx), x.Close(ctx))
}

// barrierErrors: what NewBarrier refuses.
func barrierErrors(ctx context.Context, e *Env) error {
	refused := func(o *kernels.Options) error {
		p, err := kernels.NewBarrier(ctx, e.R.Memory(), o)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	_, noMemory := kernels.NewBarrier(ctx, nil, nil)
	err := errors.Join(
		wantArgument("no memory", noMemory, "m"),
		wantArgument("an unknown form", refused(&kernels.Options{Algorithm: 99}), "99", "one_shot"),
		wantArgument("a negative bound", refused(&kernels.Options{MaxBlocks: -1}), "MaxBlocks"),
		wantError("a form that it has not", refused(&kernels.Options{Algorithm: kernels.TwoShotFlow}), symmem.ErrUnsupported, "transfers"),
	)
	if err != nil {
		return err
	}
	if e.R.WorldSize() > 1 {
		epochs := []uint32{0, 5}
		if err := wantError("epochs that differ", refused(&kernels.Options{FirstEpoch: epochs[slices.Min([]int{e.R.Rank(), 1})]}), symmem.ErrMismatch); err != nil {
			return err
		}
	}
	p, err := kernels.NewBarrier(ctx, e.R.Memory(), nil)
	if err != nil {
		return err
	}
	return errors.Join(p.Run(e.S), e.S.Synchronize(ctx), p.Close(ctx), wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed))
}
