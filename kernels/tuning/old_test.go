package tuning_test

// The thresholds that the code had before there were tables: what TestShippedTables holds the shipped ones against, and what they were made from.
var (
	oldHostOneShot   = [...]int64{2: 1 << 10, 3: 4 << 10, 4: 4 << 10}
	oldOneShotPush   = [...]int64{2: 2 << 20, 3: 384 << 10, 4: 320 << 10, 5: 160 << 10, 6: 128 << 10, 7: 96 << 10, 8: 64 << 10}
	oldTwoShotPush   = int64(12 << 20)
	oldTwoShotWhole  = [...]int64{2: 32 << 20, 3: 16 << 20, 4: 16 << 20, 5: 12 << 20}
	oldOneShotLL     = [...]int64{2: 768 << 10, 3: 512 << 10, 4: 512 << 10, 5: 256 << 10, 6: 192 << 10, 7: 128 << 10, 8: 96 << 10}
	oldTwoShotPull   = [...]int64{2: 8 << 20, 3: 4 << 20}
	oldCopyEngine    = [...]int64{2: 1 << 30, 3: 1 << 30, 4: 1 << 30}
	oldGatherLL      = [...]int64{2: 3 << 19, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	oldAllToAllLL    = [...]int64{2: 1 << 20, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	oldBroadcastLL   = [...]int64{2: 768 << 10, 3: 384 << 10, 4: 256 << 10, 5: 192 << 10, 6: 128 << 10, 7: 128 << 10, 8: 96 << 10}
	oldScatterLL     = [...]int64{2: 640 << 10, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	oldScatterPush   = [...]int64{2: 7 << 19, 3: 2 << 20, 4: 2 << 20, 5: 3 << 19, 6: 3 << 19, 7: 1 << 20, 8: 1 << 20}
	oldReduceLL      = [...]int64{2: 768 << 10, 3: 384 << 10, 4: 256 << 10, 5: 192 << 10, 6: 128 << 10, 7: 128 << 10, 8: 96 << 10}
	oldReducePush    = [...]int64{2: 3 << 19, 3: 768 << 10, 4: 512 << 10, 5: 384 << 10, 6: 256 << 10, 7: 256 << 10, 8: 192 << 10}
	oldBroadcastTwo  = 4              // ranks
	oldBroadcastSize = int64(1 << 20) // from which on two phases
	oldLongLapsFrom  = int64(64 << 20)
)

// at is the entry of a world size; the last serves all above.
func at(table []int64, size int) int64 { return table[min(size, len(table)-1)] }

// oldForm is what auto took.
func oldForm(collective string, host bool, size int, bytes int64, floats, whole bool) string {
	first := func(limit []int64, small, large string) string {
		if bytes <= at(limit, size) {
			return small
		}
		return large
	}
	switch {
	case host && (collective == "all_reduce" || collective == "all_reduce_many" || collective == "all_reduce_rms_norm"):
		return first(oldHostOneShot[:], "one_shot", "two_shot")
	case host:
		return "one_shot"
	}
	switch collective {
	case "all_reduce":
		switch {
		case size <= 4 && bytes >= at(oldCopyEngine[:], size):
			return "transfers"
		case floats && bytes <= at(oldOneShotPush[:], size):
			return "one_shot_push"
		case floats && (bytes <= oldTwoShotPush || whole && bytes <= at(oldTwoShotWhole[:], size)):
			return "two_shot_push"
		case !floats && bytes <= at(oldOneShotLL[:], size):
			return "one_shot_ll"
		case !floats && bytes <= at(oldTwoShotPull[:], size):
			return "two_shot_pull"
		}
		return "two_shot_flow"
	case "all_reduce_many":
		if floats {
			return first(oldOneShotPush[:], "one_shot_push", "two_shot_pull")
		}
		return first(oldOneShotLL[:], "one_shot_ll", "two_shot_pull")
	case "all_reduce_rms_norm":
		if bytes <= at(oldOneShotPush[:], size) {
			return "one_shot_push"
		}
		return first([]int64{oldTwoShotPush}, "two_shot_push", "two_shot_pull")
	case "broadcast":
		if size >= oldBroadcastTwo && bytes >= oldBroadcastSize {
			return "two_shot_pull"
		}
		return first(oldBroadcastLL[:], "one_shot_ll", "one_shot_pull")
	case "all_gather":
		return first(oldGatherLL[:], "one_shot_ll", "one_shot_pull")
	case "all_to_all":
		return first(oldAllToAllLL[:], "one_shot_ll", "one_shot_pull")
	}
	lines, sealed := oldScatterLL[:], oldScatterPush[:]
	if collective == "reduce" {
		lines, sealed = oldReduceLL[:], oldReducePush[:]
	}
	if floats {
		return first(sealed, "one_shot_push", "one_shot_pull")
	}
	return first(lines, "one_shot_ll", "one_shot_pull")
}
