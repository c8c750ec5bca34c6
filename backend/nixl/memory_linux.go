package nixl

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/memfd"
)

// obtain returns private memory of the process, filled with zeros, that the garbage collector does not manage.
func obtain(bytes int) ([]byte, error) {
	mem, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	return mem, memfd.NoMemory(err)
}

// giveBack frees memory from obtain.
func giveBack(mem []byte) error { return unix.Munmap(mem) }

// preferHugePages asks for large pages for memory that was not touched yet: the kernel copies between processes page by page, and with large ones
// almost twice as fast.
func preferHugePages(mem []byte) {
	page := uintptr(os.Getpagesize())
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	if skip := -at & (page - 1); uintptr(len(mem)) > skip {
		_ = unix.Madvise(mem[skip:], unix.MADV_HUGEPAGE) // where the system has none, small ones do
	}
}
