package kernels

import (
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// byCast makes the spec that of the kernel that stores to all ranks at once, in one phase, for a movement that gives all the same of each rank.
func (v *movement) byCast(s *collective.Spec) {
	s.Program = nil
	if d := v.in.Device(); !ptx.Hopper(d) {
		s.Failure = fmt.Errorf("the form %s needs compute capability 9.0, which %s has not: %w", v.algorithm, d.Name(), errs.ErrUnsupported)
		return
	}
	image, err := ptx.Image(ptx.Cast.File)
	if err != nil {
		s.Failure = err
		return
	}
	longest := int64(0)
	for r := range v.in.WorldSize() {
		longest = max(longest, v.cast(r).bytes)
	}
	s.Multicast = true
	s.CUDA = &collective.Kernel{
		Image: image, Function: ptx.Cast.Name, Overlap: ptx.Cast.Overlap,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(v.algorithm, longest, 0, v.in.WorldSize(), multiprocessors).atMost(v.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any { return []any{at.Comm(), v.castParams(at)} },
	}
}

// cast is what a rank has for all ranks. In place it has that itself.
func (v *movement) cast(from int) (c piece) {
	for to := range v.in.WorldSize() {
		if p := v.phases[0](from, to); p.bytes > 0 {
			c = p
		}
	}
	return c
}

// castParams is the kernel's parameter.
func (v *movement) castParams(at *collective.Addresses) ptx.CastParams {
	c := v.cast(at.Rank())
	p := ptx.CastParams{
		From: uint64(at.Tensor(specIn, at.Rank()).Add(c.src)), To: uint64(at.Multicast(v.specOut()).Add(c.dst)), Bytes: uint64(c.bytes),
	}
	var table []byte
	for r := range at.WorldSize() {
		own := uint64(at.Tensor(v.specOut(), r).Add(c.dst))
		if r < ptx.Inline {
			p.Own[r] = own
		}
		table = binary.LittleEndian.AppendUint64(table, own)
	}
	if at.WorldSize() > ptx.Inline {
		p.Table = uint64(at.Upload(table))
	}
	return p
}
