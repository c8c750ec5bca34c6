//go:build !unix

package symmem_test

import (
	"errors"
	"os"
)

func dup(*os.File) (int, error) { return -1, errors.ErrUnsupported }

func alive(int) bool { return false }
