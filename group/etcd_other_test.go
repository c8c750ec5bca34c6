//go:build !linux

package group

import (
	"testing"

	"github.com/symmem/symmem/internal/testneed"
)

func etcdURL(t *testing.T) string {
	t.Helper()
	testneed.Missing(t, "etcd", "its server is started on Linux only")
	return ""
}

func endEtcd() {}
