package images

import (
	"bytes"
	"compress/zlib"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// TestSize: what the kernels add to a program.
func TestSize(t *testing.T) {
	assert.LessOrEqual(t, len(compressed), 470_000)
}

// TestKernels looks up every kernel there can be, and finds in the files just these.
func TestKernels(t *testing.T) {
	entry := regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`)
	unused := map[ptx.Kernel]bool{}
	files, err := Files()
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		image, err := ptx.Image(file)
		require.NoError(t, err)
		text := string(image)
		assert.Contains(t, text, "\n.version 8.4\n", file)
		target := "\n.target sm_80\n"
		if strings.HasSuffix(file, "_sm90.ptx") || file == "multimem.ptx" {
			target = "\n.target sm_90\n"
		}
		assert.Contains(t, text, target, file)
		assert.NotRegexp(t, `[^\n -~]`, text, file)
		for _, m := range entry.FindAllStringSubmatch(text, -1) {
			unused[ptx.Kernel{File: file, Name: m[1]}] = true
		}
	}
	exists := make(map[ptx.Kernel]bool, len(unused))
	for k := range unused {
		exists[k] = true
	}
	use := func(k ptx.Kernel) {
		k.Overlap = false
		assert.True(t, exists[k], "%+v", k)
		delete(unused, k)
	}
	for _, form := range ptx.Forms() {
		for _, dtype := range []string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"} {
			for op := ptx.Sum; op <= ptx.Avg; op++ {
				for world := 1; world <= 16; world++ {
					for _, hopper := range []bool{false, true} {
						if k, ok := ptx.AllReduce(form, dtype, op, world, hopper); ok {
							use(k)
						}
						if k, ok := ptx.PushLong(form, dtype, op, world, hopper); ok {
							use(k)
						}
						if k, ok := ptx.PushLonger(form, dtype, op, world, hopper); ok {
							use(k)
						}
						if k, ok := ptx.PushWhole(form, dtype, op, world, hopper); ok {
							use(k)
						}
						if k, ok := ptx.ManyPushWhole(dtype, op, world, hopper); ok {
							use(k)
						}
					}
				}
			}
		}
	}
	for world := 1; world <= 16; world++ {
		for _, hopper := range []bool{false, true} {
			for pattern := range ptx.Broadcast + 2 {
				if k, ok := ptx.LinesWhole(pattern, world, hopper); ok {
					use(k)
				}
			}
			if k, ok := ptx.LinesPass(world, hopper); ok {
				use(k)
			}
			for _, dtype := range []string{"f16", "bf16", "f32", "i32"} {
				for _, toRoot := range []bool{false, true} {
					if k, ok := ptx.ScatterWhole(dtype, ptx.Sum, world, toRoot, hopper); ok {
						use(k)
					}
				}
				if k, ok := ptx.ScatterFlow(dtype, ptx.Sum, world); ok {
					use(k)
				}
			}
		}
	}
	for _, form := range ptx.Forms() {
		for _, dtype := range []string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"} {
			for _, hopper := range []bool{false, true} {
				if k, ok := ptx.PushScatter(form, dtype, hopper); ok {
					use(k)
				}
			}
		}
	}
	for _, dtype := range []string{"f16", "bf16", "f32"} {
		for _, find := range []func(string) (ptx.Kernel, bool){ptx.QuantizedAllReduce, ptx.Quantize, ptx.QuantizedSum, ptx.Dequantize} {
			k, _ := find(dtype)
			use(k)
		}
		for _, hopper := range []bool{false, true} {
			k, _ := ptx.LocalRMSNorm(dtype, hopper)
			use(k)
			for world := 1; world <= 16; world++ {
				for _, form := range []ptx.Form{ptx.OneShotPush, ptx.TwoShotPush, ptx.TwoShotPull} {
					k, _ := ptx.RMSNorm(form, dtype, world, hopper)
					use(k)
					if k, ok := ptx.RMSNormCluster(form, dtype, world, hopper); ok {
						use(k)
					}
				}
			}
		}
	}
	for _, dtype := range []string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"} {
		pull, ok := ptx.ManyPull(dtype)
		require.True(t, ok)
		use(pull)
		for _, hopper := range []bool{false, true} {
			k, ok := ptx.ManyOneShot(dtype, hopper)
			require.True(t, ok)
			use(k)
			scatter, ok := ptx.ManyScatter(dtype, hopper)
			require.True(t, ok)
			use(scatter)
		}
	}
	for _, width := range []int64{1, 2, 4, 8} {
		use(ptx.ManyCopy(width))
	}
	use(ptx.ManyMoves)
	use(ptx.ManyLines(false))
	use(ptx.ManyLines(true))
	use(ptx.Told)
	for _, k := range []ptx.Kernel{ptx.Barrier, ptx.PutSignal, ptx.PutSignalWait, ptx.Signal, ptx.SignalAll, ptx.Wait, ptx.WaitAll} {
		use(k)
		use(ptx.SignalOn(k, true))
	}
	for _, k := range []ptx.Kernel{ptx.Pull(false), ptx.Pull(true), ptx.PushLines(false), ptx.PushLines(true), ptx.Meet(false), ptx.Meet(true), ptx.PushAllToAllV, ptx.Cast} {
		use(k)
	}
	assert.Empty(t, unused, "kernels that nothing finds")
	_, err = ptx.Image("nothing.ptx")
	assert.ErrorContains(t, err, "nothing.ptx")
}

// TestDamaged: no byte of the archive can be another one unnoticed, unless the texts are the same: of a code that stands for nothing, any length
// will do.
func TestDamaged(t *testing.T) {
	whole, err := open(compressed)
	require.NoError(t, err)
	for at := 0; at < len(compressed); at += len(compressed) / 157 {
		damaged := bytes.Clone(compressed)
		damaged[at] ^= 1 << (at % 8)
		a, err := open(damaged)
		if err != nil {
			continue
		}
		// The stream's checksum is a sum, which bytes that changed places may leave as it was; the texts have one each that is none.
		for file := range whole.modules {
			want, err := whole.image(file)
			require.NoError(t, err)
			if text, err := a.image(file); err == nil {
				require.Equal(t, string(want), string(text), "byte %d", at)
			}
		}
	}
	_, err = open(compressed[:len(compressed)-1])
	assert.Error(t, err)
}

// FuzzArchive: what somebody wrote in place of the archive, checksum and all, is an error and no crash.
func FuzzArchive(f *testing.F) {
	f.Add([]byte("\x04\x01,\x01\n\x01\x01a\x00\x00\x00\x00\x01\x00\x01\x00\x00\x03\x00\x00\x00"))
	f.Add([]byte("\x04\x07\x08,\n\x01\x01a\x00\x00\x00\x00\x01\x00\x01\x01k\x02\x06\x00\x01\x02\x00\x03\x01"))
	f.Fuzz(func(t *testing.T, content []byte) {
		var b bytes.Buffer
		z := zlib.NewWriter(&b)
		_, err := z.Write(content)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		a, err := open(b.Bytes())
		if err != nil {
			return
		}
		for file := range a.modules {
			_, _ = a.image(file)
		}
	})
}

// BenchmarkOpen is what the first kernel of a process costs.
func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		if _, err := open(compressed); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkImage is what each module costs besides, the largest one.
func BenchmarkImage(b *testing.B) {
	a, err := opened()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		image, err := a.image("any_i8.ptx")
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(int64(len(image)))
	}
}

// TestTwoBlocks: a plan may have half of a device (package collective), which is a block on each multiprocessor only if two of its kernel fit one. So the kernel for
// long shares is compiled with as few registers as that takes.
func TestTwoBlocks(t *testing.T) {
	files, err := Files()
	require.NoError(t, err)
	found := 0
	entry := regexp.MustCompile(`(?s)\.visible \.entry symmem_scatter_flow_\w+\([^)]*\)\s*([^{]*)\{`)
	for _, file := range files {
		image, err := ptx.Image(file)
		require.NoError(t, err)
		for _, m := range entry.FindAllSubmatch(image, -1) {
			found++
			assert.Contains(t, string(m[1]), ".maxntid 256, 1, 1\n.minnctapersm 2\n", file)
		}
	}
	assert.Equal(t, 3*7, found) // of each dtype and world size
}

// TestFiveBlocks: what two-shot pushes do between two and three ranks fits 48 registers, of which a plan, which has half of a device, gets more threads.
func TestFiveBlocks(t *testing.T) {
	for world, blocks := range map[int]string{2: "5", 3: "5", 4: "4"} {
		for _, dtype := range []string{"f16", "bf16", "f32"} {
			for _, hopper := range []bool{false, true} {
				k, ok := ptx.PushWhole(ptx.TwoShotPush, dtype, ptx.Sum, world, hopper)
				require.True(t, ok)
				assert.Contains(t, directives(t, k), ".maxntid 256, 1, 1\n.minnctapersm "+blocks+"\n", k.Name)
			}
		}
	}
}

// TestLong: a multiprocessor holds 2048 threads of the kernels for long messages, of which a plan, which has half of a device, gets more.
func TestLong(t *testing.T) {
	for _, dtype := range []string{"f16", "bf16", "f32"} {
		for _, hopper := range []bool{false, true} {
			for _, find := range []func(ptx.Form, string, int, int, bool) (ptx.Kernel, bool){ptx.PushLong, ptx.PushLonger} {
				k, ok := find(ptx.OneShotPush, dtype, ptx.Sum, 2, hopper)
				require.True(t, ok)
				assert.Contains(t, directives(t, k), ".maxntid 256, 1, 1\n.minnctapersm 8\n", k.Name)
			}
		}
	}
}

// TestClusters: the kernels of norms for few rows have clusters of as many blocks as package ptx says, of 64 threads.
func TestClusters(t *testing.T) {
	for _, dtype := range []string{"f16", "bf16", "f32"} {
		for _, world := range []int{2, 4, 8} {
			k, ok := ptx.RMSNormCluster(ptx.OneShotPush, dtype, world, true)
			require.True(t, ok)
			assert.Contains(t, directives(t, k), fmt.Sprintf(".maxntid %d, 1, 1\n.explicitcluster\n.reqnctapercluster %d, 1, 1\n", 512/ptx.NormCluster, ptx.NormCluster))
		}
	}
}

// directives are those between a kernel's parameters and its body.
func directives(t *testing.T, k ptx.Kernel) string {
	image, err := ptx.Image(k.File)
	require.NoError(t, err)
	m := regexp.MustCompile(`(?s)\.visible \.entry ` + k.Name + `\([^)]*\)\s*([^{]*)\{`).FindSubmatch(image)
	require.NotNil(t, m, k.Name)
	return string(m[1])
}
