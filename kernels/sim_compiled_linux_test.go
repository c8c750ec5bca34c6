package kernels

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/ptxvm"
	"github.com/symmem/symmem/kernels/ptx"
)

// compiled reports whether a simDevice runs a kernel as it was compiled, on the machine for PTX, between goroutines that are the ranks. That is
// sequentially consistent; package ptxvm's own tests run them under weak memory.
func (f simFunction) compiled() bool {
	return slices.ContainsFunc([]string{
		ptx.PushLines(false).Name, ptx.PushAllToAllV.Name, ptx.Meet(false).Name, "symmem_scatter_", "symmem_rms_norm_", "symmem_quantize", "symmem_dequantize_", ptx.Cast.Name, "symmem_allreduce_oneshot_multimem_", wholeLists,
		ptx.ManyLines(false).Name, ptx.ManyMoves.Name, "symmem_many_scatter_",
	}, func(name string) bool { return strings.HasPrefix(f.name, name) })
}

// wholeLists is how the names of the kernels for lists of whole vectors begin.
const wholeLists = "symmem_allreduce_many_push_whole_"

// compiledLaunch is a launch of a compiled kernel.
type compiledLaunch struct {
	simFunction
	launch device.Launch
	memory *ptxvm.Memory // once it was launched
}

var compiledModules sync.Map // by the hash of the image

func compiledModule(name string, image []byte) (*ptxvm.Module, error) {
	key := sha256.Sum256(image)
	if m, ok := compiledModules.Load(key); ok {
		return m.(*ptxvm.Module), nil
	}
	m, err := ptxvm.Parse(name, image)
	if err == nil {
		compiledModules.Store(key, m)
	}
	return m, err
}

// run runs the launch on a machine of its own, whose memory is this process's.
func (l *compiledLaunch) run() error {
	module, err := compiledModule(l.name, l.image)
	if err != nil {
		return err
	}
	if l.memory == nil {
		l.memory = ptxvm.NewMemory()
		if err := l.mapAll(l.memory); err != nil {
			return err
		}
	}
	m := ptxvm.New(l.memory, ptxvm.Config{Turn: 200})
	err = m.NewStream(0).Launch(ptxvm.Launch{Function: module.Function(l.name), Grid: l.launch.Grid, Block: l.launch.Block, Params: l.launch.Params, Overlap: l.launch.Overlap})
	for err == nil {
		var idle bool
		if idle, err = m.Step(256); idle {
			return err
		}
		runtime.Gosched() // a kernel that waits leaves the processor to those that it waits for
	}
	return err
}

// mapAll maps whatever the words of the parameters, and of the tables that they name, may be addresses of: whole mappings of the process that are
// no heap of Go's, and pieces of that as the device knows them.
func (l *compiledLaunch) mapAll(memory *ptxvm.Memory) error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	var ranges [][2]uint64
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n == 3 && strings.HasPrefix(mode, "rw") {
			ranges = append(ranges, [2]uint64{from, to})
		}
	}
	var queue [][]byte
	queue = append(queue, l.launch.Params...)
	done := map[uint64]bool{}
	var casts []castCopies // which come last: what they stand for is mapped then
	l.dev.casts.Range(func(_, c any) bool {
		cast := c.(castCopies)
		var where []byte
		for _, copy := range cast.copies {
			where = binary.LittleEndian.AppendUint64(where, copy)
		}
		queue, casts = append(queue, where), append(casts, cast)
		return true
	})
	for len(queue) > 0 {
		words := queue[0]
		queue = queue[1:]
		for i := 0; i+8 <= len(words); i += 8 {
			p := binary.LittleEndian.Uint64(words[i:])
			for _, r := range ranges {
				if p < r[0] || p >= r[1] {
					continue
				}
				if _, err := l.dev.mem.Bytes(device.Ptr(p), 1); err != nil {
					continue // a number like any other
				}
				base, b := l.known(p, r)
				if done[base] {
					continue
				}
				done[base] = true
				if err := memory.Map(base, b); err != nil {
					return err
				}
				if len(b) <= 1<<14 { // it may be a table
					queue = append(queue, append([]byte(nil), b...))
				}
			}
		}
	}
	for _, c := range casts {
		if err := memory.Multicast(uint64(c.at), uint64(c.bytes), c.copies...); err != nil {
			return err
		}
	}
	return nil
}

// known is all that the device knows around an address, of which it is the beginning or an inner one.
func (l *compiledLaunch) known(p uint64, within [2]uint64) (base uint64, b []byte) {
	grow := func(most uint64, ok func(n uint64) bool) uint64 { // the most for which it holds
		var n uint64
		for step := most; step > 0; step /= 2 {
			for n+step <= most && ok(n+step) {
				n += step
			}
		}
		return n
	}
	before := grow(p-within[0], func(n uint64) bool {
		_, err := l.dev.mem.Bytes(device.Ptr(p-n), int64(n+1)) // with p, or it may be the end of another piece
		return err == nil
	})
	base = p - before
	length := grow(within[1]-base, func(n uint64) bool {
		_, err := l.dev.mem.Bytes(device.Ptr(base), int64(n))
		return err == nil
	})
	b, _ = l.dev.mem.Bytes(device.Ptr(base), int64(length))
	return base, b
}
