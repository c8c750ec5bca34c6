package nixl

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/nixl"
)

// nixlCodes are what a call of NIXL may fail with.
var nixlCodes = []backendtest.Code{
	{Name: "NIXL_CAPI_ERROR_BACKEND", Value: -2}, {Name: "NIXL_CAPI_ERROR_INVALID_PARAM", Value: -1}, {Name: "NIXL_CAPI_ERROR_INVALID_STATE", Value: -3},
	{Name: "NIXL_CAPI_ERROR_EXCEPTION", Value: -4},
}

// faultyEngine lets calls go wrong.
type faultyEngine struct {
	*fakeEngine
	calls *backendtest.Calls
}

// fails is the error of a call that is to fail.
func fails(calls *backendtest.Calls, call string) error {
	if code, refused := calls.Enter(call, nixlCodes...); refused {
		return &dl.Error{Library: "NIXL", Call: call, Code: code.Value, Name: code.Name}
	}
	return nil
}

func (e *faultyEngine) Register(m nixl.Memory, b nixl.Block) error {
	if err := fails(e.calls, "nixl_capi_register_mem"); err != nil {
		return err
	}
	return e.fakeEngine.Register(m, b)
}

func (e *faultyEngine) Deregister(m nixl.Memory, b nixl.Block) error {
	if err := fails(e.calls, "nixl_capi_deregister_mem"); err != nil {
		return err
	}
	return e.fakeEngine.Deregister(m, b)
}

func (e *faultyEngine) Metadata() ([]byte, error) {
	if err := fails(e.calls, "nixl_capi_get_local_md"); err != nil {
		return nil, err
	}
	return e.fakeEngine.Metadata()
}

func (e *faultyEngine) MetadataOf(m nixl.Memory, b nixl.Block) ([]byte, error) {
	if err := fails(e.calls, "nixl_capi_get_local_partial_md"); err != nil {
		return nil, err
	}
	return e.fakeEngine.MetadataOf(m, b)
}

func (e *faultyEngine) Know(metadata []byte) (string, error) {
	if err := fails(e.calls, "nixl_capi_load_remote_md"); err != nil {
		return "", err
	}
	return e.fakeEngine.Know(metadata)
}

func (e *faultyEngine) NewRequest(op nixl.Op, m nixl.Memory, local, remote []nixl.Block, peer string) (request, error) {
	if err := fails(e.calls, "nixl_capi_create_xfer_req"); err != nil {
		return nil, err
	}
	r, err := e.fakeEngine.NewRequest(op, m, local, remote, peer)
	if err != nil {
		return nil, err
	}
	return &faultyRequest{r, e.calls}, nil
}

func (e *faultyEngine) Close() error {
	if err := fails(e.calls, "nixl_capi_destroy_agent"); err != nil {
		return err
	}
	return e.fakeEngine.Close()
}

// faultyRequest lets calls go wrong.
type faultyRequest struct {
	request
	calls *backendtest.Calls
}

func (r *faultyRequest) Post() (bool, error) {
	if err := fails(r.calls, "nixl_capi_post_xfer_req"); err != nil {
		return false, err
	}
	return r.request.Post()
}

func (r *faultyRequest) Status() (bool, error) {
	if err := fails(r.calls, "nixl_capi_get_xfer_status"); err != nil {
		return false, err
	}
	return r.request.Status()
}

func (r *faultyRequest) Release() error {
	if err := fails(r.calls, "nixl_capi_release_xfer_req"); err != nil {
		return err
	}
	return r.request.Release()
}

// TestFaults lets every call of the library go wrong.
func TestFaults(t *testing.T) {
	const keeps = "it is the call that gives it back"
	backendtest.Faults{
		Keeps: map[string]string{
			"nixl_capi_destroy_agent": keeps, "nixl_capi_deregister_mem": keeps, "nixl_capi_release_xfer_req": keeps,
		},
		Machine: func() backendtest.FaultMachine {
			net := &network{}
			var mu sync.Mutex
			devices := map[*group.Group]*devhost.Device{}
			return backendtest.FaultMachine{
				Open: func(ctx context.Context, g *group.Group, parent backend.Backend, calls *backendtest.Calls) (backend.Backend, error) {
					o := &Options{engine: func(name string) (engine, error) {
						if err := fails(calls, "nixl_capi_create_agent"); err != nil {
							return nil, err
						}
						e, err := net.engine(name)
						if err != nil {
							return nil, err
						}
						return &faultyEngine{e.(*fakeEngine), calls}, nil
					}}
					if parent != nil {
						o.Parent, o.Opened = parent.(*Backend), parent.Device()
						return New(ctx, g, o)
					}
					d, err := devhost.New(&devhost.Options{Err: g.Err})
					if err != nil {
						return nil, err
					}
					o.Opened = device.Device(d)
					mu.Lock()
					devices[g] = d
					mu.Unlock()
					return New(ctx, g, o)
				},
				Left: func() string {
					var left []string
					for _, d := range devices {
						if err := d.Close(); err != nil {
							left = append(left, err.Error())
						}
					}
					for name, e := range net.engines {
						if !e.closed || len(e.regs) > 0 || e.requests > 0 {
							left = append(left, fmt.Sprintf("%s: closed %t with %d registrations and %d requests", name, e.closed, len(e.regs), e.requests))
						}
					}
					return strings.Join(left, "; ")
				},
			}
		},
	}.Run(t)
}
