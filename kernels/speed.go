package kernels

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// What MeasureSpeed runs.
const (
	hopBytes    = 1 << 10 // of an all-reduce that is nothing but one exchange
	streamBytes = 4 << 20 // of one that is mostly loads
	hopRuns     = 20      // in a graph
	streamRuns  = 3
	speedRounds = 5 // of which the median counts

	slowHop   = 500 // us
	slowBytes = 64 << 10
)

// speedRecord is what a rank tells the others.
type speedRecord struct {
	tuning.Speed
	Failure string `json:"failure,omitempty"`
}

// MeasureSpeed measures how long one exchange between the ranks' GPUs takes, and how fast their kernels load from each other, for [tuning.Model]. The runs take some
// hundred microseconds where links are fast; making the memory and plans for them takes longer. Collective: every rank gets the same, what the slowest has measured, or an
// error. It blocks until all ranks have come.
//
// ErrUnsupported on devices other than CUDA ones, where peers have no pointers, and for a rank alone. Its other errors are those of a rendezvous and of plans.
func MeasureSpeed(ctx context.Context, m *memory.Memory) (tuning.Speed, error) {
	ctx, missing := errs.WithContext("MeasureSpeed", ctx, nil)
	if err := errs.Given("MeasureSpeed", "m", m, "a memory"); err != nil {
		return tuning.Speed{}, errors.Join(missing, err)
	}
	if m.Group() == nil {
		return tuning.Speed{}, errors.Join(missing, errs.Invalid("MeasureSpeed", "m", "the zero Memory", "one that New of package memory gave"))
	}
	if m.Device().Kind() != device.CUDA || !m.Backend().Capabilities().PeerPointers || m.Group().Size() < 2 {
		return tuning.Speed{}, errors.Join(missing, fmt.Errorf("measuring the links of a %s device between %d ranks: %w", m.Device().Kind(), m.Group().Size(), errs.ErrUnsupported))
	}
	var speed tuning.Speed
	err := m.InTurn(ctx, "measuring the links", func(ctx context.Context, gaveUp error) error {
		measured, err := measureSpeed(ctx, m, cmp.Or(gaveUp, missing))
		if gaveUp == nil { // else who called has gone
			speed = measured
		}
		return err
	})
	if err == nil && !speed.Known() {
		err = fmt.Errorf("an exchange takes %v us, and they carry %v GB/s: %w", speed.Hop, speed.Bandwidth, errs.ErrUnavailable)
	}
	if err != nil {
		return tuning.Speed{}, fmt.Errorf("measuring the links: %w", err)
	}
	return speed, nil
}

// measureSpeed takes the same collective calls on all ranks, whatever fails on one.
func measureSpeed(ctx context.Context, m *memory.Memory, gaveUp error) (speed tuning.Speed, err error) {
	t, err := tensor.Zeros(ctx, m, tensor.Float32, streamBytes/4)
	if vote := m.Group().Vote(ctx, "memory to measure the links with", cmp.Or(gaveUp, err)); vote != nil {
		if err == nil {
			vote = errors.Join(vote, t.Close(ctx))
		}
		return speed, vote
	}
	defer func() { err = errors.Join(err, t.Close(ctx)) }()
	if err := t.Rendezvous(ctx); err != nil {
		return speed, err
	}
	small, err := t.Sub(0, hopBytes/4)
	if vote := m.Group().Vote(ctx, "memory to measure the links with", err); vote != nil {
		return speed, vote
	}
	form := OneShotPush
	if !Supported(device.CUDA, form, tensor.Float32, Sum, m.Group().Size()) {
		form = OneShotLL
	}
	hop, err := NewAllReduce(ctx, small, Sum, &AllReduceOptions{Algorithm: form})
	if err != nil {
		return speed, err
	}
	defer func() { err = errors.Join(err, hop.Close(ctx)) }()
	mine := speedRecord{}
	stream, err := m.Device().NewStream()
	if err == nil {
		defer func() { err = errors.Join(err, stream.Close()) }()
		mine.Hop, err = timeGraph(ctx, stream, hop, hopRuns)
	}
	if speed, err = slowestSpeed(ctx, m, mine, err); err != nil {
		return speed, err
	}
	// A machine on which an exchange takes so long is none of hardware; there nobody wants to wait for megabytes.
	n := int64(streamBytes)
	if speed.Hop > slowHop {
		n = slowBytes
	}
	large, err := t.Sub(0, n/4)
	if vote := m.Group().Vote(ctx, "memory to measure the links with", err); vote != nil {
		return speed, vote
	}
	flow, err := NewAllReduce(ctx, large, Sum, &AllReduceOptions{Algorithm: TwoShotPull})
	if err != nil {
		return speed, err
	}
	defer func() { err = errors.Join(err, flow.Close(ctx)) }()
	mine = speedRecord{Speed: speed}
	took, err := timeGraph(ctx, stream, flow, streamRuns)
	w := float64(m.Group().Size())
	// What is left of a run behind its barriers, but not less than a tenth: then it was nothing but waiting.
	mine.Bandwidth = float64(n) * 2 * (w - 1) / w / max(took-tuning.BarrierHops*speed.Hop, took/10) / 1e3
	return slowestSpeed(ctx, m, mine, err)
}

// slowestSpeed is the slowest of what the ranks have measured, or an error on all of them if one has failed.
func slowestSpeed(ctx context.Context, m *memory.Memory, mine speedRecord, failure error) (speed tuning.Speed, err error) {
	if failure != nil {
		mine = speedRecord{Failure: failure.Error()}
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		blob = []byte(`{"failure": "it is no number"}`)
	}
	blobs, err := m.Group().AllGather(ctx, "speed of the links", blob)
	if err != nil {
		return speed, err
	}
	for r, b := range blobs {
		var theirs speedRecord
		if err := json.Unmarshal(b, &theirs); err != nil {
			return speed, fmt.Errorf("reading what rank %d has measured: %w", r, err)
		}
		if theirs.Failure != "" {
			return speed, fmt.Errorf("rank %d has measured nothing: %s: %w", r, theirs.Failure, errs.ErrUnavailable)
		}
		if speed.Hop = max(speed.Hop, theirs.Hop); r == 0 || theirs.Bandwidth < speed.Bandwidth {
			speed.Bandwidth = theirs.Bandwidth
		}
	}
	return speed, nil
}

// timeGraph is what one of so many runs of a plan in a graph takes, in microseconds.
func timeGraph(ctx context.Context, s device.Stream, p *Plan, runs int) (us float64, err error) {
	if err := s.BeginCapture(); err != nil {
		return 0, err
	}
	for range runs {
		if err = p.Run(s); err != nil {
			break
		}
	}
	graph, endErr := s.EndCapture()
	if err = errors.Join(err, endErr); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, graph.Close()) }()
	var took []float64
	for range speedRounds + 1 { // the first does not count
		began := time.Now()
		if err := graph.Launch(s); err != nil {
			return 0, err
		}
		if err := s.Synchronize(ctx); err != nil {
			return 0, err
		}
		took = append(took, float64(time.Since(began).Nanoseconds())/1e3/float64(runs))
	}
	took = took[1:]
	slices.Sort(took)
	return took[len(took)/2], nil
}
