// Package tests runs the correctness suite over every backend, world size and way to start ranks, and kills ranks.
package tests

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tests/suite"
)

// worlds are the world sizes of the matrix.
var worlds = []int{1, 2, 3, 4, 5, 8}

func TestGoroutines(t *testing.T) {
	for _, w := range worlds {
		t.Run(fmt.Sprintf("world=%d", w), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			cfg := config.Default()
			cfg.KernelTimeout = 30 * time.Second
			ranks, err := symmem.OpenLocal(ctx, w, cfg, nil)
			require.NoError(t, err)
			opts := &suite.Options{Short: w != 4 || testing.Short()}
			cases := suite.Cases(opts)
			var wg sync.WaitGroup
			for _, r := range ranks {
				wg.Go(func() {
					report := func(res suite.Result) {
						if res.Status == suite.Failed {
							t.Errorf("%s: %s", res.Case, res.Reason)
						} else if os.Getenv("V") != "" {
							t.Log(res)
						}
					}
					if r.Rank() != 0 {
						report = nil
					}
					sum, err := suite.Run(ctx, r, cases, opts, report)
					if err != nil {
						t.Errorf("rank %d: %v", r.Rank(), err)
					}
					if r.Rank() == 0 {
						t.Log(sum)
					}
					if err := r.Close(ctx); err != nil {
						t.Errorf("rank %d: %v", r.Rank(), err)
					}
				})
			}
			wg.Wait()
		})
	}
}
