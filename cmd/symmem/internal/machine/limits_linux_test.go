package machine

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/unix"
)

// TestShmLimit: advice is about what is wrong with /dev/shm, and names those that need it.
func TestShmLimit(t *testing.T) {
	large := unix.Statfs_t{Bsize: 4096, Blocks: 1 << 20, Bavail: 1 << 19}
	l := shmLimit(&large, nil)
	assert.Equal(t, "2.0 GiB free of 4.0 GiB", l.Value)
	assert.Empty(t, l.Advice)

	small := large
	small.Blocks = 1 << 14
	assert.Equal(t, "make it larger (in a container --shm-size=1g) before using NCCL, NVSHMEM or NIXL (UCX)", shmLimit(&small, nil).Advice)

	for _, st := range []unix.Statfs_t{large, small} {
		st.Flags = unix.ST_RDONLY
		l = shmLimit(&st, nil)
		assert.Contains(t, l.Value, "is read-only")
		assert.Contains(t, l.Advice, "mount it writable")
		assert.Contains(t, l.Advice, "NIXL")
		assert.NotContains(t, l.Advice, "larger")
	}
	assert.Contains(t, shmLimit(nil, unix.ENOENT).Advice, "mount a tmpfs")
}
