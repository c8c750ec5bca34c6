package memory

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group"
)

// TestRecordsAreCompared: a difference in any field that the ranks must agree on is an error on all, which says in what.
func TestRecordsAreCompared(t *testing.T) {
	groups, err := group.Local(2, nil)
	require.NoError(t, err)
	for what, differ := range map[string]func(*Record){
		"":                                       func(r *Record) { r.DeviceUUID = "another" },
		"backend":                                func(r *Record) { r.Backend = "other" },
		"order of rendezvous (operation number)": func(r *Record) { r.Operation++ },
		"name or purpose":                        func(r *Record) { r.Name = "other" },
		"dtype":                                  func(r *Record) { r.DType = "other" },
		"shape":                                  func(r *Record) { r.Shape = "other" },
		"size in bytes":                          func(r *Record) { r.Bytes++ },
		"rounded size in bytes":                  func(r *Record) { r.RoundedBytes++ },
		"offset in the allocation in bytes":      func(r *Record) { r.Offset++ },
		"whether the allocation is mapped already": func(r *Record) { r.Mapped = true },
		"what is taken of the workspaces (some rank gave up an earlier call that others went on with: close the rank and open it again)": func(r *Record) { r.Taken = "something" },
	} {
		var wg sync.WaitGroup
		for rank, g := range groups {
			wg.Go(func() {
				r := &Record{Backend: "one", Name: "name", DType: "f32", Shape: "[1]", Bytes: 4, RoundedBytes: 4096}
				if rank == 1 {
					differ(r)
				}
				all, err := exchange(t.Context(), g, r, nil)
				if what == "" {
					assert.NoError(t, err)
					assert.Len(t, all, 2)
					return
				}
				var m *group.MismatchError
				if assert.ErrorAs(t, err, &m, what) {
					assert.Equal(t, what, m.What)
					assert.Len(t, m.Values, 2)
				}
			})
		}
		wg.Wait()
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() { assert.NoError(t, g.Close(context.Background())) })
	}
	wg.Wait()
}
