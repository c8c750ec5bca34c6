package ptx

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/symmem/symmem/internal/errs"
)

// images finds the PTX of a file; nil until it is registered.
var images atomic.Pointer[func(file string) ([]byte, error)]

// Register says where [Image] finds compiled kernels. Package kernels/ptx/images, which carries them, calls it when it is initialized.
func Register(image func(file string) ([]byte, error)) { images.Store(&image) }

// Image is the PTX of a file that a [Kernel] names, to be given to the driver. ErrUnsupported if the program carries no compiled
// kernels; another error if there is no such file. Safe for concurrent use.
func Image(file string) ([]byte, error) {
	image := images.Load()
	if image == nil {
		return nil, fmt.Errorf(`this program carries no compiled kernels, such as %s: import _ "github.com/symmem/symmem/kernels/ptx/images", as backends with CUDA devices do: %w`,
			file, errs.ErrUnsupported)
	}
	return (*image)(file)
}

// Form is how an all-reduce moves data.
type Form uint8

// The forms. OneShotLL, the Push forms and TwoShotFlow send before they wait and never read other ranks' inputs; the Pull and
// Multimem forms begin with a barrier.
const (
	OneShotLL       Form = iota + 1 // push lines with flags; every dtype
	OneShotPush                     // push lines that are all data; f32, f16, bf16
	OneShotPull                     // load every input
	TwoShotPush                     // push shards, then results; f32, f16, bf16
	TwoShotPull                     // load the own shard of every input, store to every output
	TwoShotFlow                     // push shards in laps, store to every output
	OneShotMultimem                 // add in the switch; f32, f16, bf16
	TwoShotMultimem                 // add and broadcast in the switch; f32, f16, bf16
)

var formNames = [...]string{
	OneShotLL: "oneshot_ll", OneShotPush: "oneshot_push", OneShotPull: "oneshot_pull", TwoShotPush: "twoshot_push",
	TwoShotPull: "twoshot_pull", TwoShotFlow: "twoshot_flow",
	OneShotMultimem: "oneshot_multimem", TwoShotMultimem: "twoshot_multimem",
}

// Forms lists all forms.
func Forms() []Form {
	return []Form{OneShotLL, OneShotPush, OneShotPull, TwoShotPush, TwoShotPull, TwoShotFlow, OneShotMultimem, TwoShotMultimem}
}

// String gives the name: "oneshot_ll".
func (f Form) String() string {
	if f == 0 || int(f) >= len(formNames) {
		return fmt.Sprintf("Form(%d)", f)
	}
	return formNames[f]
}

// The operations, with the values of kernels.Op and of [Params].
const (
	Sum = iota + 1
	Prod
	Min
	Max
	Avg
)

// MaxThreads is the most threads a block of any all-reduce kernel may have, MaxPutThreads one of PutSignal, and MaxPutWaitThreads one of PutSignalWait, which
// keeps its room while it waits.
const (
	MaxThreads        = 512
	MaxPutThreads     = 1024
	MaxPutWaitThreads = 512
)

// Kernel is one compiled kernel.
type Kernel struct {
	File string // for Image: "signals.ptx"
	Name string // of the function
	// Overlap says that the kernel waits by itself for the work before it, so that it may be launched with programmatic
	// stream serialization.
	Overlap bool
}

// The kernels of signals. All take Params and are one block. PutSignal and PutSignalWait copy Count bytes from In[0] to Out[0] before; PutSignalWait waits for
// the rank Shard after.
var (
	Barrier       = Kernel{File: "signals.ptx", Name: "symmem_barrier"}
	PutSignal     = Kernel{File: "signals.ptx", Name: "symmem_put_signal"}
	PutSignalWait = Kernel{File: "signals.ptx", Name: "symmem_put_signal_wait"}
	Signal        = Kernel{File: "signals.ptx", Name: "symmem_signal"}
	SignalAll     = Kernel{File: "signals.ptx", Name: "symmem_signal_all"}
	Wait          = Kernel{File: "signals.ptx", Name: "symmem_wait"}
	WaitAll       = Kernel{File: "signals.ptx", Name: "symmem_wait_all"}
)

// Hopper reports whether a device is a GPU of compute capability 9.0 or later, by its method ComputeCapability, which gives ten times the major number plus
// the minor one.
func Hopper(device any) bool {
	g, ok := device.(interface{ ComputeCapability() int })
	return ok && g.ComputeCapability() >= 90
}

// SignalOn is a kernel of signals for a device; hopper says that it has compute capability 9.0 or later.
func SignalOn(k Kernel, hopper bool) Kernel {
	if hopper {
		k.File, k.Overlap = "signals_sm90.ptx", true
	}
	return k
}

// Pull is the kernel that moves pieces between ranks. It takes Comm and Pieces, and has as many blocks as are of use. hopper is as for AllReduce.
func Pull(hopper bool) Kernel {
	k := Kernel{File: "pull.ptx", Name: "symmem_pull"}
	if hopper {
		k.File, k.Overlap = "pull_sm90.ptx", true
	}
	return k
}

var (
	dtypes   = []string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}
	pushable = []string{"f16", "bf16", "f32"}
)

// PushWhole finds the kernel that takes the place of AllReduce's for OneShotPush and TwoShotPush where every rank's input and output begin at
// multiples of 16 and are whole vectors of 16 bytes, and whether there is one. It takes PushParams, and has the same Layout.
func PushWhole(form Form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	if form != OneShotPush && form != TwoShotPush {
		return Kernel{}, false
	}
	k, ok := AllReduce(form, dtype, op, world, hopper)
	k.Name = strings.Replace(k.Name, "_push_", "_push_whole_", 1)
	return k, ok
}

// PushLong finds the kernel that takes the place of PushWhole's for long messages of OneShotPush, and whether there is one: a multiprocessor holds more blocks of it. There is one between two ranks.
func PushLong(form Form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	return pushLong("_push_long_", form, dtype, op, world, hopper)
}

// PushLonger finds the kernel that takes the place of PushLong's where each thread has several vectors, and whether there is one: the rank's own elements do not go through the workspace.
func PushLonger(form Form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	return pushLong("_push_longer_", form, dtype, op, world, hopper)
}

func pushLong(name string, form Form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	if form != OneShotPush || world != 2 {
		return Kernel{}, false
	}
	k, ok := AllReduce(form, dtype, op, world, hopper)
	k.Name = strings.Replace(k.Name, "_push_", name, 1)
	return k, ok
}

// AllReduce finds the kernel for a form, a dtype by its short name ("bf16"), an operation and a world size of at least 1, and
// whether there is one. hopper says that the device has compute capability 9.0 or later; then kernels that overlap with the
// work before them are preferred.
func AllReduce(form Form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	if !slices.Contains(dtypes, dtype) || op < Sum || op > Avg || world < 1 {
		return Kernel{}, false
	}
	float := slices.Contains(pushable, dtype)
	special := float && world >= 2 && world <= 8 && (op == Sum || op == Avg)
	name := "symmem_allreduce_" + form.String() + "_" + dtype
	switch form {
	case OneShotMultimem, TwoShotMultimem:
		return Kernel{File: "multimem.ptx", Name: name + "_sum_wn"}, hopper && float && op == Sum
	case OneShotPush, TwoShotPush:
		k := Kernel{File: fmt.Sprintf("push_%s_w%d.ptx", dtype, world), Name: fmt.Sprintf("%s_sum_w%d", name, world)}
		if hopper {
			k.File, k.Overlap = fmt.Sprintf("push_%s_w%d_sm90.ptx", dtype, world), true
		}
		return k, special
	case OneShotPull, TwoShotPull, TwoShotFlow:
		if special {
			return Kernel{File: fmt.Sprintf("pull_%s_w%d.ptx", dtype, world), Name: fmt.Sprintf("%s_sum_w%d", name, world)}, true
		}
		return Kernel{File: "any_" + dtype + ".ptx", Name: name + "_any_wn"}, true
	case OneShotLL:
		return Kernel{File: "any_" + dtype + ".ptx", Name: name + "_any_wn"}, true
	}
	return Kernel{}, false
}

// ManyOneShot and ManyPull find the kernels that all-reduce a list of tensors of a dtype, by its short name. They take Params and Many. hopper
// is as for [AllReduce].
func ManyOneShot(dtype string, hopper bool) (Kernel, bool) {
	k := Kernel{File: "many_" + dtype + ".ptx", Name: "symmem_many_oneshot_" + dtype}
	if hopper && slices.Contains(pushable, dtype) {
		k.File, k.Overlap = "many_"+dtype+"_sm90.ptx", true
	}
	return k, slices.Contains(dtypes, dtype)
}

// ManyPushWhole finds the kernel that takes the place of ManyOneShot's where every rank's inputs and outputs begin at multiples of 16 and are whole
// vectors of 16 bytes, and whether there is one. It takes PushParams and Many, and has the same workspace.
func ManyPushWhole(dtype string, op, world int, hopper bool) (Kernel, bool) {
	k, ok := AllReduce(OneShotPush, dtype, op, world, hopper)
	k.Name = strings.Replace(k.Name, OneShotPush.String(), "many_push_whole", 1)
	return k, ok
}

// ManyPull is described with ManyOneShot.
func ManyPull(dtype string) (Kernel, bool) {
	return Kernel{File: "many_" + dtype + ".ptx", Name: "symmem_many_pull_" + dtype}, slices.Contains(dtypes, dtype)
}

// ManyScatter finds the kernel that reduce-scatters a list of tensors of a dtype by pushing shares. It takes Params and Many, and has the workspace of ManyOneShot. hopper is as for
// [AllReduce]. ManyPull's does it by loads.
func ManyScatter(dtype string, hopper bool) (Kernel, bool) {
	k, ok := ManyOneShot(dtype, hopper)
	k.Name = "symmem_many_scatter_" + dtype
	return k, ok
}

// ManyLines and ManyMoves are the kernels that move the bytes of a list of tensors from one rank to all others, or from all to all: by pushing lines of 8 bytes, and by loads. They take Params
// and Many. Of ManyLines the workspace has two buffers of Params.Span bytes for each rank.
func ManyLines(hopper bool) Kernel {
	k := Kernel{File: "many_moves.ptx", Name: "symmem_many_lines"}
	if hopper {
		k.File, k.Overlap = "many_moves_sm90.ptx", true
	}
	return k
}

// ManyMoves is described with ManyLines.
var ManyMoves = Kernel{File: "many_moves.ptx", Name: "symmem_many_moves"}

// LineBytes is how many bytes of data a line with flags has, of ManyLines' kernel and others.
const LineBytes = 8

// ManyLine is how many bytes of a message are in one line of ManyOneShot, which has 16.
func ManyLine(dtype string) int64 {
	if slices.Contains(pushable, dtype) {
		return vector
	}
	return vector / 2
}

// ManyCopy is the kernel that copies a list of tensors whose elements have so many bytes, between memory of one device. It takes Many.
func ManyCopy(width int64) Kernel {
	return Kernel{File: "many_copy.ptx", Name: fmt.Sprintf("symmem_many_copy_%d", width)}
}
