package cuda_test

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// ptx holds kernels. Most take a struct of an address, a 32-bit value and four bytes of nothing.
const ptx = `
.version 7.0
.target sm_70
.address_size 64

// adds the value to the word at the address, once for each block
.visible .entry kernel(.param .align 8 .b8 arg[16])
{
	.reg .pred %p<2>;
	.reg .b32 %r<3>;
	.reg .b64 %rd<3>;
	mov.u32 %r1, %tid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra done;
	ld.param.u64 %rd1, [arg];
	ld.param.u32 %r2, [arg+8];
	cvta.to.global.u64 %rd2, %rd1;
	red.global.add.u32 [%rd2], %r2;
done:
	ret;
}

// stores the value as a 64-bit word, for everybody to see
.visible .entry store(.param .align 8 .b8 arg[16])
{
	.reg .b32 %r<2>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [arg];
	ld.param.u32 %r1, [arg+8];
	cvt.u64.u32 %rd2, %r1;
	st.relaxed.sys.u64 [%rd1], %rd2;
	ret;
}

// waits until the 32-bit word at the address is not 0, and a few seconds at most
.visible .entry linger(.param .align 8 .b8 arg[16])
{
	.reg .pred %p<3>;
	.reg .b32 %r<2>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [arg];
	mov.u64 %rd2, %globaltimer;
again:
	ld.relaxed.sys.u32 %r1, [%rd1];
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra done;
	mov.u64 %rd3, %globaltimer;
	sub.u64 %rd4, %rd3, %rd2;
	setp.lt.u64 %p2, %rd4, 20000000000;
	@%p2 bra again;
done:
	ret;
}

// gives up at once, for the reason of the value, as device.FaultCell says
.visible .entry giveup(.param .align 8 .b8 arg[16])
{
	.reg .pred %p<2>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [arg];
	ld.param.u32 %r1, [arg+8];
	ld.relaxed.sys.u32 %r2, [%rd1];
	ld.relaxed.sys.u32 %r3, [%rd1+4];
	cvt.u64.u32 %rd2, %r1;
	setp.ne.u32 %p1, %r2, %r3;
	@%p1 bra told;
	st.relaxed.sys.u64 [%rd1+8], %rd2;
told:
	add.u32 %r2, %r2, 1;
	st.release.sys.u32 [%rd1], %r2;
	ret;
}

// gives up as well, with the cell's address in the last 8 bytes of the last parameter
.visible .entry report(.param .u32 why, .param .u8 beside, .param .align 8 .b8 arg[24])
{
	.reg .pred %p<2>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [arg+16];
	ld.param.u32 %r1, [why];
	ld.relaxed.sys.u32 %r2, [%rd1];
	ld.relaxed.sys.u32 %r3, [%rd1+4];
	cvt.u64.u32 %rd2, %r1;
	setp.ne.u32 %p1, %r2, %r3;
	@%p1 bra told;
	st.relaxed.sys.u64 [%rd1+8], %rd2;
told:
	add.u32 %r2, %r2, 1;
	st.release.sys.u32 [%rd1], %r2;
	ret;
}

// stores each parameter at out, where mixedAt says
.visible .entry mixed(.param .u8 a, .param .u16 b, .param .u32 c, .param .u64 d, .param .f32 e, .param .f64 f, .param .u64 out,
	.param .align 4 .b8 three[12], .param .align 16 .b8 four[16])
{
	.reg .b16 %rs<3>;
	.reg .b32 %r<9>;
	.reg .f32 %f<2>;
	.reg .f64 %fd<2>;
	.reg .b64 %rd<4>;
	ld.param.u64 %rd1, [out];
	cvta.to.global.u64 %rd2, %rd1;
	ld.param.u8 %rs1, [a];
	st.global.u8 [%rd2], %rs1;
	ld.param.u16 %rs2, [b];
	st.global.u16 [%rd2+2], %rs2;
	ld.param.u32 %r1, [c];
	st.global.u32 [%rd2+4], %r1;
	ld.param.u64 %rd3, [d];
	st.global.u64 [%rd2+8], %rd3;
	ld.param.f32 %f1, [e];
	st.global.f32 [%rd2+16], %f1;
	ld.param.f64 %fd1, [f];
	st.global.f64 [%rd2+24], %fd1;
	st.global.u64 [%rd2+32], %rd1;
	ld.param.u32 %r2, [three];
	ld.param.u32 %r3, [three+4];
	ld.param.u32 %r4, [three+8];
	st.global.u32 [%rd2+40], %r2;
	st.global.u32 [%rd2+44], %r3;
	st.global.u32 [%rd2+48], %r4;
	ld.param.v4.u32 {%r5, %r6, %r7, %r8}, [four];
	st.global.v4.u32 [%rd2+64], {%r5, %r6, %r7, %r8};
	ret;
}

.visible .entry none()
{
	ret;
}
`

// params lays out the one parameter of the kernels that take an address and a value.
func params(p device.Ptr, value uint32) [][]byte {
	b := make([]byte, 16)
	binary.LittleEndian.PutUint64(b, uint64(p))
	binary.LittleEndian.PutUint32(b[8:], value)
	return [][]byte{b}
}

func function(t testing.TB, d *cuda.Device, name string) device.Function {
	t.Helper()
	m, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	f, err := m.Function(name)
	require.NoError(t, err)
	return f
}

func word(t testing.TB, d *cuda.Device, p device.Ptr) uint32 {
	t.Helper()
	return binary.LittleEndian.Uint32(read(t, d, p, 4))
}

func TestLaunch(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s, other := newStream(t, d), newStream(t, d)
		p := alloc(t, d, 4)
		f := function(t, d, "kernel")
		arg := params(p, 3)
		l, err := f.Prepare(device.Launch{Grid: [3]uint32{7, 2}, Block: [3]uint32{64}, Params: arg, Overlap: true})
		require.NoError(t, err)
		clear(arg[0]) // the launch has its own copy
		arg[0] = nil
		require.NoError(t, l.Launch(s))
		require.NoError(t, l.Launch(other))
		synchronize(t, s)
		synchronize(t, other)
		assert.EqualValues(t, 2*7*2*3, word(t, d, p))

		plain, err := f.Prepare(device.Launch{Params: params(p, 1), SharedBytes: 100 << 10})
		require.NoError(t, err)
		g := capture(t, s, func() {
			require.NoError(t, l.Launch(s))
			require.NoError(t, plain.Launch(s))
		})
		for range 10 {
			require.NoError(t, g.Launch(s))
		}
		require.NoError(t, l.Close())
		require.ErrorIs(t, l.Close(), device.ErrClosed)
		require.ErrorIs(t, l.Launch(s), device.ErrClosed)
		synchronize(t, s)
		assert.EqualValues(t, 2*42+10*43, word(t, d, p))
		assert.Equal(t, 1, d.Stats().Modules)
	})
}

// Enqueueing is tried without a current context; a driver that wants one gets it.
func TestDriversThatNeedAContext(t *testing.T) {
	f := newFake(1)
	f.needsContext = true
	d := openFake(t, f, nil)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 256)
	l, err := function(t, d, "kernel").Prepare(device.Launch{Params: params(p, 1)})
	require.NoError(t, err)
	require.NoError(t, l.Launch(s))
	g := capture(t, s, func() {
		require.NoError(t, l.Launch(s))
		require.NoError(t, s.Fill(p.Add(8), 3, 8))
		require.NoError(t, s.Copy(p.Add(64), p.Add(8), 8))
		require.NoError(t, s.WriteValue32(p.Add(128), 4))
	})
	require.NoError(t, g.Launch(s))
	require.NoError(t, s.Record(e))
	require.NoError(t, other.WaitEvent(e))
	synchronize(t, other)
	assert.EqualValues(t, 2, word(t, d, p))
	assert.EqualValues(t, 0x03030303, word(t, d, p.Add(64)))
	assert.EqualValues(t, 4, word(t, d, p.Add(128)))

	// A stream that the driver does not know is asked for twice, and refused.
	f.failing("cuMemsetD8Async", cu.InvalidHandle)
	require.ErrorIs(t, s.Fill(p, 1, 8), device.ErrInvalid)
	f.failing("cuMemsetD8Async", cu.Success)
}

func TestLaunchAllocatesNothing(t *testing.T) {
	d := open(t, nil)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 4096)
	l, err := function(t, d, "kernel").Prepare(device.Launch{Params: params(p, 1)})
	require.NoError(t, err)
	several, err := function(t, d, "mixed").Prepare(device.Launch{Params: mixed(p.Add(3072))})
	require.NoError(t, err)
	g := capture(t, s, func() { require.NoError(t, l.Launch(s)) })
	ctx := bounded(t)
	var failed error
	note := func(err error) {
		if err != nil {
			failed = err
		}
	}
	round := func() {
		for range 10 {
			note(l.Launch(s))
			note(several.Launch(s))
			note(s.Copy(p.Add(64), p.Add(1024), 64))
			note(s.Fill(p.Add(128), 7, 64))
			note(s.WriteValue32(p.Add(2048), 1))
			note(s.Record(e))
			note(other.WaitEvent(e))
			note(g.Launch(s))
		}
		note(s.Synchronize(ctx))
		note(other.Synchronize(ctx))
		note(e.Synchronize(ctx))
	}
	for range 10 {
		round()
	}
	assert.Zero(t, testing.AllocsPerRun(100, round))
	require.NoError(t, failed)
}

func TestMaxBlocks(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		f := function(t, d, "kernel")
		few, err := f.MaxBlocks(512, 0)
		require.NoError(t, err)
		assert.GreaterOrEqual(t, few, d.Multiprocessors())
		assert.Zero(t, few%d.Multiprocessors())
		many, err := f.MaxBlocks(64, 0)
		require.NoError(t, err)
		assert.Greater(t, many, few)
		_, err = f.MaxBlocks(32, 64<<10)
		require.NoError(t, err, "more shared memory than without asking")
		for _, c := range [][2]int{{0, 0}, {-1, 0}, {100000, 0}, {32, -1}, {32, 1 << 20}} {
			_, err = f.MaxBlocks(c[0], c[1])
			require.ErrorIs(t, err, device.ErrInvalid, "%v", c)
		}
	})
}

// fakeClusters is how many clusters the fake GPU runs at a time.
const fakeClusters = 100

// TestClusters: of a kernel in clusters a launch has whole ones, and a GPU as many as the driver says, or as its multiprocessors have room for.
func TestClusters(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	k := function(t, d, "clustered")
	require.Equal(t, 8, k.(device.Clustered).ClusterBlocks())
	require.Equal(t, 1, function(t, d, "kernel").(device.Clustered).ClusterBlocks())
	n, err := k.MaxBlocks(64, 0)
	require.NoError(t, err)
	require.Equal(t, 8*fakeClusters, n)
	room, err := function(t, d, "kernel").MaxBlocks(512, 0)
	require.NoError(t, err)
	require.Less(t, room, 8*fakeClusters)
	n, err = k.MaxBlocks(512, 0)
	require.NoError(t, err)
	require.Equal(t, room/8*8, n, "no more than the multiprocessors have room for")
	for grid, arg := range map[[3]uint32]string{{4, 2, 1}: "", {8, 4, 3}: "", {6, 2, 1}: "Grid[0]", {4, 1, 1}: "Grid[1]", {1, 2, 1}: "Grid[0]"} {
		l, err := k.Prepare(device.Launch{Grid: grid, Block: [3]uint32{64}})
		if arg != "" {
			require.ErrorIs(t, err, device.ErrInvalid)
			require.ErrorContains(t, err, arg)
			require.ErrorContains(t, err, "multiples of")
			continue
		}
		require.NoError(t, err, "%v", grid)
		require.NoError(t, l.Close())
	}
	f.failing("cuOccupancyMaxActiveClusters", cu.InvalidClusterSize)
	n, err = k.MaxBlocks(64, 0)
	f.failing("cuOccupancyMaxActiveClusters", cu.Success)
	require.NoError(t, err)
	require.Zero(t, n, "none fits")
	for _, symbol := range []string{"cuOccupancyMaxActiveClusters", "cuOccupancyMaxActiveBlocksPerMultiprocessor"} {
		f.failing(symbol, cu.IllegalAddress)
		_, err = k.MaxBlocks(64, 0)
		f.failing(symbol, cu.Success)
		failed, ok := errors.AsType[*cuda.Error](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, symbol, failed.Call)
	}
	require.NoError(t, d.Close())

	old := newFake(1) // a driver that is older than clusters
	old.old = true
	d = openFake(t, old, nil)
	require.Equal(t, 1, function(t, d, "clustered").(device.Clustered).ClusterBlocks())
	require.NoError(t, d.Close())
}

// TestMaxBlocksFails: that blocks do not fit is what the driver says of them alone. The same code from the calls before is a failure of theirs.
func TestMaxBlocksFails(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	k := function(t, d, "kernel")
	for symbol, large := range map[string]bool{"cuOccupancyMaxActiveBlocksPerMultiprocessor": true, "cuFuncSetAttribute": false, "cuCtxPushCurrent_v2": false} {
		f.failing(symbol, cu.InvalidValue)
		_, err := k.MaxBlocks(32, 64<<10)
		f.failing(symbol, cu.Success)
		require.ErrorIs(t, err, device.ErrInvalid, symbol)
		failed, ok := errors.AsType[*cuda.Error](err)
		require.True(t, ok, "%v", err)
		require.Contains(t, symbol, failed.Call)
		_, refused := errors.AsType[*errs.ArgumentError](err)
		require.Equal(t, large, refused, "%s: %v", symbol, err)
	}
	require.NoError(t, d.Close())
}

func TestBadLaunches(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		f := function(t, d, "kernel")
		p := params(alloc(t, d, 4), 1)
		for i, l := range []device.Launch{
			{},
			{Params: [][]byte{p[0][:8]}},
			{Params: [][]byte{append(p[0], 0)}},
			{Params: [][]byte{p[0], p[0]}},
			{Params: [][]byte{nil}},
			{Params: p, Block: [3]uint32{2048}},
			{Params: p, Block: [3]uint32{1024, 1024, 64}},
			{Params: p, Block: [3]uint32{1, 1, 65}},
			{Params: p, Grid: [3]uint32{1, 65536}},
			{Params: p, Grid: [3]uint32{1 << 31}},
			{Params: p, SharedBytes: 1 << 20},
			{Params: p, SharedBytes: 1<<32 - 1},
		} {
			_, err := f.Prepare(l)
			var arg *errs.ArgumentError
			require.ErrorAs(t, err, &arg, "launch %d", i)
		}
		l, err := f.Prepare(device.Launch{Params: p})
		require.NoError(t, err)
		other := openFake(t, newFake(1), nil)
		var none *cuda.Stream
		for _, s := range []device.Stream{nil, none, newStream(t, other)} {
			require.ErrorIs(t, l.Launch(s), device.ErrInvalid)
		}
		s := newStream(t, d)
		require.NoError(t, s.Close())
		require.ErrorIs(t, l.Launch(s), device.ErrClosed)
	})
}

func TestModules(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		for i, image := range [][]byte{nil, {}, {0}, []byte("hello"), []byte("\x7fELF"), append([]byte("\x7fELF"), make([]byte, 100)...),
			{0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0, 255, 255, 0, 0, 0, 0, 0, 0}, []byte("a\x00.version b")} {
			_, err := d.LoadModule(image)
			require.ErrorIs(t, err, device.ErrInvalid, "image %d", i)
		}
		m, err := d.LoadModule([]byte(ptx))
		require.NoError(t, err)
		for _, name := range []string{"", "missing", "ker\x00nel"} {
			_, err = m.Function(name)
			require.ErrorIs(t, err, device.ErrInvalid, "%q", name)
		}
		f, err := m.Function("kernel")
		require.NoError(t, err)
		l, err := f.Prepare(device.Launch{Params: params(alloc(t, d, 4), 1)})
		require.NoError(t, err)
		s := newStream(t, d)
		require.NoError(t, l.Launch(s))
		synchronize(t, s)
		require.NoError(t, m.Close())
		_, functionErr := m.Function("kernel")
		_, blocksErr := f.MaxBlocks(32, 0)
		_, prepareErr := f.Prepare(device.Launch{Params: params(8, 1)})
		for i, err := range []error{m.Close(), functionErr, blocksErr, prepareErr, l.Launch(s)} {
			require.ErrorIs(t, err, device.ErrClosed, "call %d", i)
		}
		assert.Zero(t, d.Stats().Modules)
	})
}

// Modules of one image share what was loaded, for as long as one of them is open.
func TestModulesShareTheirImage(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	first, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	second, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	other, err := d.LoadModule([]byte(ptx + "\n"))
	require.NoError(t, err)
	assert.Equal(t, 3, d.Stats().Modules)
	assert.Equal(t, 2, f.calls["cuModuleLoadDataEx"])
	require.NoError(t, first.Close())
	_, err = first.Function("kernel")
	require.ErrorIs(t, err, device.ErrClosed)
	kernel, err := second.Function("kernel")
	require.NoError(t, err)
	l, err := kernel.Prepare(device.Launch{Params: params(alloc(t, d, 4), 1)})
	require.NoError(t, err)
	s := newStream(t, d)
	require.NoError(t, l.Launch(s))
	synchronize(t, s)
	require.Zero(t, f.calls["cuModuleUnload"])
	require.NoError(t, errors.Join(second.Close(), other.Close()))
	require.Equal(t, 2, f.calls["cuModuleUnload"])
	_, err = d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	assert.Equal(t, 3, f.calls["cuModuleLoadDataEx"])

	// One that cannot be loaded leaves nothing behind.
	f.failing("cuModuleLoadDataEx", cu.OutOfMemory)
	_, err = d.LoadModule([]byte(ptx + "\n"))
	require.ErrorIs(t, err, device.ErrNoMemory)
	f.failing("cuModuleLoadDataEx", cu.Success)
	_, err = d.LoadModule([]byte(ptx + "\n"))
	require.NoError(t, err)
}

// Enqueueing asks the driver for nothing that waits for the GPU.
func TestEnqueueingMakesNoMemory(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	w := newFault(t, d)
	l := givesUp(t, d, w, 1)
	p := alloc(t, d, 4)
	s := newStream(t, d)
	slow := []string{"cuMemHostAlloc", "cuMemAlloc_v2", "cuModuleLoadDataEx", "cuModuleGetFunction"}
	before := map[string]int{}
	for _, call := range slow {
		before[call] = f.calls[call]
	}
	enqueue := func() {
		require.NoError(t, s.WriteValue32(p, 1))
		require.NoError(t, s.WaitValue32(p, 1))
		require.NoError(t, l.Launch(s))
	}
	enqueue()
	g := capture(t, s, enqueue)
	require.NoError(t, g.Launch(s))
	require.ErrorIs(t, s.Synchronize(bounded(t)), errGaveUp)
	for _, call := range slow {
		assert.Equal(t, before[call], f.calls[call], call)
	}
}

func TestBadPTX(t *testing.T) {
	d := open(t, nil)
	_, err := d.LoadModule([]byte(".version 7.0\n.target sm_70\n.address_size 64\nnonsense;\n"))
	require.ErrorIs(t, err, device.ErrUnsupported)
	require.ErrorContains(t, err, "line 4", "the compiler's own words")
	_, err = d.LoadModule([]byte(".version 7.0\n.target sm_999\n.address_size 64\n"))
	require.Error(t, err)
}

func TestFaultWord(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		boom := errors.New("rank 3 did not come")
		var got uint64
		w, err := d.NewFaultWord(func(word uint64) error { got = word; return boom })
		require.NoError(t, err)
		quiet, err := d.NewFaultWord(func(uint64) error { return nil })
		require.NoError(t, err)
		assert.Zero(t, w.Load())
		assert.Zero(t, w.Ptr()%8)
		s, other := newStream(t, d), newStream(t, d)
		synchronize(t, s)

		name, value := "store", uint32(77)
		if d.Driver().Path == "fake" {
			name = "kernel"
		}
		l, err := function(t, d, name).Prepare(device.Launch{Params: params(w.Ptr(), value)})
		require.NoError(t, err)
		require.NoError(t, l.Launch(s))
		require.NoError(t, d.Synchronize(bounded(t)), "errors of the work stay with the streams")
		require.ErrorIs(t, other.Synchronize(bounded(t)), boom, "any stream")
		assert.EqualValues(t, 77, got)
		synchronize(t, s)
		synchronize(t, other)
		assert.EqualValues(t, 77, w.Load())
		require.NoError(t, w.Close())
		require.ErrorIs(t, w.Close(), device.ErrClosed)
		assert.EqualValues(t, 77, w.Load())

		require.NoError(t, s.WriteValue32(quiet.Ptr(), 5))
		require.ErrorContains(t, s.Synchronize(bounded(t)), "0x5", "a decode that finds nothing hides nothing")
		assert.Equal(t, 1, d.Stats().FaultWords)
	})
}

func TestStopWord(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w, err := d.NewStopWord()
		require.NoError(t, err)
		other, err := d.NewStopWord()
		require.NoError(t, err)
		assert.NotEqual(t, w.Ptr(), other.Ptr())
		assert.Zero(t, word(t, d, w.Ptr()))
		w.Stop()
		w.Stop()
		assert.NotZero(t, word(t, d, w.Ptr()))
		assert.Zero(t, word(t, d, other.Ptr()))
		assert.Equal(t, 2, d.Stats().StopWords)
		require.NoError(t, w.Close())
		require.ErrorIs(t, w.Close(), device.ErrClosed)
		w.Stop()
	})
}

func TestStopWordEndsAKernel(t *testing.T) {
	d := open(t, nil)
	w, err := d.NewStopWord()
	require.NoError(t, err)
	l, err := function(t, d, "linger").Prepare(device.Launch{Params: params(w.Ptr(), 0)})
	require.NoError(t, err)
	s := newStream(t, d)
	require.NoError(t, l.Launch(s))
	time.Sleep(20 * time.Millisecond)
	done, err := s.Query()
	require.NoError(t, err)
	assert.False(t, done)
	begin := time.Now()
	w.Stop()
	synchronize(t, s)
	assert.Less(t, time.Since(begin), 10*time.Second, "long before the kernel's own bound")
}

// A kernel that does not end holds Close up no longer than WaitTimeout; what the kernel may use is not freed under it.
func TestCloseLeavesAKernelThatDoesNotEnd(t *testing.T) {
	keep := open(t, nil)
	w, err := keep.NewStopWord()
	require.NoError(t, err)
	d := open(t, &cuda.Options{WaitTimeout: 100 * time.Millisecond})
	l, err := function(t, d, "linger").Prepare(device.Launch{Params: params(w.Ptr(), 0)})
	require.NoError(t, err)
	s := newStream(t, d)
	require.NoError(t, l.Launch(s))
	begin := time.Now()
	err = d.Close()
	assert.Less(t, time.Since(begin), 10*time.Second)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.ErrorContains(t, err, "not given back")
	w.Stop()
	require.NoError(t, keep.Synchronize(bounded(t)))
}
