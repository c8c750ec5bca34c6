package nixl

import (
	"context"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/nixl"
)

// engine is what the backend needs of an agent of the library. A test may substitute another.
type engine interface {
	Register(m nixl.Memory, b nixl.Block) error
	Deregister(m nixl.Memory, b nixl.Block) error
	Metadata() ([]byte, error)
	MetadataOf(m nixl.Memory, b nixl.Block) ([]byte, error)
	Know(metadata []byte) (name string, err error)
	Progress() error
	NewRequest(op nixl.Op, m nixl.Memory, local, remote []nixl.Block, peer string) (request, error)
	Close() error
}

// request is a prepared transfer of an engine.
type request interface {
	Post() (ended bool, err error)
	Status() (ended bool, err error)
	Release() error
}

// agent is an engine that is an agent of the library.
type agent struct{ *nixl.Agent }

func (a agent) NewRequest(op nixl.Op, m nixl.Memory, local, remote []nixl.Block, peer string) (request, error) {
	r, err := a.Agent.NewRequest(op, m, local, remote, peer)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// agentTimeout bounds the making of an agent.
const agentTimeout = 60 * time.Second

// makeAgent makes an agent of the library on a network, with or without a progress thread. It is bounded by ctx and agentTimeout. The error is a
// [group.FileLimitError] if too few files are left to this process.
func makeAgent(ctx context.Context, lib *nixl.Library, d device.Device, name string, on route, thread bool) (*nixl.Agent, error) {
	if err := roomForFiles(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	scope := func(f func() error) error { return within(d, f) } // UCX finds the GPU by the context
	return lib.NewAgentWithin(ctx, scope, name, &nixl.AgentOptions{NoThread: !thread, Settings: on.settings()})
}
