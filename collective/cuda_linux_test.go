package collective_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// limits is a parameter of its own type.
type limits struct {
	From, To int16
	_        [4]byte
	Scale    float64
}

// exchange is a pretended kernel with parameters of several types: every rank writes its first value to every rank's workspace and takes
// all of them, scaled, behind each other, into its tensor, whose addresses it has from the table.
var exchange = fake{
	sizes: []int{int(unsafe.Sizeof(ptx.Comm{})), 8, 8, 4, 1, int(unsafe.Sizeof(limits{})), 12},
	run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
		c := commAt(p[0], grid)
		epoch := c.count()
		table, own, value, sign, l, rest := *(*device.Ptr)(p[1]), *(*device.Ptr)(p[2]), *(*float32)(p[3]), *(*int8)(p[4]), (*limits)(p[5]), (*[3]uint32)(p[6])
		me, world := int64(c.Rank), int64(c.World)
		mine := *(*device.Ptr)(at(table.Add(8 * me)))
		if mine != own || value != 2.5 || sign != -1 || l.From != 1 || l.To != 3 || rest[2] != 9 {
			c.fail(ptx.FaultTimeout, 77)
			return
		}
		for r := range int(world) {
			*(*float32)(at(c.data(r).Add(8*me + 4*int64(epoch&1)))) = *(*float32)(at(own))
		}
		if c.barrier(epoch) != nil {
			return
		}
		for r := range world {
			*(*float32)(at(own.Add(4 + 4*r))) = float32(l.Scale) * *(*float32)(at(c.data(int(me)).Add(8*r + 4*int64(epoch&1))))
		}
	},
}

// still is a pretended kernel that does nothing, and keeps no records.
var still = fake{run: func(cu.LaunchConfig, []unsafe.Pointer) {}}

// held is what the rank's device holds.
func held(r *rank) cuda.Stats { return r.m.Device().(*cuda.Device).Stats() }

// exchanging is the Spec of exchange.
func (r *rank) exchanging() collective.Spec {
	return collective.Spec{
		Name: "exchange", Tensors: []tensor.SymmetricTensor{r.x}, Workspace: int64(8 * r.Size()),
		CUDA: &collective.Kernel{
			Image: []byte(image), Function: "exchange", Blocks: 4, Threads: 64,
			Params: func(a *collective.Addresses) []any {
				c := a.Comm()
				return []any{c, a.Table(), a.Tensor(0, a.Rank()), float32(2.5), int8(-1), limits{From: 1, To: 3, Scale: 10}, [3]uint32{7, 8, 9}}
			},
		},
	}
}

// TestCUDAKernel: a kernel with parameters of several types reaches all ranks by Comm and Table, also of more than eight ranks, run after
// run and over the end of the epochs, and its runs allocate nothing. Nothing is left behind.
func TestCUDAKernel(t *testing.T) {
	for _, size := range []int{1, 2, 4, ptx.Inline + 1} {
		for _, first := range []uint32{0, 1<<32 - 3} {
			t.Run(fmt.Sprintf("size=%d/first=%d", size, first), func(t *testing.T) {
				m := newMachine(size, map[string]fake{"exchange": exchange})
				onRanks(t, size, patience, m.open, func(ctx context.Context, r *rank) error {
					spec := r.exchanging()
					spec.FirstEpoch = first
					had := held(r)
					for again := range 3 {
						p, err := collective.New(ctx, r.m, spec)
						if err != nil {
							return err
						}
						for run := range 6 {
							if err := r.fill(r.x, run); err != nil {
								return err
							}
							if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
								return err
							}
							got, err := tensor.ReadAll[float32](r.x.Local())
							if err != nil {
								return err
							}
							for from := range size {
								if want := float32(10 * (1000*run + 100*from)); got[1+from] != want {
									return fmt.Errorf("run %d: %v of rank %d, not %v", run, got[1+from], from, want)
								}
							}
						}
						if n := m.launched[r.Rank()].Grid[0]; n != 4 {
							return fmt.Errorf("%d blocks and not 4", n)
						}
						if size == 1 && again == 2 {
							if n := allocations(func() {
								if err := p.Run(r.s); err != nil {
									panic(err)
								}
							}); n >= 1 {
								return fmt.Errorf("%v allocations a run", n)
							}
						}
						if err := p.Close(ctx); err != nil {
							return err
						}
						if now := held(r); again == 0 {
							had = now // the stop word and the module stay with the memory
						} else if now != had {
							return fmt.Errorf("the device holds %+v, and had %+v", now, had)
						}
					}
					return nil
				})
				assert.Empty(t, m.left())
			})
		}
	}
}

// TestCUDALaunch: the launch is as the Kernel says, cut to the room that there is, alike on all ranks.
func TestCUDALaunch(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		for _, c := range []struct {
			kernel          collective.Kernel
			blocks, threads int
		}{
			{collective.Kernel{Blocks: 3, Threads: 96, SharedBytes: 100}, 3, 96},
			{collective.Kernel{Blocks: 15, Threads: 96, Overlap: true}, 15, 96},
			{collective.Kernel{Blocks: 16, Threads: 96, Overlap: true}, 16, 96},
			{collective.Kernel{Blocks: 1000, Threads: 96}, 31, 96}, // half of 2 on each of 32, less a reserve
			{collective.Kernel{Blocks: 1000, Threads: 96, MinBlocks: 31}, 31, 96},
			{collective.Kernel{Fit: func(n int) (int, int) { return n / 2, 256 }, BlockWorkspace: 1 << 20}, 16, 256},
		} {
			k := c.kernel
			k.Image, k.Function = []byte(image), "still"
			blocks, room := 0, [2]device.Ptr{}
			k.Params = func(a *collective.Addresses) []any {
				blocks = a.Blocks()
				room = [2]device.Ptr{a.Workspace(0), a.Workspace(1)}
				return nil
			}
			had := r.backend.bytes.Load()
			p, err := collective.New(ctx, r.m, collective.Spec{Name: "launch", Workspace: 128, CUDA: &k})
			if err != nil {
				return err
			}
			if held := r.backend.bytes.Load() - had; k.BlockWorkspace > 0 && held < int64(c.blocks)*k.BlockWorkspace {
				return fmt.Errorf("%d bytes of workspace", held)
			}
			if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
				return err
			}
			m.Mu.Lock()
			l := m.launched[r.Rank()]
			m.Mu.Unlock()
			if blocks != c.blocks || room[0]%128 != 0 || room[1]%128 != 0 || room[0] == room[1] ||
				l.Grid != [3]uint32{uint32(c.blocks), 1, 1} || l.Block != [3]uint32{uint32(c.threads), 1, 1} ||
				int(l.SharedBytes) != k.SharedBytes || (l.NumAttrs > 0) != k.Overlap {
				return fmt.Errorf("%+v: %d blocks, workspaces %v, launched as %+v", k, blocks, room, l)
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	assert.Empty(t, m.left())
}

// TestSettingBlocks: no plan takes more blocks than the settings of any rank allow, which need not be alike.
func TestSettingBlocks(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still, fakecuda.Clustered: still})
	most := func(rank int) memory.Options {
		return memory.Options{KernelTimeout: patience, MaxBlocks: []int{0, 9}[rank]}
	}
	onRanksWith(t, 2, most, m.open, func(ctx context.Context, r *rank) error {
		for _, c := range []struct {
			kernel collective.Kernel
			blocks uint32
		}{
			{collective.Kernel{Blocks: 7, Threads: 96}, 7},
			{collective.Kernel{Blocks: 1000, Threads: 96, MinBlocks: 9}, 9},
			{collective.Kernel{Fit: func(n int) (int, int) { return n, 256 }}, 9},
			{collective.Kernel{Function: fakecuda.Clustered, Blocks: 7, Threads: 96}, 4},
			{collective.Kernel{Function: fakecuda.Clustered, Blocks: 1000, Threads: 96, MinBlocks: 8}, 8},
		} {
			c.kernel.Image, c.kernel.Function = []byte(image), cmp.Or(c.kernel.Function, "still")
			step := &collective.Program{Build: func(_ context.Context, b *collective.Builder) error { b.Kernel(&c.kernel); return nil }}
			for _, spec := range []collective.Spec{{Name: "launch", CUDA: &c.kernel}, {Name: "launch as a step", Program: step}} {
				p, err := collective.New(ctx, r.m, spec)
				if err != nil {
					return err
				}
				if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
					return err
				}
				m.Mu.Lock()
				n := m.launched[r.Rank()].Grid[0]
				m.Mu.Unlock()
				if n != c.blocks {
					return fmt.Errorf("%s: %d blocks, not %d", spec.Name, n, c.blocks)
				}
				if err := p.Close(ctx); err != nil {
					return err
				}
			}
		}
		k := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 100, Threads: 96, MinBlocks: 10}
		step := &collective.Program{Build: func(_ context.Context, b *collective.Builder) error { b.Kernel(k); return nil }}
		less := &collective.Kernel{Image: []byte(image), Function: fakecuda.Clustered, Blocks: 3, Threads: 96}
		lessStep := &collective.Program{Build: func(_ context.Context, b *collective.Builder) error { b.Kernel(less); return nil }}
		return errors.Join(
			r.refused(ctx, collective.Spec{Name: "less than a cluster", CUDA: less}, errs.ErrInvalid, "MinBlocks is 4", "at most 0 of 96 threads"),
			r.refused(ctx, collective.Spec{Name: "less than a cluster in a step", Program: lessStep}, errs.ErrInvalid, "MinBlocks is 4", "at most 0"),
			r.refused(ctx, collective.Spec{Name: "too few", CUDA: k}, errs.ErrInvalid, "MinBlocks is 10", "at most 9 of 96 threads", "max-blocks"),
			r.refused(ctx, collective.Spec{Name: "too few in a step", Program: step}, errs.ErrInvalid, "MinBlocks is 10", "at most 9", "max-blocks"))
	})
	assert.Empty(t, m.left())
}

// TestLimitFails: a device on which larger blocks do not fit takes part in a plan of smaller ones. One that could not be asked does not, whatever code
// that fails with.
func TestLimitFails(t *testing.T) {
	for _, call := range []string{"cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuCtxPushCurrent"} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(2, map[string]fake{"still": still})
			open := func(g *group.Group, near backend.Backend) (backend.Backend, error) {
				d := m.driver()
				push, resident := d.CtxPushCurrent, d.OccupancyMaxActiveBlocks
				var asked atomic.Bool // about the first of the sizes
				d.OccupancyMaxActiveBlocks = func(n *int32, f cu.FunctionHandle, threads int32, shared uint64) cu.Result {
					asked.Store(true)
					if g.Rank() == 1 && call != "cuCtxPushCurrent" && threads >= 256 {
						return cu.InvalidValue
					}
					return resident(n, f, threads, shared)
				}
				d.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
					if g.Rank() == 1 && call == "cuCtxPushCurrent" && asked.Swap(false) {
						return cu.InvalidValue
					}
					return push(c)
				}
				dev, err := cuda.Open(&cuda.Options{Driver: d, LocalRank: g.Rank()})
				return &gpuBackend{near, dev}, err
			}
			onRanks(t, 2, patience, open, func(ctx context.Context, r *rank) error {
				fit := func(threads int) collective.Spec {
					k := &collective.Kernel{Image: []byte(image), Function: "still", Fit: func(int) (int, int) { return 1, threads }}
					return collective.Spec{Name: "fitting", CUDA: k}
				}
				if call == "cuCtxPushCurrent" {
					return r.refused(ctx, fit(32), errs.ErrInvalid, "rank 1", call)
				}
				if err := r.refused(ctx, fit(256), errs.ErrInvalid, "1 blocks of 256 threads", "rank 1", call); err != nil {
					return err
				}
				p, err := collective.New(ctx, r.m, fit(64))
				if err != nil {
					return err
				}
				return p.Close(ctx)
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestCUDAPlanMoves: a plan of a kernel that keeps records moves to another stream when every block of every run has ended, though the
// stream has more to do, and not before; one that keeps none when its stream is idle. A launch that was refused is no run.
func TestCUDAPlanMoves(t *testing.T) {
	for _, first := range []uint32{0, 7, 1<<32 - 3} {
		t.Run(fmt.Sprintf("first=%d", first), func(t *testing.T) {
			m := newMachine(1, map[string]fake{"queued": {sizes: []int{int(unsafe.Sizeof(ptx.Comm{}))}, run: still.run}})
			refuse := false
			call := m.Call
			m.Call = func(name string, gpu int) cu.Result {
				if refuse && name == "cuLaunchKernelEx" {
					return cu.InvalidValue
				}
				return call(name, gpu)
			}
			onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
				const blocks = 4
				var c ptx.Comm
				p, err := collective.New(ctx, r.m, collective.Spec{Name: "queue", FirstEpoch: first, CUDA: &collective.Kernel{
					Image: []byte(image), Function: "queued", Blocks: blocks, Threads: 32,
					Params: func(a *collective.Addresses) []any { c = a.Comm(); return []any{c} },
				}})
				if err != nil {
					return err
				}
				set := func(f func()) { m.Mu.Lock(); f(); m.Mu.Unlock() }
				end := func(lo, hi, runs int) {
					for b := lo; b < hi; b++ {
						(*atomic.Uint32)(at(device.Ptr(c.Workspace[0]).Add(int64(b) * ptx.ControlBytes(1, 1)))).Add(uint32(runs))
					}
				}
				to, err := r.streams()
				if err != nil {
					return err
				}
				from := r.s
				for round := range 4 {
					set(func() { m.busy = true })
					for range round + 1 {
						if err := p.Run(from); err != nil {
							return err
						}
					}
					if err := p.Run(to); !errors.Is(err, errs.ErrTwoStreams) {
						return fmt.Errorf("round %d, with runs queued on another stream: %w", round, err)
					}
					end(0, blocks-1, round+1)
					if err := p.Run(to); !errors.Is(err, errs.ErrTwoStreams) {
						return fmt.Errorf("round %d, with the last block at work: %w", round, err)
					}
					end(blocks-1, blocks, round+1)
					set(func() { refuse = true })
					if err := p.Run(to); err == nil || errors.Is(err, errs.ErrTwoStreams) {
						return fmt.Errorf("round %d, a launch that is refused: %w", round, err)
					}
					set(func() { refuse = false })
					if err := p.Run(from); err != nil {
						return fmt.Errorf("round %d, when all has ended: %w", round, err)
					}
					if err := p.Run(to); !errors.Is(err, errs.ErrTwoStreams) {
						return fmt.Errorf("round %d, and again: %w", round, err)
					}
					// Without a record of it, and without a look at the records: the stream is idle.
					var looked int
					set(func() { m.busy, looked = false, m.copies })
					if err := p.Run(to); err != nil {
						return fmt.Errorf("round %d, idle: %w", round, err)
					}
					set(func() { looked = m.copies - looked })
					if looked != 0 {
						return fmt.Errorf("round %d, idle: %d copies", round, looked)
					}
					end(0, blocks, 2)
					from, to = to, from
				}
				if from == r.s {
					from = to
				}
				return errors.Join(from.Close(), p.Close(ctx))
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestCUDAFault: a kernel that has given up is the plan's last, told by the stream, and refused also before anybody has synchronized. One
// that was compiled for another version says so.
func TestCUDAFault(t *testing.T) {
	for _, version := range []bool{false, true} {
		t.Run(fmt.Sprintf("version=%t", version), func(t *testing.T) {
			var ran atomic.Int32
			fault := fake{sizes: []int{int(unsafe.Sizeof(ptx.Comm{}))}, run: func(grid cu.LaunchConfig, p []unsafe.Pointer) {
				ran.Add(1)
				if c := commAt(p[0], grid); version {
					c.fail(ptx.FaultVersion, 0)
				} else {
					c.fail(ptx.FaultTimeout, 1-int(c.Rank))
				}
			}}
			m := newMachine(2, map[string]fake{"fault": fault})
			onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
				p, err := collective.New(ctx, r.m, collective.Spec{Name: "fault", CUDA: &collective.Kernel{
					Image: []byte(image), Function: "fault", Blocks: 1, Threads: 32,
					Params: func(a *collective.Addresses) []any { return []any{a.Comm()} },
				}})
				if err != nil {
					return err
				}
				right := func(err error) error {
					if version {
						if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "compile it again") {
							return fmt.Errorf("another version: %w", err)
						}
						return nil
					}
					wait, ok := errors.AsType[*device.WaitError](err)
					if !ok || wait.Op != "fault" || wait.Peer != 1-r.Rank() || !errors.Is(err, os.ErrDeadlineExceeded) {
						return fmt.Errorf("a fault: %w", err)
					}
					return nil
				}
				if err := p.Run(r.s); err != nil {
					return err
				}
				if err := errors.Join(right(p.Run(r.s)), right(r.s.Synchronize(ctx)), right(p.Err()), right(p.Run(r.s))); err != nil {
					return err
				}
				return errors.Join(r.Barrier(ctx, "failed"), p.Close(ctx))
			})
			assert.Equal(t, int32(2), ran.Load(), "none runs after a fault")
			assert.Empty(t, m.left())
		})
	}
}

// TestLateKernel: a kernel whose peer does not come gives up in time.
func TestLateKernel(t *testing.T) {
	m := newMachine(2, map[string]fake{"exchange": exchange})
	onRanks(t, 2, 50*time.Millisecond, m.open, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, r.exchanging())
		if err != nil {
			return err
		}
		if r.Rank() == 0 {
			if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("alone: %w", err)
			}
		}
		return errors.Join(r.Barrier(ctx, "late"), p.Close(ctx))
	})
	assert.Empty(t, m.left())
}

// TestWrongKernels: what a kernel must not be is every rank's error with the value, whichever rank has it; the memory goes on, and nothing
// is left of it. The same holds for a step of a program.
func TestWrongKernels(t *testing.T) {
	one := 1
	type change = func(k *collective.Kernel)
	params := func(values ...any) change {
		return func(k *collective.Kernel) { k.Params = func(*collective.Addresses) []any { return values } }
	}
	fit := func(blocks, threads int) change {
		return func(k *collective.Kernel) { k.Fit = func(int) (int, int) { return blocks, threads } }
	}
	for _, c := range []struct {
		what   string
		change change
		want   error
		says   string
		plan   bool // only of a plan's own kernel
	}{
		{"no image", func(k *collective.Kernel) { k.Image = nil }, errs.ErrInvalid, "CUDA.Image", false},
		{"damaged image", func(k *collective.Kernel) { k.Image = []byte("\x7fELF") }, errs.ErrInvalid, "4 bytes", false},
		{"text", func(k *collective.Kernel) { k.Image = []byte("hello") }, errs.ErrInvalid, ".version", false},
		{"no function", func(k *collective.Kernel) { k.Function = "" }, errs.ErrInvalid, "CUDA.Function", false},
		{"another function", func(k *collective.Kernel) { k.Function = "nobody" }, errs.ErrInvalid, "nobody", false},
		{"no blocks", func(k *collective.Kernel) { k.Blocks = 0 }, errs.ErrInvalid, "CUDA.Blocks is 0", false},
		{"negative blocks", func(k *collective.Kernel) { k.Blocks = -1 }, errs.ErrInvalid, "CUDA.Blocks is -1", false},
		{"huge blocks", func(k *collective.Kernel) { k.Blocks = 1<<32 + 1 }, errs.ErrInvalid, "4294967297", false},
		{"no threads", func(k *collective.Kernel) { k.Threads = 0 }, errs.ErrInvalid, "CUDA.Threads is 0", false},
		{"threads", func(k *collective.Kernel) { k.Threads = 1025 }, errs.ErrInvalid, "1025", false},
		{"huge threads", func(k *collective.Kernel) { k.Threads = 1<<32 + 32 }, errs.ErrInvalid, "4294967328", false},
		{"min blocks", func(k *collective.Kernel) { k.MinBlocks = -1 }, errs.ErrInvalid, "CUDA.MinBlocks is -1", false},
		{"too many min blocks", func(k *collective.Kernel) { k.Blocks, k.MinBlocks = 100, 32 }, errs.ErrInvalid, "at most 31", true},
		{"shared", func(k *collective.Kernel) { k.SharedBytes = -1 }, errs.ErrInvalid, "-1", false},
		{"much shared", func(k *collective.Kernel) { k.SharedBytes = 1 << 20 }, errs.ErrInvalid, "1048576", false},
		{"huge shared", func(k *collective.Kernel) { k.SharedBytes = 1 << 32 }, errs.ErrInvalid, "4294967296", false},
		{"block workspace", func(k *collective.Kernel) { k.BlockWorkspace = -1 }, errs.ErrInvalid, "-1", false},
		{"huge block workspace", func(k *collective.Kernel) { k.BlockWorkspace = math.MaxInt64/2 + 1 }, errs.ErrInvalid, "4611686018427387904", true},
		{"fit no blocks", fit(0, 64), errs.ErrInvalid, "0 blocks", false},
		{"fit negative blocks", fit(-5, 64), errs.ErrInvalid, "-5 blocks", false},
		{"fit no threads", fit(1, 0), errs.ErrInvalid, "0 threads", false},
		{"fit odd threads", fit(1, 100), errs.ErrInvalid, "100 threads", false},
		{"fit too many threads", fit(1, 2048), errs.ErrInvalid, "2048 threads", false},
		{"no params", func(k *collective.Kernel) { k.Params = nil }, errs.ErrInvalid, "2, as many", false},
		{"few params", params(int32(1)), errs.ErrInvalid, "2, as many", false},
		{"many params", params(int32(1), int64(1), int32(1)), errs.ErrInvalid, "2, as many", false},
		{"wrong size", params(int64(1), int64(1)), errs.ErrInvalid, "Params[0]", false},
		{"int", params(1, int64(1)), errs.ErrInvalid, "Params[0] is int;", false},
		{"string", params(int32(1), "12345678"), errs.ErrInvalid, "Params[1] is string;", false},
		{"bool", params(int32(1), true), errs.ErrInvalid, "Params[1] is bool;", false},
		{"pointer", params(int32(1), &one), errs.ErrInvalid, "Params[1] is *int;", false},
		{"pointer to a number", params(new(int32), int64(1)), errs.ErrInvalid, "Params[0] is *int32;", false},
		{"nil", params(nil, int64(1)), errs.ErrInvalid, "Params[0]", false},
		{"slice", params([]int32{1}, int64(1)), errs.ErrInvalid, "Params[0] is []int32;", false},
		{"no bytes", params([]byte{}, int64(1)), errs.ErrInvalid, "Params[0]", false},
		{"empty struct", params(struct{}{}, int64(1)), errs.ErrInvalid, "Params[0]", false},
		{"padding", params(int32(1), struct {
			A int8
			B int32
		}{}), errs.ErrInvalid, "of 8 bytes, of which 5", false},
		{"a wrong address", func(k *collective.Kernel) {
			k.Params = func(a *collective.Addresses) []any { return []any{int32(1), a.Tensor(3, 0)} }
		}, errs.ErrInvalid, "one of 1 tensors", false},
		{"an upload of nothing", func(k *collective.Kernel) {
			k.Params = func(a *collective.Addresses) []any { a.Upload([]byte{1}); return []any{int32(1), a.Upload(nil)} }
		}, errs.ErrInvalid, "", false},
		{"host memory", func(k *collective.Kernel) {
			k.Params = func(a *collective.Addresses) []any { a.Bytes(a.Workspace(0), 8); return []any{int32(1), int64(1)} }
		}, errs.ErrUnsupported, "as a slice", false},
	} {
		for _, step := range []bool{false, true} {
			if step && c.plan {
				continue
			}
			t.Run(fmt.Sprintf("%s/step=%t", c.what, step), func(t *testing.T) {
				m := newMachine(2, map[string]fake{"two": {sizes: []int{4, 8}, run: still.run}})
				onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
					spec := func(bad bool) collective.Spec {
						k := collective.Kernel{Image: []byte(image), Function: "two", Blocks: 2, Threads: 64}
						params(int32(1), r.x.Ptr())(&k)
						if bad {
							c.change(&k)
						}
						s := collective.Spec{Name: "wrong", Tensors: []tensor.SymmetricTensor{r.x}, CUDA: &k}
						if step {
							s.CUDA, s.Program = nil, &collective.Program{Build: func(_ context.Context, b *collective.Builder) error { b.Kernel(&k); return nil }}
						}
						return s
					}
					var had any
					for bad := range 4 { // on none, on one rank, on the other, on all
						mine := bad == 3 || bad == r.Rank()+1
						if bad > 0 {
							want := c.want
							if bad < 3 && !step {
								want = nil // it may be a difference
							}
							says := c.says
							if step {
								says = strings.Replace(says, "CUDA.", "Builder.Kernel: k.", 1)
							}
							if want == nil {
								says = ""
							}
							if err := r.refused(ctx, spec(mine), want, says); err != nil {
								return fmt.Errorf("on %d: %w", bad, err)
							}
						}
						p, err := collective.New(ctx, r.m, spec(false))
						if err != nil {
							return err
						}
						if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx)); err != nil {
							return err
						}
						now := held(r)
						now.Modules = 0 // they stay with the memory
						if had == nil {
							had = now
						} else if now != had {
							return fmt.Errorf("on %d: the device holds %+v, and had %+v", bad, now, had)
						}
					}
					return nil
				})
				assert.Empty(t, m.left())
			})
		}
	}
}

// TestCUDAForms: on a GPU the kernel is taken of all forms, and where there is only one for the CPU every rank is told. A step of the host
// is none of a GPU's.
func TestCUDAForms(t *testing.T) {
	ran := [2]atomic.Int32{}
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		k := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32, Params: func(*collective.Addresses) []any {
			ran[r.Rank()].Add(1)
			return nil
		}}
		host := r.forms(nil)[0].spec.Host
		none := &collective.Program{Build: func(context.Context, *collective.Builder) error { return errOwn }}
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "any", CUDA: k, Host: host, Program: none})
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx)); err != nil {
			return err
		}
		if ran[r.Rank()].Load() != 1 {
			return errors.New("it is another form")
		}
		steps := &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
			b.Host(func() error { return nil })
			return nil
		}}
		return errors.Join(
			r.refused(ctx, collective.Spec{Name: "host", Host: host}, errs.ErrUnsupported, "host devices only"),
			r.refused(ctx, collective.Spec{Name: "step", Program: steps}, errs.ErrUnsupported, "a step of the host"),
		)
	})
	assert.Empty(t, m.left())
}

// large makes a plan of each spec, of a kernel that takes a large part of the GPU, and a stream for each.
func (r *rank) large(ctx context.Context, specs ...collective.Spec) (plans []*collective.Plan, streams []device.Stream, err error) {
	for _, spec := range specs {
		spec.CUDA = &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 100, Threads: 32}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return nil, nil, err
		}
		s, err := r.streams()
		if err != nil {
			return nil, nil, err
		}
		plans, streams = append(plans, p), append(streams, s)
	}
	return plans, streams, nil
}

// TestRoom: plans that would not fit the device together are refused on the third stream, until one is closed or moves. A small one fits beside them, and a large
// one too when a tensor of another was closed.
func TestRoom(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	setBusy := func(busy bool) { m.Mu.Lock(); m.busy = busy; m.Mu.Unlock() }
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		x, err := r.tensor(ctx, 16)
		if err != nil {
			return err
		}
		plans, streams, err := r.large(ctx, collective.Spec{Name: "large"}, collective.Spec{Name: "of a tensor", Tensors: []tensor.SymmetricTensor{x}}, collective.Spec{Name: "third"})
		if err != nil {
			return err
		}
		if err := errors.Join(plans[0].Run(streams[0]), plans[1].Run(streams[1])); err != nil {
			return err
		}
		err = plans[2].Run(streams[2])
		if room, ok := errors.AsType[*collective.RoomError](err); !ok || room.Streams != 2 || !errors.Is(err, errs.ErrNoRoom) {
			return fmt.Errorf("a third plan: %w", err)
		}
		small, err := collective.New(ctx, r.m, collective.Spec{Name: "small", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}})
		if err != nil {
			return err
		}
		if err := errors.Join(small.Run(streams[2]), small.Close(ctx)); err != nil {
			return fmt.Errorf("a small plan: %w", err)
		}
		if err := plans[2].Run(streams[0]); err != nil {
			return fmt.Errorf("a third plan behind the first: %w", err)
		}
		if err := plans[2].Run(streams[2]); !errors.Is(err, errs.ErrNoRoom) {
			return fmt.Errorf("a third plan that moves: %w", err)
		}
		if err := r.Barrier(ctx, "moved in vain"); err != nil {
			return err
		}
		setBusy(true) // what there is no room beside is at work
		if err := errors.Join(plans[2].Run(streams[0]), r.Barrier(ctx, "at work")); err != nil {
			return fmt.Errorf("a third plan that had no room elsewhere, where it was: %w", err)
		}
		setBusy(false)
		if err := errors.Join(r.m.Device().Synchronize(ctx), plans[0].Close(ctx), plans[2].Run(streams[2])); err != nil {
			return err
		}
		fourth, err := collective.New(ctx, r.m, collective.Spec{Name: "fourth", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 100, Threads: 32}})
		if err != nil {
			return err
		}
		if err := fourth.Run(streams[0]); !errors.Is(err, errs.ErrNoRoom) {
			return fmt.Errorf("a fourth plan: %w", err)
		}
		if err := errors.Join(x.Close(ctx), fourth.Run(streams[0])); err != nil {
			return fmt.Errorf("a fourth plan when a tensor of the second is closed: %w", err)
		}
		if err := errors.Join(fourth.Close(ctx), plans[1].Close(ctx), plans[2].Close(ctx)); err != nil {
			return err
		}
		return errors.Join(streams[0].Close(), streams[1].Close(), streams[2].Close())
	})
	assert.Empty(t, m.left())
}

// TestWrongWaiting: a run has each of a program's kernels that wait for peers once at most, as its records count launches, and no other.
func TestWrongWaiting(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		for _, c := range []struct {
			steps []int
			says  string
		}{
			{[]int{0}, ""},
			{[]int{1}, "one of 1 kernels"},
			{[]int{-1}, "one of 1 kernels"},
			{[]int{0, 0}, "does not have yet"},
		} {
			spec := collective.Spec{Name: "waiting", Program: &collective.Program{
				Kernels: []*collective.Kernel{{Image: []byte(image), Function: "still", Blocks: 2, Threads: 32}},
				Build: func(_ context.Context, b *collective.Builder) error {
					for _, i := range c.steps {
						b.Waiting(i)
					}
					return nil
				},
			}}
			if c.says != "" {
				if err := r.refused(ctx, spec, errs.ErrInvalid, c.says); err != nil {
					return fmt.Errorf("%v: %w", c.steps, err)
				}
				continue
			}
			p, err := collective.New(ctx, r.m, spec)
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
	assert.Empty(t, m.left())
}

// TestFullQueueHoldsUpNobodyElse: a launch that waits for room in the driver's queue, and a plan of the same rank that looks whether its stream is closed, do not hold up the first run of
// another rank's plan, for which that launch may wait.
func TestFullQueueHoldsUpNobodyElse(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	var full atomic.Bool
	waits, room, looks, ran := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	call := m.Call
	m.Call = func(name string, gpu int) cu.Result {
		if name == "cuLaunchKernelEx" && full.CompareAndSwap(true, false) {
			m.Mu.Unlock() // which is the whole machine's
			close(waits)
			<-room
			m.Mu.Lock()
		}
		return call(name, gpu)
	}
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 0"}, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		end := func(err error) error {
			for i := range plans {
				err = errors.Join(err, plans[i].Close(ctx), streams[i].Close())
			}
			return err
		}
		if r.Rank() == 1 {
			<-looks
			go func() {
				defer close(ran)
				assert.NoError(t, plans[0].Run(streams[0]))
			}()
			select {
			case <-ran:
			case <-time.After(10 * time.Second):
				t.Error("another rank's plan was held up")
			}
			close(room)
			<-ran
			return end(nil)
		}
		if err := errors.Join(plans[0].Run(streams[0]), plans[1].Run(streams[1])); err != nil {
			return err
		}
		full.Store(true)
		both := make(chan error, 2)
		go func() { both <- plans[0].Run(streams[0]) }()
		<-waits
		go func() {
			err := plans[2].Run(streams[2])
			if !errors.Is(err, errs.ErrNoRoom) {
				both <- fmt.Errorf("a third plan: %w", err)
				return
			}
			both <- nil
		}()
		time.Sleep(200 * time.Millisecond) // for it to look
		close(looks)
		return end(errors.Join(<-both, <-both))
	})
	assert.Empty(t, m.left())
}
