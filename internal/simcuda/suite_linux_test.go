package simcuda_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/tests/suite"
)

func TestTmpSuite(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("N"))
	m, ranks := open(t, n, simcuda.Config{Seed: 1, Multicast: true})
	opts := &suite.Options{Device: ranks[0].Device().Kind(), Backend: "native", World: n, Short: true}
	var mu sync.Mutex
	each(t, ranks, func(r *symmem.Rank) error {
		var report func(suite.Result)
		if r.Rank() == 0 {
			report = func(res suite.Result) {
				mu.Lock()
				defer mu.Unlock()
				fmt.Println(res.Status, res.Case, res.Took.Round(time.Millisecond), res.Reason)
			}
		}
		sum, err := suite.Run(context.Background(), r, slices.Values(suite.Cases(opts)), opts, report)
		if r.Rank() == 0 {
			fmt.Println(sum)
		}
		return err
	})
	fmt.Println(m.Stats())
}
