package kernels

import (
	"context"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
)

// byTransfers makes the spec that of a program: the inputs are gathered in the workspace, behind what an all-reduce by transfers has there, one
// message is all-reduced in place, and scattered to the outputs. On GPUs each tensor is there at a place that is alike to its own modulo 16, which the
// ranks have compared (placeOf). What is between two tensors is reduced too, and looked at by nobody.
//
// A peer puts results to this rank's copy only when it has this rank's part of the message, which is sent behind the gathering: so it overwrites
// nothing of the run before that was not scattered.
func (m *many) byTransfers(s *collective.Spec) {
	var bytes int64
	places := make([]int64, len(m.parts))
	for i, v := range m.parts {
		places[i] = alignUp(bytes, manyAlign)
		if m.memory.Device().Kind() == device.CUDA {
			places[i] += int64(v.In.Ptr() % manyAlign)
		}
		bytes = places[i] + v.In.Bytes()
	}
	f := transferForm{allReduce: &allReduce{in: m.parts[0].In, op: m.op, maxBlocks: m.maxBlocks}, rank: m.memory.Group().Rank(), size: m.memory.Group().Size(), inWorkspace: true}
	f.bytes = alignUp(bytes, manyAlign)
	f.cut()
	f.at = f.workspaceBytes()
	s.Workspace = f.at + f.bytes
	f.program(s)
	s.Program.Build = func(_ context.Context, b *collective.Builder) error {
		gather, scatter := make([]stretched, len(m.parts)), make([]stretched, len(m.parts))
		for i, v := range m.parts {
			copied := f.input(b).Add(places[i])
			gather[i] = stretched{in: v.In.Ptr(), out: copied, bytes: v.In.Bytes()}
			scatter[i] = stretched{in: copied, out: v.Out.Ptr(), bytes: v.In.Bytes()}
		}
		if err := m.addCopies(b, gather); err != nil {
			return err
		}
		if err := f.addTo(b); err != nil {
			return err
		}
		return m.addCopies(b, scatter)
	}
}

// addCopies adds a step that copies between memory of this rank's device.
func (m *many) addCopies(b *collective.Builder, tensors []stretched) error {
	if m.memory.Device().Kind() == device.CUDA {
		return byCopies(b, tensors, m.unit(), m.maxBlocks)
	}
	dsts, srcs := make([][]byte, len(tensors)), make([][]byte, len(tensors))
	for i, t := range tensors {
		dsts[i], srcs[i] = b.Bytes(t.out, t.bytes), b.Bytes(t.in, t.bytes)
	}
	b.Host(func() error {
		for i, dst := range dsts {
			copy(dst, srcs[i])
		}
		return nil
	})
	return nil
}
