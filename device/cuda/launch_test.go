package cuda_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// mixedAt is where the kernel mixed stores each of its parameters, in mixedBytes.
var mixedAt = []int{0, 2, 4, 8, 16, 24, 32, 40, 64}

const mixedBytes = 80

// mixed lays out the parameters of the kernel of that name: numbers of all widths, a pointer, a struct of three words and one of four that
// is aligned to 16 bytes.
func mixed(out device.Ptr) [][]byte {
	le := binary.LittleEndian
	var three, four []byte
	for i := range uint32(3) {
		three = le.AppendUint32(three, 0x30303030+i)
	}
	for i := range uint32(4) {
		four = le.AppendUint32(four, 0x40404040+i)
	}
	return [][]byte{
		{0xa1}, le.AppendUint16(nil, 0xb2b1), le.AppendUint32(nil, 0xc4c3c2c1), le.AppendUint64(nil, 0xd8d7d6d5d4d3d2d1),
		le.AppendUint32(nil, math.Float32bits(-1.5)), le.AppendUint64(nil, math.Float64bits(math.Pi)), le.AppendUint64(nil, uint64(out)),
		three, four,
	}
}

// Every parameter arrives as it was given, from a stream and from a graph.
func TestLaunchWithSeveralParameters(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		out := alloc(t, d, mixedBytes)
		given := mixed(out)
		want := make([]byte, mixedBytes)
		for i, at := range mixedAt {
			copy(want[at:], given[i])
		}
		l, err := function(t, d, "mixed").Prepare(device.Launch{Params: given})
		require.NoError(t, err)
		for i := range given { // the launch has its own copy
			clear(given[i])
			given[i] = nil
		}
		runtime.GC()
		require.NoError(t, d.CopyFromHost(out, make([]byte, mixedBytes)))
		require.NoError(t, l.Launch(s))
		synchronize(t, s)
		assert.Equal(t, want, read(t, d, out, mixedBytes))

		g := capture(t, s, func() { require.NoError(t, l.Launch(s)) })
		require.NoError(t, l.Close())
		runtime.GC()
		require.NoError(t, d.CopyFromHost(out, make([]byte, mixedBytes)))
		require.NoError(t, g.Launch(s))
		synchronize(t, s)
		assert.Equal(t, want, read(t, d, out, mixedBytes))
	})
}

func TestLaunchWithoutParameters(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		f := function(t, d, "none")
		for _, params := range [][][]byte{nil, {}} {
			l, err := f.Prepare(device.Launch{Params: params})
			require.NoError(t, err)
			require.NoError(t, l.Launch(s))
			synchronize(t, s)
			require.NoError(t, l.Close())
		}
		for _, params := range [][][]byte{{nil}, {{1}}} {
			_, err := f.Prepare(device.Launch{Params: params})
			requireArgument(t, err, "len(Params)", 1, "0, as many as the kernel none has")
		}
	})
}

// manyParams is how many 32-bit parameters a kernel can have behind a pointer.
const manyParams = 8189

// many is a kernel that takes a pointer to a word and n numbers, and stores there what combine makes of these.
func many(n int) []byte {
	var b strings.Builder
	b.WriteString(".version 8.1\n.target sm_70\n.address_size 64\n.visible .entry many(.param .u64 out")
	for i := range n {
		fmt.Fprintf(&b, ", .param .u32 p%d", i)
	}
	b.WriteString(")\n{\n\t.reg .b32 %r<3>;\n\t.reg .b64 %rd<2>;\n\tmov.u32 %r1, 0;\n")
	for i := range n {
		fmt.Fprintf(&b, "\tld.param.u32 %%r2, [p%d];\n\tmad.lo.u32 %%r1, %%r1, 31, %%r2;\n", i)
	}
	b.WriteString("\tld.param.u64 %rd1, [out];\n\tst.global.u32 [%rd1], %r1;\n\tret;\n}\n")
	return []byte(b.String())
}

// As many parameters as a kernel can have: 32764 bytes.
func TestLaunchWithTheMostParameters(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		m, err := d.LoadModule(many(manyParams))
		require.NoError(t, err)
		f, err := m.Function("many")
		require.NoError(t, err)
		out := alloc(t, d, 4)
		params := [][]byte{binary.LittleEndian.AppendUint64(nil, uint64(out))}
		var want uint32
		for i := range uint32(manyParams) {
			params = append(params, binary.LittleEndian.AppendUint32(nil, i*2654435761))
			want = want*31 + i*2654435761
		}
		l, err := f.Prepare(device.Launch{Params: params})
		require.NoError(t, err)
		s := newStream(t, d)
		require.NoError(t, l.Launch(s))
		synchronize(t, s)
		assert.Equal(t, want, word(t, d, out))
	})
}

// requireArgument requires that err refuses that argument with that value, and says what is allowed.
func requireArgument(t *testing.T, err error, arg string, value any, allowed string) {
	t.Helper()
	require.ErrorIs(t, err, device.ErrInvalid)
	var a *errs.ArgumentError
	require.ErrorAs(t, err, &a)
	assert.Equal(t, "Prepare", a.Op)
	assert.Equal(t, arg, a.Arg)
	assert.Equal(t, value, a.Value)
	assert.Contains(t, a.Allowed, allowed)
}

// Prepare says which parameter is wrong, how long it is and how long it must be.
func TestWrongParameters(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		f := function(t, d, "mixed")
		good := mixed(alloc(t, d, mixedBytes))
		count := "9, as many as the kernel mixed has parameters; their sizes in bytes are [1 2 4 8 4 8 8 12 16]"
		for _, params := range [][][]byte{nil, good[:8], append(good, []byte{1})} {
			_, err := f.Prepare(device.Launch{Params: params})
			requireArgument(t, err, "len(Params)", len(params), count)
		}
		for i, p := range good {
			for _, wrong := range [][]byte{nil, p[:len(p)-1], append(p[:len(p):len(p)], 0)} {
				params := append([][]byte(nil), good...)
				params[i] = wrong
				_, err := f.Prepare(device.Launch{Params: params})
				requireArgument(t, err, fmt.Sprintf("len(Params[%d])", i), len(wrong),
					fmt.Sprintf("%d, the size of parameter %d of the kernel mixed", len(p), i))
			}
		}
		_, err := f.Prepare(device.Launch{Params: good})
		require.NoError(t, err)
	})
}

// With drivers that do not tell what parameters a kernel has, launches work, and what no kernel has is refused.
func TestDriversThatTellNoParameters(t *testing.T) {
	drv := newFake(1).driver()
	drv.FuncGetParamInfo = nil
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	s := newStream(t, d)
	out := alloc(t, d, mixedBytes)
	f := function(t, d, "mixed")
	l, err := f.Prepare(device.Launch{Params: mixed(out)})
	require.NoError(t, err)
	require.NoError(t, l.Launch(s))
	synchronize(t, s)
	assert.EqualValues(t, 0xa1, read(t, d, out, 1)[0])
	none, err := function(t, d, "none").Prepare(device.Launch{})
	require.NoError(t, err)
	require.NoError(t, none.Launch(s))
	synchronize(t, s)
	none, err = f.Prepare(device.Launch{})
	require.NoError(t, err)
	require.ErrorIs(t, none.Launch(s), device.ErrInvalid, "by the driver")

	allowed := "1 or more, and 32764 for all parameters together"
	_, err = f.Prepare(device.Launch{Params: [][]byte{make([]byte, 32764)}})
	require.NoError(t, err)
	_, err = f.Prepare(device.Launch{Params: [][]byte{{1}, {}}})
	requireArgument(t, err, "len(Params[1])", 0, allowed)
	_, err = f.Prepare(device.Launch{Params: [][]byte{make([]byte, 32764), {1}}})
	requireArgument(t, err, "len(Params[1])", 1, allowed)
}

// A driver that tells of parameters that no kernel has is not believed, and not asked for ever.
func TestDriversThatTellTooManyParameters(t *testing.T) {
	for name, size := range map[string]func(i uint64) uint64{
		"parameters without end": func(uint64) uint64 { return 1 },
		"a large one":            func(i uint64) uint64 { return 1 + i*32764 },
		"more than there is":     func(uint64) uint64 { return math.MaxUint64 },
		"one of no bytes":        func(i uint64) uint64 { return i },
	} {
		t.Run(name, func(t *testing.T) {
			drv := newFake(1).driver()
			drv.FuncGetParamInfo = func(_ cu.FunctionHandle, i uint64, _, n *uint64) cu.Result {
				*n = size(i)
				return cu.Success
			}
			d, err := cuda.Open(&cuda.Options{Driver: drv})
			require.NoError(t, err)
			closeInTheEnd(t, d)
			m, err := d.LoadModule([]byte(ptx))
			require.NoError(t, err)
			_, err = m.Function("kernel")
			require.ErrorIs(t, err, device.ErrUnsupported)
			require.ErrorContains(t, err, `"kernel"`)
			require.ErrorContains(t, err, "32764 together")
		})
	}
}

// reports makes a launch that gives up and reports it in a cell whose address is in its third parameter.
func reports(t testing.TB, d *cuda.Device, w device.FaultWord, why uint32) device.PreparedLaunch {
	t.Helper()
	l, err := function(t, d, "report").Prepare(device.Launch{
		Params:    [][]byte{binary.LittleEndian.AppendUint32(nil, why), {7}, make([]byte, 24)},
		FaultCell: &device.FaultCellParam{Word: w, Param: 2, Offset: 16},
	})
	require.NoError(t, err)
	return l
}

func TestFaultCellInALaterParameter(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w := newFault(t, d)
		a, b := newStream(t, d), newStream(t, d)
		l := reports(t, d, w, 7)
		require.NoError(t, l.Launch(a))
		require.NoError(t, l.Launch(b))
		require.NoError(t, l.Launch(b))
		told(t, a, 7, "")
		told(t, b, 7, "(and 1 later failures)")
		g := capture(t, a, func() { require.NoError(t, l.Launch(a)) })
		synchronize(t, a)
		require.NoError(t, g.Launch(b))
		told(t, b, 7, "")
		synchronize(t, a)

		f := function(t, d, "report")
		for _, c := range []struct {
			param, offset int
			arg           string
			allowed       string
		}{
			{-1, 0, "FaultCell.Param", "3 parameters"},
			{3, 0, "FaultCell.Param", "3 parameters"},
			{0, 0, "FaultCell.Offset", "in the 4 of parameter 0"},
			{1, 0, "FaultCell.Offset", "in the 1 of parameter 1"},
			{2, -8, "FaultCell.Offset", "in the 24 of parameter 2"},
			{2, 12, "FaultCell.Offset", "in the 24 of parameter 2"},
			{2, 24, "FaultCell.Offset", "in the 24 of parameter 2"},
		} {
			value := c.param
			if c.arg == "FaultCell.Offset" {
				value = c.offset
			}
			_, err := f.Prepare(device.Launch{
				Params:    [][]byte{make([]byte, 4), {7}, make([]byte, 24)},
				FaultCell: &device.FaultCellParam{Word: w, Param: c.param, Offset: c.offset},
			})
			requireArgument(t, err, c.arg, value, c.allowed)
		}
		_, err := function(t, d, "none").Prepare(device.Launch{FaultCell: &device.FaultCellParam{Word: w}})
		requireArgument(t, err, "FaultCell.Param", 0, "0 parameters")
	})
}

// Goroutines that launch the same kernel at once, each on its stream, do not take each other's fault cell.
func TestLaunchesAtTheSameTime(t *testing.T) {
	onEach(t, nil, launchAtTheSameTime)
}

// What the driver reads stays what it is until its call has returned.
func TestParametersDuringTheCall(t *testing.T) {
	drv := newFake(1).driver()
	launch := drv.LaunchKernelEx
	var changed atomic.Int32
	drv.LaunchKernelEx = func(c *cu.LaunchConfig, f cu.FunctionHandle, params, extra *unsafe.Pointer) cu.Result {
		config, third := *c, unsafe.Slice(params, 3)[2] // both kernels have so many
		was := *(*byte)(third)
		var cell uint64
		reports := was == 0 // mixed has 0xc1 there
		if reports {
			cell = *(*uint64)(unsafe.Add(third, 16))
		}
		for range 10 {
			runtime.Gosched() // the others come to launch
		}
		if *c != config || reports && *(*uint64)(unsafe.Add(third, 16)) != cell {
			changed.Add(1)
		}
		return launch(c, f, params, extra)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	launchAtTheSameTime(t, d)
	assert.Zero(t, changed.Load())
}

// fullQueue is that of a stream without room: what is enqueued there waits.
type fullQueue struct {
	stream   atomic.Uintptr // its handle; 0 is none
	came     chan struct{}  // takes each call that waits
	room     chan struct{}
	makeRoom func()
}

func newFullQueue() *fullQueue {
	q := &fullQueue{came: make(chan struct{}), room: make(chan struct{})}
	q.makeRoom = sync.OnceFunc(func() { q.stream.Store(0); close(q.room) })
	return q
}

// need waits for room on a stream.
func (q *fullQueue) need(s cu.StreamHandle) {
	if uintptr(s) == q.stream.Load() {
		q.came <- struct{}{}
		<-q.room
	}
}

// launches makes launches of a driver wait for room.
func (q *fullQueue) launches(drv *cu.Driver) {
	launch := drv.LaunchKernelEx
	drv.LaunchKernelEx = func(c *cu.LaunchConfig, f cu.FunctionHandle, params, extra *unsafe.Pointer) cu.Result {
		q.need(c.Stream)
		return launch(c, f, params, extra)
	}
}

// TestLaunchThatWaitsForRoom: a launch that waits for room in the queue of its stream holds up none of the same kernel on another stream, for which what makes the room may wait. Closing it waits.
func TestLaunchThatWaitsForRoom(t *testing.T) {
	drv := newFake(1).driver()
	full := newFullQueue()
	full.launches(drv)
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	l := reports(t, d, newFault(t, d), 5)
	first, second := newStream(t, d), newStream(t, d)
	t.Cleanup(full.makeRoom) // the first that is cleaned up
	full.stream.Store(first.Handle())
	held, other, closes := make(chan error, 1), make(chan error, 1), make(chan error, 1)
	go func() { held <- l.Launch(first) }()
	<-full.came
	go func() { other <- l.Launch(second) }()
	select {
	case err := <-other:
		assert.NoError(t, err)
	case <-time.After(10 * time.Second):
		require.Fail(t, "a launch on another stream waits, too")
	}
	go func() { closes <- l.Close() }()
	require.Eventually(t, func() bool { return errors.Is(l.Launch(second), errs.ErrClosed) }, 10*time.Second, time.Millisecond, "what is being closed is launched")
	assert.Empty(t, closes, "it is closed while it is launched")
	full.makeRoom()
	require.NoError(t, <-held)
	require.NoError(t, <-closes)
	told(t, first, 5, "")
	told(t, second, 5, "")
}

// TestModuleIsClosedDuringALaunch: a module that is being closed stays loaded until the launches of its kernels that are being made have returned, and nobody waits for
// it who would launch them then.
func TestModuleIsClosedDuringALaunch(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	full, unload := newFullQueue(), drv.ModuleUnload
	full.launches(drv)
	var unloaded atomic.Bool
	drv.ModuleUnload = func(m cu.ModuleHandle) cu.Result { unloaded.Store(true); return unload(m) }
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	m, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	k, err := m.Function("none")
	require.NoError(t, err)
	l, err := k.Prepare(device.Launch{})
	require.NoError(t, err)
	first, second := newStream(t, d), newStream(t, d)
	t.Cleanup(full.makeRoom) // the first that is cleaned up
	full.stream.Store(first.Handle())
	held, closes := make(chan error, 1), make(chan error, 1)
	go func() { held <- l.Launch(first) }()
	<-full.came
	require.NoError(t, l.Launch(second), "a launch on another stream waits, too")
	go func() { closes <- m.Close() }()
	require.Eventually(t, func() bool { return errors.Is(l.Launch(second), errs.ErrClosed) }, 10*time.Second, time.Millisecond, "what is being closed is launched")
	time.Sleep(1100 * time.Millisecond) // longer than unloading waits for a moment without work
	assert.False(t, unloaded.Load(), "it is unloaded while its kernel is launched")
	assert.Empty(t, closes)
	full.makeRoom()
	require.NoError(t, <-held)
	require.NoError(t, <-closes)
	assert.True(t, unloaded.Load())
}

func launchAtTheSameTime(t *testing.T, d *cuda.Device) {
	const goroutines, launches = 4, 100
	l := reports(t, d, newFault(t, d), 5)
	out := alloc(t, d, mixedBytes)
	other, err := function(t, d, "mixed").Prepare(device.Launch{Params: mixed(out)})
	require.NoError(t, err)
	var streams [goroutines]*cuda.Stream
	var failed [goroutines]error
	var wg sync.WaitGroup
	for i := range streams {
		streams[i] = newStream(t, d)
		wg.Go(func() {
			for n := 0; n < launches+i && failed[i] == nil; n++ {
				if failed[i] = l.Launch(streams[i]); failed[i] == nil {
					failed[i] = other.Launch(streams[i])
				}
			}
		})
	}
	wg.Wait()
	for i, s := range streams {
		require.NoError(t, failed[i])
		told(t, s, 5, fmt.Sprintf("(and %d later failures)", launches+i-1))
	}
	assert.EqualValues(t, 0xa1, read(t, d, out, 1)[0])
}

// TestEventBehindAFullQueue: who asks about an event, or waits for it, waits for no other call of the event that waits for room in the queue of its stream.
func TestEventBehindAFullQueue(t *testing.T) {
	for _, records := range []bool{true, false} {
		t.Run(fmt.Sprintf("records=%t", records), func(t *testing.T) {
			drv := newFake(1).driver()
			record, wait := drv.EventRecord, drv.StreamWaitEvent
			full := newFullQueue()
			drv.EventRecord = func(e cu.EventHandle, s cu.StreamHandle) cu.Result { full.need(s); return record(e, s) }
			drv.StreamWaitEvent = func(s cu.StreamHandle, e cu.EventHandle, flags uint32) cu.Result {
				full.need(s)
				return wait(s, e, flags)
			}
			d, err := cuda.Open(&cuda.Options{Driver: drv})
			require.NoError(t, err)
			closeInTheEnd(t, d)
			first, second, e, start := newStream(t, d), newStream(t, d), newEvent(t, d), newEvent(t, d)
			require.NoError(t, second.Record(start))
			require.NoError(t, second.Record(e))
			require.NoError(t, e.Synchronize(bounded(t)))
			t.Cleanup(full.makeRoom) // the first that is cleaned up
			full.stream.Store(first.Handle())
			held, asked := make(chan error, 1), make(chan error, 1)
			go func() {
				if records {
					held <- first.Record(e)
				} else {
					held <- first.WaitEvent(e)
				}
			}()
			<-full.came
			go func() {
				soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				_, since := e.Since(start)
				complete, err := e.Query()
				if waited := e.Synchronize(soon); complete == records || errors.Is(waited, context.DeadlineExceeded) != records || errors.Is(since, errs.ErrInvalid) != records {
					err = fmt.Errorf("complete: %t, %w; waited for: %w; since another: %w", complete, err, waited, since)
				}
				asked <- err
			}()
			select {
			case err := <-asked:
				assert.NoError(t, err)
			case <-time.After(10 * time.Second):
				require.Fail(t, "who asks waits, too")
			}
			full.makeRoom()
			require.NoError(t, <-held)
			require.NoError(t, e.Synchronize(bounded(t)))
			_, err = e.Since(start)
			require.NoError(t, err)
		})
	}
}
