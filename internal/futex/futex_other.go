//go:build !linux

package futex

import (
	"sync/atomic"
	"time"
)

// pollEvery is how long the fallback sleeps at a time: nobody wakes it, so this is how late it sees a write.
const pollEvery = 100 * time.Microsecond

// wait polls, since there is no futex that this module uses on this system.
func wait(addr *uint32, old uint32, timeout time.Duration) error {
	for ; timeout > 0; timeout -= pollEvery {
		if atomic.LoadUint32(addr) != old {
			return nil
		}
		time.Sleep(min(pollEvery, timeout))
	}
	return nil
}

// wake has nobody to wake: the sleepers of the fallback wake by themselves.
func wake(*uint32, int) (int, error) { return 0, nil }
