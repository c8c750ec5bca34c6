// Package testneed skips tests that need what not every machine has, such as a library or a GPU. The variable SYMMEM_TEST_REQUIRE forbids
// that: it lists, with commas between them, the names of what the machine must have, and gpus=N for N GPUs. A test that would be skipped for one of
// them fails. It also finds addresses that are a test's own. Only tests import this package.
package testneed

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Missing skips the test, because what name stands for is missing; why says what that is. It fails the test if name is required.
func Missing(t testing.TB, name string, why any) {
	t.Helper()
	if slices.Contains(required(), name) {
		t.Fatalf("SYMMEM_TEST_REQUIRE names %s, which is missing: %v", name, why)
	}
	t.Skip(name+" is missing: ", why)
}

// MissingGPUs skips the test, because it needs so many GPUs and there are fewer. It fails the test if that many are required.
func MissingGPUs(t testing.TB, need int, why any) {
	t.Helper()
	for _, name := range required() {
		if n, ok := strings.CutPrefix(name, "gpus="); ok {
			if must, err := strconv.Atoi(n); err != nil || must >= need {
				t.Fatalf("SYMMEM_TEST_REQUIRE has %s, and there are fewer than %d GPUs: %v", name, need, why)
			}
		}
	}
	t.Skip("there are fewer than ", need, " GPUs: ", why)
}

// FreeAddress returns a loopback address, host:port, that nobody listens on. Its port is none that systems give to who asks for any, nor one that is made from the id of a
// job: somebody else could be given it before the test listens there.
func FreeAddress(t testing.TB) string {
	t.Helper()
	l := Listen(t)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr().String()
}

// Listen listens at such an address, which the test may leave for a while and come back to.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	const first, after = 10240, 20480
	var last error
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", first+rand.IntN(after-first)))
		if err == nil {
			return l
		}
		last = err
	}
	t.Fatal("no free address: ", last)
	return nil
}

// required returns the entries of SYMMEM_TEST_REQUIRE.
func required() []string {
	names := strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names
}
