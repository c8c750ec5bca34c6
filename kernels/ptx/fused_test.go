package ptx

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestFused compares what the kernels beyond all-reduce take with their headers.
func TestFused(t *testing.T) {
	norm, quantized := header(t, "rms_norm.cuh"), header(t, "quantized.cu")
	sameLayout(t, norm, "Norm", reflect.TypeFor[Norm]())
	sameLayout(t, quantized, "Quantized", reflect.TypeFor[Quantized]())
	assert.Contains(t, norm, fmt.Sprintf("kKindRMSNorm = %d ", FaultRMSNorm))
	assert.Contains(t, quantized, fmt.Sprintf("kKindQuantized = %d ", FaultQuantized))
	assert.Contains(t, quantized, fmt.Sprintf("kQuantizedBlock = %d, kQuantizedBytes = %d ", QuantizedBlock, QuantizedBytes))
	for _, dtype := range dtypes {
		_, norm := RMSNorm(OneShotPush, dtype, 2, true)
		_, local := LocalRMSNorm(dtype, false)
		_, quantized := QuantizedAllReduce(dtype)
		want := dtype == "f16" || dtype == "bf16" || dtype == "f32"
		assert.Equal(t, []bool{want, want, want}, []bool{norm, local, quantized}, dtype)
	}
	assert.Equal(t, int64(3), NormShard(3, 128))
	assert.Equal(t, int64(5*128), NormSpan(OneShotPush, 3, 5, 128))
	assert.Equal(t, int64(256), NormSpan(TwoShotPush, 3, 5, 128))
	assert.Equal(t, int64(2), QuantizedShard(129, 2))
	assert.Equal(t, int64(256), QuantizedSpan(2))
}
