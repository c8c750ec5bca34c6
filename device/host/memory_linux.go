package host

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
)

// obtain gets anonymous memory of n bytes from the system: full is all of it, in whole pages, mem the first n bytes.
func obtain(n int) (full, mem []byte, err error) {
	page := unix.Getpagesize()
	full, err = unix.Mmap(-1, 0, (n+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if errors.Is(err, unix.ENOMEM) {
		return nil, nil, fmt.Errorf("%w: %w; free some, or raise the limits of the process (ulimit -v) or of its container",
			device.ErrNoMemory, err)
	}
	if err != nil {
		return nil, nil, err
	}
	return full, full[:n:n], nil
}

// giveBack returns to the system the memory that obtain has allocated.
func giveBack(full []byte) error { return unix.Munmap(full) }
