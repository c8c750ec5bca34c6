//go:build amd64 || arm64

package cuda

import (
	"log/slog"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/dl"
)

// The driver calls back on threads that Go does not know. Any C library can stand in for it here: it starts threads on the C
// function itself.
func TestCallbacksFromForeignThreads(t *testing.T) {
	lib, err := dl.Open(dl.Search{Library: "the C library", Names: []string{"libc.so.6"}})
	require.NoError(t, err)
	var create func(thread *uint64, attr, fn, data uintptr) int32
	var join func(thread uint64, result *uintptr) int32
	if !lib.Has("pthread_create", "pthread_join") { // before glibc 2.34
		lib, err = dl.Open(dl.Search{Library: "the thread library", Names: []string{"libpthread.so.0"}})
		require.NoError(t, err)
	}
	require.NoError(t, lib.Bind(&create, "pthread_create"))
	require.NoError(t, lib.Bind(&join, "pthread_join"))

	const threads = 50
	d := &Device{log: slog.New(slog.DiscardHandler)}
	s := &Stream{dev: d}
	var mu sync.Mutex
	ran := 0
	ids := make([]uint64, threads)
	for i := range ids {
		fn := func() {
			runtime.GC()
			mu.Lock()
			defer mu.Unlock()
			ran++
		}
		switch i {
		case 10:
			fn = func() { panic("ten") }
		case 20:
			fn = runtime.Goexit
		}
		data := callbacks.add(callback{dev: d, fn: fn, stream: s})
		require.Zero(t, create(&ids[i], 0, hostFuncAddress(), data))
	}
	require.Zero(t, create(new(uint64), 0, hostFuncAddress(), 1<<40), "a number that nobody gave")
	for _, id := range ids {
		require.Zero(t, join(id, nil))
	}
	assert.Equal(t, threads-2, ran)
	var work *device.WorkError
	require.ErrorAs(t, s.failures.take(), &work)
	assert.Equal(t, 1, work.More)
	assert.Zero(t, callbacks.count(d))
}
