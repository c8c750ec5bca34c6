package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// The collectives other than all-reduce over rails. What moves goes straight to the outputs. What is reduced goes by way of the workspace, in which two laps have
// room: a rank behind the last rail, and root, load it from there.

// newRails is [newRails] of a maker's tensors. It makes the spec fail where there can be none.
func (m *maker) newRails(s *collective.Spec, op Op, shares func(rank int) (lo, hi int64)) *railForm {
	if s.Failure = checkRails(m.in.Memory(), m.in.DType(), op); s.Failure != nil {
		return nil
	}
	for _, t := range []tensor.SymmetricTensor{m.in, m.out} {
		if t.Bytes() == 0 {
			continue
		}
		if s.Failure = reachesIsland(t, m.in.Memory()); s.Failure != nil {
			return nil
		}
	}
	return newRails(m.in, m.out, m.specOut(), op, m.maxBlocks, shares)
}

// broadcastCall is NCCL's broadcast of a range of the output in place.
func (f *railForm) broadcastCall(x stretch, root int) memory.LibraryCall {
	at := f.out.Ptr().Add(x.lo)
	return memory.LibraryCall{Collective: libraryNames["NewBroadcast"], In: at, Out: at, Count: x.bytes(), Root: root, DType: tensor.Uint8.String(), Op: Sum.String()}
}

// byRails makes the spec that of a broadcast over rails: the ranks of root's island load a shard each from root.
func (b *broadcast) byRails(s *collective.Spec) {
	f := b.newRails(s, 0, nil)
	if f == nil {
		return
	}
	first := newIslandPlace(b.root, f.islands, true)
	f.moves = railMoves{
		loads: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			if f.island != first.island || b.in.Rank() == b.root {
				return nil
			}
			for _, x := range f.lapOf(0, f.local, lap) {
				all = append(all, x.piece(at.Tensor(specIn, first.local).Add(x.lo), f.out.Ptr().Add(x.lo)))
			}
			return all
		},
		calls: func(lap int, _ device.Ptr) (all []memory.LibraryCall) {
			for _, x := range f.lapOf(0, f.local, lap) {
				all = append(all, f.broadcastCall(x, f.islands[first.island][f.local]))
			}
			return all
		},
		leaves: func(at *collective.Addresses, lap int) []ptx.Piece {
			if b.in.Rank() == b.root {
				return nil // which has it all
			}
			return f.others(at, lap)
		},
	}
	if f.puts != nil {
		f.puts.passes = func(lap, island int) []stretch {
			if island != first.island {
				return nil
			}
			return f.lapOf(0, f.local, lap)
		}
	}
	f.spec(s)
}

// byRails makes the spec that of an all-gather over rails: what the ranks of an island bring is cut into shards, which the ranks of a rail gather in the workspace,
// one behind the other in the order in which NCCL numbers them, as long for each. Broadcasts straight to the outputs, one of each rank, NCCL runs one after the other.
func (a *allGather) byRails(s *collective.Spec) {
	n, size, width := a.out.NumElements(), a.out.WorldSize(), a.out.DType().Bytes()
	share := func(rank int) (lo, hi int64) {
		lo, hi = shareOf(n, size, rank)
		return lo * width, hi * width
	}
	f := a.newRails(s, 0, share)
	if f == nil {
		return
	}
	if f.puts != nil {
		a.passOn(f, share)
		f.spec(s)
		return
	}
	f.workspace(s, len(f.islands))
	// room is where those of a rail have what one of them brings.
	room := func(lap, place, island int) int64 {
		return f.roomAt(lap, 0) + int64(f.number(place, island))*f.each(lap)
	}
	f.moves = railMoves{
		loads: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			if !f.owns() {
				return nil
			}
			to := at.Workspace(f.local).Add(room(lap, f.local, f.island))
			for _, x := range f.lapOf(f.island, f.local, lap) {
				all = append(all, a.brought(f, at, share, x, to)...)
				to = to.Add(x.bytes())
			}
			return all
		},
		calls: func(lap int, own device.Ptr) []memory.LibraryCall {
			if !f.owns() {
				return nil
			}
			return []memory.LibraryCall{{
				Collective: libraryNames["NewAllGather"], In: own.Add(room(lap, f.local, f.island)), Out: own.Add(f.roomAt(lap, 0)), Count: f.each(lap),
				DType: tensor.Uint8.String(), Op: Sum.String(),
			}}
		},
		leaves: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			var own stretch // is there already
			if a.inPlace() {
				own.lo, own.hi = share(a.out.Rank())
			}
			for k := range at.WorldSize() {
				place := (at.Rank() + k) % at.WorldSize()
				for i := range f.islands {
					if place >= f.rails {
						continue
					}
					from := at.Workspace(place).Add(room(lap, place, i))
					for _, x := range f.lapOf(i, place, lap) {
						for _, part := range x.without(own) {
							all = append(all, part.piece(from.Add(part.lo-x.lo), f.out.Ptr().Add(part.lo)))
						}
						from = from.Add(x.bytes())
					}
				}
			}
			return all
		},
	}
	f.spec(s)
}

// brought is the pieces of a range of the output that the ranks of the island bring, to go to another place. What is there already is not among them.
func (a *allGather) brought(f *railForm, at *collective.Addresses, share func(rank int) (lo, hi int64), x stretch, to device.Ptr) (all []ptx.Piece) {
	for place, r := range f.islands[f.island] {
		lo, hi := share(r)
		part := stretch{max(lo, x.lo), min(hi, x.hi)}
		if part.bytes() <= 0 {
			continue // of another rank
		}
		from := at.Tensor(specIn, place).Add(part.lo)
		if !a.inPlace() {
			from = from.Add(-lo)
		}
		if to := to.Add(part.lo - x.lo); from != to {
			all = append(all, part.piece(from, to))
		}
	}
	return all
}

// passOn makes the shards of an island go by puts, straight to the outputs, from which the island loads them.
func (a *allGather) passOn(f *railForm, share func(rank int) (lo, hi int64)) {
	f.puts.passes = func(lap, island int) []stretch { return f.lapOf(island, f.local, lap) }
	f.moves = railMoves{
		loads: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			for _, x := range f.lapOf(f.island, f.local, lap) {
				all = append(all, a.brought(f, at, share, x, f.out.Ptr().Add(x.lo))...)
			}
			return all
		},
		leaves: func(at *collective.Addresses, lap int) []ptx.Piece { return f.others(at, lap) },
	}
}

// byRails makes the spec that of a reduction over rails.
func (r *reduction) byRails(s *collective.Spec) {
	if r.scatter {
		r.scatterByRails(s)
		return
	}
	f := r.newRails(s, r.op, nil)
	if f == nil {
		return
	}
	first := newIslandPlace(r.root, f.islands, true)
	if f.messages != nil {
		f.cutForAll(func(lap int, own device.Ptr) device.Ptr { return own.Add(f.roomAt(lap, 0)) }, func(island int) bool { return island == first.island }, true)
	}
	f.workspace(s, 1) // what the island, and then the rail, has combined of a lap
	if f.puts != nil {
		f.puts.brings = func(lap, island int) (room int, bytes int64) {
			if island == first.island {
				bytes = sizeOf(f.lapOf(0, f.local, lap))
			}
			return 0, bytes
		}
		f.puts.takes = func(lap int, own device.Ptr) (dst device.Ptr, room int, bytes int64) {
			if f.island == first.island {
				bytes = sizeOf(f.lapOf(0, f.local, lap))
			}
			return own.Add(f.roomAt(lap, 0)), 0, bytes
		}
	}
	f.moves = railMoves{
		sums: f.sumsAside,
		calls: func(lap int, own device.Ptr) (all []memory.LibraryCall) {
			at := own.Add(f.roomAt(lap, 0))
			for _, x := range f.lapOf(0, f.local, lap) {
				all = append(all, memory.LibraryCall{
					Collective: libraryNames["NewReduce"], In: at, Out: at, Count: x.bytes() / r.in.DType().Bytes(), Root: f.islands[first.island][f.local],
					DType: r.in.DType().String(), Op: r.op.String(),
				})
			}
			return all
		},
		leaves: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			if r.in.Rank() != r.root {
				return nil
			}
			for k := range at.WorldSize() {
				place := (at.Rank() + k) % at.WorldSize()
				for _, x := range f.lapOf(0, place, lap) {
					all = append(all, x.piece(at.Workspace(place).Add(f.roomAt(lap, 0)), r.out.Ptr().Add(x.lo)))
				}
			}
			return all
		},
	}
	f.spec(s)
}

// scatterByRails makes the spec that of a reduce-scatter over rails. What an island has combined for each island is in the workspace one behind the other, in the
// order in which NCCL numbers the ranks of the rail, as long for each, and behind it what the rail has combined of what this island gets. Where kernels combine that, each island has a room of its own
// there, and it goes to that of this island.
func (r *reduction) scatterByRails(s *collective.Spec) {
	n, size, width := r.in.NumElements(), r.in.WorldSize(), r.in.DType().Bytes()
	share := func(rank int) (lo, hi int64) {
		lo, hi = shareOf(n, size, rank)
		return lo * width, hi * width
	}
	f := r.newRails(s, r.op, share)
	if f == nil {
		return
	}
	rooms := len(f.islands)
	aside := f.puts != nil || f.messages != nil // kernels combine what comes of the rail
	if !aside {
		rooms++
	}
	bytes := func(lap, island int) int64 { return sizeOf(f.lapOf(island, f.local, lap)) }
	if m := f.messages; m != nil {
		m.part = func(lap, island int) (int64, int64) { return f.roomAt(lap, island), bytes(lap, island) }
		m.most = f.lap
		m.result = func(lap, island int, own device.Ptr) device.Ptr { return own.Add(f.roomAt(lap, island)) }
	}
	f.workspace(s, rooms)
	result := func(lap int) int64 {
		switch {
		case !f.crosses():
			return f.roomAt(lap, 0)
		case aside:
			return f.roomAt(lap, f.island)
		}
		return f.roomAt(lap, len(f.islands))
	}
	if f.puts != nil {
		f.puts.brings = func(lap, island int) (int, int64) { return island, bytes(lap, island) }
		f.puts.takes = func(lap int, own device.Ptr) (device.Ptr, int, int64) {
			return own.Add(result(lap)), f.island, bytes(lap, f.island)
		}
	}
	f.moves = railMoves{
		sums: func(lap int, own device.Ptr) (all []railSum) {
			for i := range f.islands {
				to := own.Add(f.roomAt(lap, 0))
				switch {
				case aside:
					to = own.Add(f.roomAt(lap, i))
				case f.owns():
					to = to.Add(int64(f.number(f.local, i)) * f.each(lap))
				}
				for _, x := range f.lapOf(i, f.local, lap) {
					all = append(all, railSum{x, to})
					to = to.Add(x.bytes())
				}
			}
			return all
		},
		calls: func(lap int, own device.Ptr) []memory.LibraryCall {
			if !f.owns() {
				return nil
			}
			return []memory.LibraryCall{{
				Collective: libraryNames["NewReduceScatter"], In: own.Add(f.roomAt(lap, 0)), Out: own.Add(result(lap)), Count: f.each(lap) / width,
				DType: r.in.DType().String(), Op: r.op.String(),
			}}
		},
		leaves: func(at *collective.Addresses, lap int) (all []ptx.Piece) {
			lo, hi := share(r.in.Rank())
			for k := range at.WorldSize() {
				place := (at.Rank() + k) % at.WorldSize()
				from := at.Workspace(place).Add(result(lap))
				for _, x := range f.lapOf(f.island, place, lap) {
					if own := (stretch{max(lo, x.lo), min(hi, x.hi)}); own.bytes() > 0 {
						all = append(all, own.piece(from.Add(own.lo-x.lo), r.out.Ptr().Add(own.lo-lo)))
					}
					from = from.Add(x.bytes())
				}
			}
			return all
		},
	}
	f.spec(s)
}

// takesRails reports whether Auto takes Hierarchical between islands of GPUs in place of NCCL's own collective, which has shares of one length only.
func (m *maker) takesRails() bool {
	var shared int64
	switch m.call {
	case "NewAllGather":
		shared = m.out.NumElements()
	case "NewReduceScatter":
		shared = m.in.NumElements()
	}
	return shared%int64(m.in.WorldSize()) != 0
}
