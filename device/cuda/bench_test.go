package cuda_test

import (
	"context"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// batch is how many works a benchmark enqueues before it waits; the driver's queue holds a thousand or so.
const batch = 200

// enqueueing measures the time that enqueue takes of its caller, without the time that the GPU takes.
func enqueueing(b *testing.B, s *cuda.Stream, enqueue func() error) {
	ctx := context.Background()
	for range batch {
		require.NoError(b, enqueue())
	}
	require.NoError(b, s.Synchronize(ctx))
	b.ReportAllocs()
	b.ResetTimer()
	for left := b.N; left > 0; left -= batch {
		for range min(batch, left) {
			if err := enqueue(); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkLaunch(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(alloc(b, d, 4), 1)})
	require.NoError(b, err)
	enqueueing(b, s, func() error { return l.Launch(s) })
}

func BenchmarkLaunchInContext(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(alloc(b, d, 4), 1)})
	require.NoError(b, err)
	require.NoError(b, d.WithContext(func() error {
		enqueueing(b, s, func() error { return l.Launch(s) })
		return nil
	}))
}

// BenchmarkLaunchByDriver is the driver's call alone, for what this package adds to it.
func BenchmarkLaunchByDriver(b *testing.B) {
	d := open(b, nil)
	drv := d.Driver()
	s := newStream(b, d)
	require.NoError(b, d.WithContext(func() error {
		image := append([]byte(ptx), 0)
		var m cu.ModuleHandle
		if err := drv.Check("load", drv.ModuleLoadDataEx(&m, unsafe.Pointer(&image[0]), 0, nil, nil)); err != nil {
			return err
		}
		var f cu.FunctionHandle
		if err := drv.Check("function", drv.ModuleGetFunction(&f, m, "kernel")); err != nil {
			return err
		}
		arg := params(alloc(b, d, 4), 1)
		config := &cu.LaunchConfig{Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{1, 1, 1}, Stream: cu.StreamHandle(s.Handle())}
		list := &[1]unsafe.Pointer{unsafe.Pointer(&arg[0][0])}
		enqueueing(b, s, func() error { return drv.Check("launch", drv.LaunchKernelEx(config, f, &list[0], nil)) })
		return drv.Check("unload", drv.ModuleUnload(m))
	}))
}

// BenchmarkContext is the cost of making the context current and putting the old one back, with a call of the driver between.
func BenchmarkContext(b *testing.B) {
	d := open(b, nil)
	fn := func() error { return nil }
	b.ReportAllocs()
	for b.Loop() {
		if err := d.WithContext(fn); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEnqueue(b *testing.B) {
	d := open(b, nil)
	s, other := newStream(b, d), newStream(b, d)
	e := newEvent(b, d)
	p := alloc(b, d, 4096)
	require.NoError(b, s.Record(e))
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(p, 1)})
	require.NoError(b, err)
	g := capture(b, s, func() {
		for range 10 {
			require.NoError(b, l.Launch(s))
		}
	})
	for _, c := range []struct {
		name    string
		enqueue func() error
	}{
		{"Copy64B", func() error { return s.Copy(p, p.Add(2048), 64) }},
		{"Fill64B", func() error { return s.Fill(p, 1, 64) }},
		{"WriteValue32", func() error { return s.WriteValue32(p, 1) }},
		{"WaitValue32", func() error { return s.WaitValue32(p, 0) }},
		{"Record", func() error { return s.Record(e) }},
		{"WaitEvent", func() error { return other.WaitEvent(e) }},
		{"HostFunc", func() error { return s.HostFunc(func() {}) }},
		{"GraphOf10", func() error { return g.Launch(s) }},
		{"Query", func() error { _, err := s.Query(); return err }},
		{"EventQuery", func() error { _, err := e.Query(); return err }},
	} {
		b.Run(c.name, func(b *testing.B) { enqueueing(b, s, c.enqueue) })
	}
}

// BenchmarkRoundTrip is one launch and Synchronize after the other.
func BenchmarkRoundTrip(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(alloc(b, d, 4), 1)})
	require.NoError(b, err)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := l.Launch(s); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRoundTripByDriver is the same with the driver's own waiting.
func BenchmarkRoundTripByDriver(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(alloc(b, d, 4), 1)})
	require.NoError(b, err)
	require.NoError(b, d.WithContext(func() error {
		for b.Loop() {
			if err := l.Launch(s); err != nil {
				return err
			}
			if err := d.Driver().Check("wait", d.Driver().StreamSynchronize(cu.StreamHandle(s.Handle()))); err != nil {
				return err
			}
		}
		return nil
	}))
}

func BenchmarkSynchronizeIdle(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHostFunc is from the call of HostFunc to that of its function, on an idle stream.
func BenchmarkHostFunc(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	called := make(chan time.Time, 1)
	var took time.Duration
	for b.Loop() {
		begin := time.Now()
		if err := s.HostFunc(func() { called <- time.Now() }); err != nil {
			b.Fatal(err)
		}
		took += (<-called).Sub(begin)
		if err := s.Synchronize(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N), "ns/latency")
}

// BenchmarkGraphReplay is a launch of a graph of 10 kernels in a batch of 100, the GPU's time included.
func BenchmarkGraphReplay(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	l, err := function(b, d, "kernel").Prepare(device.Launch{Params: params(alloc(b, d, 4), 1)})
	require.NoError(b, err)
	g := capture(b, s, func() {
		for range 10 {
			require.NoError(b, l.Launch(s))
		}
	})
	for b.Loop() {
		for range 100 {
			if err := g.Launch(s); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Synchronize(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/launch")
}

func BenchmarkHostCopies(b *testing.B) {
	d := open(b, nil)
	for _, c := range []struct {
		name  string
		bytes int64
	}{{"4B", 4}, {"64KiB", 64 << 10}, {"64MiB", 64 << 20}} {
		p := alloc(b, d, c.bytes)
		mem := make([]byte, c.bytes)
		b.Run("in/"+c.name, func(b *testing.B) {
			b.SetBytes(c.bytes)
			for b.Loop() {
				if err := d.CopyFromHost(p, mem); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("out/"+c.name, func(b *testing.B) {
			b.SetBytes(c.bytes)
			for b.Loop() {
				if err := d.CopyToHost(mem, p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// lasting is work of the CPU that takes so long.
type lasting time.Duration

// lastingRun is a run of it.
type lastingRun time.Time

func (l lasting) Start() (device.HostProgress, error) {
	return lastingRun(time.Now().Add(time.Duration(l))), nil
}

func (r lastingRun) Poll() (bool, error) { return !time.Now().Before(time.Time(r)), nil }

// BenchmarkHostWork measures how much longer a stream is held up than the CPU works for it, for work of several lengths.
func BenchmarkHostWork(b *testing.B) {
	for _, work := range []time.Duration{0, 20 * time.Microsecond, 200 * time.Microsecond, 3 * time.Millisecond} {
		b.Run(work.String(), func(b *testing.B) {
			d := open(b, nil)
			s := newStream(b, d)
			const n = 20
			var took time.Duration
			for b.Loop() {
				began := time.Now()
				for range n {
					require.NoError(b, s.HostWork(lasting(work)))
				}
				require.NoError(b, s.Synchronize(context.Background()))
				took += time.Since(began)
			}
			b.ReportMetric(float64((took/time.Duration(b.N)/n-work).Nanoseconds())/1000, "us-beside")
		})
	}
}
