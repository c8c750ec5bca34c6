package nvshmem

import (
	"fmt"

	"github.com/symmem/symmem/group"
)

// alike returns ErrMismatch with every rank's value, unless all ranks have the same.
func alike[T any, V comparable](what string, all []T, of func(*T) V) error {
	values := make([]string, len(all))
	differ := false
	for r := range all {
		values[r] = fmt.Sprint(of(&all[r]))
		differ = differ || of(&all[r]) != of(&all[0])
	}
	if differ {
		return &group.MismatchError{What: what, Values: values}
	}
	return nil
}
