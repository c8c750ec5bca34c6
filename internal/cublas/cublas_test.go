package cublas

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// pretended is a library whose calls return statuses that the test gives, by the name of the call.
func pretended(fail map[string]Status) (l *Library, seen *[]string) {
	seen = &[]string{}
	answer := func(call string) Status {
		*seen = append(*seen, call)
		return fail[call]
	}
	return &Library{path: "/fake/libcublas.so.13", call: functions{
		create:    func(h *uintptr) Status { *h = 7; return answer("cublasCreate") },
		destroy:   func(uintptr) Status { return answer("cublasDestroy") },
		version:   func(_ uintptr, v *int32) Status { *v = 120405; return answer("cublasGetVersion") },
		setStream: func(_, _ uintptr) Status { return answer("cublasSetStream") },
		gemmEx: func(_ uintptr, _, _, m, n, k int32, alpha *float32, _ uint64, _, ldA int32, _ uint64, _, ldB int32, beta *float32, _ uint64, _, ldC int32, _, _ int32) Status {
			if m != n || n != k || k != ldA || ldA != ldB || ldB != ldC || *alpha != 1 || *beta != 0 {
				return 7
			}
			return answer("cublasGemmEx")
		},
	}}, seen
}

// TestCalls: each call's failure has its name and the status, and a handle whose version is not told is given back.
func TestCalls(t *testing.T) {
	l, seen := pretended(nil)
	h, err := l.New()
	require.NoError(t, err)
	assert.Equal(t, "12.4.5", h.Version())
	require.NoError(t, errors.Join(h.SetStream(3), h.Multiply(64, 1, 2, 3), h.Close()))
	assert.Equal(t, []string{"cublasCreate", "cublasGetVersion", "cublasSetStream", "cublasGemmEx", "cublasDestroy"}, *seen)
	require.ErrorIs(t, h.Multiply(0, 1, 2, 3), errs.ErrInvalid)

	for _, call := range []string{"cublasCreate", "cublasGetVersion", "cublasSetStream", "cublasGemmEx", "cublasDestroy"} {
		l, seen := pretended(map[string]Status{call: 15})
		h, err := l.New()
		if err == nil {
			err = errors.Join(h.SetStream(3), h.Multiply(64, 1, 2, 3), h.Close())
		}
		require.EqualError(t, err, call+": CUBLAS_STATUS_NOT_SUPPORTED (15)")
		if call != "cublasCreate" {
			assert.Equal(t, "cublasDestroy", (*seen)[len(*seen)-1])
		}
	}
	assert.Equal(t, "cublasStatus_t 99", Status(99).String())
}

// TestLoadWithoutLibrary: what is not there is ErrUnavailable, and the error says where it was looked for.
func TestLoadWithoutLibrary(t *testing.T) {
	t.Setenv(LibraryEnv, t.TempDir())
	_, err := Load()
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, LibraryEnv)
}
