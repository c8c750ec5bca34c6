package tests

import (
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/kernels"
)

// gpuHosts pretends that ranks on the GPUs of this machine are on several hosts, each with so many: by boot ids, and, for NCCL, by its variables. Ranks may share a GPU. Their data goes by sockets.
// Where the backend has no GPU the test is skipped, which is a failure with gpus=1 in SYMMEM_TEST_REQUIRE.
func gpuHosts(t *testing.T, name string, ranks ...int) *hosts {
	t.Helper()
	requireBackend(t, name)
	have := gpus(t)
	if have == 0 || deviceKind(t, name) != device.CUDA {
		testneed.MissingGPUs(t, 1, "backend "+name+" works on none here")
	}
	visible := strings.FieldsFunc(os.Getenv("CUDA_VISIBLE_DEVICES"), func(r rune) bool { return r == ',' })
	if len(visible) == 0 {
		for d := range have {
			visible = append(visible, strconv.Itoa(d))
		}
	}
	addr := testneed.FreeAddress(t)
	return &hosts{
		addr:    addr,
		listen:  func() (net.Listener, error) { return net.Listen("tcp", addr) },
		command: func(int) []string { return nil },
		env: func(rank int) []string {
			h, _ := placeOf(ranks, rank)
			return append(onHost(ranks, rank), fmt.Sprintf("NCCL_HOSTID=host%d", h), "NCCL_NET=Socket", "NCCL_IB_DISABLE=1", "NCCL_MNNVL_ENABLE=0", "NCCL_NVLS_ENABLE=0",
				"NCCL_MULTI_RANK_GPU_ENABLE=1", "UCX_TLS=tcp,cuda_copy,self", "SYMMEM_SHARE_DEVICE=true", "CUDA_VISIBLE_DEVICES="+visible[rank%len(visible)])
		},
	}
}

// TestGPUHosts runs the suite between pretended hosts of GPUs: two of two ranks each, and, for what combines, hosts of other numbers.
func TestGPUHosts(t *testing.T) {
	for _, name := range []string{"nccl", "nixl"} {
		t.Run("backend="+name, func(t *testing.T) {
			t.Run("2_2", func(t *testing.T) { suiteOnGPUs(t, name, nil, 2, 2) })
			combining := regexp.MustCompile("^(all_reduce|reduce|reduce_scatter)/hierarchical/")
			t.Run("2_1_1", func(t *testing.T) { suiteOnGPUs(t, name, combining, 2, 1, 1) })
			t.Run("3_1", func(t *testing.T) { suiteOnGPUs(t, name, combining, 3, 1) })
		})
	}
}

func suiteOnGPUs(t *testing.T, name string, filter *regexp.Regexp, ranks ...int) {
	on := gpuHosts(t, name, ranks...)
	size := 0
	for _, n := range ranks {
		size += n
	}
	opts := options(t, name, size)
	opts.Short, opts.Filter = true, filter
	runCases(t, on, name, opts, size, "suite")
}

// TestKillBetweenGPUHosts is TestKill between two pretended hosts of GPUs, one of which has two ranks.
func TestKillBetweenGPUHosts(t *testing.T) {
	for _, name := range []string{"nccl", "nixl"} {
		t.Run("backend="+name, func(t *testing.T) {
			k := &killing{on: gpuHosts(t, name, 2, 1), served: true, islands: "auto", without: pointerStages}
			if name == kernels.NCCL.Backend() { // which puts between hosts only where GPUs send over the network
				k.without = append(slices.Clone(k.without), "all_reduce/"+kernels.Transfers.String(), "transfer", "wait", "barrier")
			}
			kill(t, name, k, 0, 1, 0, 2)
		})
	}
}
