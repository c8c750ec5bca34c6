package ptxvm_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/ptxvm"
	"github.com/symmem/symmem/internal/testneed"
)

// Two threads of two blocks: the first stores data and then a flag, the second looks for the flag and then at the data. Another seed shows another
// order.
func ExampleConfig_trace() {
	const text = `.version 8.0
.target sm_90
.address_size 64
.visible .entry pass(.param .u64 words)
{
	.reg .b64 %rd<2>;
	.reg .b32 %r<4>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [words];
	mov.u32 %r1, %ctaid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra $second;
	st.relaxed.gpu.global.u32 [%rd1], 42;
	st.release.gpu.global.u32 [%rd1+4], 1;
	ret;
$second:
	ld.acquire.gpu.global.u32 %r2, [%rd1+4];
	ld.relaxed.gpu.global.u32 %r3, [%rd1];
	st.global.u32 [%rd1+8], %r3;
	ret;
}
`
	module, err := ptxvm.Parse("pass.ptx", []byte(text))
	if err != nil {
		panic(err)
	}
	words := make([][4]uint32, 1)
	memory := ptxvm.NewMemory()
	if err := memory.Map(0x1000, unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 16)); err != nil {
		panic(err)
	}
	m := ptxvm.New(memory, ptxvm.Config{Seed: 1, Weak: true, Turn: 1, Trace: func(t ptxvm.Thread, p ptxvm.Place) {
		fmt.Printf("block %d  line %d  %s\n", t.Block[0], p.Line, p.Instruction)
	}})
	at := []byte{0, 0x10, 0, 0, 0, 0, 0, 0}
	if err := m.NewStream(0).Launch(ptxvm.Launch{Function: module.Function("pass"), Grid: [3]uint32{2}, Params: [][]byte{at}}); err != nil {
		panic(err)
	}
	if err := m.Run(); err != nil {
		panic(err)
	}
	// Output:
	// block 0  line 13  st.relaxed.gpu.global.u32 [%rd1], 42;
	// block 1  line 17  ld.acquire.gpu.global.u32 %r2, [%rd1+4];
	// block 0  line 14  st.release.gpu.global.u32 [%rd1+4], 1;
	// block 1  line 18  ld.relaxed.gpu.global.u32 %r3, [%rd1];
	// block 1  line 19  st.global.u32 [%rd1+8], %r3;
}

// TestTraceIsShown: docs/simulate.md shows what the example prints.
func TestTraceIsShown(t *testing.T) {
	page, err := os.ReadFile("../../docs/simulate.md")
	if errors.Is(err, fs.ErrNotExist) {
		testneed.Missing(t, "checkout", "this is not run in a checkout: the documents are not here")
	}
	require.NoError(t, err)
	source, err := os.ReadFile("trace_example_test.go")
	require.NoError(t, err)
	_, output, _ := strings.Cut(string(source), "\t// Output:\n")
	output, _, _ = strings.Cut(output, "\n}")
	require.Contains(t, string(page), strings.ReplaceAll(output, "\t// ", "")+"\n")
}
