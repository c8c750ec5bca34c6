//go:build !linux

package group

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func runWorker(string) int { return 1 }

func TestFilesAreUnsupported(t *testing.T) {
	eachKind(t, 2, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for _, err := range onAll(groups, func(g *Group) error {
			_, err := g.ExchangeFile(ctx, "files", os.Stdin)
			return err
		}) {
			require.ErrorIs(t, err, ErrUnsupported)
		}
	})
}
