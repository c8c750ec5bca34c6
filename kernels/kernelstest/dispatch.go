package kernelstest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Dispatch is an all-to-all of rows whose counts are in memory of the device. A rank's rows are full of its number and one. The output is in the middle of a larger tensor.
type Dispatch struct {
	Plan   Plan
	Stream device.Stream

	m                         *memory.Memory
	in, out, counts, received *tensor.Tensor
	graph                     device.Graph // nil if it is run without
}

// DispatchRows is how many rows a rank has, each of so many bytes.
const (
	DispatchRows  = 12
	DispatchWidth = 16
)

// NewDispatch makes the tensors and the plan, and a graph if it is to be run by one. If there is no plan it releases the tensors. Collective.
func NewDispatch(ctx context.Context, m *memory.Memory, graph bool, newPlan func(in, out, counts, received tensor.SymmetricTensor) (Plan, error)) (*Dispatch, error) {
	d := &Dispatch{m: m}
	size := int64(m.Group().Size())
	of := func(t **tensor.Tensor, dtype tensor.DType, shape ...int64) (err error) {
		if *t, err = tensor.Zeros(ctx, m, dtype, shape...); err == nil {
			err = (*t).Rendezvous(ctx)
		}
		return err
	}
	err := errors.Join(of(&d.in, tensor.Int8, DispatchRows, DispatchWidth), of(&d.out, tensor.Int8, DispatchRows*(size+2), DispatchWidth),
		of(&d.counts, tensor.Int64, size), of(&d.received, tensor.Int64, 2, size))
	if err != nil {
		return nil, err
	}
	middle, err := d.out.Sub(DispatchRows*DispatchWidth, DispatchRows*size, DispatchWidth)
	if err != nil {
		return nil, err
	}
	if d.Plan, err = newPlan(d.in, middle, d.counts, d.received); err != nil {
		return nil, errors.Join(err, d.closeTensors(ctx))
	}
	if d.Stream, err = m.Device().NewStream(); err != nil || !graph {
		return d, err
	}
	if err := errors.Join(d.Stream.BeginCapture(), d.Plan.Run(d.Stream)); err != nil {
		return nil, err
	}
	d.graph, err = d.Stream.EndCapture()
	return d, err
}

// Fill writes rows and the counts of a run, and clears the output. Collective.
func (d *Dispatch) Fill(ctx context.Context, counts []int64) error {
	dev := d.m.Device()
	b, _ := binary.Append(nil, binary.LittleEndian, counts)
	return errors.Join(dev.CopyFromHost(d.in.Ptr(), bytes.Repeat([]byte{byte(d.m.Group().Rank() + 1)}, int(d.in.Bytes()))), dev.CopyFromHost(d.counts.Ptr(), b),
		dev.CopyFromHost(d.out.Ptr(), make([]byte, d.out.Bytes())), d.m.Group().Barrier(ctx, "filled"))
}

// Run enqueues a run, or launches the graph.
func (d *Dispatch) Run() error {
	if d.graph != nil {
		return d.graph.Launch(d.Stream)
	}
	return d.Plan.Run(d.Stream)
}

// Output is what is in the output. It fails if something is around it.
func (d *Dispatch) Output() ([]byte, error) {
	whole := make([]byte, d.out.Bytes())
	if err := d.m.Device().CopyToHost(whole, d.out.Ptr()); err != nil {
		return nil, err
	}
	const edge = DispatchRows * DispatchWidth
	if around := append(bytes.Clone(whole[:edge]), whole[len(whole)-edge:]...); !bytes.Equal(around, make([]byte, 2*edge)) {
		return nil, fmt.Errorf("around the output there is %v", around)
	}
	return whole[edge : len(whole)-edge], nil
}

// Check fails unless so many rows of each rank have come.
func (d *Dispatch) Check(from []int64) error {
	var want []byte
	for r, n := range from {
		want = append(want, bytes.Repeat([]byte{byte(r + 1)}, int(n)*DispatchWidth)...)
	}
	got, err := d.Output()
	if err != nil {
		return err
	}
	if want = append(want, make([]byte, len(got)-len(want))...); !bytes.Equal(got, want) {
		return fmt.Errorf("of %v rows came %v", from, got)
	}
	return nil
}

func (d *Dispatch) closeTensors(ctx context.Context) error {
	return errors.Join(d.received.Close(ctx), d.counts.Close(ctx), d.out.Close(ctx), d.in.Close(ctx))
}

// Close releases everything. Collective.
func (d *Dispatch) Close(ctx context.Context) error {
	return errors.Join(d.closeGraph(), d.Stream.Close(), d.Plan.Close(ctx), d.closeTensors(ctx))
}

// CloseFailed is Close for a plan that has failed, whose stream may tell it again. Collective.
func (d *Dispatch) CloseFailed(ctx context.Context) error {
	if d.Plan.Err() == nil {
		return errors.Join(errors.New("the plan has not failed"), d.Close(ctx))
	}
	err := d.closeGraph()
	_ = d.Stream.Close()
	return errors.Join(err, d.Plan.Close(ctx), d.closeTensors(ctx))
}

func (d *Dispatch) closeGraph() error {
	if d.graph == nil {
		return nil
	}
	return d.graph.Close()
}
