package group

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestBusyServiceEnds: a service whose ranks ask for changes without pause ends when it is told to, and the next one goes on with the job.
func TestBusyServiceEnds(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	store := "memory://here/" + uniqueJob()
	s := newKeptService(t, 4, Options{Job: uniqueJob(), Store: store})
	groups := s.join()
	place := memoryPlaceOf(store, s.opts.Job+"\x000")
	place.mu.Lock()
	place.commit = func() error { // a store that is asked over a network
		time.Sleep(100 * time.Microsecond)
		return nil
	}
	place.mu.Unlock()
	done := make(chan struct{})
	var asking sync.WaitGroup
	for _, g := range groups {
		for range 8 {
			asking.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					if _, err := g.Store().Add(ctx, "k", 1); err != nil {
						return
					}
				}
			})
		}
	}
	time.Sleep(100 * time.Millisecond) // so that all of them ask
	s.stop()
	select {
	case err := <-s.ended:
		require.ErrorAs(t, err, new(*MissingRanksError))
	case <-time.After(2 * storeTime):
		t.Error("the service goes on")
		place.mu.Lock()
		place.commit = nil
		place.mu.Unlock()
		close(done)
		<-s.ended
		asking.Wait()
		return
	}
	s.start(nil)
	close(done)
	asking.Wait()
	s.finish(ctx, groups)
}

// TestServiceEndsWithoutItsStore: a service that is told to end while its store does not answer takes some seconds, however long ranks may be silent.
func TestServiceEndsWithoutItsStore(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	store := "memory://here/" + uniqueJob()
	s := newKeptService(t, 1, Options{Job: uniqueJob(), Store: store, LivenessTimeout: time.Minute})
	groups := s.join()
	place := memoryPlaceOf(store, s.opts.Job+"\x000")
	asked := make(chan struct{})
	place.mu.Lock()
	place.hangs = asked
	place.mu.Unlock()
	added := make(chan error, 1)
	go func() {
		_, err := groups[0].Store().Add(ctx, "k", 1)
		added <- err
	}()
	<-asked
	began := time.Now()
	require.ErrorAs(t, s.end(), new(*MissingRanksError))
	require.Less(t, time.Since(began), 2*storeTime)
	s.start(nil)
	require.NoError(t, <-added, "the next service has done it")
	s.finish(ctx, groups)
}
