package nixl

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
	"github.com/symmem/symmem/memory"
)

// network is what fake engines of one process reach each other by.
type network struct {
	mu      sync.Mutex
	engines map[string]*fakeEngine
	serial  int                               // of the latest registration
	delay   time.Duration                     // of each transfer
	slow    func(engine string) time.Duration // how much longer those of an engine take
	hang    func() bool                       // whether transfers do not end
	fail    func(engine, call string) error   // the error of a call, by the names of the engine and of the method
	gpus    []*cuda.Device                    // by ordinal: what memory of GPUs is copied by
	moved   atomic.Int64                      // bytes of memory of GPUs
	blind   bool                              // nobody looks whether memory is registered, as where a process writes another one's by its addresses
	astray  atomic.Int32                      // blocks that were so moved to or from memory that was given back
}

// errBackend is what the library says of a peer that has died, and of much else.
var errBackend = &dl.Error{Library: "NIXL", Call: "nixl_capi_get_xfer_status", Code: -2, Name: "ERROR_BACKEND"}

// fakeEngine keeps the library's rules and checks that the caller does.
type fakeEngine struct {
	net      *network
	name     string
	regs     map[nixl.Block]nixl.Memory
	serials  map[nixl.Block]int
	remote   map[string]map[nixl.Block]int // what is known of others: the registration that each block is of
	requests int
	closed   bool

	progressed int // how often Progress was called
	late       int // after Close
}

// fakeMetadata is what a fake engine tells others.
type fakeMetadata struct {
	Name   string
	Block  nixl.Block
	Serial int // 0 without a block
}

func (n *network) engine(name string) (engine, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.failure(name, "NewAgent"); err != nil {
		return nil, err
	}
	if n.engines == nil {
		n.engines = map[string]*fakeEngine{}
	}
	e := &fakeEngine{
		net: n, name: name, regs: map[nixl.Block]nixl.Memory{}, serials: map[nixl.Block]int{}, remote: map[string]map[nixl.Block]int{},
	}
	n.engines[name] = e
	return e, nil
}

func (n *network) failure(engine, call string) error {
	if n.fail == nil {
		return nil
	}
	return n.fail(engine, call)
}

func (e *fakeEngine) Register(m nixl.Memory, b nixl.Block) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if err := e.net.failure(e.name, "Register"); err != nil {
		return err
	}
	if _, twice := e.regs[b]; twice {
		return errors.New("registered twice")
	}
	e.net.serial++
	e.regs[b], e.serials[b] = m, e.net.serial
	return nil
}

func (e *fakeEngine) Deregister(m nixl.Memory, b nixl.Block) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if had, ok := e.regs[b]; !ok || had != m {
		return errors.New("not registered")
	}
	delete(e.regs, b)
	return nil
}

func (e *fakeEngine) Metadata() ([]byte, error) { return json.Marshal(fakeMetadata{Name: e.name}) }

func (e *fakeEngine) MetadataOf(_ nixl.Memory, b nixl.Block) ([]byte, error) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if err := e.net.failure(e.name, "MetadataOf"); err != nil {
		return nil, err
	}
	return json.Marshal(fakeMetadata{Name: e.name, Block: b, Serial: e.serials[b]})
}

func (e *fakeEngine) Know(blob []byte) (string, error) {
	var m fakeMetadata
	if err := json.Unmarshal(blob, &m); err != nil {
		return "", err
	}
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if err := e.net.failure(e.name, "Know"); err != nil {
		return "", err
	}
	if e.remote[m.Name] == nil {
		e.remote[m.Name] = map[nixl.Block]int{}
	}
	if had := e.remote[m.Name][m.Block]; had != 0 && had != m.Serial {
		return "", errors.New("as the library: metadata of one block may not change") // and it is never forgotten
	}
	if m.Serial != 0 {
		e.remote[m.Name][m.Block] = m.Serial
	}
	return m.Name, nil
}

// Progress delivers nothing: what a request moves is there when it has ended.
func (e *fakeEngine) Progress() error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.closed {
		e.late++
		return errors.New("driven on when it was closed")
	}
	e.progressed++
	return nil
}

func (e *fakeEngine) NewRequest(op nixl.Op, m nixl.Memory, local, remote []nixl.Block, peer string) (request, error) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if err := e.net.failure(e.name, "NewRequest"); err != nil {
		return nil, err
	}
	within := func(b nixl.Block, all map[nixl.Block]int) bool {
		for r := range all {
			if r.Device == b.Device && r.Addr <= b.Addr && b.Addr+b.Bytes <= r.Addr+r.Bytes {
				return true
			}
		}
		return false
	}
	mine := map[nixl.Block]int{}
	for b, kind := range e.regs {
		if kind == m {
			mine[b] = e.serials[b]
		}
	}
	var serials []int
	for i := range local {
		for b, serial := range mine {
			if within(local[i], map[nixl.Block]int{b: serial}) {
				serials = append(serials, serial)
			}
		}
		if !within(local[i], mine) || !within(remote[i], e.remote[peer]) || local[i].Bytes != remote[i].Bytes {
			return nil, fmt.Errorf("no registrations for %v and %v of %s", local[i], remote[i], peer)
		}
	}
	e.requests++
	return &fakeRequest{engine: e, op: op, memory: m, local: local, remote: remote, peer: peer, serials: serials}, nil
}

func (e *fakeEngine) Close() error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.closed || len(e.regs) > 0 || e.requests > 0 {
		return fmt.Errorf("closed %t with %d registrations and %d requests", e.closed, len(e.regs), e.requests)
	}
	e.closed = true
	return nil
}

// fakeRequest is one transfer.
type fakeRequest struct {
	engine        *fakeEngine
	op            nixl.Op
	memory        nixl.Memory
	local, remote []nixl.Block
	peer          string
	serials       []int // of the registrations of the local blocks, which the library does not look for again
	active        bool
	released      bool
	end           time.Time
}

func (r *fakeRequest) Post() (bool, error) {
	n := r.engine.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.active || r.released {
		return false, errors.New("posted while it is active, or released")
	}
	if err := n.failure(r.engine.name, "Post"); err != nil {
		return false, err
	}
	for _, serial := range r.serials {
		if !r.engine.has(serial) {
			return false, errors.New("posted from or to memory that was deregistered, of which the library has kept what it had allocated for it")
		}
	}
	r.active, r.end = true, time.Now().Add(n.delay)
	if n.slow != nil {
		r.end = r.end.Add(n.slow(r.engine.name))
	}
	return r.progress()
}

func (r *fakeRequest) Status() (bool, error) {
	r.engine.net.mu.Lock()
	defer r.engine.net.mu.Unlock()
	if r.released {
		return false, errors.New("released")
	}
	if err := r.engine.net.failure(r.engine.name, "Status"); err != nil {
		r.active = false
		return false, err
	}
	return r.progress()
}

func (r *fakeRequest) progress() (bool, error) {
	n := r.engine.net
	if !r.active {
		return true, nil
	}
	if time.Now().Before(r.end) || n.hang != nil && n.hang() {
		return false, nil
	}
	for _, b := range r.remote {
		if !n.engines[r.peer].registered(b) {
			r.active = false
			if n.blind {
				n.astray.Add(1)
			}
			return false, errBackend // its owner has taken the registration back: the network refuses the access
		}
	}
	for i := range r.local {
		mine, theirs := r.local[i], r.remote[i]
		if r.op == nixl.Read {
			mine, theirs = theirs, mine
		}
		if r.memory == nixl.VRAM {
			if err := n.copyOnGPUs(theirs, mine); err != nil {
				r.active = false
				return false, err
			}
			continue
		}
		copy(bytesAt(theirs), bytesAt(mine))
	}
	r.active = false
	return true, nil
}

// copyOnGPUs copies memory of GPUs, by way of the CPU.
func (n *network) copyOnGPUs(dst, src nixl.Block) error {
	n.moved.Add(int64(src.Bytes))
	through := make([]byte, src.Bytes)
	if err := n.gpus[src.Device&0xffff].CopyToHost(through, device.Ptr(src.Addr)); err != nil {
		return err
	}
	return n.gpus[dst.Device&0xffff].CopyFromHost(device.Ptr(dst.Addr), through)
}

// has reports whether a registration is there. The network is locked.
func (e *fakeEngine) has(serial int) bool {
	for b := range e.regs {
		if e.serials[b] == serial {
			return true
		}
	}
	return false
}

// registered reports whether the block is in one that is registered. The network is locked.
func (e *fakeEngine) registered(b nixl.Block) bool {
	for r := range e.regs {
		if r.Addr <= b.Addr && b.Addr+b.Bytes <= r.Addr+r.Bytes {
			return true
		}
	}
	return false
}

func (r *fakeRequest) Release() error {
	r.engine.net.mu.Lock()
	defer r.engine.net.mu.Unlock()
	if r.released {
		return errors.New("released twice")
	}
	r.released = true
	r.engine.requests--
	return nil
}

// bytesAt returns memory of this process that is not the garbage collector's.
func bytesAt(b nixl.Block) []byte {
	p := uintptr(b.Addr)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), b.Bytes)
}

// onFakes runs f on size ranks over fake engines, which move everything unless the options say otherwise.
func onFakes(t *testing.T, net *network, size int, opts Options, f func(ctx context.Context, m *memory.Memory) error) {
	t.Helper()
	opts.Islands = cmp.Or(opts.Islands, islandsOff)
	onFakesAt(t, net, make([]string, size), func(int) Options { return opts }, f)
}

// onFakesAt is onFakes for ranks of several hosts, named by rank, with the options of each rank.
func onFakesAt(t *testing.T, net *network, hosts []string, opts func(rank int) Options, f func(ctx context.Context, m *memory.Memory) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	groups, err := group.Local(len(hosts), &group.LocalOptions{BootIDs: hosts})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			d, err := devhost.New(&devhost.Options{Err: g.Err})
			if err != nil {
				t.Error(err)
				return
			}
			o := opts(g.Rank())
			o.Opened, o.engine = d, net.engine
			b, err := New(ctx, g, &o)
			if err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
				return
			}
			m := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: o.KernelTimeout})
			err = f(ctx, m)
			left := errors.Join(m.Close(ctx), g.Close(ctx))
			if errors.Is(left, errs.ErrPeerLost) {
				left = nil
			}
			if err := errors.Join(err, left, d.Close()); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
}
