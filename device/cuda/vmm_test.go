package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/testneed"
)

// roleEnv makes the test binary a helper process: see helper.
const roleEnv = "SYMMEM_CUDA_TEST_ROLE"

// helper returns what a helper process does; it returns the exit status.
func helper(role string) int {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	switch role {
	case "import":
		err = importMemory(ctx)
	case "lose":
		err = loseContext(ctx)
	default:
		err = fmt.Errorf("there is no role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "helper process:", err)
		return 1
	}
	return 0
}

// runHelper runs the test binary in a role.
func runHelper(t *testing.T, role string, files []*os.File, env ...string) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(append(os.Environ(), roleEnv+"="+role), env...)
	cmd.ExtraFiles = files
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// shared is memory of the VMM functions, mapped for some devices.
type shared struct {
	drv    *cu.Driver
	handle cu.MemHandle
	ptr    device.Ptr
	bytes  uint64
}

// mapShared maps the memory of the handle, which it takes over.
func mapShared(drv *cu.Driver, h cu.MemHandle, bytes uint64, devices ...cu.DeviceOrdinal) (*shared, error) {
	m := &shared{drv: drv, handle: h, bytes: bytes}
	if err := drv.Check("cuMemAddressReserve", drv.MemAddressReserve(&m.ptr, bytes, 0, 0, 0)); err != nil {
		return nil, err
	}
	if err := drv.Check("cuMemMap", drv.MemMap(m.ptr, bytes, 0, h, 0)); err != nil {
		return nil, err
	}
	access := make([]cu.MemAccessDesc, len(devices))
	for i, dev := range devices {
		access[i] = cu.MemAccessDesc{Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(dev)}, Flags: cu.AccessReadWrite}
	}
	return m, drv.Check("cuMemSetAccess", drv.MemSetAccess(m.ptr, bytes, &access[0], uint64(len(access))))
}

// close unmaps and gives back.
func (m *shared) close() error {
	return errors.Join(
		m.drv.Check("cuMemUnmap", m.drv.MemUnmap(m.ptr, m.bytes)),
		m.drv.Check("cuMemAddressFree", m.drv.MemAddressFree(m.ptr, m.bytes)),
		m.drv.Check("cuMemRelease", m.drv.MemRelease(m.handle)))
}

// createShared makes memory on d that can be exported, mapped for the devices.
func createShared(t *testing.T, d *cuda.Device, bytes uint64, devices ...cu.DeviceOrdinal) *shared {
	t.Helper()
	drv := d.Driver()
	require.NoError(t, drv.Require("cuMemCreate", "cuMemGetAllocationGranularity", "cuMemExportToShareableHandle",
		"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"))
	prop := &cu.MemAllocationProp{
		Type:                 cu.AllocationPinned,
		RequestedHandleTypes: cu.HandleFD,
		Location:             cu.MemLocation{Type: cu.LocationDevice, ID: int32(d.Ordinal())},
	}
	var granularity uint64
	require.NoError(t, drv.Check("granularity", drv.MemGetAllocationGranularity(&granularity, prop, cu.GranularityRecommended)))
	require.Positive(t, granularity)
	bytes = (bytes + granularity - 1) / granularity * granularity
	var h cu.MemHandle
	require.NoError(t, drv.Check("cuMemCreate", drv.MemCreate(&h, bytes, prop, 0)))
	var back cu.MemAllocationProp
	require.NoError(t, drv.Check("properties", drv.MemGetAllocationPropertiesFromHandle(&back, h)))
	assert.Equal(t, prop.Location, back.Location)
	assert.Equal(t, prop.RequestedHandleTypes, back.RequestedHandleTypes)
	m, err := mapShared(drv, h, bytes, devices...)
	require.NoError(t, err)
	return m
}

// importMemory imports the memory of file descriptor 3, checks that it holds 0x5a, and answers in it with 0xa5 and a word.
func importMemory(ctx context.Context) error {
	bytesShared, err := strconv.ParseUint(os.Getenv("SYMMEM_CUDA_TEST_BYTES"), 10, 64)
	if err != nil {
		return err
	}
	d, err := cuda.Open(&cuda.Options{Device: os.Getenv("SYMMEM_CUDA_TEST_DEVICE")})
	if err != nil {
		return err
	}
	drv := d.Driver()
	var h cu.MemHandle
	if err := drv.Check("cuMemImportFromShareableHandle", drv.MemImportFD(&h, 3, cu.HandleFD)); err != nil {
		return err
	}
	if err := os.NewFile(3, "memory").Close(); err != nil {
		return err
	}
	m, err := mapShared(drv, h, bytesShared, d.Ordinal())
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	p, err := d.Alloc(int64(bytesShared))
	if err != nil {
		return err
	}
	got := make([]byte, bytesShared)
	if err := errors.Join(s.Copy(p, m.ptr, int64(bytesShared)), s.Synchronize(ctx), d.CopyToHost(got, p)); err != nil {
		return err
	}
	if n := bytes.Count(got, []byte{0x5a}); n != len(got) {
		return fmt.Errorf("%d of %d bytes are right", n, len(got))
	}
	half := int64(bytesShared / 2)
	return errors.Join(
		s.Fill(m.ptr, 0xa5, half),
		s.WaitValue32(m.ptr.Add(half), 0x5a5a5a5a),
		s.WriteValue32(m.ptr.Add(half), 7),
		s.Synchronize(ctx),
		m.close(), d.Close())
}

// Memory is created and filled here, and mapped, read and written by another process, on another GPU if there is one.
func TestMemoryIsSharedBetweenProcesses(t *testing.T) {
	d := open(t, &cuda.Options{Device: "0"})
	drv := d.Driver()
	m := createShared(t, d, 3<<20, d.Ordinal())
	defer func() { assert.NoError(t, m.close()) }()
	s := newStream(t, d)
	require.NoError(t, s.Fill(m.ptr, 0x5a, int64(m.bytes)))
	synchronize(t, s)
	var fd int32 = -1
	require.NoError(t, drv.Check("export", drv.MemExportFD(&fd, m.handle, cu.HandleFD, 0)))
	file := os.NewFile(uintptr(fd), "memory")
	defer file.Close()
	other := "0"
	if visible(t, d) > 1 {
		other = "1"
	}
	t.Logf("another process on GPU %s", other)
	runHelper(t, "import", []*os.File{file}, "SYMMEM_CUDA_TEST_DEVICE="+other, fmt.Sprintf("SYMMEM_CUDA_TEST_BYTES=%d", m.bytes))
	got := read(t, d, m.ptr, int(m.bytes))
	half := len(got) / 2
	assert.Equal(t, half, bytes.Count(got[:half], []byte{0xa5}))
	assert.Equal(t, []byte{7, 0, 0, 0, 0x5a}, got[half:half+5])

	var retained cu.MemHandle
	require.NoError(t, drv.Check("retain", drv.MemRetainAllocationHandle(&retained, m.ptr.Add(100))))
	require.NoError(t, drv.Check("release", drv.MemRelease(retained)))
	require.NoError(t, d.WithContext(func() error {
		var base device.Ptr
		var size uint64
		if err := drv.Check("range", drv.MemGetAddressRange(&base, &size, m.ptr.Add(100))); err != nil {
			return err
		}
		assert.Equal(t, m.ptr, base)
		assert.Equal(t, m.bytes, size)
		return nil
	}))
}

// visible tells how many GPUs there are.
func visible(t *testing.T, d *cuda.Device) int {
	t.Helper()
	var count int32
	require.NoError(t, d.Driver().Check("count", d.Driver().DeviceGetCount(&count)))
	return int(count)
}

func TestPeers(t *testing.T) {
	a := open(t, &cuda.Options{Device: "0"})
	if visible(t, a) < 2 {
		testneed.MissingGPUs(t, 2, "there is only one GPU")
	}
	b := open(t, &cuda.Options{Device: "1"})
	require.NotEqual(t, a.UUID(), b.UUID())
	const n = 5<<20 + 3
	s, other := newStream(t, a), newStream(t, b)

	// Memory of Alloc, by a copy on the stream of either.
	p, q := alloc(t, a, n), alloc(t, b, n)
	require.NoError(t, s.Fill(p, 3, n))
	e := newEvent(t, a)
	require.NoError(t, s.Copy(q, p, n))
	require.NoError(t, s.Record(e))
	require.NoError(t, other.WaitEvent(e), "an event of another device")
	require.NoError(t, other.Fill(q, 4, 1))
	synchronize(t, other)
	got := read(t, b, q, n)
	assert.Equal(t, n-1, bytes.Count(got, []byte{3}))
	assert.EqualValues(t, 4, got[0])

	// Memory that both have mapped: values, copies in graphs, kernels.
	m := createShared(t, a, n, a.Ordinal(), b.Ordinal())
	defer func() { assert.NoError(t, m.close()) }()
	require.NoError(t, s.Fill(m.ptr, 0, int64(m.bytes)))
	synchronize(t, s)
	l, err := function(t, b, "kernel").Prepare(device.Launch{Params: params(m.ptr.Add(4), 5)})
	require.NoError(t, err)
	g := capture(t, other, func() {
		require.NoError(t, other.WaitValue32(m.ptr, 1))
		require.NoError(t, l.Launch(other))
		require.NoError(t, other.Copy(m.ptr.Add(1<<20), q, 1<<20))
		require.NoError(t, other.WriteValue32(m.ptr.Add(8), 1))
	})
	require.NoError(t, g.Launch(other))
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, s.WriteValue32(m.ptr, 1))
	require.NoError(t, s.WaitValue32(m.ptr.Add(8), 1))
	synchronize(t, s)
	synchronize(t, other)
	assert.EqualValues(t, 5, word(t, a, m.ptr.Add(4)))
	assert.Equal(t, 1<<20-1, bytes.Count(read(t, a, m.ptr.Add(1<<20), 1<<20), []byte{3}))

	// Whatever context the caller has made current: work goes where its stream is, and the caller's context stays.
	before := word(t, b, m.ptr.Add(4))
	f := newEvent(t, b)
	require.NoError(t, a.WithContext(func() error {
		if err := errors.Join(l.Launch(other), other.Fill(q, 9, 16), other.Copy(q.Add(16), q, 16), other.WriteValue32(q.Add(64), 8),
			other.WaitValue32(q.Add(64), 8), other.Record(f), s.WaitEvent(f), f.Synchronize(context.Background()),
			other.Synchronize(context.Background())); err != nil {
			return err
		}
		g, err := func() (device.Graph, error) {
			if err := other.BeginCapture(); err != nil {
				return nil, err
			}
			if err := errors.Join(l.Launch(other), other.Fill(q.Add(32), 9, 16), other.HostFunc(func() {})); err != nil {
				return nil, err
			}
			return other.EndCapture()
		}()
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(other), other.Synchronize(context.Background()), g.Close()); err != nil {
			return err
		}
		var current cu.ContextHandle
		drv := a.Driver()
		if err := drv.Check("current", drv.CtxGetCurrent(&current)); err != nil {
			return err
		}
		assert.EqualValues(t, a.Context(), current)
		return nil
	}))
	assert.EqualValues(t, before+10, word(t, b, m.ptr.Add(4)))
	assert.Equal(t, bytes.Repeat([]byte{9}, 48), read(t, b, q, 48))

	// A wait for a word on the peer that nobody writes ends, too.
	short, err := cuda.Open(&cuda.Options{Device: "1", WaitTimeout: 100 * time.Millisecond})
	require.NoError(t, err)
	closeInTheEnd(t, short)
	stuck := newStream(t, short)
	require.NoError(t, stuck.WaitValue32(m.ptr.Add(64), 1))
	require.ErrorIs(t, stuck.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
}

// loseContext makes a kernel write where nothing is mapped, and checks what the device then says.
func loseContext(ctx context.Context) error {
	d, err := cuda.Open(nil)
	if err != nil {
		return err
	}
	m, err := d.LoadModule([]byte(ptx))
	if err != nil {
		return err
	}
	f, err := m.Function("kernel")
	if err != nil {
		return err
	}
	l, err := f.Prepare(device.Launch{Params: params(0x10, 1)})
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	other, err := d.NewStream()
	if err != nil {
		return err
	}
	p, err := d.Alloc(64)
	if err != nil {
		return err
	}
	e, err := d.NewEvent()
	if err != nil {
		return err
	}
	if err := errors.Join(s.HostFunc(func() {}), s.WaitValue32(p, 0), l.Launch(s), s.HostFunc(func() {}), s.Record(e)); err != nil {
		return err
	}
	_, allocErr := func() (device.Ptr, error) { _ = s.Synchronize(ctx); return d.Alloc(64) }()
	for i, err := range []error{s.Synchronize(ctx), other.Synchronize(ctx), d.Synchronize(ctx), e.Synchronize(ctx), allocErr,
		d.CopyToHost(make([]byte, 8), p), s.Fill(p, 1, 8), s.Close(), d.Free(p), d.Close()} {
		if !errors.Is(err, cuda.ErrContextLost) {
			return fmt.Errorf("call %d: %v", i, err)
		}
	}
	if held := d.Stats(); held != (cuda.Stats{}) {
		return fmt.Errorf("the closed device holds %+v", held)
	}
	return nil
}

// A kernel that touches memory which is not there ends the context of its process, and every call says so; nothing hangs.
func TestLostContext(t *testing.T) {
	d := open(t, nil)
	runHelper(t, "lose", nil)
	s := newStream(t, d)
	require.NoError(t, s.Fill(alloc(t, d, 64), 1, 64))
	synchronize(t, s) // other processes are not concerned
}
