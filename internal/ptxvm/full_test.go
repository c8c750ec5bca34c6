package ptxvm

import "os"

// full says that SYMMEM_TEST_MATRIX=full asks for everything.
func full() bool { return os.Getenv("SYMMEM_TEST_MATRIX") == "full" }

// seedsOr is how many seeds to try.
func seedsOr(few, many uint64) uint64 {
	if full() {
		return many
	}
	return few
}
