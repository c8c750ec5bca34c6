package nccl

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// MemAlloc allocates bytes (> 0) of the current GPU's memory by ncclMemAlloc: virtual memory that every GPU with peer access to it may use, in whole
// granules. Where NCCL has no such memory (NCCL_CUMEM_ENABLE=0) it is plain memory of cudaMalloc, which cannot become a window, so the caller has to
// check. The GPU's context is current. ErrUnsupported before NCCL 2.19.
func (l *Library) MemAlloc(bytes int64) (uint64, error) {
	if err := l.Require("ncclMemAlloc", "ncclMemFree"); err != nil {
		return 0, err
	}
	if bytes <= 0 {
		return 0, errs.Invalid("MemAlloc", "bytes", bytes, "1 and more")
	}
	p := new(uint64)
	if err := l.check("ncclMemAlloc", l.call.MemAlloc(p, uintptr(bytes))); err != nil {
		return 0, fmt.Errorf("allocating %d bytes: %w", bytes, err)
	}
	if *p == 0 {
		return 0, fmt.Errorf("allocating %d bytes: NCCL gave no address: %w", bytes, errs.ErrNoMemory)
	}
	return *p, nil
}

// MemFree frees what MemAlloc allocated. The GPU's context is current.
func (l *Library) MemFree(p uint64) error {
	if err := l.Require("ncclMemFree"); err != nil {
		return err
	}
	return l.check("ncclMemFree", l.call.MemFree(p))
}
