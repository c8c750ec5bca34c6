package nccl

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

//go:embed testdata/lsa_all_reduce.cu
var lsaAllReduce []byte

// headers returns the folder with the headers of the library, of the same version, or "" and why there is none.
func headers(lib *nccl.Library) (dir, why string) {
	version := regexp.MustCompile(`(?m)^#define NCCL_VERSION_CODE (\d+)`)
	tried := []string{filepath.Join(filepath.Dir(filepath.Dir(lib.Path())), "include"), "/usr/include", "/usr/local/include",
		"/usr/local/cuda/include"}
	for _, dir := range tried {
		text, err := os.ReadFile(filepath.Join(dir, "nccl.h"))
		if _, deviceErr := os.Stat(filepath.Join(dir, "nccl_device.h")); err != nil || deviceErr != nil {
			continue
		}
		if m := version.FindSubmatch(text); m != nil && string(m[1]) == fmt.Sprint(int(lib.Version())) {
			return dir, ""
		}
	}
	return "", fmt.Sprintf("the headers of NCCL %s are in none of %s", lib.Version(), strings.Join(tried, ", "))
}

// compile makes machine code of the kernel, or skips the test where there is no compiler or are no headers; with "nvcc" in
// SYMMEM_TEST_REQUIRE that is a failure.
func compile(t *testing.T, lib *nccl.Library, capability int) []byte {
	t.Helper()
	nvcc, err := exec.LookPath("nvcc")
	if err != nil {
		nvcc = "/usr/local/cuda/bin/nvcc"
	}
	missing := ""
	if _, err := os.Stat(nvcc); err != nil {
		missing = "there is no nvcc on the path or at " + nvcc
	}
	include, why := headers(lib)
	if missing == "" {
		missing = why
	}
	if missing != "" {
		testneed.Missing(t, "nvcc", "the kernel for NCCL's device interface is not tried: "+missing)
	}
	source, out := filepath.Join(t.TempDir(), "lsa_all_reduce.cu"), filepath.Join(t.TempDir(), "lsa_all_reduce.cubin")
	require.NoError(t, os.WriteFile(source, lsaAllReduce, 0o600))
	text, err := exec.CommandContext(t.Context(), nvcc, "-std=c++17", "-cubin", fmt.Sprintf("-arch=sm_%d", capability), "-I",
		include, "-o", out, source).CombinedOutput()
	require.NoError(t, err, string(text))
	image, err := os.ReadFile(out)
	require.NoError(t, err)
	return image
}

// TestDeviceSideOnGPU: a kernel that was compiled with NCCL's own headers gets the device communicator and the window's handle
// as plain arguments, and reduces between NCCL's own barriers.
func TestDeviceSideOnGPU(t *testing.T) {
	size := min(gpus(t), 4)
	lib, err := nccl.Load(nil)
	require.NoError(t, err)
	d, err := cuda.Open(nil)
	require.NoError(t, err)
	capability := d.ComputeCapability()
	require.NoError(t, d.Close())
	image := compile(t, lib, capability)

	const blocks, count = 8, 100_001
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			module, err := b.device.LoadModule(image)
			if err != nil {
				return err
			}
			f, err := module.Function("lsa_all_reduce")
			if err != nil {
				return err
			}
			comm, err := b.NewDevComm(ctx, blocks)
			if err != nil {
				return err
			}
			s, err := b.device.NewStream()
			if err != nil {
				return err
			}
			return errors.Join(backendtest.WithWindow(ctx, m, 4*count+64, func(w *memory.Window) error {
				handle, at, err := w.Handle(64)
				if err != nil {
					return err
				}
				params := slices.Clone(comm.Bytes())
				for _, v := range []uint64{handle, uint64(at), count} {
					params = binary.LittleEndian.AppendUint64(params, v)
				}
				launch, err := f.Prepare(device.Launch{Grid: [3]uint32{blocks}, Block: [3]uint32{256}, Params: [][]byte{params}})
				if err != nil {
					return err
				}
				data := make([]byte, 0, 4*count)
				for i := range count {
					data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32((g.Rank()+1)*(i%1000))))
				}
				mine := w.Allocation().Ptr().Add(64)
				if err := b.device.CopyFromHost(mine, data); err != nil {
					return err
				}
				// Once by itself, and once from a graph: the barriers count on.
				if err := errors.Join(launch.Launch(s), s.Synchronize(ctx), s.BeginCapture(), launch.Launch(s)); err != nil {
					return err
				}
				graph, err := s.EndCapture()
				if err != nil {
					return err
				}
				if err := errors.Join(graph.Launch(s), s.Synchronize(ctx), graph.Close(), launch.Close(), b.device.CopyToHost(data,
					mine)); err != nil {
					return err
				}
				ranks := g.Size()
				for i := range count {
					want := float32(ranks*ranks*(ranks+1)/2) * float32(i%1000)
					if got := math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:])); got != want {
						return fmt.Errorf("element %d is %v, expected %v", i, got, want)
					}
				}
				return nil
			}), s.Close(), module.Close(), comm.Close(ctx))
		})
	}))
}
