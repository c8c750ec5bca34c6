//go:build !linux

package group

import (
	"fmt"
	"runtime"
)

// depot and its carriers stand in where files cannot be passed.
type depot struct{}

func newDepot() *depot { return &depot{} }

type depotCarrier struct{ depot *depot }

func (c *depotCarrier) prepare(*parcel) (exchange, []byte, error) {
	return nil, nil, fmt.Errorf("passing open files between ranks on %s: %w; it works on Linux", runtime.GOOS, ErrUnsupported)
}

func (c *depotCarrier) close() error { return nil }

func newFileCarrier(*session) carrier { return &depotCarrier{depot: newDepot()} }
