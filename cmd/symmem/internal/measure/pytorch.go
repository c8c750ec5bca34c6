package measure

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// pytorchScript is what a process of the peer runs. Its text says what the two say to each other.
//
//go:embed pytorch.py
var pytorchScript string

const (
	// pytorchInterpreter runs the script unless another one is named.
	pytorchInterpreter = "python3"
	// pytorchTime bounds each wait for a process of the peer: loading PyTorch takes long where no file is in memory yet. So do three quarters of what ranks wait for each other, so that
	// one whose process does not answer still tells the others; the processes wait for half of that.
	pytorchTime = 3 * time.Minute
	// pytorchEnd is how long a process gets to end by itself.
	pytorchEnd = 5 * time.Second
)

// pytorchForms are the all-reduces that are measured.
var pytorchForms = []string{"one_shot_all_reduce", "two_shot_all_reduce_"}

// PyTorchHas reports whether PyTorch's symmetric memory can reduce a dtype by an operation.
func PyTorchHas(dtype tensor.DType, op kernels.Op) bool {
	return (dtype == tensor.BFloat16 || dtype == tensor.Float32) && op == kernels.Sum
}

// pytorchPeer is the process that measures PyTorch's symmetric memory for a rank of bench, on the same GPU. It does nothing while the rank measures, and the rank does nothing
// while it does.
type pytorchPeer struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     io.Closer
	within  time.Duration      // bounds each wait
	answers chan pytorchAnswer // closed when the process has ended
	ended   error              // how; to be read after that
	said    lastWords
	about   string
}

// pytorchJob is the first request.
type pytorchJob struct {
	Rank    int     `json:"rank"`
	Ranks   int     `json:"ranks"`
	Device  int     `json:"device"` // number of the GPU in CUDA
	UUID    string  `json:"uuid"`
	DType   string  `json:"dtype"`
	Graph   bool    `json:"graph"`
	Timeout float64 `json:"timeout"` // of coming together, in seconds
}

// pytorchMeeting is the second request: where the processes meet.
type pytorchMeeting struct {
	Port int `json:"port"`
}

// pytorchSize is a request to measure.
type pytorchSize struct {
	Bytes       int64 `json:"bytes"`
	Iterations  int   `json:"iterations"`
	Each        int   `json:"each"` // in a graph
	Repetitions int   `json:"repetitions"`
}

// pytorchAnswer is the answer to any request.
type pytorchAnswer struct {
	Version string               `json:"version,omitempty"`
	Port    int                  `json:"port,omitempty"`
	Times   map[string][]float64 `json:"times,omitempty"` // by form and repetition, in microseconds
	Error   string               `json:"error,omitempty"` // why it is not measured
	Wrong   string               `json:"wrong,omitempty"` // which result is not right
}

// lastWords keeps the end of what is written.
type lastWords struct {
	mu   sync.Mutex
	text []byte
}

func (l *lastWords) Write(b []byte) (int, error) {
	const most = 4096
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	l.text = l.text[max(len(l.text)-most, 0):]
	return len(b), nil
}

// line returns the last line.
func (l *lastWords) line() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := bytes.TrimSpace(l.text)
	return string(text[bytes.LastIndexByte(text, '\n')+1:])
}

// startPyTorch starts the process. The environment is this process's. What it says of multicast stays as it is: multicast is switched off only where it says nothing, and the setting
// does not switch it on.
func startPyTorch(ctx context.Context, spec *PeerSpec) (*pytorchPeer, error) {
	interpreter := spec.Library
	if interpreter == "" {
		interpreter = pytorchInterpreter
	}
	p := &pytorchPeer{cmd: exec.CommandContext(ctx, interpreter, "-c", pytorchScript), within: min(pytorchTime, spec.Timeout/4*3), answers: make(chan pytorchAnswer, 1)}
	p.cmd.Env = os.Environ()
	for name, off := range map[string]string{"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"} {
		if os.Getenv(name) == "" && !spec.Multicast { // what is empty says nothing to them
			p.cmd.Env = append(p.cmd.Env, name+"="+off)
		}
	}
	p.cmd.Stderr, p.cmd.WaitDelay = &p.said, pytorchEnd
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = out
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting Python: %w; name another interpreter by --peer-library", err)
	}
	go func() {
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var a pytorchAnswer
			if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
				a = pytorchAnswer{Error: "it says " + strconv.Quote(lines.Text()) + ", which is no answer"}
			}
			p.answers <- a
		}
		p.ended = errors.Join(lines.Err(), p.cmd.Wait())
		close(p.answers)
	}()
	return p, nil
}

// ask makes a request and waits for the answer. After an error the process can only be closed.
func (p *pytorchPeer) ask(ctx context.Context, request any) (pytorchAnswer, error) {
	text, err := json.Marshal(request)
	if err != nil {
		return pytorchAnswer{}, err
	}
	_, _ = p.in.Write(append(text, '\n')) // fails where the process has ended, which the answer says better
	ctx, cancel := context.WithTimeoutCause(ctx, p.within, fmt.Errorf("PyTorch has not answered within %v", p.within))
	defer cancel()
	select {
	case a, ok := <-p.answers:
		if ok {
			return a, nil
		}
		why := p.said.line()
		if p.ended != nil {
			why = strings.TrimSuffix(fmt.Sprintf("%v: %s", p.ended, why), ": ")
		}
		return a, fmt.Errorf("the Python process has ended: %s", why)
	case <-ctx.Done():
		return pytorchAnswer{}, context.Cause(ctx)
	}
}

// close ends the process, which ends by itself when nothing more can be asked.
func (p *pytorchPeer) close() {
	_ = p.in.Close()
	late := time.AfterFunc(pytorchEnd, func() {
		_ = p.cmd.Process.Kill()
		_ = p.out.Close() // what it has started may still have the other end
	})
	defer late.Stop()
	given := time.After(3 * pytorchEnd) // one that the system cannot end is left
	for {
		select {
		case _, more := <-p.answers:
			if !more {
				return
			}
		case <-given:
			return
		}
	}
}

// closePyTorch ends this rank's process, if there is one.
func (b *bencher) closePyTorch() {
	if b.pytorch != nil {
		b.pytorch.close()
		b.pytorch = nil
	}
}

// openPyTorch starts the processes and lets them meet. Collective.
func (b *bencher) openPyTorch(ctx context.Context) (refused bool, err error) {
	first, failure := b.loadPyTorch(ctx)
	reason, err := b.agree(ctx, "starting the peer", failure)
	if err == nil && reason == "" {
		reason, err = b.meetPyTorch(ctx, first)
	}
	if err != nil || reason != "" {
		b.closePyTorch()
	}
	if err != nil || reason == "" {
		return false, err
	}
	return b.refusePeer(reason)
}

// loadPyTorch starts the process of this rank and returns its first answer.
func (b *bencher) loadPyTorch(ctx context.Context) (first pytorchAnswer, err error) {
	d, ok := b.r.Device().(*cuda.Device)
	switch {
	case !ok:
		return first, fmt.Errorf("PyTorch's symmetric memory is on CUDA devices, and this backend is on a %s device", b.r.Device().Kind())
	case b.r.WorldSize() < 2:
		return first, errors.New("PyTorch's symmetric memory is for 2 ranks or more")
	case !oneIsland(b.r.Memory().Islands()):
		return first, errors.New("PyTorch's symmetric memory is for ranks with addresses of each other's memory")
	}
	if b.pytorch, err = startPyTorch(ctx, b.spec.Peer); err != nil {
		return first, err
	}
	first, err = b.pytorch.ask(ctx, pytorchJob{
		Rank: b.r.Rank(), Ranks: b.r.WorldSize(), Device: int(d.Ordinal()), UUID: d.UUID(), DType: b.spec.DType, Graph: b.spec.Graph, Timeout: b.spec.Peer.Timeout.Seconds() / 2,
	})
	if err == nil && first.Error != "" {
		err = errors.New(first.Error)
	}
	return first, err
}

// meetPyTorch tells all processes where that of rank 0 waits for them, and returns the reason why they do not come together. Collective.
func (b *bencher) meetPyTorch(ctx context.Context, first pytorchAnswer) (reason string, err error) {
	port, err := b.r.Group().Broadcast(ctx, "where the peer meets", 0, []byte(strconv.Itoa(first.Port)))
	if err != nil {
		return "", err
	}
	at, failure := strconv.Atoi(string(port))
	if failure == nil {
		var met pytorchAnswer
		if met, failure = b.pytorch.ask(ctx, pytorchMeeting{Port: at}); failure == nil && met.Error != "" {
			failure = errors.New(met.Error)
		}
	}
	b.pytorch.about = fmt.Sprintf("PyTorch %s in processes of its own, torch.ops.symm_mem, the faster of one_shot_all_reduce, out of place, and two_shot_all_reduce_, in place", first.Version)
	return b.agree(ctx, "connecting the peer", failure)
}

// pytorchAllReduce measures PyTorch's all-reduces of the bytes, mode and iterations of the row like, and reports the fastest. Collective.
func (b *bencher) pytorchAllReduce(ctx context.Context, like Row) error {
	a, lost := b.pytorch.ask(ctx, pytorchSize{Bytes: like.Bytes, Iterations: like.Iterations, Each: min(graphRuns, like.Iterations), Repetitions: b.spec.Repetitions})
	var wrong, refusal error
	if a.Wrong != "" {
		wrong = errors.New(a.Wrong)
	}
	if a.Error != "" {
		refusal = errors.New(a.Error)
	}
	if lost == nil && wrong == nil && refusal == nil {
		lost = a.check(b.spec.Repetitions)
	}
	reason, err := b.agree(ctx, "the peer's results", wrong)
	if err != nil {
		return err
	}
	if reason != "" {
		return errors.New(reason)
	}
	gone, err := b.agree(ctx, "the peer's process", lost)
	if err != nil {
		return err
	}
	if gone != "" {
		b.closePyTorch()
	}
	if reason, err = b.agree(ctx, "what the peer has", refusal); err != nil {
		return err
	}
	if gone != "" {
		reason = gone
	}
	row := like
	row.Backend, row.Beside, row.Algorithm, row.Chosen = PyTorch, b.r.Backend(), "", ""
	if reason != "" {
		if b.r.Rank() != 0 {
			return nil
		}
		note := fmt.Sprintf("%d bytes are not measured: %s", like.Bytes, reason)
		if gone != "" {
			note = fmt.Sprintf("%d bytes and more are not measured: %s", like.Bytes, reason)
		}
		return b.rep.Row(Row{Kind: like.Kind, Backend: PyTorch, Beside: b.r.Backend(), Note: note})
	}
	row.Note = b.pytorch.about
	var best []float64 // of the slowest rank, by repetition
	for _, form := range pytorchForms {
		slowest, err := b.slowest(ctx, a.Times[form])
		if err != nil {
			return err
		}
		// All ranks see the same times, so they choose the same.
		if len(slowest) > 0 && (best == nil || median(slowest) < median(best)) {
			best, row.Chosen = slowest, form
		}
	}
	return b.tellRow(row, best)
}

// check reports what is not right about an answer with times: each form that is there has one for each repetition.
func (a *pytorchAnswer) check(repetitions int) error {
	forms := 0
	for form, times := range a.Times {
		if !slices.Contains(pytorchForms, form) || len(times) != repetitions || slices.ContainsFunc(times, func(t float64) bool { return !(t > 0) || math.IsInf(t, 1) }) {
			return fmt.Errorf("PyTorch answers %v for the times of %s, and %d are right", times, form, repetitions)
		}
		forms++
	}
	if forms == 0 {
		return errors.New("PyTorch answers without times")
	}
	return nil
}
