package tests

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/tensor"
)

// TestOwnKernel: the kernels that docs/own-kernel.md shows, as one that waits for peers, as a program of puts, and as that of Triton between signals, run on simulated GPUs, and with
// weak memory without a race.
func TestOwnKernel(t *testing.T) {
	images := map[string][]byte{}
	for form, file := range map[string]string{"kernel": "testdata/own-kernel/mean.ptx", "program": "testdata/own-kernel/mean.ptx", "triton": "../examples/kernel/testdata/add_peers.ptx"} {
		image, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			skipWithout(t, "checkout", "this is not run in a checkout: the kernels are not here")
		}
		require.NoError(t, err)
		images[form] = image
	}
	for _, tt := range []struct {
		form  string
		ranks int
		n     int64
		weak  bool
	}{
		{"kernel", 1, 300, false}, {"kernel", 2, 1000, true}, {"kernel", 3, 5000, false},
		{"program", 1, 300, false}, {"program", 2, 1000, true}, {"program", 3, 5000, false},
		{"triton", 2, 3000, true}, {"triton", 3, 1023, false},
	} {
		t.Run(fmt.Sprintf("%s/world=%d", tt.form, tt.ranks), func(t *testing.T) {
			t.Parallel()
			m, err := simcuda.New(simcuda.Config{GPUs: tt.ranks, Seed: 1, Weak: tt.weak})
			require.NoError(t, err)
			cfg := goroutinesConfig(native.Name, time.Minute)
			cfg.Multicast = config.MulticastOff
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			ranks, err := symmem.OpenLocal(ctx, tt.ranks, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver(), Multicast: config.MulticastOff}})
			require.NoError(t, err)
			var g errgroup.Group
			for _, r := range ranks {
				g.Go(func() error { return errors.Join(ownKernel(ctx, r, tt.form, images[tt.form], tt.n), r.Close(ctx)) })
			}
			assert.NoError(t, g.Wait())
			assert.Empty(t, m.Violations())
			assert.Empty(t, m.Left())
		})
	}
}

// ownKernel runs a form of the page's kernels on one rank, from the stream and from a graph, late on one rank, and looks at what comes of it.
func ownKernel(ctx context.Context, r *symmem.Rank, form string, image []byte, n int64) error {
	var made [2]*tensor.Tensor
	for i := range made {
		var err error
		if made[i], err = r.Zeros(ctx, tensor.Float32, n); err != nil {
			return err
		}
		if err := made[i].Rendezvous(ctx); err != nil {
			return err
		}
	}
	x, y := made[0], made[1]
	plan, err := collective.New(ctx, r.Memory(), ownSpec(form, image, x, y))
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(s.BeginCapture(), plan.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	for run, launch := range []func(device.Stream) error{plan.Run, plan.Run, graph.Launch, plan.Run, graph.Launch} {
		mine := slices.Repeat([]float32{float32(6*r.Rank() + 12*run)}, int(n))
		if err := tensor.Write(x.Local(), mine, 0); err != nil {
			return err
		}
		if run == r.Rank() {
			time.Sleep(20 * time.Millisecond)
		}
		if err := errors.Join(launch(s), s.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := tensor.ReadAll[float32](y.Local())
		if err != nil {
			return err
		}
		want := float32(3*(r.WorldSize()-1) + 12*run)
		if i := slices.IndexFunc(got, func(v float32) bool { return v != want }); i >= 0 {
			return fmt.Errorf("rank %d, run %d: element %d is %v, expected %v", r.Rank(), run, i, got[i], want)
		}
	}
	return errors.Join(graph.Close(), plan.Close(ctx), s.Close(), y.Close(ctx), x.Close(ctx))
}

// ownSpec is the page's Spec of the form.
func ownSpec(form string, image []byte, x, y tensor.SymmetricTensor) collective.Spec {
	n := x.NumElements()
	spec := collective.Spec{Name: form, Tensors: []tensor.SymmetricTensor{x, y}}
	switch form {
	case "kernel":
		spec.CUDA = &collective.Kernel{
			Image: image, Function: "mean", Blocks: int(n+255) / 256, Threads: 256,
			Params: func(a *collective.Addresses) []any { return []any{a.Comm(), a.Table(), y.Ptr(), n} },
		}
	case "program":
		spec.Program = &collective.Program{Signals: 2, Granted: 1, Workspace: int64(x.WorldSize()) * x.Bytes(), Build: func(_ context.Context, b *collective.Builder) error {
			var puts []collective.Put
			at := make([]device.Ptr, b.WorldSize())
			for rank := range at {
				at[rank] = b.Workspace(b.Rank()).Add(int64(rank) * x.Bytes())
				if rank != b.Rank() {
					puts = append(puts, collective.Put{Peer: rank, Tensor: collective.ToWorkspace, Offset: int64(b.Rank()) * x.Bytes(), Local: x.Ptr(), Bytes: x.Bytes()})
				}
			}
			at[b.Rank()] = x.Ptr()
			b.Wait(1)
			b.Send(0, puts...)
			b.Finish(0)
			table, err := binary.Append(nil, binary.LittleEndian, at)
			if err != nil {
				return err
			}
			b.Kernel(&collective.Kernel{
				Image: image, Function: "mean_here", Blocks: int(n+255) / 256, Threads: 256,
				Params: func(a *collective.Addresses) []any { return []any{a.Upload(table), uint32(len(at)), y.Ptr(), n} },
			})
			b.Signal(1)
			return nil
		}}
	case "triton":
		spec.Tensors = spec.Tensors[:1]
		kernel := &collective.Kernel{
			Image: image, Function: "add_peers", Blocks: int((n + 1023) / 1024), Threads: 128,
			Params: func(a *collective.Addresses) []any {
				return []any{y.Ptr(), a.Table(), int32(n), int32(a.WorldSize()), 1 / float32(a.WorldSize()), device.Ptr(0), device.Ptr(0)}
			},
		}
		spec.Program = &collective.Program{Signals: 2, Build: func(_ context.Context, b *collective.Builder) error {
			b.Signal(0)
			b.Finish(0)
			b.Kernel(kernel)
			b.Signal(1)
			b.Finish(1)
			return nil
		}}
	}
	return spec
}
