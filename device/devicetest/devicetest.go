// Package devicetest is the conformance suite that every device passes: what [device.Device], [device.Stream],
// [device.Event] and [device.Graph] promise, and [device.HostMemory] and [device.HostLauncher] where the device has them. The
// package of a device calls [Run] from a test. What only one device promises is tested in its own package.
package devicetest

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

// Harness opens the device under test and says how it differs from others.
type Harness struct {
	// Open opens a device that holds nothing. When t ends it closes the device, unless the test has done so, and checks that nothing is left. It may
	// be called several times in one test; the devices then have the same identity.
	Open func(t testing.TB, o Options) device.Device
	// Other opens a device of the same package that shares no streams, events and graphs with those of Open; nil is Open.
	Other func(t testing.TB) device.Device
	// Held returns what a device holds; nothing for a closed one.
	Held func(d device.Device) Held
	// NilStream and NilEvent are nil pointers of the device's own types, which it must refuse.
	NilStream device.Stream
	NilEvent  device.Event

	// Fast is set when enqueueing and running work costs next to nothing, so that the long tests take their large numbers.
	Fast bool
	// Slack is by how much Since may be shorter than the host's clock says, and Resolution by how much two measurements of
	// one time may differ. Both are 0 where events read the host's clock.
	Slack, Resolution time.Duration
	// Allocates names the calls that may allocate when they enqueue: "HostFunc", "WaitValue32" and so on, "Graph.Launch", and
	// "nested Graph.Launch" for graphs that are part of others. "all" leaves the test of it out.
	Allocates []string
}

// Options are the options with which the suite wants a device opened; zero values are the device's defaults.
type Options struct {
	WaitTimeout time.Duration // how long one WaitValue32 may hold a stream up
	Err         func() error  // an error of it ends the waits, as for a lost peer; asked from any goroutine
}

// Held is what a device holds at one moment.
type Held struct {
	Streams     int   // not closed
	Events      int   // not closed
	Graphs      int   // not closed
	Allocations int   // not freed
	Bytes       int64 // the sum of the allocations, as asked for
	Other       int   // whatever else the device counts, host functions that have not run among it
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	if h.Other == nil {
		h.Other = func(t testing.TB) device.Device { return h.Open(t, Options{}) }
	}
	for _, tt := range []struct {
		name string
		run  func(t *testing.T, h Harness)
	}{
		{"Identity", identity},
		{"AllocIsZeroed", allocIsZeroed},
		{"HostMemory", hostMemory},
		{"CopiesOfAnySize", copiesOfAnySize},
		{"BadRangesAreRefused", badRangesAreRefused},

		{"StreamRunsInOrder", streamRunsInOrder},
		{"StreamMovesMemory", streamMovesMemory},
		{"SeveralGoroutinesEnqueue", severalGoroutinesEnqueue},
		{"SeveralGoroutines", severalGoroutines},
		{"SynchronizeEndsWithItsContext", synchronizeEndsWithItsContext},
		{"SynchronizeWaitsOnlyForWhatCameBefore", synchronizeWaitsOnlyForWhatCameBefore},
		{"SynchronizeWaitsForStreamsThatClose", synchronizeWaitsForStreamsThatClose},
		{"SynchronizeWaitsForWhatCameBeforeACapture", synchronizeWaitsForWhatCameBeforeACapture},
		{"BadArguments", badArguments},
		{"EnqueueingAllocatesNothing", enqueueingAllocatesNothing},

		{"ValuesAcrossStreams", valuesAcrossStreams},
		{"WaitValueHoldsUpUntilTheValueIsThere", waitValueHoldsUp},
		{"WaitValueTimesOut", waitValueTimesOut},
		{"WaitValueTimesOutInAGraph", waitValueTimesOutInAGraph},
		{"WaitValueEndsWhenAPeerIsLost", waitValueEndsWhenAPeerIsLost},
		{"WaitValueEndsWhenItsStreamIsClosed", waitValueEndsWhenItsStreamIsClosed},
		{"LongestWaitTimeout", longestWaitTimeout},

		{"HostWorkHoldsUp", hostWorkHoldsUp},
		{"HostWorkInOrder", hostWorkInOrder},
		{"HostWorkFails", hostWorkFails},
		{"HostWorkInAGraph", hostWorkInAGraph},
		{"HostWorkIsCheap", hostWorkIsCheap},

		{"EventOrdersStreams", eventOrdersStreams},
		{"EventNeverRecorded", eventNeverRecorded},
		{"WaitEventMeansTheRecordAtItsCall", waitEventMeansTheRecordAtItsCall},
		{"EventSince", eventSince},
		{"EventClose", eventClose},
		{"OrderModel", orderModel},

		{"GraphReplays", graphReplays},
		{"GraphReplaysManyTimes", graphReplaysManyTimes},
		{"EmptyGraph", emptyGraph},
		{"ClosedGraphStillRunsWhatWasLaunched", closedGraphStillRunsWhatWasLaunched},
		{"GraphLaunchesNeverOverlap", graphLaunchesNeverOverlap},
		{"GraphLaunchesRunInTheOrderOfTheirCalls", graphLaunchesRunInTheOrderOfTheirCalls},
		{"NestedLaunchesDoNotDeadlock", nestedLaunchesDoNotDeadlock},
		{"GraphInAGraphAwaitsLaunchesOnForks", graphInAGraphAwaitsLaunchesOnForks},
		{"GraphInAGraphAwaitsLaunchesOnClosedStreams", graphInAGraphAwaitsLaunchesOnClosedStreams},
		{"CaptureForksAndJoins", captureForksAndJoins},
		{"UnjoinedForkIsAnError", unjoinedForkIsAnError},
		{"CallsThatCaptureRefuses", callsThatCaptureRefuses},

		{"ErrorsAreReturnedOnce", errorsAreReturnedOnce},
		{"ErrorOfLaterWorkIsLeftForLater", errorOfLaterWorkIsLeftForLater},
		{"ManyFailuresAreCounted", manyFailuresAreCounted},
		{"PanicsBecomeErrors", panicsBecomeErrors},
		{"GoexitDoesNotStopTheStream", goexitDoesNotStopTheStream},
		{"ErrorsInGraphs", errorsInGraphs},

		{"StreamClose", streamClose},
		{"CloseReturnsErrorsNobodyAskedFor", closeReturnsErrorsNobodyAskedFor},
		{"DeviceClose", deviceClose},
		{"DeviceCloseRacesWithEverything", deviceCloseRacesWithEverything},
	} {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, h) })
	}
}

// patience is a bound that no test reaches unless something is broken.
const patience = time.Minute

// open opens a device with default options.
func (h *Harness) open(t testing.TB) device.Device {
	t.Helper()
	return h.Open(t, Options{})
}

// many is how much work a long test enqueues.
func (h *Harness) many(slow, fast int) int {
	if h.Fast {
		return fast
	}
	return slow
}

func newStream(t testing.TB, d device.Device) device.Stream {
	t.Helper()
	s, err := d.NewStream()
	require.NoError(t, err)
	return s
}

func newEvent(t testing.TB, d device.Device) device.Event {
	t.Helper()
	e, err := d.NewEvent()
	require.NoError(t, err)
	return e
}

func alloc(t testing.TB, d device.Device, bytes int64) device.Ptr {
	t.Helper()
	p, err := d.Alloc(bytes)
	require.NoError(t, err)
	return p
}

// capture records what body enqueues.
func capture(t testing.TB, s device.Stream, body func()) device.Graph {
	t.Helper()
	require.NoError(t, s.BeginCapture())
	body()
	g, err := s.EndCapture()
	require.NoError(t, err)
	return g
}

// bounded returns a context that ends when the test has lost patience.
func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func synchronize(t testing.TB, s device.Stream) {
	t.Helper()
	require.NoError(t, s.Synchronize(bounded(t)))
}

// read returns n bytes of the device's memory.
func read(t testing.TB, d device.Device, p device.Ptr, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, d.CopyToHost(b, p))
	return b
}

// kernel runs a function as a kernel.
type kernel func() error

func (k kernel) RunKernel() error { return k() }

// counter is a kernel, and a host function, that counts its runs.
type counter struct{ runs atomic.Int64 }

func (c *counter) RunKernel() error { c.runs.Add(1); return nil }
func (c *counter) run()             { c.runs.Add(1) }

// enqueue enqueues a call of fn: as a kernel where kernels are Go code, and otherwise as a host function, which fails by
// panicking.
func enqueue(s device.Stream, fn kernel) error {
	if l, ok := s.(device.HostLauncher); ok {
		return l.Launch(fn)
	}
	return s.HostFunc(func() {
		if err := fn(); err != nil {
			panic(err)
		}
	})
}

// opOf returns what a WorkError calls the work of enqueue.
func opOf(s device.Stream) string {
	if _, ok := s.(device.HostLauncher); ok {
		return "Launch(devicetest.kernel)"
	}
	return "HostFunc"
}

// gate holds a stream up until it is opened.
type gate struct {
	word    device.Ptr
	by      device.Stream // another stream, which opens it
	held    device.Stream
	entered atomic.Bool
}

func newGate(t testing.TB, d device.Device) *gate {
	t.Helper()
	return &gate{word: alloc(t, d, 4), by: newStream(t, d)}
}

// hold makes s stop here.
func (g *gate) hold(t testing.TB, s device.Stream) {
	t.Helper()
	g.held = s
	require.NoError(t, s.HostFunc(func() { g.entered.Store(true) }))
	require.NoError(t, s.WaitValue32(g.word, 1))
}

// await waits until the stream has come as far as the gate.
func (g *gate) await(t testing.TB) {
	t.Helper()
	awaitWork(t, g.held, &g.entered)
}

func (g *gate) open(t testing.TB) {
	t.Helper()
	require.NoError(t, g.by.WriteValue32(g.word, 1))
	synchronize(t, g.by)
}

// awaitWork waits until work of s has set done. It asks the stream meanwhile, since some drivers get on only when asked.
func awaitWork(t testing.TB, s device.Stream, done *atomic.Bool) {
	t.Helper()
	for begin := time.Now(); !done.Load(); time.Sleep(time.Millisecond) {
		_, err := s.Query()
		require.NoError(t, err)
		require.Less(t, time.Since(begin), patience, "the work does not begin")
	}
}
