//go:build !linux

package futex_test

import "errors"

// runChild has no role here: processes share no memory on this system.
func runChild(role string) error { return errors.New("unknown role " + role) }
