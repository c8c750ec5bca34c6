package nixl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// progressDelayUS is how long the progress thread sleeps at most, in microseconds. Events for which UCX does not wake the thread wait that long.
const progressDelayUS = 1000

// Agent is one party of transfers, with an engine over UCX. It may be used by several goroutines at once.
type Agent struct {
	lib  *Library
	name string

	mu      sync.RWMutex // read-locked during NIXL's calls, so that the handle stays good
	handle  handle
	backend handle
	closing atomic.Bool // no call begins any more

	progress sync.Mutex // held during Progress
	notes    handle     // the notifications of Progress, which there are none of; 0 with a progress thread
}

// AgentOptions says what agent to make.
type AgentOptions struct {
	// NoThread makes the agent do without the library's progress thread: what arrives is handled in Status of its requests and in
	// Progress only. The thread wakes when something arrives; with memory of GPUs under way it makes UCX enqueue a function of the
	// CPU behind each copy (uct_cuda_base_iface_event_fd_arm in uct/cuda/base/cuda_iface.c of UCX 1.23), for which the next copy
	// waits.
	NoThread bool
	// Settings are UCX's settings for this agent alone, by their names without "UCX_". Those of the environment take precedence.
	Settings map[string]string
}

// NewAgent makes an agent and its engine; nil options are the defaults. The name must differ from those of all agents that it is to know. NewAgent
// may block: see NewAgentWithin. Close the agent.
func (l *Library) NewAgent(name string, opts *AgentOptions) (*Agent, error) {
	if name == "" {
		return nil, errs.Invalid("NewAgent", "name", `""`, "a name that no other agent has")
	}
	if opts == nil {
		opts = &AgentOptions{}
	}
	thread := !opts.NoThread
	a := &Agent{lib: l, name: name}
	if err := l.check("create_configured_agent", l.call.createAgent(name, newAgentConfig(thread, progressDelayUS),
		&a.handle)); err != nil {
		return nil, fmt.Errorf("making an agent: %w", err)
	}
	err := a.start(opts.Settings)
	if err == nil && !thread {
		err = l.check("create_notif_map", l.call.createNotes(&a.notes))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making an agent: %w", err), a.Close())
	}
	return a, nil
}

// NewAgentWithin is NewAgent that waits no longer than ctx lasts: then the error is a [*StuckError], and an agent that is made all the same is closed, of which
// nobody else knows. Scope calls a function with what NewAgent needs, such as a GPU's context.
func (l *Library) NewAgentWithin(ctx context.Context, scope func(func() error) error, name string, opts *AgentOptions) (*Agent, error) {
	var made *Agent
	_, err := Bound(ctx, "making an agent", func() (struct{}, error) {
		return struct{}{}, scope(func() (err error) {
			made, err = l.NewAgent(name, opts)
			return err
		})
	})
	if err == nil {
		return made, nil
	}
	stuck, late := errors.AsType[*StuckError](err)
	switch {
	case late:
		go func() {
			<-stuck.Ended
			if made != nil {
				_ = made.Close() // whoever wanted it has gone
			}
		}()
	case made != nil: // it is the scope that has failed
		err = errors.Join(err, made.Close())
	}
	return nil, err
}

// environment is held while an engine is made, which reads UCX's settings from the environment of the process; for writing by those
// that change it meanwhile.
var environment sync.RWMutex

// lent are the variables that such a change has set, for as long as they are there.
var lent struct {
	sync.Mutex
	names map[string]bool
}

// UserVariable is os.LookupEnv for a variable of UCX's. One that is there only because an agent is being made is not set: the user has not chosen it.
func UserVariable(name string) (value string, set bool) {
	lent.Lock()
	defer lent.Unlock()
	if lent.names[name] {
		return "", false
	}
	return os.LookupEnv(name)
}

// lend sets a variable. takeBack ends that.
func lend(name, value string) error {
	lent.Lock()
	defer lent.Unlock()
	if err := os.Setenv(name, value); err != nil {
		return fmt.Errorf("setting %s for UCX: %w", name, err)
	}
	if lent.names == nil {
		lent.names = map[string]bool{}
	}
	lent.names[name] = true
	return nil
}

func takeBack(name string) {
	lent.Lock()
	defer lent.Unlock()
	_ = os.Unsetenv(name) // it was set, so its name is right
	delete(lent.names, name)
}

// start makes the engine with UCX's settings.
func (a *Agent) start(settings map[string]string) error {
	l := a.lib
	var params handle
	if err := l.check("create_params", l.call.createParams(&params)); err != nil {
		return err
	}
	config, lists := engineConfig(settings)
	err := l.check("params_add", l.call.addParam(params, "engine_config", config))
	if err == nil {
		err = withEnvironment(lists, func() error {
			return l.check("create_backend", l.call.createBackend(a.handle, "UCX", params, &a.backend))
		})
	}
	if failed, ok := errors.AsType[*dl.Error](err); ok {
		failed.Err = errs.ErrUnsupported
		failed.Hint = whyNoEngine() + failed.Hint
		if plugins, listErr := a.Plugins(); listErr == nil {
			failed.Text = fmt.Sprintf("the plugins that it has found are %v", plugins)
		}
	}
	return errors.Join(err, l.check("destroy_params", l.call.destroyParams(params)))
}

// engineConfig returns UCX's settings as the engine takes them, and those that it cannot take, because it has no way to write a value with a comma in
// it.
func engineConfig(settings map[string]string) (config string, lists map[string]string) {
	var pairs []string
	lists = map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if value := settings[name]; strings.Contains(value, ",") {
			lists[name] = value
		} else {
			pairs = append(pairs, name+"="+value)
		}
	}
	return strings.Join(pairs, ","), lists
}

// withEnvironment calls f with these settings of UCX's in the environment, C's included, but for those that it has already.
func withEnvironment(settings map[string]string, f func() error) error {
	if len(settings) == 0 {
		environment.RLock()
		defer environment.RUnlock()
		return f()
	}
	environment.Lock()
	defer environment.Unlock()
	for name, value := range settings {
		name = "UCX_" + name
		if _, set := os.LookupEnv(name); set {
			continue
		}
		if err := lend(name, value); err != nil {
			return err
		}
		defer takeBack(name)
	}
	return f()
}

// whyNoEngine names the settings that most often keep UCX from starting.
func whyNoEngine() string {
	for _, name := range []string{"UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULE_DIR", "NIXL_PLUGIN_DIR"} {
		if value, set := UserVariable(name); set && (name != "UCX_MODULE_DIR") {
			return fmt.Sprintf("%s is %q, which may leave UCX without a transport that can do it (with UCX_TLS, one of them must be posix, tcp or "+
				"that of a network card): unset it; ", name, value)
		}
	}
	return "the plugin UCX, or a library that it needs, does not load; "
}

// Name returns the agent's name.
func (a *Agent) Name() string { return a.name }

// Plugins lists the plugins that the library has found.
func (a *Agent) Plugins() ([]string, error) {
	l := a.lib
	var list handle
	if err := l.check("get_available_plugins", l.call.plugins(a.handle, &list)); err != nil {
		return nil, err
	}
	var names []string
	var n uintptr
	err := l.check("string_list_size", l.call.listSize(list, &n))
	for i := uintptr(0); i < n && err == nil; i++ {
		var s unsafe.Pointer
		if err = l.check("string_list_get", l.call.listGet(list, i, &s)); err == nil {
			names = append(names, cString(s))
		}
	}
	return names, errors.Join(err, l.check("destroy_string_list", l.call.destroyList(list)))
}

// use runs call while the agent is open.
func (a *Agent) use(call func(agent handle) error) error {
	if a.closing.Load() { // before the lock, which Close may wait for
		return fmt.Errorf("the agent is %w", errs.ErrClosed)
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.handle == 0 {
		return fmt.Errorf("the agent is %w", errs.ErrClosed)
	}
	return call(a.handle)
}

// withRegs calls f with a list of one block of memory for registration.
func (a *Agent) withRegs(m Memory, b Block, f func(regs handle) error) error {
	l := a.lib
	var regs handle
	if err := l.check("create_reg_dlist", l.call.createRegs(m, &regs)); err != nil {
		return err
	}
	err := l.check("reg_dlist_add_desc", l.call.addReg(regs, uintptr(b.Addr), uintptr(b.Bytes), b.Device, nil, 0))
	if err == nil {
		err = f(regs)
	}
	return errors.Join(err, l.check("destroy_reg_dlist", l.call.destroyRegs(regs)))
}

// Register makes memory known to the engine, so that it can be either side of transfers.
func (a *Agent) Register(m Memory, b Block) error {
	registered := false
	err := a.use(func(agent handle) error {
		return a.withRegs(m, b, func(regs handle) error {
			err := a.lib.check("register_mem", a.lib.call.register(agent, regs, 0))
			registered = err == nil
			return err
		})
	})
	if err != nil {
		if registered { // it is the list that was not given back
			err = errors.Join(err, a.Deregister(m, b))
		}
		return fmt.Errorf("registering %d bytes of %v at %#x: %w", b.Bytes, m, b.Addr, err)
	}
	return nil
}

// Deregister undoes Register. No request may use the memory any more.
func (a *Agent) Deregister(m Memory, b Block) error {
	err := a.use(func(agent handle) error {
		return a.withRegs(m, b, func(regs handle) error {
			return a.lib.check("deregister_mem", a.lib.call.deregister(agent, regs,
				0))
		})
	})
	if err != nil {
		return fmt.Errorf("deregistering %d bytes of %v at %#x: %w", b.Bytes, m, b.Addr, err)
	}
	return nil
}

// Metadata returns what other agents need to connect to this one and to reach all registered memory.
func (a *Agent) Metadata() ([]byte, error) {
	return a.take("get_local_md", func(agent handle, data *unsafe.Pointer, n *uintptr) Status {
		return a.lib.call.metadata(agent, data, n)
	})
}

// MetadataOf returns what agents that know this one need to reach one registered block of memory.
func (a *Agent) MetadataOf(m Memory, b Block) (blob []byte, err error) {
	err = a.withRegs(m, b, func(regs handle) error {
		blob, err = a.take("get_local_partial_md", func(agent handle, data *unsafe.Pointer, n *uintptr) Status {
			return a.lib.call.metadataOf(agent, regs, data, n, 0)
		})
		return err
	})
	return blob, err
}

// take copies bytes that the library has allocated, and frees the original.
func (a *Agent) take(name string, call func(agent handle, data *unsafe.Pointer, n *uintptr) Status) (blob []byte, err error) {
	err = a.use(func(agent handle) error {
		var data unsafe.Pointer
		var n uintptr
		if err := a.lib.check(name, call(agent, &data, &n)); err != nil {
			return err
		}
		blob = append([]byte(nil), unsafe.Slice((*byte)(data), n)...)
		a.lib.call.free(data)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("taking metadata: %w", err)
	}
	return blob, nil
}

// Know takes metadata of another agent, and connects to that agent if it was not known. It may block: see [Bound].
func (a *Agent) Know(metadata []byte) (name string, err error) {
	if len(metadata) == 0 {
		return "", errs.Invalid("Know", "metadata", "nothing", "what Metadata or MetadataOf of another agent gave")
	}
	err = a.use(func(agent handle) error {
		var p unsafe.Pointer
		s := a.lib.call.loadMetadata(agent, unsafe.Pointer(unsafe.SliceData(metadata)), uintptr(len(metadata)), &p)
		if err := a.lib.check("load_remote_md", s); err != nil {
			return err
		}
		name = cString(p)
		a.lib.call.free(p)
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("loading metadata of %d bytes: %w", len(metadata), err)
	}
	return name, nil
}

// Progress handles what has arrived, for an agent without a progress thread; with one there is nothing to do. It does not block. Peers depend on it:
// this process writes what the network cannot write by itself, and answers those that connect to it. It does nothing while another call is under way.
func (a *Agent) Progress() error {
	if !a.progress.TryLock() {
		return nil
	}
	defer a.progress.Unlock()
	return a.use(func(agent handle) error {
		if a.notes == 0 {
			return nil
		}
		return a.lib.check("get_notifs", a.lib.call.getNotes(agent, a.notes, 0))
	})
}

// Forget drops what is known of another agent. No request to that agent may be used any more.
func (a *Agent) Forget(name string) error {
	return a.use(func(agent handle) error {
		return a.lib.check("invalidate_remote_md", a.lib.call.invalidate(agent, name))
	})
}

// closeTimeout is how long Close waits for calls that are under way. Only one that was given up, see Bound, lasts longer than a moment.
const closeTimeout = 2 * time.Second

// Close ends the agent and deregisters everything. All requests must have been released before. While a call that was given up is still in the library the error is a
// [*StuckError], and the agent ends when that call has ended. A second Close returns ErrClosed.
func (a *Agent) Close() error {
	if a.closing.Swap(true) {
		return fmt.Errorf("the agent is %w", errs.ErrClosed)
	}
	alone := make(chan struct{})
	go func() {
		a.mu.Lock()
		close(alone)
	}()
	select {
	case <-alone:
		return a.end()
	case <-time.After(closeTimeout):
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-alone
		_ = a.end() // whoever closes it has gone
	}()
	return &StuckError{Library: libraryName, What: "ending a call that was given up, before the agent is closed", Err: os.ErrDeadlineExceeded, Ended: ended}
}

// end is Close with the lock held, which it ends.
func (a *Agent) end() error {
	defer a.mu.Unlock()
	l := a.lib
	var err error
	if a.notes != 0 {
		err = l.check("destroy_notif_map", l.call.destroyNotes(a.notes))
	}
	if a.backend != 0 {
		err = errors.Join(err, l.check("destroy_backend", l.call.destroyBackend(a.backend)))
	}
	err = errors.Join(err, l.check("destroy_agent", l.call.destroyAgent(a.handle)))
	a.handle, a.backend, a.notes = 0, 0, 0
	return err
}
