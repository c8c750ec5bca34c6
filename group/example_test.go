package group_test

import (
	"context"
	"fmt"
	"time"

	"github.com/symmem/symmem/group"
)

func ExampleLocal() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	groups, err := group.Local(2, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	done := make(chan error)
	for _, g := range groups { // one goroutine a rank
		go func() {
			all, err := g.AllGather(ctx, "greeting", fmt.Appendf(nil, "rank %d of %d", g.Rank(), g.Size()))
			if err == nil && g.Rank() == 0 {
				fmt.Printf("%s\n", all)
			}
			done <- err
		}()
	}
	for range groups {
		if err := <-done; err != nil {
			fmt.Println(err)
		}
	}
	for _, g := range groups {
		if err := g.Close(ctx); err != nil {
			fmt.Println(err)
		}
	}
	// Output: [rank 0 of 2 rank 1 of 2]
}
