package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// movement is launches of the kernel that copies pieces: all ranks, each with kernels of a user in front that write what is moved, and behind that look at it.
type movement struct {
	what    string // allGather, allToAll, broadcast or broadcastTwoShot
	ranks   int
	bytes   int // of a piece
	in, out int // bytes that the tensors begin behind an aligned address
	epochs  int
	blocks  int
	threads int
	first   uint32 // epoch
	missing int    // so many of the last ranks do not launch
	began   int    // but they have come to so many of the barriers
	stop    bool   // the host ends it, and not the time
	version uint32 // 0 is the right one
	skew    int    // each rank's tensors begin so many bytes later than those of the rank before
	stores  bool   // ranks store to those that are to have the pieces, and do not load from those that have them
	hopper  bool   // the next launch begins early

	replace func(*Module) *Module
}

const (
	allGather        = "all-gather"
	allToAll         = "all-to-all"
	broadcast        = "broadcast"
	broadcastTwoShot = "broadcast two-shot"
)

func (v movement) String() string {
	return fmt.Sprintf("%s/ranks=%d/bytes=%d+%d+%d/blocks=%d/stores=%t/hopper=%t", v.what, v.ranks, v.bytes, v.in, v.out, v.blocks, v.stores, v.hopper)
}

// whole says whether a tensor holds a piece for every rank: the input, and the output.
func (v movement) sizes() (in, out int) {
	switch v.what {
	case allGather:
		return v.bytes, v.bytes * v.ranks
	case allToAll:
		return v.bytes * v.ranks, v.bytes * v.ranks
	}
	return v.bytes, v.bytes
}

// pieces are those of a rank, with those of the second phase behind.
func (v movement) pieces(rank int, in, out []uint64) (all []ptx.Piece, counts [2]uint32) {
	// peer is of use where a second phase goes chunk by chunk.
	add := func(phase int, from, to uint64, n, turn, peer int) {
		if n > 0 {
			all = append(all, ptx.Piece{From: from, To: to, Bytes: uint64(n), Turn: uint32(turn * chunksOf(n)), Peer: uint32(peer)})
			counts[phase]++
		}
	}
	shard := func(q int) (uint64, int) {
		lo, n := v.shard(q)
		return uint64(lo), n
	}
	for k := 1; k <= v.ranks && v.stores; k++ {
		q := (rank + k) % v.ranks
		switch v.what {
		case allGather:
			add(0, in[rank], out[q]+uint64(rank*v.bytes), v.bytes, rank, q)
		case allToAll:
			add(0, in[rank]+uint64(q*v.bytes), out[q]+uint64(rank*v.bytes), v.bytes, rank, q)
		case broadcast:
			if rank == 0 && q != 0 {
				add(0, in[0], in[q], v.bytes, 0, q)
			}
		case broadcastTwoShot:
			if rank == 0 && q != 0 {
				lo, n := shard(q)
				add(0, in[0]+lo, in[q]+lo, n, q, q)
			}
		}
	}
	for k := 1; k < v.ranks && v.stores && v.what == broadcastTwoShot; k++ {
		if q := (rank + k) % v.ranks; q != 0 {
			lo, n := shard(rank)
			add(1, in[rank]+lo, in[q]+lo, n, rank, 0)
		}
	}
	if v.stores {
		return all, counts
	}
	for k := 1; k <= v.ranks; k++ {
		q := (rank + k) % v.ranks
		switch v.what {
		case allGather:
			add(0, in[q], out[rank]+uint64(q*v.bytes), v.bytes, q, q)
		case allToAll:
			add(0, in[q]+uint64(rank*v.bytes), out[rank]+uint64(q*v.bytes), v.bytes, q, q)
		case broadcast:
			if q == 0 && rank != 0 {
				add(0, in[0], in[rank], v.bytes, 0, q)
			}
		case broadcastTwoShot:
			if q == 0 && rank != 0 {
				lo, n := shard(rank)
				add(0, in[0]+lo, in[rank]+lo, n, rank, q)
			}
		}
	}
	for k := 1; k < v.ranks && v.what == broadcastTwoShot && rank != 0; k++ {
		q := (rank + k) % v.ranks
		lo, n := shard(q)
		add(1, in[q]+lo, in[rank]+lo, n, q, q)
	}
	return all, counts
}

// chunksOf is how many chunks a piece of n bytes has.
func chunksOf(n int) int { return (n + ptx.ChunkBytes - 1) / ptx.ChunkBytes }

// longest is the size of the first shard.
func (v movement) longest() int {
	parts := v.ranks
	if v.stores {
		parts = max(v.ranks-1, 1)
	}
	return (v.bytes/parts + 128) / 128 * 128
}

// shard is what rank q has of a broadcast in two phases, from its first byte on.
func (v movement) shard(q int) (lo, n int) {
	each := v.longest()
	if v.stores { // rank 0, which has it all, has none
		if q == 0 {
			return 0, 0
		}
		q--
	}
	lo = min(q*each, v.bytes)
	return lo, min(lo+each, v.bytes) - lo
}

// want is a rank's output.
func (v movement) want(rank int, inputs [][]byte) []byte {
	var out []byte
	for q := range v.ranks {
		switch v.what {
		case allGather:
			out = append(out, inputs[q]...)
		case allToAll:
			out = append(out, inputs[q][rank*v.bytes:][:v.bytes]...)
		default:
			return inputs[0]
		}
	}
	return out
}

func (v movement) run(tb testing.TB, c Config) error {
	memory := NewMemory()
	nIn, nOut := v.sizes()
	var in, out []uint64
	var words, channels [][]byte
	base := ptx.Comm{Version: ptx.CommVersion, Index: 7, World: uint32(v.ranks), Timeout: math.MaxUint64 / 2}
	if v.version != 0 {
		base.Version = v.version
	}
	var table []byte
	for r := range v.ranks {
		at := uint64(r+1) * rankAt
		tensor := func(where uint64, n, shift int) uint64 {
			shift += r * v.skew
			b := aligned((n + shift + 31) / 16 * 16)
			for i := range b {
				b[i] = fillByte
			}
			require.NoError(tb, memory.Map(at+where, b))
			return at + where + uint64(shift)
		}
		p := tensor(inAt, nIn, v.in)
		in = append(in, p)
		if v.what == allGather || v.what == allToAll {
			p = tensor(outAt, nOut, v.out)
		}
		out = append(out, p)
		channel := aligned(int(ptx.ControlBytes(v.blocks, v.ranks)))
		for i := 0; i < len(channel); i += 4 {
			binary.LittleEndian.PutUint32(channel[i:], v.first)
		}
		require.NoError(tb, memory.Map(at+channelAt, channel))
		word := aligned(64)
		require.NoError(tb, memory.Map(at+wordsAt, word))
		channels, words = append(channels, channel), append(words, word)
		table = binary.LittleEndian.AppendUint64(table, at+channelAt)
		if r < ptx.Inline {
			base.Workspace[r] = at + channelAt
		}
	}
	m := New(memory, c)
	kernels, err := copier()
	require.NoError(tb, err)
	module := moduleOf(tb, ptx.Pull(v.hopper).File)
	if v.replace != nil {
		module = v.replace(module)
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	var inputs, sinks [][][]byte
	here := v.ranks - v.missing
	var streams []*Stream
	for r := range here {
		streams = append(streams, m.NewStream(r))
	}
	for e := range max(v.epochs, 1) {
		var all, got [][]byte
		for r := range here {
			at := uint64(r+1)*rankAt + uint64(e)*epochAt
			source, sink := aligned(nIn), aligned(nOut)
			for i := range source {
				source[i] = byte(rnd.Uint32())
			}
			require.NoError(tb, memory.Map(at+sourceAt, source))
			require.NoError(tb, memory.Map(at+sinkAt, sink))
			all, got = append(all, source), append(got, sink)
			move := func(to, from uint64, n int) {
				require.NoError(tb, streams[r].Launch(Launch{Function: kernels.Function("copy1"), Block: [3]uint32{8}, Params: [][]byte{u64(to), u64(from), u32(uint32(n))}}))
			}
			comm := base
			own := uint64(r+1)*rankAt + wordsAt
			comm.Rank, comm.Dead, comm.Fault, comm.Stop = uint32(r), own, own+16, own+32
			if v.missing > 0 {
				if comm.Timeout = 20_000; v.stop {
					comm.Timeout = 1 << 62
					binary.LittleEndian.PutUint32(words[r][32:], 1)
				}
				for q := here; q < v.ranks; q++ {
					for kind := range v.began {
						binary.LittleEndian.PutUint32(channels[r][32+4*((v.ranks+7)/8*8*kind+q):], v.first+1)
					}
				}
			}
			if v.ranks > ptx.Inline {
				b := aligned(len(table))
				copy(b, table)
				comm.Table = at + wordsAt + tableAt
				require.NoError(tb, memory.Map(comm.Table, b))
			}
			list, counts := v.pieces(r, in, out)
			p := ptx.Pieces{Phases: 1, Counts: counts}
			if v.what == broadcastTwoShot {
				if p.Phases = 2; v.stores {
					p.Chunk = 16 * uint32(v.threads) << (v.bytes / 16 % 4) // one, two, four or eight vectors a thread
					p.Chunks = (uint32(v.longest()) + p.Chunk - 1) / p.Chunk
				}
			}
			if v.stores && len(list) <= ptx.InlinePieces {
				p.Flags = ptx.TogetherFlags(list[:counts[0]]) | ptx.TogetherFlags(list[counts[0]:])<<1
			}
			if len(list) <= ptx.InlinePieces {
				copy(p.Inlined[:], list)
			} else {
				var b bytes.Buffer
				for _, c := range list {
					require.NoError(tb, binary.Write(&b, binary.LittleEndian, c))
				}
				text := aligned(b.Len())
				copy(text, b.Bytes())
				p.Table = at + wordsAt + 2*tableAt
				require.NoError(tb, memory.Map(p.Table, text))
			}
			var pieces bytes.Buffer
			require.NoError(tb, binary.Write(&pieces, binary.LittleEndian, struct {
				Table   uint64
				Counts  [2]uint32
				Phases  uint32
				Chunks  uint32
				Chunk   uint32
				Flags   uint32
				Inlined [ptx.InlinePieces]ptx.Piece
			}{Table: p.Table, Counts: p.Counts, Phases: p.Phases, Chunks: p.Chunks, Chunk: p.Chunk, Flags: p.Flags, Inlined: p.Inlined}))
			move(in[r], at+sourceAt, nIn)
			require.NoError(tb, streams[r].Launch(Launch{
				Function: module.Function(ptx.Pull(v.hopper).Name), Grid: [3]uint32{uint32(v.blocks)}, Block: [3]uint32{uint32(v.threads)},
				Params: [][]byte{comm.Bytes(), pieces.Bytes()}, Overlap: v.hopper,
			}))
			move(at+sinkAt, out[r], nOut)
		}
		inputs, sinks = append(inputs, all), append(sinks, got)
	}
	if err := m.Run(); err != nil {
		return err
	}
	for r := range here {
		fault, dead := ptx.DecodeFault(binary.LittleEndian.Uint64(words[r][16:])), binary.LittleEndian.Uint32(words[r])
		epoch := binary.LittleEndian.Uint32(channels[r])
		switch {
		case v.version != 0:
			if fault != (ptx.Fault{Why: ptx.FaultVersion, Kernel: ptx.FaultPull, Peer: uint16(r), Index: 7, Block: fault.Block}) || dead != 1 {
				return fmt.Errorf("rank %d: fault %+v, dead word %d", r, fault, dead)
			}
			continue
		case v.missing > 0:
			why := uint8(ptx.FaultTimeout)
			if v.stop {
				why = ptx.FaultStopped
			}
			if fault.Why != why || fault.Kernel != ptx.FaultPull || int(fault.Peer) >= v.ranks || int(fault.Peer) == r || fault.Index != 7 || dead != 1 || epoch != v.first {
				return fmt.Errorf("rank %d: fault %+v, dead word %d, epoch %d", r, fault, dead, epoch)
			}
			continue
		case fault != ptx.Fault{} || dead != 0 || epoch != v.first+uint32(max(v.epochs, 1)):
			return fmt.Errorf("rank %d: fault %+v, dead word %d, epoch %d", r, fault, dead, epoch)
		}
		for e := range sinks {
			if want := v.want(r, inputs[e]); !bytes.Equal(want, sinks[e][r]) {
				return fmt.Errorf("rank %d, launch %d: %x, not %x", r, e, sinks[e][r], want)
			}
		}
		for i, x := range memory.find(out[r]).keep {
			if at := memory.find(out[r]).base + uint64(i); (at < out[r] || at >= out[r]+uint64(nOut)) && x != fillByte {
				return fmt.Errorf("rank %d: a byte outside of the output, %d from its begin, has changed", r, int64(at-out[r]))
			}
		}
	}
	return nil
}

// movements are those that TestPull runs: every alignment that the two sides may have to each other, heads and tails, several chunks, more pieces than are inlined, more ranks.
func movements() (all []movement) {
	for i := range 8 {
		base := movement{
			what: []string{allGather, allToAll, broadcast, broadcastTwoShot}[i%4], ranks: 3, bytes: 150, epochs: 3, blocks: 2, threads: 8, first: 1<<32 - 2,
			stores: i >= 4, hopper: (i+i/4)%2 == 1,
		}
		all = append(all, base)
		for _, by := range []int{16, 8, 4, 2, 1} {
			v := base
			v.in, v.out, v.bytes = 1, 1+by, 117
			all = append(all, v)
		}
		for _, ranks := range []int{1, 2, 4, 5, 9, 10} { // of 16 bytes, some of which are stored together, four or fewer at a time
			v := base
			v.ranks, v.bytes = ranks, 160
			all = append(all, v)
		}
		v := base
		v.bytes = 5
		all = append(all, v)
		v.missing, v.bytes = 1, 64
		for ; v.began <= 2; v.began++ {
			if v.began == 2 && v.what != broadcastTwoShot {
				break
			}
			all = append(all, v)
		}
		v.began, v.stop = 0, true
		all = append(all, v)
		v = base
		v.version = 2
		all = append(all, v)
	}
	return all
}

// TestPull: the kernel of the collectives that only move elements, strong and weak.
func TestPull(t *testing.T) {
	for _, v := range movements() {
		t.Run(fmt.Sprintf("%s/missing=%d,%d,%v/version=%d", v, v.missing, v.began, v.stop, v.version), func(t *testing.T) {
			require.NoError(t, v.run(t, Config{Seed: 1, MaxSteps: 1 << 28}))
			if v.stop {
				return // which takes long
			}
			for seed := range seedsOr(1, 10) {
				require.NoError(t, v.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28}), "seed %d", seed)
			}
		})
	}
	// Pieces of several chunks.
	for i := range 8 {
		v := movement{
			what: []string{allGather, allToAll, broadcast, broadcastTwoShot}[i%4], ranks: 3, bytes: 3*ptx.ChunkBytes + 40, in: 8, out: 24, epochs: 2, blocks: 2, threads: 64,
			stores: i >= 4, hopper: (i+i/4)%2 == 0,
		}
		t.Run(v.String(), func(t *testing.T) {
			require.NoError(t, v.run(t, Config{Seed: 1, MaxSteps: 1 << 28}))
		})
		if v.what == broadcastTwoShot && v.stores { // a block has several of a piece, which go on one by one
			v.blocks, v.ranks, v.bytes, v.first = 1, 4, 9*ptx.ChunkBytes+16, 1<<32-2
			t.Run(v.String(), func(t *testing.T) {
				require.NoError(t, v.run(t, Config{Seed: 2, Weak: true, MaxSteps: 1 << 28}))
			})
		}
	}
}
