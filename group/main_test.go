package group

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("SYMMEM_TEST_GROUP_WORKER"); role != "" {
		os.Exit(runWorker(role))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(status int) {
		endEtcd()
		os.Exit(status)
	}))
}
