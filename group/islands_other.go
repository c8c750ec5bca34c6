//go:build !linux

package group

import (
	"context"
	"fmt"
	"runtime"
)

// islandTrial stands in where files cannot be passed: no rank reaches another process.
type islandTrial struct{}

func newIslandTrial(g *Group, _ uint64, why map[int]string) *islandTrial {
	for r := range g.members {
		if r != g.rank {
			why[r] = fmt.Sprintf("open files cannot be passed between processes on %s; it works on Linux", runtime.GOOS)
		}
	}
	return &islandTrial{}
}

func (*islandTrial) ticket() []byte                            { return nil }
func (*islandTrial) send(context.Context, []islandsWord) []int { return nil }
func (*islandTrial) write(context.Context, []int) []int        { return nil }
func (*islandTrial) read([]int) []int                          { return nil }
func (*islandTrial) end()                                      {}
