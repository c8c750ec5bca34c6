package fleet

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/cmd/symmem/internal/launch"
)

func TestDescribe(t *testing.T) {
	end := func(rank, code int, asked bool) launch.RankEnd {
		return launch.RankEnd{Rank: rank, PID: 100 + rank, Code: code, Asked: asked}
	}
	for name, tt := range map[string]struct {
		ranks   []launch.RankEnd
		texts   []string
		done    []bool
		stalled bool
		want    []string
	}{
		"all well": {
			ranks: []launch.RankEnd{end(0, 0, false), end(1, 0, false)}, texts: []string{"", ""}, done: []bool{true, true},
		},
		"one died": {
			ranks: []launch.RankEnd{end(0, 1, true), end(1, 9, false)}, texts: []string{"rank 1 is lost", ""}, done: []bool{false, false},
			want: []string{"rank 1 (process 101) exited with status 9; rank 0: rank 1 is lost"},
		},
		"one died and was asked to end before that was known": {
			ranks: []launch.RankEnd{end(0, 1, false), end(1, 9, true), end(2, 1, true)}, texts: []string{"rank 1 is lost", "", ""}, done: []bool{false, false, false},
			want: []string{"rank 1 (process 101) exited with status 9; rank 0: rank 1 is lost"},
		},
		"one left early": {
			ranks: []launch.RankEnd{end(0, 0, false), end(1, 0, false)}, texts: []string{"", ""}, done: []bool{true, false},
			want: []string{"rank 1 ended without"},
		},
		"one hangs": {
			ranks: []launch.RankEnd{end(0, 1, true), end(1, 1, true)}, texts: []string{"gave up", ""}, done: []bool{false, false}, stalled: true,
			want: []string{"ranks [1] hang", "rank 0: gave up"},
		},
		"ended from here": {
			ranks: []launch.RankEnd{end(0, 1, true), end(1, 1, true)}, texts: []string{"", ""}, done: []bool{false, false},
			want: []string{"rank 0 (process 100)"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := describe(&launch.Outcome{Ranks: tt.ranks}, tt.texts, tt.done, tt.stalled)
			if tt.want == nil {
				assert.Empty(t, got)
			}
			for _, part := range tt.want {
				assert.Contains(t, got, part)
			}
		})
	}
}
