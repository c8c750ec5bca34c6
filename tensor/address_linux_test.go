package tensor_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// switched is a backend whose windows have the addresses that only hardware gives: for multicast, and as a library's handle.
type switched struct{ backend.Backend }

func (b switched) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.Multicast = true
	return c
}

func (b switched) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.Backend.Rendezvous(ctx, a)
	if err != nil {
		return nil, err
	}
	return switchedMapping{m}, nil
}

type switchedMapping struct{ backend.Mapping }

const (
	castAddress device.Ptr = 1 << 60
	handle                 = 77
	insideOf               = 1 << 20 // bytes that the library's window has before the allocation
)

func (switchedMapping) EnableMulticast(context.Context) (device.Ptr, error) { return castAddress, nil }

func (switchedMapping) WindowHandle() (uint64, int64, error) { return handle, insideOf, nil }

// TestSlicesOfMulticastMemory: the multicast address of a slice, and its place in a library's window, are where the slice begins.
func TestSlicesOfMulticastMemory(t *testing.T) {
	ctx := t.Context()
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	near, err := host.New(groups[0], nil)
	require.NoError(t, err)
	m := memory.New(switched{near}, groups[0], nil)
	x, err := tensor.Zeros(ctx, m, tensor.Float64, 10, 3)
	require.NoError(t, err)
	early, err := x.Slice(2, 8)
	require.NoError(t, err)
	_, err = early.Multicast()
	require.ErrorIs(t, err, errs.ErrNoRendezvous)
	require.NoError(t, x.Rendezvous(ctx))
	_, err = early.Multicast()
	require.ErrorIs(t, err, errs.ErrNoMulticast)
	require.NoError(t, early.EnableMulticast(ctx), "which gives all of the memory an address")
	inner, err := early.Sub(4, 5)
	require.NoError(t, err)
	for _, c := range []struct {
		tensor.SymmetricTensor
		offset int64
	}{{x, 0}, {early, 2 * 3 * 8}, {inner, (2*3 + 4) * 8}} {
		p, err := c.Multicast()
		require.NoError(t, err)
		require.Equal(t, castAddress.Add(c.offset), p)
		w, offset, err := c.Window()
		require.NoError(t, err)
		h, at, err := w.Handle(offset)
		require.NoError(t, err)
		require.Equal(t, uint64(handle), h)
		require.Equal(t, insideOf+c.offset, at)
	}
	empty, err := x.Slice(4, 4)
	require.NoError(t, err)
	p, err := empty.Multicast()
	require.NoError(t, err)
	require.True(t, p.IsNil(), "what has no elements has no address")
	require.NoError(t, errors.Join(x.Close(ctx), m.Close(ctx), groups[0].Close(ctx)))
}

// TestPeerTablesAreGivenBack: those of a tensor and of its slices are there until the tensor is closed, whichever slices were.
func TestPeerTablesAreGivenBack(t *testing.T) {
	ctx := t.Context()
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	b, err := host.New(groups[0], nil)
	require.NoError(t, err)
	m := memory.New(b, groups[0], nil)
	x, err := tensor.Zeros(ctx, m, tensor.Float64, 10)
	require.NoError(t, err)
	require.NoError(t, x.Rendezvous(ctx))
	s, err := x.Slice(3, 5)
	require.NoError(t, err)
	var tables []device.Ptr
	for _, of := range []tensor.SymmetricTensor{x, s} {
		table, err := of.PeerTable()
		require.NoError(t, err)
		tables = append(tables, table)
	}
	require.NoError(t, s.Close(ctx))
	word := make([]byte, 8)
	for _, table := range tables {
		require.NoError(t, m.Device().CopyToHost(word, table))
	}
	require.NoError(t, x.Close(ctx))
	for _, table := range tables {
		require.ErrorIs(t, m.Device().CopyToHost(word, table), errs.ErrInvalid, "a peer table was not given back")
	}
	require.NoError(t, errors.Join(m.Close(ctx), groups[0].Close(ctx)))
}
