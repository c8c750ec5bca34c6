package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/symmem/symmem/cmd/symmem/internal/bench"
	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func (a app) benchCommand() *cobra.Command {
	var o bench.Options
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure all-reduce, put and get",
		Long: `Bench starts ranks on this machine and measures. In a job that torchrun, mpirun, srun or Kubernetes has started, each process is one rank
of the job instead: all are given the same flags without --ranks, and rank 0 prints and writes the files. One repetition of a measurement is a barrier of all ranks and then many
iterations back to back on one stream; its time is that of the slowest rank, and a row shows the median of the repetitions.
Results of collectives are checked before they are measured.

all_reduce is in place. put and get are done by all ranks at once, each with the next. put_signal is one hop of a ring: put and
signal to the next rank, wait for the one before; put_signal_wait is the same in one call. rendezvous is allocating 64 MiB and making it reachable for all, the first
time in a process and later. plan_run is what enqueuing one all-reduce of the smallest size costs the host.

signal_wait is a hop without data: a signal to the next rank, and a wait for that of the one before. enqueue is what enqueuing costs the host, without the work itself: of a put of the
smallest size, a signal, a wait and a barrier. heap_alloc is taking a tensor of the size from a symmetric heap and closing it, on the host; what was closed is reclaimed in between, which
is not measured.

broadcast, reduce, all_gather, reduce_scatter, all_to_all and all_to_all_v take those of the algorithms that they have, and auto if that is none;
bytes are those of the whole message: what all_gather has put together, what reduce_scatter and all_to_all take apart, rounded up to shares of whole
vectors of 16 bytes. all_to_all_v reads its
counts, which are equal, when it runs. barrier is one of all ranks on their streams. all_reduce_many is one
plan of as many tensors as --tensors says, each of the size; bytes are those of all of them. all_gather_many, reduce_scatter_many and broadcast_many are
the same of those. --tensors, --place and --op are refused where nothing that is measured has them.

all_reduce_rms_norm is an all-reduce with what follows it in a transformer, residual and RMSNorm, in one kernel: rows of 8192 elements, as
many as bytes say. Beside it the same is measured as an all-reduce and a norm behind it (unfused).

all_reduce_matmul is how much room an all-reduce leaves for other work: all-reduces on one stream while cuBLAS (libcublas.so, found as NCCL is, or by
SYMMEM_CUBLAS_LIBRARY) multiplies matrices of bf16 with a side of 8192 on another, as many of both as take about as long. Its times are
those of one all-reduce with its share of the products: together, and beside that what either takes alone. --max-blocks bounds the all-reduce.

--algorithm quantized_int8 is an all-reduce that is lossy: 64 elements are sent as 68 bytes. Its row says how many bytes each rank sends.

Bus bandwidth is bytes/time * 2(W-1)/W of an all-reduce between W ranks, (W-1)/W of all_gather, reduce_scatter, all_to_all and all_to_all_v, and of lists as of one tensor.

On CUDA devices NCCL's own collective, if libnccl.so.2 is there, is measured as a peer, of all_reduce, broadcast, reduce, all_gather, reduce_scatter and
all_to_all: right after ours, in the same processes
and on the same stream, with as many iterations, on plain device memory, and again over symmetric windows (nccl_symmetric) with the
best of several numbers of blocks. Of lists it is a group of calls, and of all_reduce_matmul it is on plain memory. The ratio is the faster one's time divided by ours: above 1 it is slower. Its NVLink multicast is
switched off (NCCL_NVLS_ENABLE=0) unless the setting multicast is on. --peer nvshmem measures NVSHMEM's own reductions, on memory
of its heap, instead, and --peer sglang SGLang's push kernels, on the same memory as ours, with the best of several launches; its
--peer-library is the cubin that bench/peers/sglang.sh of the source makes. --peer pytorch measures the all-reduces of PyTorch's symmetric memory
(torch.ops.symm_mem), sums of bf16 and f32, in a process of its own for each rank, on the rank's GPU, with as many iterations; python3 runs it, or the Python that
--peer-library names. Variables of the environment that say whether PyTorch and its NCCL take multicast stay as they are; where they say nothing it is
switched off unless the setting multicast is on.`,
		Example: "  symmem bench -n 2 --sizes 1K:64M --algorithm all --output out.json --plot out.png\n" +
			"  srun --nodes 2 --ntasks-per-node 4 symmem bench --backend nixl\n" +
			"  symmem bench --backend native --kind all_reduce --dtype bf16 --mode graph --peer nccl",
		Args: cli.NoArgs,
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		return bench.Run(cmd.Context(), a.Process, cmd.CommandPath(), cmd.Flags(), o)
	})
	flags := cmd.Flags()
	flags.StringVar(&o.Backends, "backend", config.BackendAuto,
		"names with commas between them, each in turn; auto takes the best that works, all takes every one")
	flags.IntVarP(&o.Ranks, "ranks", "n", 4, fmt.Sprintf("number of ranks to start, 1 to %d", launch.MaxRanks))
	flags.StringVar(&o.Sizes, "sizes", "1K:64M", "bytes of a message: a range that doubles, or sizes with commas between them")
	flags.StringVar(&o.Kinds, "kind", strings.Join(measure.DefaultKinds, ","),
		"what to measure, with commas between: these, broadcast, reduce, all_gather, reduce_scatter, all_to_all, all_to_all_v, barrier, put_signal_wait, signal_wait, heap_alloc, enqueue, all_reduce_rms_norm, all_reduce_many, all_gather_many, reduce_scatter_many, broadcast_many and all_reduce_matmul")
	flags.StringVar(&o.DType, "dtype", tensor.Float32.String(), "type of the elements of collectives")
	flags.StringVar(&o.Op, "op", kernels.Sum.String(), "operation of reductions: sum, prod, min, max or avg")
	flags.StringVar(&o.Algorithm, "algorithm", kernels.Auto.String(), "form of all-reduce: auto, one_shot, two_shot, transfers, another by its name, or all")
	flags.StringVar(&o.Mode, "mode", "eager", "eager enqueues each piece of work; graph replays a captured graph of several")
	flags.StringVar(&o.Place, "place", "in", "in reduces each tensor in place; out writes the result to another tensor")
	flags.BoolVar(&o.Exclusive, "exclusive", false, "let the kernels of collectives take all of a GPU but a small part, where they take half of that, so that a second plan fits beside them")
	flags.StringVar(&o.Peer, "peer", bench.PeerAuto, "library to measure beside ours: auto takes nccl if it is there; nccl, nvshmem, sglang or pytorch, which must be there; or none")
	flags.StringVar(&o.PeerLibrary, "peer-library", "", "file of the peer's library, or the folder it is in; of pytorch the Python that has it; empty looks for it")
	flags.IntVar(&o.Tensors, "tensors", 50, "tensors in the list of all_reduce_many and the others of lists")
	flags.IntVar(&o.Repetitions, "reps", 15, "repetitions of each measurement")
	flags.BoolVar(&o.JSON, "json", false, jsonUsage)
	flags.StringVarP(&o.OutputFile, "output", "o", "", "file for the results as JSON, whatever is printed")
	flags.StringVar(&o.PlotFile, "plot", "", "file for a picture of the results, ending in .png or .svg")
	settings.AddForRanks(flags)
	return cmd
}

// benchRankCommand is what a rank of bench runs.
func (a app) benchRankCommand() *cobra.Command {
	return a.measuringRankCommand("bench", bench.RankCommand, bench.SpecFlag, bench.Rank)
}

// measuringRankCommand is what a rank of a command runs that gives its ranks as JSON what they measure.
func (a app) measuringRankCommand(
	of, use, specFlag string, rank func(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, spec string) error,
) *cobra.Command {
	var spec string
	fd := -1
	cmd := &cobra.Command{Use: use, Short: "Be one rank of " + of, Hidden: true, Args: cli.NoArgs}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		return rank(cmd.Context(), a.Process, cmd.Flags(), fd, spec)
	})
	cmd.Flags().StringVar(&spec, specFlag, "", "what to measure, as JSON")
	cmd.Flags().IntVar(&fd, fleet.ReportFlag, fd, "descriptor of the pipe to report to")
	return cmd
}
