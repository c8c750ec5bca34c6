package backendtest

import (
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Silenced passes connections on to the rendezvous service at to, whose answers it holds back while held is locked, and returns the address where it does so. It ends
// with the test.
func Silenced(t testing.TB, to string, held *sync.Mutex) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			service, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			pass := func(to, from net.Conn, wait bool) {
				b := make([]byte, 4096)
				for {
					n, err := from.Read(b)
					if wait {
						held.Lock()
					}
					_, failed := to.Write(b[:n])
					if wait {
						held.Unlock()
					}
					if err != nil || failed != nil {
						_, _ = to.Close(), from.Close()
						return
					}
				}
			}
			go pass(service, client, false)
			go pass(client, service, true)
		}
	}()
	return l.Addr().String()
}
