package nixl

import "golang.org/x/sys/unix"

// obtain gives memory of the process, filled with zeros, that the garbage collector does not know and that the system shares with
// nobody.
func obtain(bytes int) ([]byte, error) {
	return unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

// giveBack returns what obtain gave.
func giveBack(mem []byte) error { return unix.Munmap(mem) }
