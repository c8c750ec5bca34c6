package nixl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestFlagUnderWayKeepsItsWord: a value that is refused is not what one under way brings.
func TestFlagUnderWayKeepsItsWord(t *testing.T) {
	s := &flagStore{&transfer{running: true}, new(atomic.Uint64)}
	s.source.Store(7)
	require.ErrorIs(t, s.Post(8), errs.ErrInProgress)
	require.EqualValues(t, 7, s.source.Load())
}

// TestFlagsThatCannotBePrepared: what the library refuses to prepare takes nothing away from what it prepares later, however often it has refused.
func TestFlagsThatCannotBePrepared(t *testing.T) {
	var refusing atomic.Bool
	net := &network{fail: func(_, call string) error {
		if call == "NewRequest" && refusing.Load() {
			return errBackend
		}
		return nil
	}}
	var ready sync.WaitGroup
	ready.Add(2)
	onFakes(t, net, 2, Options{KernelTimeout: 5 * time.Second}, func(ctx context.Context, m *memory.Memory) error {
		_, _, err := mapped(ctx, m, 8)
		ready.Done()
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if m.Group().Rank() == 0 {
			ready.Wait()
			refusing.Store(true)
			for range 20 {
				assert.ErrorIs(t, m.Signal(s, 1, 0), errBackend)
			}
			refusing.Store(false)
			err = m.Signal(s, 1, 0)
		} else {
			err = m.Wait(s, 0, 0)
		}
		return errors.Join(err, s.Synchronize(ctx), s.Close())
	})
}

// TestFlagsOfARankThatIsNotTold: a rank that never hears that all ranks have flags keeps its own, which the others write to.
func TestFlagsOfARankThatIsNotTold(t *testing.T) {
	var fakes network
	fakes.blind = true
	var armed atomic.Pointer[func()]
	fakes.fail = func(engine, call string) error {
		if call == "Know" && strings.HasPrefix(engine, "world-1-") {
			if last := armed.Swap(nil); last != nil {
				(*last)() // all that is left is the vote
			}
		}
		return nil
	}
	flagsUntold(t, &fakes, []string{"", ""}, Options{Islands: islandsOff}, func(ctx context.Context, b *Backend, last func()) (backend.Flags, error) {
		if last != nil {
			armed.Store(&last)
		}
		if err := b.group.Barrier(ctx, "armed"); err != nil {
			return nil, err
		}
		return b.newFlags(ctx, 2)
	})
}

// TestFlagsOfARankOfAnIslandThatIsNotTold is the same where it shares its flags with others.
func TestFlagsOfARankOfAnIslandThatIsNotTold(t *testing.T) {
	fakes := &network{blind: true}
	flagsUntold(t, fakes, []string{"a", "b", "b"}, Options{NetDevices: []string{"lo"}}, func(ctx context.Context, b *Backend, last func()) (backend.Flags, error) {
		if last == nil {
			return b.NewFlags(ctx, 2)
		}
		return b.newIsleFlagsIn(ctx, 2, &lastWords{&allocatedWords{isle: b.isle}, last})
	})
}

// lastWords are words that have met when all that is left is the vote.
type lastWords struct {
	wordMemory
	met func()
}

func (w *lastWords) meet(ctx context.Context, failure error) ([]device.Ptr, error) {
	defer w.met()
	return w.wordMemory.meet(ctx, failure)
}

// deafRank is a rank of a job in which rank 1 does not hear the service's answers from last on.
type deafRank struct {
	number int
	group  *group.Group
	device *devhost.Device
	*Backend
	within context.Context // of what the rank is not told of
	last   func()          // nothing is heard behind it, and after deafFor within ends; nil on all ranks but 1
	giveUp func()          // within ends now: another rank was told
	hear   func()
}

// deafFor is how long a rank that does not hear waits for what the others are told, which they must have said all of by then.
const deafFor = time.Second

// withDeafRank runs the ranks of a job on those hosts, and looks at what was written where nothing is any more.
func withDeafRank(t *testing.T, fakes *network, hosts []string, opts Options, run func(ctx context.Context, r *deafRank) error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := backendtest.Silenced(t, addr, &held)
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	rank := func(number int) error {
		r := &deafRank{number: number, within: ctx, giveUp: giveUp}
		o := &group.Options{Rank: number, WorldSize: len(hosts), Addr: addr, Timeout: 20 * time.Second, BootID: hosts[number]}
		switch number {
		case 0:
			o.Listener = l
		case 1:
			o.Addr, r.within, r.hear = deaf, within, held.Unlock
			o.Timeout = 4 * time.Second // which is how long it waits to hear how a call ended, and less than makes the service count as lost
			r.last = func() {
				held.Lock()
				time.AfterFunc(deafFor, giveUp)
			}
		}
		var err error
		if r.group, err = group.Join(ctx, o); err != nil {
			return err
		}
		if r.device, err = devhost.New(nil); err != nil {
			return err
		}
		mine := opts
		mine.Opened, mine.engine = r.device, fakes.engine
		if r.Backend, err = New(ctx, r.group, &mine); err != nil {
			return err
		}
		return run(ctx, r)
	}
	failed := make(chan error, len(hosts))
	for number := range hosts {
		go func() { failed <- rank(number) }()
	}
	for range hosts {
		err = errors.Join(err, <-failed)
	}
	require.NoError(t, err)
	assert.Zero(t, fakes.astray.Load(), "what was written to memory that was given back")
}

// flagsUntold makes flags of ranks of those hosts by flagsOf, which on rank 1 calls last before the vote: what comes of that the rank does not hear. Rank 0 writes a word of its then.
func flagsUntold(t *testing.T, fakes *network, hosts []string, opts Options, flagsOf func(ctx context.Context, b *Backend, last func()) (backend.Flags, error)) {
	gone := make(chan struct{})
	withDeafRank(t, fakes, hosts, opts, func(ctx context.Context, r *deafRank) error {
		f, err := flagsOf(r.within, r.Backend, r.last)
		if r.number == 1 {
			if err == nil {
				err = errors.New("it was told")
			} else {
				err = nil
			}
			close(gone)
			r.hear()
			return errors.Join(err, r.group.Barrier(ctx, "written"), r.Close(ctx), r.group.Close(ctx), r.device.Close())
		}
		if err != nil {
			return err
		}
		r.giveUp()
		<-gone
		if r.number == 0 {
			var w backend.FlagStore
			if w, err = f.PrepareStore(1, 0); err != nil {
				return err
			}
			err = errors.Join(w.Post(7), await(ctx, []*flagStore{w.(*flagStore)}), w.Close())
		}
		return errors.Join(err, r.group.Barrier(ctx, "written"), f.Close(), r.Close(ctx), r.group.Close(ctx), r.device.Close())
	})
}

// lastFlags is a backend whose flags are made when all that is left is the memory's own vote.
type lastFlags struct {
	*Backend
	made func()
}

func (b *lastFlags) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	defer b.made()
	return b.Backend.NewFlags(ctx, count)
}

// TestSignalsOfARankThatIsNotTold: the same goes for the signals of a memory.
func TestSignalsOfARankThatIsNotTold(t *testing.T) {
	withDeafRank(t, &network{blind: true}, []string{"", ""}, Options{Islands: islandsOff}, func(ctx context.Context, r *deafRank) error {
		m := memory.New(r.Backend, r.group, nil)
		if r.number == 1 {
			m = memory.New(&lastFlags{r.Backend, r.last}, r.group, nil)
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		_, err = m.Rendezvous(r.within, a, memory.Record{})
		if err == nil {
			return errors.New("a rank that was not told has a window")
		}
		if r.number == 1 {
			r.hear()
			err = r.group.Barrier(ctx, "next") // the other is still in the rendezvous
		}
		if !errors.Is(err, errs.ErrMismatch) {
			return err
		}
		err = nil
		if r.number == 0 {
			s, made := r.device.NewStream()
			if made != nil {
				return made
			}
			err = errors.Join(m.Signal(s, 1, 0), s.Synchronize(ctx), s.Close())
		}
		return errors.Join(err, r.group.Barrier(ctx, "signalled"), m.Close(ctx), r.group.Close(ctx), r.device.Close())
	})
}

// lastMapping is a backend whose mappings are made when all that is left is the memory's vote.
type lastMapping struct {
	*Backend
	made func()
}

func (b *lastMapping) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	defer b.made()
	return b.Backend.Rendezvous(ctx, a)
}

// TestMemoryOfARankThatIsNotTold: memory that others may have a window of, though this rank has none, is freed with the others only.
func TestMemoryOfARankThatIsNotTold(t *testing.T) {
	gone := make(chan struct{})
	withDeafRank(t, &network{blind: true}, []string{"", ""}, Options{Islands: islandsOff}, func(ctx context.Context, r *deafRank) error {
		m := memory.New(r.Backend, r.group, nil)
		if r.number == 1 {
			m = memory.New(&lastMapping{r.Backend, r.last}, r.group, nil)
		}
		a, err := m.Allocate(ctx, 64, "")
		if err != nil {
			return err
		}
		if r.number == 1 {
			_, err := m.Rendezvous(r.within, a, memory.Record{})
			r.hear()
			if err == nil {
				return errors.New("it was told")
			}
			soon, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if err := m.Free(soon, a); err == nil {
				return errors.New("what another rank has a window of was freed")
			}
			close(gone)
			return errors.Join(r.group.Barrier(ctx, "written"), m.Close(ctx), r.group.Close(ctx), r.device.Close())
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		r.giveUp()
		select {
		case <-gone:
		case <-ctx.Done():
			return ctx.Err()
		}
		s, err := r.device.NewStream()
		if err != nil {
			return err
		}
		err = errors.Join(m.PutSignal(s, 1, w, 0, a.Ptr(), 8, 0), s.Synchronize(ctx), s.Close())
		for _, step := range []string{"leaving the mapping", "freeing"} { // the other has given them up
			if r.group.Barrier(ctx, step) == nil {
				err = errors.Join(err, fmt.Errorf("%s: the other came", step))
			}
		}
		return errors.Join(err, r.group.Barrier(ctx, "written"), m.Close(ctx), r.group.Close(ctx), r.device.Close())
	})
}
