package ptxvm

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// header begins a module of a test.
const header = ".version 8.4\n.target sm_90\n.address_size 64\n"

const copyKernels = header + `
.visible .entry put(.param .u64 to, .param .u32 value) {
	.reg .b64 %rd<2>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [to];
	ld.param.u32 %r1, [value];
	st.global.u32 [%rd1], %r1;
	ret;
}
.visible .entry get(.param .u64 to, .param .u64 from) {
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [to];
	ld.param.u64 %rd2, [from];
	ld.global.u32 %r1, [%rd2];
	st.global.u32 [%rd1], %r1;
	ret;
}
`

func parse(tb testing.TB, file, text string) *Module {
	m, err := Parse(file, []byte(text))
	require.NoError(tb, err)
	return m
}

func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }
func u32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

// pads is ranks with signal pads, and a page of words each for what they send to each other.
type pads struct {
	tb      testing.TB
	m       *Machine
	params  []ptx.Params
	pages   [][]byte
	streams []*Stream
	kernels *Module
	replace func(*Module) *Module
}

const channels, channel = 3, 1

func newPads(tb testing.TB, ranks int, flags uint32, c Config) *pads {
	memory := NewMemory()
	p := &pads{tb: tb, kernels: parse(tb, "copy.ptx", copyKernels)}
	base := ptx.Params{World: uint32(ranks), Timeout: 1 << 62, Index: channel, Channels: channels, Flags: flags}
	for r := range ranks {
		at := uint64(r+1) * rankAt
		pad := aligned(int(ptx.PadBytes(ranks, channels)))
		copy(pad, ptx.PadImage(ranks, channels, 1<<32-2, func(int) uint32 { return 1<<32 - 2 }))
		require.NoError(tb, memory.Map(at+channelAt, pad))
		page := aligned(4096)
		p.pages = append(p.pages, page)
		require.NoError(tb, memory.Map(at+inAt, page))
		require.NoError(tb, memory.Map(at+wordsAt, aligned(64)))
		base.Workspace[r] = at + channelAt
	}
	p.m = New(memory, c)
	for r := range ranks {
		q := base
		q.Rank, q.Fault, q.Dead, q.Stop = uint32(r), uint64(r+1)*rankAt+wordsAt, uint64(r+1)*rankAt+wordsAt+32, uint64(r+1)*rankAt+wordsAt+48
		p.params = append(p.params, q)
		p.streams = append(p.streams, p.m.NewStream(r))
	}
	return p
}

func (p *pads) signals(rank, peer int, k ptx.Kernel) {
	q := p.params[rank]
	q.Peer = uint32(peer)
	m := moduleOf(p.tb, k.File)
	if p.replace != nil {
		m = p.replace(m)
	}
	require.NoError(p.tb, p.streams[rank].Launch(Launch{Function: m.Function(k.Name), Block: [3]uint32{32}, Params: [][]byte{q.Bytes()}}))
}

func page(rank, word int) uint64 { return uint64(rank+1)*rankAt + inAt + uint64(word)*4 }

func (p *pads) put(rank, to, word int, value uint32) {
	require.NoError(p.tb, p.streams[rank].Launch(Launch{Function: p.kernels.Function("put"), Params: [][]byte{u64(page(to, word)), u32(value)}}))
}

func (p *pads) get(rank, from, word, to int) {
	require.NoError(p.tb, p.streams[rank].Launch(Launch{Function: p.kernels.Function("get"), Params: [][]byte{u64(page(rank, to)), u64(page(from, word))}}))
}

func (p *pads) word(rank, word int) uint32 { return binary.LittleEndian.Uint32(p.pages[rank][word*4:]) }

// exchange uses every kernel for signals a few times, with values that each receiver must see.
func exchange(tb testing.TB, ranks int, flags uint32, c Config, replace func(*Module) *Module) error {
	p := newPads(tb, ranks, flags, c)
	p.replace = replace
	result := 256
	type want struct {
		rank, word int
		value      uint32
	}
	var wants []want
	for round := range 3 {
		for r := range ranks {
			next, last := (r+1)%ranks, (r+ranks-1)%ranks
			v := func(rank, kind int) uint32 { return uint32(1000*round + 100*kind + rank + 1) }
			look := func(from, word int, value uint32) {
				p.get(r, from, word, result)
				wants = append(wants, want{r, result, value})
				result++
			}
			// To the next rank, and from the last.
			p.put(r, next, round*64+0, v(r, 1))
			p.signals(r, next, ptx.Signal)
			p.signals(r, last, ptx.Wait)
			look(r, round*64+0, v(last, 1))
			// To all, and from all.
			for q := range ranks {
				p.put(r, q, round*64+8+r, v(r, 2))
			}
			p.signals(r, 0, ptx.SignalAll)
			p.signals(r, 0, ptx.WaitAll)
			for q := range ranks {
				look(r, round*64+8+q, v(q, 2))
			}
			// The barrier: each has its own, which others then look at.
			p.put(r, r, round*64+32, v(r, 3))
			p.signals(r, 0, ptx.Barrier)
			for q := range ranks {
				look(q, round*64+32, v(q, 3))
			}
			p.signals(r, 0, ptx.Barrier)
		}
	}
	if err := p.m.Run(); err != nil {
		return err
	}
	for _, w := range wants {
		if got := p.word(w.rank, w.word); got != w.value {
			return fmt.Errorf("rank %d: word %d is %d, not %d", w.rank, w.word, got, w.value)
		}
	}
	return nil
}

func TestSignals(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		for _, flags := range []uint32{0, ptx.Atomics} {
			for _, weak := range []bool{false, true} {
				for seed := range uint64(3) {
					t.Run(fmt.Sprintf("ranks=%d/flags=%d/weak=%v/seed=%d", ranks, flags, weak, seed), func(t *testing.T) {
						require.NoError(t, exchange(t, ranks, flags, Config{Seed: seed, Weak: weak, MaxSteps: 1 << 26}, nil))
					})
				}
			}
		}
	}
}

// TestTimeout: who waits in vain gives up after its time, and says for whom it has waited. The stop word ends it before.
func TestTimeout(t *testing.T) {
	for _, weak := range []bool{false, true} {
		p := newPads(t, 3, 0, Config{Weak: weak, MaxSteps: 1 << 26})
		p.params[1].Timeout = 100_000
		p.signals(1, 2, ptx.Wait)
		require.NoError(t, p.m.Run())
		cell, err := cellOf(p, 1)
		require.NoError(t, err)
		require.Equal(t, ptx.Fault{Why: ptx.FaultTimeout, Kernel: ptx.FaultWait, Peer: 2, Index: channel}, cell)
		require.GreaterOrEqual(t, p.m.Steps(), uint64(100_000))

		p.params[0].Timeout = 1 << 62
		binary.LittleEndian.PutUint32(bytesAt(p, 0)[48:], 1)
		p.signals(0, 1, ptx.Wait)
		require.NoError(t, p.m.Run())
		cell, err = cellOf(p, 0)
		require.NoError(t, err)
		require.Equal(t, uint8(ptx.FaultStopped), cell.Why)
	}
}

func bytesAt(p *pads, rank int) []byte { return p.m.memory.find(uint64(rank+1)*rankAt + wordsAt).keep }

func cellOf(p *pads, rank int) (ptx.Fault, error) {
	b := bytesAt(p, rank)
	if n := binary.LittleEndian.Uint32(b); n != 1 {
		return ptx.Fault{}, fmt.Errorf("%d launches have given up", n)
	}
	return ptx.DecodeFault(binary.LittleEndian.Uint64(b[8:])), nil
}

// twoStreams is two streams of a rank that signal the same peer at the same time. The peer sees what was before both signals.
func twoStreams(tb testing.TB, kernel ptx.Kernel, flags uint32, c Config, replace func(*Module) *Module) error {
	p := newPads(tb, 3, flags, c)
	p.replace = replace
	own := p.streams[0]
	other := p.m.NewStream(0)
	const rounds = 3
	for round := range rounds {
		for i, s := range []*Stream{own, other} {
			p.streams[0] = s
			p.put(0, 1, 2*round+i, uint32(10*round+i+1))
			p.signals(0, 1, kernel)
		}
		p.signals(1, 0, ptx.Wait)
		p.signals(1, 0, ptx.Wait)
		if round+1 == rounds { // only then is it known which signals have come
			for k := range 2 * rounds {
				p.get(1, 1, k, 100+k)
			}
		}
	}
	if err := p.m.Run(); err != nil {
		return err
	}
	for k := range 2 * rounds {
		if got, want := p.word(1, 100+k), uint32(10*(k/2)+k%2+1); got != want {
			return fmt.Errorf("word %d is %d, not %d", k, got, want)
		}
	}
	return nil
}

const listener = header + `
.visible .entry listen(.param .u64 cell, .param .u64 to) {
	.reg .b64 %rd<4>;
	.reg .b32 %r<2>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [cell];
	ld.param.u64 %rd2, [to];
Again:
	ld.acquire.sys.global.u32 %r1, [%rd1];
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra Again;
	ld.relaxed.sys.global.u64 %rd3, [%rd1+8];
	st.global.u64 [%rd2], %rd3;
	ret;
}
`

// givesUp is a kernel for which from one peer, or two, nothing comes, while somebody else, as the host does, looks whether it has given up, and why.
func givesUp(tb testing.TB, kernel ptx.Kernel, missing int, c Config, replace func(*Module) *Module) error {
	p := newPads(tb, 3, 0, c)
	p.replace = replace
	p.params[0].Timeout = 5000
	// A signal waits only for another one that was begun before it.
	pad := p.m.memory.find(rankAt + channelAt).keep
	state := pad[channels*2*3*128+channel*128:]
	for r := 1; r <= missing; r++ {
		binary.LittleEndian.PutUint32(state[32+4*r:], 7)
	}
	for r := 1 + missing; r < 3; r++ { // these have come
		for kind := range 2 {
			counter := pad[((channel*2+kind)*3+r)*128:]
			binary.LittleEndian.PutUint32(counter, binary.LittleEndian.Uint32(counter)+1)
		}
	}
	listen := p.m.NewStream(3)
	require.NoError(tb, listen.Launch(Launch{
		Function: parse(tb, "listen.ptx", listener).Function("listen"), Params: [][]byte{u64(rankAt + wordsAt), u64(page(2, 0))},
	}))
	p.signals(0, 1, kernel)
	if err := p.m.Run(); err != nil {
		return err
	}
	// A thread that finds the dead word set by another one passes that on, in which the channel is not.
	fault := ptx.DecodeFault(binary.LittleEndian.Uint64(p.pages[2]))
	if fault.Why != ptx.FaultTimeout || fault.Kernel != signalKinds[kernel] || fault.Peer == 0 || int(fault.Peer) > missing || fault.Index != channel && missing == 1 {
		return fmt.Errorf("fault %+v", fault)
	}
	return nil
}

var signalKinds = map[ptx.Kernel]uint8{
	ptx.Signal: ptx.FaultSignal, ptx.SignalAll: ptx.FaultSignal, ptx.Wait: ptx.FaultWait, ptx.WaitAll: ptx.FaultWait, ptx.Barrier: ptx.FaultBarrier,
}

func TestSignalsOfTwoStreams(t *testing.T) {
	for _, flags := range []uint32{0, ptx.Atomics} {
		for _, kernel := range []ptx.Kernel{ptx.Signal, ptx.SignalAll} {
			for seed := range uint64(20) {
				require.NoError(t, twoStreams(t, kernel, flags, Config{Seed: seed, Weak: true, MaxSteps: 1 << 22}, nil), "%s, flags %d, seed %d", kernel.Name, flags, seed)
			}
		}
	}
}

func TestGivingUp(t *testing.T) {
	for kernel := range signalKinds {
		for seed := range uint64(20) {
			c := Config{Seed: seed, Weak: true, MaxSteps: 1 << 22}
			require.NoError(t, givesUp(t, kernel, 1, c, nil), "%s, seed %d", kernel.Name, seed)
			// Two threads give up at the same time: one of them tells why.
			require.NoError(t, givesUp(t, kernel, 2, c, nil), "%s, seed %d", kernel.Name, seed)
		}
	}
}
