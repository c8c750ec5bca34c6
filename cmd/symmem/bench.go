package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// The things that bench measures.
const (
	kindAllReduce  = "all_reduce"
	kindPut        = "put"        // every rank puts to the next, all at once
	kindGet        = "get"        // every rank gets from the next, all at once
	kindPutSignal  = "put_signal" // put and signal to the next, wait for the one before: one hop
	kindRendezvous = "rendezvous" // allocate and make reachable
	kindPlanRun    = "plan_run"   // what enqueuing one run costs the host
)

var benchKinds = []string{kindAllReduce, kindPut, kindGet, kindPutSignal, kindRendezvous, kindPlanRun}

// benchSpec is what the ranks of bench are to measure, alike on each.
type benchSpec struct {
	Kinds       []string `json:"kinds"`
	Sizes       []int64  `json:"sizes"` // in bytes
	DType       string   `json:"dtype"`
	Op          string   `json:"op"`
	Algorithms  []string `json:"algorithms"`
	Graph       bool     `json:"graph"` // replay a captured graph instead of running each time
	OutOfPlace  bool     `json:"out_of_place"`
	Repetitions int      `json:"repetitions"` // of each measurement

	Peer *peerSpec `json:"peer,omitempty"` // nil measures none
}

// benchRow is one measurement. A time is that of the slowest rank.
//
// A row that names a backend in Beside is a measurement of a peer. If it has no iterations the peer was not measured, and the note
// says why.
type benchRow struct {
	Kind        string  `json:"kind"`
	Backend     string  `json:"backend"`          // or the peer
	Beside      string  `json:"beside,omitempty"` // of a peer: the backend that it is compared with
	Ranks       int     `json:"ranks"`
	Bytes       int64   `json:"bytes"` // of one rank's message
	DType       string  `json:"dtype,omitempty"`
	Op          string  `json:"op,omitempty"`
	Algorithm   string  `json:"algorithm,omitempty"` // that was asked for
	Chosen      string  `json:"chosen,omitempty"`    // the form that auto took
	Mode        string  `json:"mode,omitempty"`      // eager or graph
	Place       string  `json:"place,omitempty"`     // in place or out of place
	Note        string  `json:"note,omitempty"`      // first or later, of rendezvous; what was measured, of a peer
	Iterations  int     `json:"iterations"`          // back to back, in one repetition
	Repetitions int     `json:"repetitions"`
	Median      float64 `json:"median_us"` // of the repetitions, per iteration
	Min         float64 `json:"min_us"`
	Max         float64 `json:"max_us"`
	Bandwidth   float64 `json:"gb_per_s,omitempty"`     // bytes by time, in 1e9 bytes a second
	Bus         float64 `json:"bus_gb_per_s,omitempty"` // all-reduce: the same times 2(W-1)/W

	// What the peer took for the same, if it was measured.
	PeerMedian float64 `json:"peer_us,omitempty"`
	PeerBus    float64 `json:"peer_bus_gb_per_s,omitempty"`
	PeerRatio  float64 `json:"peer_ratio,omitempty"` // peer_us by median_us: above 1 the peer is slower
}

// benchReport is the document that --json prints and --output writes.
type benchReport struct {
	Version buildInfo     `json:"version"`
	Date    time.Time     `json:"date"`
	Machine machine       `json:"machine"`
	Command []string      `json:"command"`
	Skipped []skippedRuns `json:"skipped,omitempty"`
	// Incomplete says why bench ended before it had measured everything; "" if it has.
	Incomplete string     `json:"incomplete,omitempty"`
	Rows       []benchRow `json:"rows"`
}

// skippedRuns is a backend that cannot be used here, or a peer that cannot be measured.
type skippedRuns struct {
	Backend string `json:"backend"`
	Reason  string `json:"reason"`
}

// benchOptions are the flags of bench.
type benchOptions struct {
	backends, sizes, kinds, dtype, op, algorithm, mode, place string
	peer, peerLibrary                                         string
	outputFile, plotFile                                      string
	ranks, repetitions                                        int
	json                                                      bool
}

func (a *app) benchCommand() *cobra.Command {
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure all-reduce, put and get on this machine",
		Long: `Bench starts ranks on this machine and measures. One repetition of a measurement is a barrier of all ranks and then many
iterations back to back on one stream; its time is that of the slowest rank, and a row shows the median of the repetitions.
Results of all-reduce are checked before they are measured.

all_reduce is in place. put and get are done by all ranks at once, each with the next. put_signal is one hop of a ring: put and
signal to the next rank, wait for the one before. rendezvous is allocating 64 MiB and making it reachable for all, the first
time in a process and later. plan_run is what enqueuing one all-reduce of the smallest size costs the host.

Bus bandwidth is bytes/time * 2(W-1)/W for W ranks.

On CUDA devices NCCL's own all-reduce, if libnccl.so.2 is there, is measured as a peer: right after ours, in the same processes
and on the same stream, with as many iterations, on plain device memory, and again over symmetric windows (nccl_symmetric) with the
best of several numbers of blocks. The ratio is the faster one's time divided by ours: above 1 it is slower. Its NVLink multicast is
switched off (NCCL_NVLS_ENABLE=0) unless the setting multicast is on. --peer nvshmem measures NVSHMEM's own reductions, on memory
of its heap, instead.`,
		Example: "  symmem bench -n 2 --sizes 1K:64M --algorithm all --output out.json --plot out.png\n" +
			"  symmem bench --backend native --kind all_reduce --dtype bf16 --mode graph --peer nccl",
		Args: noArgs,
	}
	cmd.RunE = failing(func(cmd *cobra.Command, _ []string) error { return a.bench(cmd, o) })
	flags := cmd.Flags()
	flags.StringVar(&o.backends, "backend", config.BackendAuto,
		"names with commas between them, each in turn; auto takes the best that works, all takes every one")
	flags.IntVarP(&o.ranks, "ranks", "n", 4, fmt.Sprintf("number of ranks, 1 to %d", maxRanks))
	flags.StringVar(&o.sizes, "sizes", "1K:64M", "bytes of a message: a range that doubles, or sizes with commas between them")
	flags.StringVar(&o.kinds, "kind", strings.Join(benchKinds, ","), "what to measure, with commas between")
	flags.StringVar(&o.dtype, "dtype", tensor.Float32.String(), "type of the elements of all-reduce")
	flags.StringVar(&o.op, "op", kernels.Sum.String(), "operation of all-reduce: sum, prod, min, max or avg")
	flags.StringVar(&o.algorithm, "algorithm", kernels.Auto.String(), "form of all-reduce: auto, one_shot, two_shot, transfers, another by its name, or all")
	flags.StringVar(&o.mode, "mode", "eager", "eager enqueues each all-reduce; graph replays a captured graph")
	flags.StringVar(&o.place, "place", "in", "in reduces each tensor in place; out writes the result to another tensor")
	flags.StringVar(&o.peer, "peer", peerAuto, "library to measure beside all_reduce: auto takes nccl if it is there, nccl or nvshmem must be there, or none")
	flags.StringVar(&o.peerLibrary, "peer-library", "", "file of the peer's library, or the folder it is in; empty looks for it")
	flags.IntVar(&o.repetitions, "reps", 15, "repetitions of each measurement")
	flags.BoolVar(&o.json, "json", false, jsonUsage)
	flags.StringVarP(&o.outputFile, "output", "o", "", "file for the results as JSON, whatever is printed")
	flags.StringVar(&o.plotFile, "plot", "", "file for a picture of the results, ending in .png")
	addRankFlags(flags)
	return cmd
}

// spec checks the flags and says what to measure.
func (o *benchOptions) spec() (benchSpec, error) {
	var all []error
	s := benchSpec{DType: o.dtype, Op: o.op, Repetitions: o.repetitions, Graph: o.mode == "graph", OutOfPlace: o.place == "out"}
	var err error
	if s.Sizes, err = parseSizes(o.sizes); err != nil {
		all = append(all, fmt.Errorf("--sizes: %w", err))
	}
	for kind := range strings.SplitSeq(o.kinds, ",") {
		if !slices.Contains(benchKinds, kind) || slices.Contains(s.Kinds, kind) {
			all = append(all, fmt.Errorf("--kind is %q; allowed are %s, each once%s", o.kinds, strings.Join(benchKinds, ", "), didYouMean(kind, benchKinds)))
			break
		}
		s.Kinds = append(s.Kinds, kind)
	}
	if _, err := tensor.ParseDType(o.dtype); err != nil {
		all = append(all, fmt.Errorf("--dtype: %w%s", err, didYouMean(o.dtype, dtypeNames())))
	}
	if s.Peer, err = o.peerSpec(s.Kinds); err != nil {
		all = append(all, err)
	}
	if _, err := kernels.ParseOp(o.op); err != nil {
		all = append(all, fmt.Errorf("--op: %w%s", err, didYouMean(o.op, opNames())))
	}
	if o.algorithm == "all" {
		s.Algorithms = []string{"all"}
	} else if _, err := kernels.ParseAlgorithm(o.algorithm); err != nil {
		all = append(all, fmt.Errorf("--algorithm, which may be all too: %w%s", err, didYouMean(o.algorithm, algorithmNames())))
	} else {
		s.Algorithms = []string{o.algorithm}
	}
	if o.place != "in" && o.place != "out" {
		all = append(all, fmt.Errorf("--place is %q; allowed are in and out%s", o.place, didYouMean(o.place, benchPlaces)))
	}
	if o.mode != "eager" && o.mode != "graph" {
		all = append(all, fmt.Errorf("--mode is %q; allowed are eager and graph%s", o.mode, didYouMean(o.mode, benchModes)))
	}
	if o.repetitions < 1 || o.repetitions > 10000 {
		all = append(all, fmt.Errorf("--reps is %d; 1 to 10000 are allowed", o.repetitions))
	}
	if o.ranks < 1 || o.ranks > maxRanks {
		all = append(all, fmt.Errorf("--ranks is %d; 1 to %d are allowed", o.ranks, maxRanks))
	}
	if o.plotFile != "" && !strings.HasSuffix(strings.ToLower(o.plotFile), ".png") {
		all = append(all, fmt.Errorf("--plot is %q; a name that ends in .png is allowed", o.plotFile))
	}
	return s, usageError(errors.Join(all...))
}

func (a *app) bench(cmd *cobra.Command, o benchOptions) (err error) {
	spec, err := o.spec()
	if err != nil {
		return err
	}
	choice, err := chooseBackends(o.backends, cmd.Flags().Changed("backend"))
	if err != nil {
		return err
	}
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	settings, err := settingsForRanks(cmd, cfg)
	if err != nil {
		return err
	}
	if spec.Peer != nil {
		spec.Peer.Multicast, spec.Peer.Timeout = cfg.Multicast == config.MulticastOn, cfg.Timeout
	}
	specText, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	// A file that cannot be written is better known before the measuring than after.
	outputs, err := openOutputs(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, outputs.close()) }()

	signals, stop := catch()
	defer stop()
	f := &fleet{
		app: a, command: benchRank, args: []string{"--spec", string(specText)}, ranks: o.ranks, settings: settings, signals: signals,
		opening: openingTime(cfg),
		stall:   cfg.Timeout + 10*time.Minute, // one row takes a moment, but for very large messages on a slow machine
	}
	report := benchReport{Version: readBuild(), Date: time.Now().UTC().Truncate(time.Second), Machine: readMachine(),
		Command: cmdline(cmd), Rows: []benchRow{}}
	show := newProgress(a.err)
	for _, preferences := range choice.runs {
		show.say("starting %d ranks", o.ranks)
		total, done, where := 0, 0, ""
		end, err := f.run(cmd.Context(), preferences, func(m message) {
			where, total = cmp.Or(m.Opened, where), total+m.Rows
			switch {
			case m.Row == nil:
				show.show(where, done, total, "")
			case m.Row.Iterations == 0:
				report.Skipped = append(report.Skipped, skippedRuns{Backend: m.Row.Backend + " beside " + m.Row.Beside,
					Reason: oneLine(m.Row.Note)})
			default:
				report.Rows = append(report.Rows, *m.Row)
				if m.Row.Beside == "" {
					done++
				}
				show.show(where, done, total, fmt.Sprintf("%s of %s", m.Row.Kind, sizeText(m.Row.Bytes)))
			}
		})
		show.clear()
		switch {
		case err != nil:
		case end.interrupted != nil:
			err = &exitError{status: 128 + signalNumber(end.interrupted), err: errors.New("interrupted")}
		case end.failure != "":
			err = fmt.Errorf("measuring backend %s: %s", end.backend, end.failure)
		case end.refused != "" && choice.required:
			err = errors.New(end.refused)
		case end.refused != "":
			report.Skipped = append(report.Skipped, skippedRuns{Backend: end.backend, Reason: oneLine(end.refused)})
		}
		if err != nil {
			if len(report.Rows) == 0 {
				return err
			}
			// What took long to measure is not thrown away.
			report.Incomplete = oneLine(err.Error())
			return errors.Join(err, report.write(a.out, o, outputs))
		}
	}
	return report.write(a.out, o, outputs)
}

// write writes the report everywhere that o says.
func (r *benchReport) write(out io.Writer, o benchOptions, to outputFiles) error {
	r.compare()
	var err error
	if o.json {
		err = r.writeJSON(out)
	} else {
		err = r.writeTable(out)
	}
	if to.json != nil {
		err = errors.Join(err, r.writeJSON(to.json))
	}
	if to.plot != nil {
		err = errors.Join(err, r.writePlot(to.plot))
	}
	return err
}

// cmdline gives the flags that the command was called with. The token is not among them.
func cmdline(cmd *cobra.Command) []string {
	args := strings.Fields(cmd.CommandPath())
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name != "token" {
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	return args
}

// outputFiles are the files that bench writes at its end.
type outputFiles struct{ json, plot *os.File }

func openOutputs(o benchOptions) (outputFiles, error) {
	var f outputFiles
	var err error
	if o.outputFile != "" {
		if f.json, err = os.Create(o.outputFile); err != nil {
			return f, usageError(fmt.Errorf("--output: %w", err))
		}
	}
	if o.plotFile != "" {
		if f.plot, err = os.Create(o.plotFile); err != nil {
			return f, usageError(errors.Join(fmt.Errorf("--plot: %w", err), f.close()))
		}
	}
	return f, nil
}

func (f outputFiles) close() error {
	var err error
	for _, file := range []*os.File{f.json, f.plot} {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
	}
	return err
}
