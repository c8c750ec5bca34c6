package ptxvm

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
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
	hopper  bool   // the kernels that overlap
	threads uint32 // a block; 0 is 32
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
		page := aligned(8192)
		p.pages = append(p.pages, page)
		require.NoError(tb, memory.Map(at+inAt, page))
		require.NoError(tb, memory.Map(at+wordsAt, aligned(64)))
		if r < ptx.Inline {
			base.Workspace[r] = at + channelAt
		}
		if ranks > ptx.Inline {
			table := aligned(3 * 8 * ranks)
			for q := range ranks {
				binary.LittleEndian.PutUint64(table[8*(2*ranks+q):], uint64(q+1)*rankAt+channelAt)
			}
			require.NoError(tb, memory.Map(at+sinkAt, table))
		}
	}
	p.m = New(memory, c)
	for r := range ranks {
		q := base
		if ranks > ptx.Inline {
			q.Table = uint64(r+1)*rankAt + sinkAt
		}
		q.Rank, q.Fault, q.Dead, q.Stop = uint32(r), uint64(r+1)*rankAt+wordsAt, uint64(r+1)*rankAt+wordsAt+32, uint64(r+1)*rankAt+wordsAt+48
		p.params = append(p.params, q)
		p.streams = append(p.streams, p.m.NewStream(r))
	}
	return p
}

func (p *pads) signals(rank, peer int, k ptx.Kernel) {
	p.signalsWith(p.params[rank], rank, peer, k)
}

func (p *pads) signalsWith(q ptx.Params, rank, peer int, k ptx.Kernel) {
	q.Peer = uint32(peer)
	k = ptx.SignalOn(k, p.hopper)
	m := moduleOf(p.tb, k.File)
	if p.replace != nil {
		m = p.replace(m)
	}
	require.NoError(p.tb, p.streams[rank].Launch(Launch{
		Function: m.Function(k.Name), Block: [3]uint32{cmp.Or(p.threads, 32)}, Params: [][]byte{q.Bytes()}, Overlap: k.Overlap,
	}))
}

// putSignal puts bytes from one byte of the rank's page to another of the peer's, and signals.
func (p *pads) putSignal(rank, peer int, to, from, bytes uint64) {
	q := p.params[rank]
	q.Out[0], q.In[0], q.Count = page(peer, 0)+to, page(rank, 0)+from, bytes
	p.signalsWith(q, rank, peer, ptx.PutSignal)
}

// putSignalWait is putSignal, and then a wait for rank from.
func (p *pads) putSignalWait(rank, peer, from int, to, source, bytes uint64) {
	q := p.params[rank]
	q.Out[0], q.In[0], q.Count, q.Shard = page(peer, 0)+to, page(rank, 0)+source, bytes, uint64(from)
	p.signalsWith(q, rank, peer, ptx.PutSignalWait)
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
func exchange(tb testing.TB, ranks int, flags uint32, hopper bool, c Config, replace func(*Module) *Module) error {
	p := newPads(tb, ranks, flags, c)
	p.replace, p.hopper = replace, hopper
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
			// The same in one: words that this rank has just written, as vectors, words or bytes, and none.
			const words = 9
			for i := range words {
				p.put(r, r, 200+i, v(r, 10+i))
			}
			at := round*64 + 16 + round%2 // of a page that both look at as words
			p.putSignal(r, next, uint64(at)*4, 200*4, words*4)
			p.signals(r, last, ptx.Wait)
			// What is behind the wait is behind the put, too, though all of them overlap.
			p.putSignal(r, r, 200*4, 230*4, words*4)
			p.signals(r, r, ptx.Wait)
			for i := range words {
				look(r, at+i, v(last, 10+i))
			}
			// And among all.
			at += words
			p.put(r, r, 220, v(r, 30))
			for q := range ranks {
				if q == next {
					p.putSignal(r, q, uint64(at)*4, 220*4, 4)
				} else if q != r {
					p.putSignal(r, q, uint64(at)*4, 220*4, 0)
				}
			}
			p.signals(r, 0, ptx.WaitAll)
			p.putSignal(r, r, 220*4, 230*4, 4)
			p.signals(r, r, ptx.Wait)
			look(r, at, v(last, 30))
			// A step of the ring in one: what is behind it sees what the last has put.
			p.put(r, r, 221, v(r, 40))
			p.putSignalWait(r, next, last, uint64(at+1)*4, 221*4, 4)
			look(r, at+1, v(last, 40))
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
			for _, hopper := range []bool{false, true} {
				for _, weak := range []bool{false, true} {
					for seed := range uint64(3) {
						t.Run(fmt.Sprintf("ranks=%d/flags=%d/hopper=%v/weak=%v/seed=%d", ranks, flags, hopper, weak, seed), func(t *testing.T) {
							require.NoError(t, exchange(t, ranks, flags, hopper, Config{Seed: seed, Weak: weak, MaxSteps: 1 << 26}, nil))
						})
					}
				}
			}
		}
	}
}

// TestPutSignal: what is put is all bytes and no other, however the two sides lie.
func TestPutSignal(t *testing.T) {
	for _, hopper := range []bool{false, true} {
		for _, waits := range []bool{false, true} {
			putSignals(t, hopper, waits, 32, Config{Weak: true, MaxSteps: 1 << 26})
		}
	}
}

// putSignals puts pieces of all kinds of alignment, of each so many bytes that threads have none, one and several elements.
//
// Where it waits, it does for the peer, and goes no further before.
func putSignals(t *testing.T, hopper, waits bool, threads uint32, c Config) {
	const source = 2560 // so that a page holds both
	for _, apart := range []uint64{0, 1, 2, 4, 8} {
		for _, lead := range []uint64{0, 5} {
			for _, n := range []uint64{1, 16, 33, 100, 700, 1501} {
				if apart == 0 && lead == 0 && n == 1501 {
					n = 2501
				}
				p := newPads(t, 2, ptx.Atomics, c)
				p.hopper, p.threads = hopper, threads
				for i := range p.pages[0] {
					p.pages[0][i], p.pages[1][i] = byte(i*7+i/256), 0xa5
				}
				from := source + lead
				if from+n > uint64(len(p.pages[0])) {
					from = lead
				}
				to := lead + apart
				if waits {
					p.putSignalWait(0, 1, 1, to, from, n)
				} else {
					p.putSignal(0, 1, to, from, n)
				}
				p.signals(1, 0, ptx.Wait)
				if waits {
					p.signals(1, 0, ptx.Signal)
				}
				require.NoError(t, p.m.Run())
				want := bytes.Repeat([]byte{0xa5}, len(p.pages[1]))
				copy(want[to:], p.pages[0][from:][:n])
				require.Equal(t, want, p.pages[1], "%d bytes, %d apart, lead %d", n, apart, lead)
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

		for _, dead := range []bool{false, true} {
			for _, hopper := range []bool{false, true} {
				require.NoError(t, stepInVain(t, hopper, dead, Config{Weak: weak, MaxSteps: 1 << 26}))
			}
		}

		p.params[0].Timeout = 1 << 62
		binary.LittleEndian.PutUint32(bytesAt(p, 0)[48:], 1)
		p.signals(0, 1, ptx.Wait)
		require.NoError(t, p.m.Run())
		cell, err = cellOf(p, 0)
		require.NoError(t, err)
		require.Equal(t, uint8(ptx.FaultStopped), cell.Why)
	}
}

// stepInVain is a step of a ring whose signal comes, and for which nothing does, with a plan's dead word or without.
func stepInVain(tb testing.TB, hopper, dead bool, c Config) error {
	p := newPads(tb, 3, ptx.Atomics, c)
	p.hopper = hopper
	p.params[1].Timeout = 5000
	if !dead {
		p.params[1].Dead = 0
	}
	p.putSignalWait(1, 0, 2, 0, 0, 4)
	p.signals(0, 1, ptx.Wait)
	if err := p.m.Run(); err != nil {
		return err
	}
	fault, err := cellOf(p, 1)
	if want := (ptx.Fault{Why: ptx.FaultTimeout, Kernel: ptx.FaultWait, Peer: 2, Index: channel}); err == nil && fault != want {
		return fmt.Errorf("fault %+v", fault)
	}
	return err
}

func bytesAt(p *pads, rank int) []byte { return p.m.memory.find(uint64(rank+1)*rankAt + wordsAt).keep }

func cellOf(p *pads, rank int) (ptx.Fault, error) {
	b := bytesAt(p, rank)
	if n := binary.LittleEndian.Uint32(b); n != 1 {
		return ptx.Fault{}, fmt.Errorf("%d launches have given up", n)
	}
	return ptx.DecodeFault(binary.LittleEndian.Uint64(b[8:])), nil
}

// twoStreams is two streams of a rank that signal the same peer at the same time, and wait for it if the kernel does that too. The peer sees what was before both signals.
func twoStreams(tb testing.TB, kernel ptx.Kernel, flags uint32, c Config, replace func(*Module) *Module) error {
	p := newPads(tb, 3, flags, c)
	p.replace = replace
	own := p.streams[0]
	other := p.m.NewStream(0)
	const rounds = 3
	if kernel.Name == ptx.PutSignalWait.Name {
		for range 2 * rounds { // so that no stream waits for what the other one has taken
			p.signals(1, 0, ptx.Signal)
		}
	}
	for round := range rounds {
		for i, s := range []*Stream{own, other} {
			p.streams[0] = s
			p.put(0, 1, 2*round+i, uint32(10*round+i+1))
			if kernel.Name == ptx.PutSignalWait.Name {
				q := p.params[0]
				q.Shard = 1
				p.signalsWith(q, 0, 1, kernel)
			} else {
				p.signals(0, 1, kernel)
			}
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

// stopped is a kernel that waits in vain until the host ends it, without a dead word, as those have that belong to no plan.
func stopped(tb testing.TB, kernel ptx.Kernel, c Config) error {
	p := newPads(tb, 3, 0, c)
	p.params[0].Dead = 0
	pad := p.m.memory.find(rankAt + channelAt).keep
	state := pad[channels*2*3*128+channel*128:]
	for r := 1; r < 3; r++ {
		binary.LittleEndian.PutUint32(state[32+4*r:], 7)
	}
	binary.LittleEndian.PutUint32(bytesAt(p, 0)[48:], 1)
	p.signals(0, 1, kernel)
	if err := p.m.Run(); err != nil {
		return err
	}
	fault, err := cellOf(p, 0)
	if err == nil && (fault.Why != ptx.FaultStopped || fault.Kernel != signalKinds[kernel] || fault.Index != channel) {
		return fmt.Errorf("fault %+v", fault)
	}
	return err
}

// signalKinds is what a kernel of signals that gives up calls itself.
var signalKinds = func() map[ptx.Kernel]uint8 {
	kinds := map[ptx.Kernel]uint8{
		ptx.Signal: ptx.FaultSignal, ptx.PutSignal: ptx.FaultSignal, ptx.SignalAll: ptx.FaultSignal,
		ptx.PutSignalWait: ptx.FaultSignal, // if its signal is what is in vain
		ptx.Wait:          ptx.FaultWait, ptx.WaitAll: ptx.FaultWait, ptx.Barrier: ptx.FaultBarrier,
	}
	for k, kind := range maps.Clone(kinds) {
		kinds[ptx.SignalOn(k, true)] = kind
	}
	return kinds
}()

func TestSignalsOfTwoStreams(t *testing.T) {
	for _, flags := range []uint32{0, ptx.Atomics} {
		for _, kernel := range []ptx.Kernel{ptx.Signal, ptx.PutSignal, ptx.PutSignalWait, ptx.SignalAll} {
			for seed := range uint64(20) {
				require.NoError(t, twoStreams(t, kernel, flags, Config{Seed: seed, Weak: true, MaxSteps: 1 << 22}, nil), "%s, flags %d, seed %d", kernel.Name, flags, seed)
			}
		}
	}
}

func TestGivingUp(t *testing.T) {
	for kernel := range signalKinds {
		require.NoError(t, stopped(t, kernel, Config{MaxSteps: 1 << 24}), kernel.Name)
		for seed := range uint64(20) {
			c := Config{Seed: seed, Weak: true, MaxSteps: 1 << 22}
			require.NoError(t, givesUp(t, kernel, 1, c, nil), "%s, seed %d", kernel.Name, seed)
			// Two threads give up at the same time: one of them tells why.
			require.NoError(t, givesUp(t, kernel, 2, c, nil), "%s, seed %d", kernel.Name, seed)
		}
	}
}
