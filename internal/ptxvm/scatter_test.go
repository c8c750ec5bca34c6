package ptxvm

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// scattering is a reduce-scatter, or a reduce, by the kernel that pushes shares, for several launches.
type scattering struct {
	form    ptx.Form
	dtype   string
	op      int
	ranks   int
	count   int
	root    int // or -1
	offset  int // elements
	inPlace bool
	epochs  int
	hopper  bool
	slow    int // a rank that comes late to every third launch, or -1
}

func (j scattering) String() string {
	return fmt.Sprintf("%s/%s/op=%d/ranks=%d/count=%d+%d/root=%d/in_place=%t/slow=%d", j.form, j.dtype, j.op, j.ranks, j.count, j.offset, j.root, j.inPlace, j.slow)
}

// share is the elements that rank owns.
func (j scattering) share(rank int) (lo, hi int) {
	if j.root >= 0 {
		if rank == j.root {
			return 0, j.count
		}
		return 0, 0
	}
	each := (j.count + j.ranks - 1) / j.ranks
	return min(rank*each, j.count), min((rank+1)*each, j.count)
}

// run carries out all launches at once, each with tensors of its own.
func (j scattering) run(tb testing.TB, c Config, replace func(*Module) *Module) error {
	kernel, ok := ptx.PushScatter(j.form, j.dtype, j.hopper)
	require.True(tb, ok, "%s", j)
	width := widths[j.dtype]
	shard := (j.count + j.ranks - 1) / j.ranks
	if j.root >= 0 {
		shard = j.count
	}
	span := ptx.ScatterSpan(j.form, int64(shard*width))
	const first = 1<<32 - 2
	w := newCrew(tb, j.ranks, 2, 8, 2*int64(j.ranks)*span, first, c)
	w.replace = replace
	var table []byte
	if j.ranks > ptx.Inline {
		table = append(make([]byte, 2*8*j.ranks), w.workspaces()...)
	}
	rnd := rand.New(rand.NewPCG(c.Seed, 5))
	size := (j.count*width + 64) / 16 * 16
	type result struct {
		out    []byte
		values []uint64 // of each element, or the fill
	}
	var results []result
	for e := range j.epochs {
		values := make([][]uint64, j.ranks)
		var ins, outs [][]byte
		var inPtr, outPtr []uint64
		for r := range j.ranks {
			in, out := aligned(size), aligned(size)
			for i := range in {
				in[i], out[i] = fillByte, fillByte
			}
			for i := range j.count {
				v := element(j.dtype, rnd, false)
				values[r] = append(values[r], v)
				put(in[(j.offset+i)*width:], width, v)
			}
			lo, _ := j.share(r)
			at := w.mapped(r, in) + uint64(j.offset*width)
			to := at + uint64(lo*width)
			if !j.inPlace {
				to = w.mapped(r, out)
			}
			ins, outs, inPtr, outPtr = append(ins, in), append(outs, out), append(inPtr, at), append(outPtr, to)
		}
		for r := range j.ranks {
			lo, hi := j.share(r)
			var want []uint64
			for i := lo; i < hi; i++ {
				var of []uint64
				for q := range j.ranks {
					of = append(of, values[q][i])
				}
				want = append(want, combine(j.dtype, j.op, of))
			}
			out := outs[r]
			if j.inPlace { // and the rest of the input is as it was
				out = ins[r][j.offset*width:]
				want = append(append(append([]uint64{}, values[r][:lo]...), want...), values[r][hi:]...)
			}
			results = append(results, result{out, want})
			m := w.comm(r)
			p := ptx.Params{Workspace: m.Workspace, Count: uint64(j.count), Fault: m.Fault, Dead: m.Dead, Stop: m.Stop, Timeout: m.Timeout, Shard: uint64(shard), Span: uint64(span),
				Rank: uint32(r), World: uint32(j.ranks), Op: uint32(j.op)}
			p.In[0], p.Out[0] = inPtr[r], outPtr[r]
			if j.root >= 0 {
				p.Flags, p.Peer = ptx.ToRoot, uint32(j.root)
			}
			if table != nil {
				p.Table = w.put(r, table)
			}
			if r == j.slow && e%3 == 0 {
				w.late(r, 3000)
			}
			w.launch(r, kernel, p.Bytes())
		}
	}
	if err := w.m.Run(); err != nil {
		return err
	}
	for i, x := range results {
		for at, want := range x.values {
			if got := get(x.out[at*width:], width); got != want {
				return fmt.Errorf("launch %d, rank %d: element %d is %#x, not %#x", i/j.ranks, i%j.ranks, at, got, want)
			}
		}
		for at := len(x.values) * width; at < len(x.out)-16; at++ {
			if x.out[at] != fillByte {
				return fmt.Errorf("launch %d, rank %d: byte %d behind the output has changed", i/j.ranks, i%j.ranks, at)
			}
		}
	}
	for r, b := range w.spaces {
		if e := binary.LittleEndian.Uint32(b); e != uint32(int64(first)+int64(j.epochs)) {
			return fmt.Errorf("rank %d is in epoch %d", r, e)
		}
	}
	return w.whole()
}

func scatterings(ranks int, full bool) (all []scattering) {
	i := 0
	for _, dtype := range []string{"f32", "bf16", "f16", "f64", "i8", "u16", "i32", "u64"} {
		for _, form := range []ptx.Form{ptx.OneShotPush, ptx.OneShotLL} {
			if _, ok := ptx.PushScatter(form, dtype, true); !ok {
				continue
			}
			for _, root := range []int{-1, i % ranks} {
				for _, count := range []int{1, 30, 101} {
					if i++; !full && i%3 != 0 {
						continue
					}
					op := ptx.Sum + i%5
					all = append(all, scattering{form: form, dtype: dtype, op: op, ranks: ranks, count: count, root: root, offset: i % 4, inPlace: i%2 == 0, epochs: 5, hopper: i%5 < 3, slow: i%(ranks+1) - 1})
				}
			}
		}
	}
	return all
}

// TestScatter: the kernels that push shares to their owners give exact results for every dtype and operation, with memory as weak as it may be, whoever
// is late.
func TestScatter(t *testing.T) {
	full := os.Getenv("SYMMEM_TEST_MATRIX") == "full"
	worlds, seeds := []int{2, 3, 9}, uint64(1)
	if full {
		worlds, seeds = []int{1, 2, 3, 4, 5, 8, 9}, 4
	}
	for _, ranks := range worlds {
		for _, j := range scatterings(ranks, full) {
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seeds {
					require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 27}, nil))
				}
			})
		}
	}
}
