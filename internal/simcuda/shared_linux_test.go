package simcuda_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
)

// couple is two machines, as two processes have them, of which one uses GPU 0 and the other GPU 1, with a multicast object that both have.
type couple struct {
	rigs   [2]*rig
	cast   [2]*cu.Multicast
	object [2]cu.MemHandle
	memory [2]cu.MemHandle
	own    [2]device.Ptr
}

func newCouple(t *testing.T, c simcuda.Config) *couple {
	c.GPUs, c.Multicast = 2, true
	x := &couple{}
	for i := range 2 {
		x.rigs[i] = newRig(t, c)
		var err error
		x.cast[i], err = x.rigs[i].d.ResolveMulticast()
		require.NoError(t, err)
		x.memory[i], x.own[i] = x.rigs[i].memory(i, 0, 1)
	}
	x.rigs[0].ok(x.cast[0].Create(&x.object[0], &cu.MulticastObjectProp{NumDevices: 2, Size: granule, HandleTypes: uint64(cu.HandleFD)}))
	x.rigs[1].ok(x.imported(x.export(t)))
	return x
}

func (x *couple) export(t *testing.T) int {
	var fd int32
	x.rigs[0].ok(x.rigs[0].d.MemExportFD(&fd, x.object[0], cu.HandleFD, 0))
	t.Cleanup(func() { _ = unix.Close(int(fd)) })
	return int(fd)
}

// imported imports the object on the second machine.
func (x *couple) imported(fd int) cu.Result {
	return x.rigs[1].d.MemImportFD(&x.object[1], uintptr(fd), cu.HandleFD)
}

// bind adds the machine's GPU and binds its memory.
func (x *couple) bind(i int) {
	x.rigs[i].ok(x.cast[i].BindMem(x.object[i], 0, x.memory[i], 0, granule, 0))
}

// TestMulticastOfAnother: what another process binds, and unbinds, the kernels of this one find, or find no more, without a call of the driver here. A sum
// has what both have written, and a store of one is seen by the other.
func TestMulticastOfAnother(t *testing.T) {
	x := newCouple(t, simcuda.Config{})
	a, b := x.rigs[0], x.rigs[1]
	for i := range 2 {
		a.ok(x.cast[i].AddDevice(x.object[i], cu.DeviceOrdinal(i)))
	}
	x.bind(0)
	p := a.mapped(x.object[0], granule, 0)
	x.bind(1)
	a.write(x.own[0], math.Float32bits(2))
	b.write(x.own[1], math.Float32bits(5))
	word, to := a.pinned()
	a.ok(a.launch(0, "sum", p, to))
	a.ok(a.settled(0))
	require.Equal(t, float32(7), math.Float32frombits(*word))
	require.Empty(t, a.m.Violations())
	require.Empty(t, b.m.Violations())

	b.ok(x.cast[1].Unbind(x.object[1], 1, 0, granule))
	a.ok(a.launch(0, "sum", p, to))
	require.Equal(t, cu.IllegalAddress, a.settled(0))
}

// TestBindWaitsForAnother: binding blocks until all GPUs were added, by whichever process.
func TestBindWaitsForAnother(t *testing.T) {
	x := newCouple(t, simcuda.Config{})
	a := x.rigs[0]
	a.ok(x.cast[0].AddDevice(x.object[0], 0))
	bound := make(chan cu.Result, 1)
	go func() { bound <- x.cast[0].BindMem(x.object[0], 0, x.memory[0], 0, granule, 0) }()
	select {
	case <-bound:
		t.Fatal("bound before all GPUs were added")
	case <-time.After(50 * time.Millisecond):
	}
	a.ok(x.cast[1].AddDevice(x.object[1], 1))
	a.ok(<-bound)
	require.Empty(t, a.m.Violations())
}

// TestBindGivenUp: an object that is released while a call waits to bind ends the call.
func TestBindGivenUp(t *testing.T) {
	x := newCouple(t, simcuda.Config{})
	a := x.rigs[0]
	a.ok(x.cast[0].AddDevice(x.object[0], 0))
	bound := make(chan cu.Result, 1)
	go func() { bound <- x.cast[0].BindMem(x.object[0], 0, x.memory[0], 0, granule, 0) }()
	a.ok(a.d.MemRelease(x.object[0]))
	require.Equal(t, cu.InvalidValue, <-bound)
	require.NotEmpty(t, a.m.Violations())
}

// TestMulticastRulesOfAnother: a GPU is added once and binds once, whichever process asks; an object that no process holds is gone; and an imported one
// takes a slot.
func TestMulticastRulesOfAnother(t *testing.T) {
	x := newCouple(t, simcuda.Config{MulticastObjects: 1})
	a, b := x.rigs[0], x.rigs[1]
	a.ok(x.cast[0].AddDevice(x.object[0], 0))
	require.Equal(t, cu.InvalidValue, x.cast[1].AddDevice(x.object[1], 0), "it was added by the other")
	b.ok(x.cast[1].AddDevice(x.object[1], 1))
	x.bind(1)
	other, _ := a.memory(1, 0)
	require.Equal(t, cu.InvalidValue, x.cast[0].BindMem(x.object[0], 0, other, 0, granule, 0), "the other has bound memory of GPU 1")
	require.Equal(t, cu.OutOfMemory, x.cast[1].Create(new(cu.MemHandle), &cu.MulticastObjectProp{NumDevices: 2, Size: granule}), "the only slot is taken")

	fd := x.export(t)
	a.ok(a.d.MemRelease(x.object[0]))
	require.NotContains(t, a.m.Left(), "1 multicast objects")
	b.ok(b.d.MemRelease(x.object[1]))
	require.Equal(t, cu.InvalidHandle, x.imported(fd), "nobody holds it")
	require.NotContains(t, b.m.Left(), "1 multicast objects")
}
