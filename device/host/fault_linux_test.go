package host_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/symmem/symmem/device"
	"golang.org/x/sys/unix"
)

// Memory that a file no longer backs faults when it is touched: that is an error of the work, not the end of the process.
func TestMemoryThatIsNotThere(t *testing.T) {
	page := unix.Getpagesize()
	fd, err := unix.MemfdCreate("host-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Close(fd)) }()
	require.NoError(t, unix.Ftruncate(fd, int64(page)))
	mem, err := unix.Mmap(fd, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()

	d := open(t, nil)
	s := newStream(t, d)
	p, err := d.Map(mem)
	require.NoError(t, err)
	q := alloc(t, d, 64)
	require.NoError(t, d.CopyFromHost(p, []byte{1, 2, 3}))
	require.NoError(t, unix.Ftruncate(fd, 0))

	var fault *device.PanicError
	require.ErrorAs(t, d.CopyFromHost(p, []byte{1, 2, 3}), &fault)
	require.ErrorAs(t, d.CopyToHost(make([]byte, 8), p), &fault)
	for name, enqueue := range map[string]func() error{
		"Copy":         func() error { return s.Copy(q, p, 64) },
		"Fill":         func() error { return s.Fill(p, 1, 64) },
		"WriteValue32": func() error { return s.WriteValue32(p, 1) },
		"WaitValue32":  func() error { return s.WaitValue32(p, 1) },
		"Launch(host_test.kernel)": func() error {
			return s.Launch(kernel(func() error { mem[0]++; return nil }))
		},
	} {
		require.NoError(t, enqueue(), name)
		err := s.Synchronize(bounded(t))
		require.ErrorAs(t, err, &fault, name)
		var work *device.WorkError
		require.ErrorAs(t, err, &work)
		assert.Equal(t, name, work.Op)
	}
	require.NoError(t, d.Unmap(p), "failed work holds on to nothing")
}
