package machine

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
)

// Limits returns the limits of the system. If one cannot be read, its value is the error.
func Limits() []Limit {
	var all []Limit
	resource := func(which int, name, meaning, advice string, enough int64, text func(int64) string) {
		var r unix.Rlimit
		if err := unix.Getrlimit(which, &r); err != nil {
			all = append(all, Limit{Name: name, Value: err.Error(), Meaning: meaning})
			return
		}
		l := Limit{Name: name, Number: unlimited, Value: "unlimited", Meaning: meaning}
		if r.Cur <= math.MaxInt64 { // RLIM_INFINITY is all ones
			n := int64(r.Cur)
			l.Number, l.Value = n, text(n)
			if n < enough {
				l.Advice = advice
			}
		}
		all = append(all, l)
	}
	resource(unix.RLIMIT_MEMLOCK, "memlock", "memory that may be locked, which transfers over a network need",
		"raise it (ulimit -l unlimited; in a container --ulimit memlock=-1) before using a network", 1<<30, bytesize.Human)
	resource(unix.RLIMIT_NOFILE, "descriptors", "open files, of which each allocation takes one and each rank started here three",
		"raise it (ulimit -n 65536)", 4096, func(n int64) string { return fmt.Sprint(n) })

	var st unix.Statfs_t
	err := unix.Statfs("/dev/shm", &st)
	return append(all, shmLimit(&st, err))
}

// shmLimit is the limit of /dev/shm, of which st is the state unless that is err.
func shmLimit(st *unix.Statfs_t, err error) Limit {
	shm := Limit{Name: "/dev/shm", Meaning: "shared memory that native libraries use between ranks; the host backend does not need it"}
	if err != nil {
		shm.Value, shm.Advice = err.Error(), "mount a tmpfs at /dev/shm"
		return shm
	}
	const users = "before using NCCL, NVSHMEM or NIXL (UCX)"
	total, free := int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	shm.Number, shm.Value = free, fmt.Sprintf("%s free of %s", bytesize.Human(free), bytesize.Human(total))
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		shm.Value += ", and is read-only"
		shm.Advice = "mount it writable (mount -o remount,rw /dev/shm; in a container give it a tmpfs) " + users
	case total < 1<<30:
		shm.Advice = "make it larger (in a container --shm-size=1g) " + users
	}
	return shm
}
