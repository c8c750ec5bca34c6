package tuning_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/tuning"
)

// sizesAround are the sizes at which choices may change: around every power of two, and three quarters and 5/8 of them.
func sizesAround() (sizes []int64) {
	for n := int64(16); n <= 8<<30; n *= 2 {
		for _, m := range []int64{n, n / 4 * 3, n / 8 * 5, n / 8 * 7} {
			sizes = append(sizes, m-1, m, m+1)
		}
	}
	slices.Sort(sizes)
	return sizes
}

// every takes every form.
func every(*tuning.Step) bool { return true }

// measuredSince is the form of an all-reduce that was found to be faster than what the constants took.
func measuredSince(device, collective, dtype string, size int, bytes int64, whole bool) (form string, blocks int, ok bool) {
	floats, h100 := slices.Contains(tuning.Floats, dtype), strings.Contains(device, "H100")
	between := func(from, to int64) bool { return from < bytes && bytes <= to }
	switch {
	case device == "some processor":
	case !h100 && size == 2 && collective == tuning.AllReduceMany && floats && whole && between(2<<20, 6<<20):
		return "one_shot_push", 0, true
	case !h100 && size == 2 && collective == tuning.AllReduceRMSNorm && between(2<<20, 6<<20):
		return "one_shot_push", 0, true
	case !h100 && size == 2 && collective == tuning.AllReduceRMSNorm && between(6<<20, 192<<20):
		return "two_shot_pull", 0, true
	case !h100 && size == 2 && collective == tuning.AllReduceRMSNorm && bytes > 192<<20:
		return "transfers", 0, true
	case collective != tuning.AllReduce:
	case !h100 && size == 2 && floats && whole && between(2<<20, 4<<20):
		return "one_shot_push", 0, true
	case h100 && size == 2 && floats && whole && bytes > 24<<20 && bytes <= 32<<20:
		return tuning.Flow, 0, true
	case size == 4 && floats && whole && bytes > 192<<10 && bytes <= 320<<10:
		return "two_shot_push", 0, true
	case h100:
	case size == 2 && bytes > 384<<20:
		return "transfers", 0, true
	case dtype != "i32":
	case size == 2 && between(1536<<10, 3<<20), size == 3 && between(384<<10, 768<<10):
		return "two_shot_pull", 128, true
	case size == 3 && between(3<<20, 4<<20):
		return "two_shot_pull", 64, true
	}
	return "", 0, false
}

// moves are the collectives that were measured anew when their kernels changed.
var moves = []string{tuning.Broadcast, tuning.Reduce, tuning.AllGather, tuning.ReduceScatter, tuning.AllToAll}

// TestMovesOfTables: where GPUs are linked, small messages of the collectives other than all-reduce go in lines, as far as the constants sent them so and, if they are whole vectors, further;
// lines do not come again for larger ones. What is larger is loaded from peers where it is combined, or goes by copy engines; where it is only moved it is stored to them or goes by copy engines, except that large
// broadcasts between two may load. Integers of 32 bits between two ranks were measured by themselves.
func TestMovesOfTables(t *testing.T) {
	for _, device := range []string{"NVIDIA H200", "NVIDIA H100 80GB HBM3", "Simulated GPU"} {
		set := &tuning.Set{Tables: []*tuning.Table{tuning.Shipped(device, "")}}
		for size := 2; size <= 12; size++ {
			for _, collective := range moves {
				combines := collective == tuning.Reduce || collective == tuning.ReduceScatter
				for _, dtype := range []string{"bf16", "f32", "f64", "i32", "u8"} {
					floats := slices.Contains(tuning.Floats, dtype)
					lines, larger := "one_shot_ll", []string{"one_shot_push", "transfers"}
					switch {
					case combines && floats:
						lines, larger = "one_shot_push", []string{"one_shot_pull", "transfers"}
					case combines:
						larger = []string{"one_shot_pull", "transfers"}
					case collective == tuning.Broadcast:
						larger = append(larger, "two_shot_push")
						if size == 2 {
							larger = append(larger, "one_shot_pull")
						}
					}
					last := map[bool]int64{}
					for _, whole := range []bool{false, true} {
						over := false
						for _, bytes := range sizesAround() {
							step, _ := set.Choose(collective, size, dtype, bytes, whole, every)
							if !over && step.Form == lines {
								last[whole] = bytes
								continue
							}
							over = true
							passed := collective == tuning.Broadcast && whole && size > 2 && step.Form == "two_shot_push" // on in lines
							measured := combines && dtype == "i32" && size == 2 || passed
							if !slices.Contains(larger, step.Form) || !measured && oldForm(collective, false, size, bytes, floats, whole) == lines {
								require.Failf(t, "not the form", "%s: %s of %d bytes of %s between %d ranks, whole vectors %t: %q", device, collective, bytes, dtype, size, whole, step.Form)
							}
						}
						require.Positive(t, last[whole])
					}
					if collective != tuning.Broadcast || size == 2 { // between more ranks whole vectors are passed on
						require.GreaterOrEqual(t, last[true], last[false], "%s, %s of %s between %d ranks", device, collective, dtype, size)
					}
					if floats && combines || collective == tuning.AllGather || collective == tuning.AllToAll {
						require.Greater(t, last[true], last[false], "%s, %s of %s between %d ranks", device, collective, dtype, size)
					}
				}
			}
		}
	}
}

// TestOneShotOfTables: who asks for the one-shot forms gets none by lines for a large message, for which there would have to be room several times, and which take several times as long.
func TestOneShotOfTables(t *testing.T) {
	oneShot := func(s *tuning.Step) bool {
		return s.Form == "one_shot_ll" || s.Form == "one_shot_push" || s.Form == "one_shot_pull"
	}
	for _, device := range []string{"NVIDIA H200", "NVIDIA H100 80GB HBM3"} {
		set := &tuning.Set{Tables: []*tuning.Table{tuning.Shipped(device, "")}}
		for size := 2; size <= 12; size++ {
			for _, collective := range moves {
				for _, dtype := range []string{"bf16", "i32", "u8"} {
					step, ok := set.Choose(collective, size, dtype, 1<<30, false, oneShot)
					require.True(t, ok)
					want := []string{"one_shot_push", "one_shot_pull"} // of what only moves both do without
					if collective == tuning.Reduce || collective == tuning.ReduceScatter {
						want = want[1:]
					}
					require.Contains(t, want, step.Form, "%s: %s of %s between %d ranks", device, collective, dtype, size)
				}
			}
		}
	}
}

// TestShippedTables: without multicast, the tables that come with this package take what the constants took that were in the code before: for every all-reduce, world, dtype and
// size, and every collective on the host. So nobody's program became slower by the tables themselves. Where more was measured since, that counts.
func TestShippedTables(t *testing.T) {
	for _, tt := range []struct {
		device, link string
	}{{"NVIDIA H200", tuning.LinkNVLink}, {"NVIDIA H200", ""}, {"NVIDIA H100 80GB HBM3", tuning.LinkNVLink}, {"Simulated GPU", ""}, {"some processor", tuning.LinkHost}} {
		table := tuning.Shipped(tt.device, tt.link)
		require.NotNil(t, table, tt.device)
		set := &tuning.Set{Tables: []*tuning.Table{table}}
		for size := 2; size <= 12; size++ {
			require.True(t, table.Complete(size))
			for _, collective := range tuning.Collectives() {
				if tt.link != tuning.LinkHost && slices.Contains(moves, collective) {
					continue
				}
				for _, dtype := range []string{"bf16", "f32", "f64", "i32", "u8"} {
					floats := slices.Contains(tuning.Floats, dtype)
					if collective == tuning.AllReduceRMSNorm && !floats {
						continue // which it has not
					}
					for _, bytes := range sizesAround() {
						for _, whole := range []bool{false, true} {
							step, ok := set.Choose(collective, size, dtype, bytes, whole, every)
							require.True(t, ok)
							want := oldForm(collective, tt.link == tuning.LinkHost, size, bytes, floats, whole)
							if name, blocks, ok := measuredSince(tt.device, collective, dtype, size, bytes, whole); ok {
								require.Equal(t, name, step.Form, "%s: %s of %d bytes of %s between %d ranks", tt.device, collective, bytes, dtype, size)
								require.EqualValues(t, blocks, step.Blocks)
								continue
							}
							require.Equal(t, want, step.Form, "%s: %s of %d bytes of %s between %d ranks, whole vectors %t", tt.device, collective, bytes, dtype, size, whole)
							require.Zero(t, step.Blocks)
							if step.Form != tuning.Flow {
								continue
							}
							lap := int64(16 << 10)
							if bytes >= oldLongLapsFrom {
								lap = 32 << 10
							}
							require.EqualValues(t, lap, step.LapBytes)
						}
					}
				}
			}
		}
	}
}

// TestShippedTablesSay: where tables come from, and what of them was not measured.
func TestShippedTablesSay(t *testing.T) {
	require.Len(t, tuning.AllShipped(), 3)
	for _, table := range tuning.AllShipped() {
		assert.NotEmpty(t, table.Machine, table.Name)
		assert.NotEmpty(t, table.Date, table.Name)
		assert.NotEmpty(t, table.Command, table.Name)
		assert.NotEmpty(t, table.Notes, table.Name)
		for _, r := range table.Rules {
			if r.Ranks > 4 || r.Multicast || r.Ranks > 2 && table.Devices[0] == "NVIDIA H100 80GB HBM3" {
				assert.Equal(t, tuning.Estimated, r.Source, "%s, %s between %d ranks", table.Name, r.Collective, r.Ranks)
			}
		}
	}
	assert.Nil(t, tuning.Shipped("NVIDIA H200", tuning.LinkPCIe), "cards whose links are not NVLink go by a model")
	assert.Nil(t, tuning.Shipped("NVIDIA H100 PCIe", ""))
	assert.Nil(t, tuning.Shipped("NVIDIA A100-SXM4-80GB", tuning.LinkNVLink))
}

// TestTextIsRead: what is written is read again as the same, and the shipped files are as they would be written.
func TestTextIsRead(t *testing.T) {
	files, err := filepath.Glob("tables/*.json")
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, file := range files {
		table, text, err := tuning.Read(file)
		require.NoError(t, err)
		again, err := table.Text()
		require.NoError(t, err)
		assert.Equal(t, string(text), string(again), file)
	}
	model := tuning.Model(tuning.LinkPCIe, 5, tuning.Speed{Hop: 9, Bandwidth: 20}, true)
	text, err := model.Text()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "model.json")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	read, _, err := tuning.Read(path)
	require.NoError(t, err)
	read.Name = model.Name
	assert.Equal(t, model, read)
}

// TestMulticastWins: where memory has multicast, large all-reduces and broadcasts go by forms of it between three ranks and more, sums alone, and never a reduction that has no option to
// keep to the order of the ranks.
func TestMulticastWins(t *testing.T) {
	speed := tuning.Speed{Hop: 2.2, Bandwidth: 320}
	for name, table := range map[string]*tuning.Table{"shipped": tuning.Shipped("NVIDIA H200", ""), "model": tuning.Model(tuning.LinkNVLink, 8, speed, true)} {
		set := &tuning.Set{Tables: []*tuning.Table{table}, Multicast: true}
		form := func(collective, dtype string, bytes int64, usable func(*tuning.Step) bool) string {
			step, ok := set.Choose(collective, 8, dtype, bytes, true, usable)
			require.True(t, ok)
			return step.Form
		}
		assert.Equal(t, "two_shot_multimem", form(tuning.AllReduce, "bf16", 64<<20, every), name)
		assert.Equal(t, "one_shot_push", form(tuning.AllReduce, "bf16", 1<<10, every), name)
		assert.Equal(t, "one_shot_multimem", form(tuning.Broadcast, "i8", 1<<20, every), name)
		assert.Equal(t, tuning.Flow, form(tuning.AllReduce, "i32", 64<<20, every), name)
		assert.Equal(t, tuning.Flow, form(tuning.AllReduce, "bf16", 64<<20, func(s *tuning.Step) bool { return !tuning.NeedsMulticast(s.Form) }), "%s: without such a form the other rule", name)
		set.Multicast = false
		assert.Equal(t, tuning.Flow, form(tuning.AllReduce, "bf16", 64<<20, every), name)
		for _, r := range table.Rules {
			for _, s := range r.Steps {
				assert.False(t, tuning.NeedsMulticast(s.Form) && (!r.Multicast || r.Collective != tuning.AllReduce && r.Collective != tuning.Broadcast), "%s: %+v", name, r)
			}
		}
	}
}

// TestWhatWasMeasured: the tables say of which numbers of ranks there are figures, as docs/tune.md does, and have a choice for all others as well.
func TestWhatWasMeasured(t *testing.T) {
	for device, want := range map[string]map[string][]int{
		"NVIDIA H200": {
			tuning.AllReduce: {2, 3, 4}, tuning.Broadcast: {2, 3, 4}, tuning.Reduce: {2, 3, 4}, tuning.ReduceScatter: {2, 3, 4}, tuning.AllGather: {2, 3, 4},
			tuning.AllToAll: {2, 3, 4}, tuning.AllReduceMany: {2}, tuning.AllReduceRMSNorm: {2},
		},
		"NVIDIA H100 80GB HBM3": {tuning.AllReduce: {2}, tuning.Broadcast: {2}, tuning.Reduce: {2}, tuning.AllGather: {2}, tuning.AllToAll: {2}},
	} {
		table := tuning.Shipped(device, "")
		require.NotNil(t, table, device)
		got, ranks := map[string][]int{}, map[string][]int{}
		for _, r := range table.Rules {
			if r.Source == tuning.Measured && !slices.Contains(got[r.Collective], r.Ranks) {
				got[r.Collective] = append(got[r.Collective], r.Ranks)
			}
			ranks[r.Collective] = append(ranks[r.Collective], r.Ranks)
		}
		assert.Equal(t, want, got, device)
		for collective, has := range ranks {
			for size := 2; size <= 8; size++ {
				assert.Contains(t, has, size, "%s, %s", device, collective)
			}
		}
		assert.GreaterOrEqual(t, len(ranks), len(tuning.Collectives()), device)
	}
}
