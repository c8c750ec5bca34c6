//go:build !linux

package processors

import "runtime"

// allowed returns as many processors as this process may use.
func allowed() Set { return first(runtime.NumCPU()) }

// quota is none: there are no control groups.
func quota() (thousandths int64, of uint64) { return 0, 0 }
