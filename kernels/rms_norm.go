package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/tensor"
)

// Local is elements in memory of this rank's device that other ranks do not reach: of [device.Device.Alloc], of another library, or this
// rank's copy of a symmetric tensor, by [LocalOf]. They lie in row-major order without gaps, begin at a multiple of 16 bytes, and stay where
// they are as long as a plan works on them. The zero Local is none.
type Local struct {
	Ptr         device.Ptr
	DType       tensor.DType
	NumElements int64
}

// LocalOf is the elements of a view, which must be of this rank's memory. Of nil it is none.
func LocalOf(v *tensor.View) Local {
	if v == nil {
		return Local{}
	}
	return Local{Ptr: v.Ptr(), DType: v.DType(), NumElements: v.NumElements()}
}

func (l Local) none() bool { return l == Local{} }

func (l Local) bytes() int64 { return l.NumElements * l.DType.Bytes() }

// RMSNorm is what comes behind an all-reduce in [NewAllReduceRMSNorm]. The input has a row of hidden elements for each token; so have all
// that are called rows here. Each rank has memory of its own for all of it, and its own residual.
type RMSNorm struct {
	// Residual is rows of the input's dtype, which are added to the sum.
	Residual Local
	// ResidualOut takes what comes of that, in the input's dtype. It may be Residual, and is if it is none.
	ResidualOut Local
	// Weight is hidden elements of the input's dtype, and WeightBias is added to each of them: 0, or 1 for weights that are stored as
	// their distance from 1.
	Weight     Local
	WeightBias float32
	// Epsilon is added to the mean of the squares; 0 or more.
	Epsilon float32
	// Out takes the rows that are normalised, in the input's dtype. It may be the input. If it is none it is the input, or, where there is a
	// Quantized, nothing.
	Out Local
	// Quantized, unless none, takes the normalised rows divided by Scale as 8-bit floats, one a byte, as u8: e4m3, of 1 sign, 4 exponent
	// and 3 fraction bits, without infinities (e4m3fn of the field). What is beyond 448 becomes 448, infinities too, and NaN 0x7f.
	Quantized Local
	// Scale is the scale of Quantized: above 0, finite, and so is its reciprocal. It must be 0 where there is no Quantized, or a ScaleAt.
	Scale float32
	// ScaleAt, unless none, is one f32, at a multiple of 4, that each run reads in place of Scale: for scales that are on the device, as vLLM's are. A run of whatever is there does what the
	// formula says: of 0, all that is not 0 becomes 448.
	ScaleAt Local
}

// NewAllReduceRMSNorm prepares an all-reduce of in with what follows it in a transformer, in one kernel where peers have pointers. In has
// any number of tokens, in its first dimensions, and hidden elements for each in its last: f16, bf16 or f32, whole vectors of 16 bytes, at an
// address that is a multiple of 16. After a run, for each token,
//
//	s           = the sum of in over all ranks, with the bits that an all-reduce in the order of the ranks gives: rounded to the dtype once
//	ResidualOut = x = s + Residual, rounded to the dtype
//	Out         = y = x * (1 / sqrt(mean of x^2 + Epsilon)) * (WeightBias + Weight), rounded to the dtype once
//	Quantized   = y * (1 / Scale), or 1 / the element of ScaleAt, rounded to e4m3
//
// which is what FlashInfer's and vLLM's fused all-reduces compute. All arithmetic is of float32, each operation rounded to the nearest. The
// squares are added in an order that hidden and the dtype alone give: so a token has the same bits on every kind of device, in every form,
// and however many tokens there are. In itself stays as it is, unless Out is in. No other two of them may overlap, but Residual and
// ResidualOut may be one. Addresses are multiples of 16, that of Quantized of as many as 16 bytes of the input have elements.
//
// Collective: all ranks come with the same tensors, numbers and options (ErrMismatch with everybody's value if not), and in must have had
// its rendezvous. 0 tokens are no work. It blocks until all ranks have come. Close the plan. What a Local names must stay until then: the plan
// does not know when it is freed.
//
// The form is opts.Algorithm: of the host device OneShot, TwoShot or Transfers, of CUDA OneShotPush, TwoShotPush, TwoShotPull, their
// families or Transfers. Its errors are those of [collective.New], ErrInvalid for numbers, dtypes, sizes and addresses that do not fit
// and memory that overlaps, and ErrUnsupported for another form, and for a dtype that is none of the three.
func NewAllReduceRMSNorm(ctx context.Context, in tensor.SymmetricTensor, n RMSNorm, opts *Options) (*Plan, error) {
	return newNorm(normCall, in, n, opts).plan(ctx)
}

const normCall = "NewAllReduceRMSNorm"

// NewRMSNorm prepares what comes behind the sum in [NewAllReduceRMSNorm], of rows that are there already: s is in. Ranks do not wait for each
// other in a run. It is for sequences of an all-reduce of another kind and a norm. Arguments, bits and errors are those of
// NewAllReduceRMSNorm; opts.Algorithm is not used.
func NewRMSNorm(ctx context.Context, in tensor.SymmetricTensor, n RMSNorm, opts *Options) (*Plan, error) {
	m := newNorm("NewRMSNorm", in, n, opts)
	m.local = true
	return m.plan(ctx)
}

// norm is one that is being prepared.
type norm struct {
	*maker
	RMSNorm
	local bool // without the all-reduce
	// inClusters says that a cluster of blocks has each row, and noRoom that there was no room for that.
	inClusters, noRoom bool

	rows, columns int64
}

func newNorm(call string, in tensor.SymmetricTensor, n RMSNorm, opts *Options) *norm {
	return &norm{maker: newMaker(call, in, in, opts), RMSNorm: n}
}

func (n *norm) plan(ctx context.Context) (*Plan, error) {
	if err := usable(n.call, "in", n.in); err != nil {
		return nil, errors.Join(errs.Given(n.call, "ctx", ctx, "a context"), err)
	}
	n.fill()
	ctx, missing := errs.WithContext(n.call, ctx, nil)
	return inTurn(ctx, n.in.Memory(), n.call, func(ctx context.Context, _ error) (*Plan, error) { return n.first(ctx, missing) })
}

// first prepares it in the form that was asked for, or the first that can be had.
func (n *norm) first(ctx context.Context, failure error) (*Plan, error) {
	return untilHad(n.in.Memory(), n.opts.Algorithm, &n.avoided, func() (*Plan, Algorithm, error) {
		p, err := n.once(ctx, failure)
		return p, n.algorithm, err
	})
}

// once is first for one form.
func (n *norm) once(ctx context.Context, failure error) (*Plan, error) {
	n.maxBlocks = n.opts.MaxBlocks
	s := collective.Spec{Failure: failure, FirstEpoch: n.opts.FirstEpoch, Exclusive: n.opts.Exclusive, Tensors: []tensor.SymmetricTensor{n.in}}
	if s.Failure == nil {
		s.Failure = n.maker.check()
	}
	if s.Failure == nil {
		s.Failure = n.check()
	}
	if s.Failure == nil {
		s.Failure = n.choose()
	}
	s.Name = n.describe()
	s.Parameters = fmt.Sprintf("at most %d blocks, epsilon %v, weight bias %v, out %t, fp8 %t with scale %v, read %t",
		n.maxBlocks, n.Epsilon, n.WeightBias, !n.Out.none(), !n.Quantized.none(), n.Scale, !n.ScaleAt.none())
	if n.opts.Algorithm == Auto && !n.local {
		s.Parameters += ", chosen by auto" // who asks for the form does not go on with another one
	}
	s.Program = &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }}
	if s.Failure == nil && n.in.Bytes() > 0 {
		n.spec(&s)
	}
	p, err := collective.New(ctx, n.in.Memory(), s)
	if e, ok := errors.AsType[*errs.ArgumentError](err); ok && n.inClusters && (e.Arg == "CUDA.MinBlocks" || e.Arg == "CUDA.Threads") { // on every rank: they have counted alike
		n.in.Memory().Logger().Info("there is no room for a cluster of blocks for each row; a block has it", "error", err)
		n.noRoom = true
		return n.once(ctx, failure)
	}
	if err != nil {
		return nil, err
	}
	return &Plan{Plan: p, algorithm: n.algorithm, bytes: n.in.Bytes()}, nil
}

// fill gives what is none its default.
func (n *norm) fill() {
	if n.ResidualOut.none() {
		n.ResidualOut = n.Residual
	}
	if n.Out.none() && n.Quantized.none() {
		n.Out = LocalOf(n.in.Local())
	}
	if shape := n.in.Shape(); len(shape) > 0 {
		n.columns = shape[len(shape)-1]
	}
	if n.columns > 0 {
		n.rows = n.in.NumElements() / n.columns
	}
}

func (n *norm) describe() string {
	what := "all-reduce and RMSNorm"
	if n.local {
		what = "RMSNorm"
	}
	return fmt.Sprintf("%s of %d rows of %d %s, %s", what, n.rows, n.columns, n.in.DType(), n.algorithm)
}

// mostHidden is the longest row: its length is exact in float32, and its bytes are counted in 32 bits.
const mostHidden = 1 << 24

func (n *norm) check() error {
	if _, ok := ptx.LocalRMSNorm(n.in.DType().String(), false); !ok {
		return fmt.Errorf("%s of %s; there are f16, bf16 and f32: %w", n.call, n.in.DType(), errs.ErrUnsupported)
	}
	hidden := n.columns
	whole := 16 / n.in.DType().Bytes()
	switch {
	case hidden < 1 || hidden > mostHidden || hidden%whole != 0:
		return errs.Invalid(n.call, "in.Shape", n.in.Shape(), fmt.Sprintf("a last dimension of %d to %d, in multiples of %d", whole, mostHidden, whole))
	case n.in.NumElements()/hidden > math.MaxInt32:
		return errs.Invalid(n.call, "in.Shape", n.in.Shape(), fmt.Sprintf("at most %d rows", math.MaxInt32))
	case n.in.Ptr()%16 != 0:
		return errs.Invalid(n.call, "in.Ptr", n.in.Ptr(), "a multiple of 16")
	case !(n.Epsilon >= 0) || math.IsInf(float64(n.Epsilon), 0):
		return errs.Invalid(n.call, "Epsilon", n.Epsilon, "0 or more, finite")
	case math.IsNaN(float64(n.WeightBias)) || math.IsInf(float64(n.WeightBias), 0):
		return errs.Invalid(n.call, "WeightBias", n.WeightBias, "a finite number")
	case n.Quantized.none() && n.Scale != 0:
		return errs.Invalid(n.call, "Scale", n.Scale, "0 where there is no Quantized")
	case n.Quantized.none() && !n.ScaleAt.none():
		return errs.Invalid(n.call, "ScaleAt", fmt.Sprintf("%d %s at %s", n.ScaleAt.NumElements, n.ScaleAt.DType, n.ScaleAt.Ptr), "none where there is no Quantized")
	case !n.ScaleAt.none() && n.Scale != 0:
		return errs.Invalid(n.call, "Scale", n.Scale, "0 where there is a ScaleAt")
	case !n.Quantized.none() && n.ScaleAt.none() && (!(n.Scale > 0) || math.IsInf(float64(n.Scale), 0) || math.IsInf(float64(1/n.Scale), 0)):
		return errs.Invalid(n.call, "Scale", n.Scale, "a number above 0 that is finite, as its reciprocal is")
	}
	return errors.Join(n.checkLocals(hidden), n.checkOverlaps())
}

func (n *norm) checkLocals(hidden int64) error {
	dtype, all := n.in.DType(), n.in.NumElements()
	for _, l := range []struct {
		name  string
		local Local
		dtype tensor.DType
		count int64
		align device.Ptr
		must  bool
	}{
		{"Weight", n.Weight, dtype, hidden, 16, true},
		{"Residual", n.Residual, dtype, all, 16, true},
		{"ResidualOut", n.ResidualOut, dtype, all, 16, true},
		{"Out", n.Out, dtype, all, 16, false},
		{"Quantized", n.Quantized, tensor.Uint8, all, device.Ptr(16 / dtype.Bytes()), false},
		{"ScaleAt", n.ScaleAt, tensor.Float32, 1, 4, false},
	} {
		switch {
		case l.local.none() && !l.must:
		case l.local.none():
			return errs.Invalid(n.call, l.name, "none", fmt.Sprintf("%d %s in memory of %s", l.count, l.dtype, n.in.Device().Name()))
		case l.local.DType != l.dtype:
			return errs.Invalid(n.call, l.name+".DType", l.local.DType, l.dtype.String())
		case l.local.NumElements != l.count:
			return errs.Invalid(n.call, l.name+".NumElements", l.local.NumElements, fmt.Sprint(l.count))
		case l.count > 0 && (l.local.Ptr.IsNil() || l.local.Ptr%l.align != 0):
			return errs.Invalid(n.call, l.name+".Ptr", l.local.Ptr, fmt.Sprintf("the address of memory, a multiple of %d", l.align))
		case l.local.Ptr.Add(l.local.bytes()) < l.local.Ptr: // it would seem to be apart from everything
			return errs.Invalid(n.call, l.name+".Ptr", l.local.Ptr, fmt.Sprintf("an address with %d bytes behind it", l.local.bytes()))
		}
	}
	return nil
}

// checkOverlaps: what is written is apart from all else, but for what may be one and the same.
func (n *norm) checkOverlaps() error {
	in := LocalOf(n.in.Local())
	type named struct {
		name string
		Local
	}
	written := []named{{"ResidualOut", n.ResidualOut}, {"Out", n.Out}, {"Quantized", n.Quantized}}
	for i, w := range written {
		others := append([]named{{"in", in}, {"Residual", n.Residual}, {"Weight", n.Weight}, {"ScaleAt", n.ScaleAt}}, written[:i]...)
		for _, o := range others {
			one := w.Ptr == o.Ptr && (w.name == "Out" && o.name == "in" || w.name == "ResidualOut" && o.name == "Residual")
			if w.bytes() == 0 || o.bytes() == 0 || one || w.Ptr >= o.Ptr.Add(o.bytes()) || o.Ptr >= w.Ptr.Add(w.bytes()) {
				continue
			}
			return errs.Invalid(n.call, w.name, fmt.Sprintf("%d bytes at %s", w.bytes(), w.Ptr),
				fmt.Sprintf("memory apart from %s, %d bytes at %s", o.name, o.bytes(), o.Ptr))
		}
	}
	return nil
}

// normForms is the forms on CUDA devices, as they were compiled.
var normForms = map[Algorithm]ptx.Form{OneShotPush: ptx.OneShotPush, TwoShotPush: ptx.TwoShotPush, TwoShotPull: ptx.TwoShotPull}

// choose makes Auto and families into one form.
func (n *norm) choose() error {
	asked, kind := n.opts.Algorithm, n.in.Device().Kind()
	if n.algorithm = asked; n.local {
		n.algorithm = Transfers // to nobody
		return nil
	}
	all := asks(CollectiveAlgorithms(normCall, kind))
	switch {
	case !asked.known():
		return errs.Invalid(n.call, "Algorithm", asked, fmt.Sprint(all))
	case !slices.Contains(all, asked):
		return fmt.Errorf("there is no all-reduce and RMSNorm in the form %s on a %s device; there are %v: %w", asked, kind, all, errs.ErrUnsupported)
	}
	n.algorithm = n.chosen(asked, kind)
	return nil
}

func (n *norm) chosen(asked Algorithm, kind device.Kind) Algorithm {
	size, bytes := n.in.WorldSize(), n.in.Bytes()
	if asked == Auto && (n.far() || bytes == 0 || !reachable(n.in)) {
		return Transfers
	}
	c := choice{algorithm: asked}
	switch {
	case kind == device.CUDA && (asked == OneShot || asked == Auto && size == 1):
		c.algorithm = OneShotPush
	case kind != device.CUDA && asked == Auto && size == 1:
		c.algorithm = OneShot
	case asked == Auto, asked == TwoShot && kind == device.CUDA:
		l := lookup{tables: n.in.Memory().Tuning(), collective: tuning.AllReduceRMSNorm, asked: asked, kind: kind, dtype: n.in.DType().String(), bytes: bytes, size: size, whole: true}
		l.can = func(a Algorithm) bool {
			if slices.Contains(n.avoided, a) {
				return false
			}
			if _, compiled := normForms[a]; kind == device.CUDA {
				return compiled || a == Transfers
			}
			return a == OneShot || a == TwoShot || a == Transfers
		}
		var ok bool
		if c, ok = l.find(); !ok {
			if c.algorithm = TwoShot; kind == device.CUDA {
				c.algorithm = TwoShotPull
			}
		}
	}
	n.maxBlocks = atMostBlocks(n.opts.MaxBlocks, c.blocks)
	return c.algorithm
}

func (n *norm) spec(s *collective.Spec) {
	switch {
	case n.local || n.in.WorldSize() == 1:
		s.Program = &collective.Program{Build: func(_ context.Context, b *collective.Builder) error { return n.step(b, n.in.Ptr()) }}
	case n.algorithm == Transfers:
		n.byTransfers(s)
	case n.in.Device().Kind() == device.CUDA:
		n.onCUDA(s)
	default:
		n.onHost(s)
	}
}

// rowBytes is the size of a row.
func (n *norm) rowBytes() int64 { return n.columns * n.in.DType().Bytes() }

// normThreads is how many threads a row has, on CUDA devices and in the order in which its squares are added: it depends on the length of
// the row alone.
func normThreads(rowBytes int64) int {
	threads := 32
	for threads < 512 && int64(threads)*16 < rowBytes {
		threads *= 2
	}
	return threads
}

// params is the kernel's parameter, of which the form sets the rest.
func (n *norm) params(in device.Ptr) ptx.Norm {
	p := ptx.Norm{
		In: uint64(in), Residual: uint64(n.Residual.Ptr), ResidualOut: uint64(n.ResidualOut.Ptr), Weight: uint64(n.Weight.Ptr), Out: uint64(n.Out.Ptr),
		Quantized: uint64(n.Quantized.Ptr), Rows: uint32(n.rows), Columns: uint32(n.columns), Epsilon: n.Epsilon, Bias: n.WeightBias,
	}
	switch {
	case !n.ScaleAt.none():
		p.Scale = uint64(n.ScaleAt.Ptr)
	case !n.Quantized.none():
		p.Scale = ptx.NormScale(n.Scale)
	}
	return p
}

// fit is the launch: a block for each row.
func (n *norm) fit(multiprocessors int) (blocks, threads int) {
	g := launchGeometry{blocks: int(min(n.rows, 2*int64(multiprocessors))), threads: normThreads(n.rowBytes())}.atMost(n.maxBlocks)
	return g.blocks, g.threads
}

// clusterRows is the most rows between so many ranks that a cluster of blocks has each: more are faster with a block each (docs/hardware.md). Between 8 it was not measured.
func clusterRows(size int) int64 {
	if size == 2 {
		return 8
	}
	return 16
}

// clustered is the kernel by which a cluster has each row, and whether it is to be taken: where there are few rows, and blocks for all of them.
func (n *norm) clustered(form ptx.Form) (ptx.Kernel, bool) {
	size := n.in.WorldSize()
	k, ok := ptx.RMSNormCluster(form, n.in.DType().String(), size, hopper(n.in.Memory()))
	return k, ok && !n.noRoom && n.rows <= clusterRows(size) && normThreads(n.rowBytes()) >= 32*ptx.NormCluster && (n.maxBlocks == 0 || int64(n.maxBlocks) >= n.rows*ptx.NormCluster)
}

// clusters is the launch by clusters.
func (n *norm) clusters(int) (blocks, threads int) {
	return int(n.rows) * ptx.NormCluster, normThreads(n.rowBytes()) / ptx.NormCluster
}

// onCUDA makes the spec that of a kernel on a CUDA device.
func (n *norm) onCUDA(s *collective.Spec) {
	s.Program = nil
	form, size := normForms[n.algorithm], n.in.WorldSize()
	kernel, _ := ptx.RMSNorm(form, n.in.DType().String(), size, hopper(n.in.Memory())) // check has found the dtype
	fit, least := n.fit, 0
	var k ptx.Kernel
	if k, n.inClusters = n.clustered(form); n.inClusters {
		kernel, fit, least = k, n.clusters, int(n.rows)*ptx.NormCluster
		s.Parameters += ", in clusters"
	}
	image, err := ptx.Image(kernel.File)
	if err != nil {
		s.Failure = err
		return
	}
	s.Workspace = ptx.NormDataBytes(form, size, n.rows, n.rowBytes())
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, Fit: fit, MinBlocks: least,
		Params: func(at *collective.Addresses) []any {
			p := n.params(n.in.Ptr())
			p.Span, p.Shard = uint64(ptx.NormSpan(form, size, n.rows, n.rowBytes())), uint32(ptx.NormShard(size, n.rowBytes()))
			if form == ptx.TwoShotPull {
				p.Inputs = uint64(at.Table())
			}
			return []any{at.Comm(), p}
		},
	}
}

// step adds what comes behind the sum to a program.
func (n *norm) step(b *collective.Builder, sum device.Ptr) error {
	if n.in.Device().Kind() != device.CUDA {
		rows := n.hostRows(b.Addresses)
		from := b.Bytes(sum, n.in.Bytes())
		b.Host(func() error {
			rows.all(from)
			return nil
		})
		return nil
	}
	kernel, _ := ptx.LocalRMSNorm(n.in.DType().String(), ptx.Hopper(n.in.Device()))
	image, err := ptx.Image(kernel.File)
	if err != nil {
		return err
	}
	b.Kernel(&collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, Fit: n.fit,
		Params: func(*collective.Addresses) []any { return []any{n.params(sum)} },
	})
	return nil
}
