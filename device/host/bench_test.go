package host_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// nothing is the kernel of the measurements.
type nothing struct{}

func (*nothing) RunKernel() error { return nil }

// BenchmarkEnqueue is the cost of a Launch to the caller while the stream is busy with something else.
func BenchmarkEnqueue(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	k := new(nothing)
	const batch = 10000
	b.ReportAllocs()
	b.StopTimer()
	for left := b.N; left > 0; left -= batch {
		g := newGate()
		require.NoError(b, s.Launch(g))
		g.await(b)
		b.StartTimer()
		for range min(batch, left) {
			if err := s.Launch(k); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		g.open()
		synchronize(b, s)
	}
}

// BenchmarkBatch is the cost of a kernel in a batch of 1000 that is launched and waited for.
func BenchmarkBatch(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	k := new(nothing)
	ctx := context.Background()
	const batch = 1000
	b.ReportAllocs()
	for b.Loop() {
		for range batch {
			if err := s.Launch(k); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/batch, "ns/kernel")
}

// BenchmarkRoundTrip is one Launch and Synchronize after the other, so that the worker does not park in between.
func BenchmarkRoundTrip(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	k := new(nothing)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Launch(k); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRoundTripParked is Launch and Synchronize on a stream whose worker has parked.
func BenchmarkRoundTripParked(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	k := new(nothing)
	ctx := context.Background()
	var took time.Duration
	for b.Loop() {
		time.Sleep(200 * time.Microsecond)
		start := time.Now()
		if err := s.Launch(k); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
		took += time.Since(start)
	}
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N), "ns/trip")
}

// BenchmarkGraph is one launch of a graph of 10 kernels in a batch of 100.
func BenchmarkGraph(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	k := new(nothing)
	ctx := context.Background()
	g := capture(b, s, func() {
		for range 10 {
			require.NoError(b, s.Launch(k))
		}
	})
	b.ReportAllocs()
	for b.Loop() {
		for range 100 {
			if err := g.Launch(s); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/launch")
}

// BenchmarkEventBetweenStreams is a record, a wait for it in another stream, and back, in batches of 100.
func BenchmarkEventBetweenStreams(b *testing.B) {
	d := open(b, nil)
	s, other := newStream(b, d), newStream(b, d)
	e := newEvent(b, d)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		for range 100 {
			for _, err := range [...]error{s.Record(e), other.WaitEvent(e), other.Record(e), s.WaitEvent(e)} {
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/there-and-back")
}

func BenchmarkCopySmall(b *testing.B) {
	d := open(b, nil)
	s := newStream(b, d)
	p := alloc(b, d, 4096)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		for range 100 {
			if err := s.Copy(p, p.Add(2048), 64); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/copy")
}

func BenchmarkBytes(b *testing.B) {
	d := open(b, nil)
	p := alloc(b, d, 4096)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Bytes(p, 64); err != nil {
			b.Fatal(err)
		}
	}
}
