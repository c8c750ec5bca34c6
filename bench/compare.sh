#!/usr/bin/env bash
# Measures all-reduce of symmem's host backend and of Open MPI side by side, in turn, on this machine, and prints for each size
# the median over all rounds. Alternating lets both meet the same disturbances. Open MPI runs with several settings, of which the
# fastest at each size counts.
#
#   bench/compare.sh [-n RANKS] [-r ROUNDS] [-s SIZES] [-o DIRECTORY]
#
#   -n  ranks, default 2; more than there are cores is no fair comparison
#   -r  rounds, default 5
#   -s  sizes in bytes, with commas between them, default 1024,65536,1048576,67108864
#   -o  directory for what both measured, as JSON; default one that is removed at the end
#
# Needs go, mpicc and mpirun (Debian: openmpi-bin libopenmpi-dev). Exits with 1 if symmem is slower at any size.
set -euo pipefail

ranks=2 rounds=5 sizes=1024,65536,1048576,67108864 out=
while getopts n:r:s:o: flag; do
	case $flag in
	n) ranks=$OPTARG ;;
	r) rounds=$OPTARG ;;
	s) sizes=$OPTARG ;;
	o) out=$OPTARG ;;
	*) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
	esac
done
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${out:-$work/results}
mkdir -p "$out"

(cd "$here/.." && CGO_ENABLED=0 go build -o "$work/symmem" ./cmd/symmem)
mpicc -O3 -march=native -std=gnu11 -Wall -Wextra -o "$work/mpi_allreduce" "$here/peers/mpi_allreduce.c"

# Shared memory only, a core for each rank where there are enough, spinning.
mpi=(mpirun -np "$ranks" --mca pml ob1 --mca btl self,vader)
if [ "$ranks" -le "$(nproc)" ]; then
	mpi+=(--bind-to core --mca mpi_yield_when_idle 0)
else
	mpi+=(--bind-to none --oversubscribe)
fi
if [ "$(id -u)" = 0 ]; then
	mpi+=(--allow-run-as-root)
fi
# Which is best depends on the size and the machine: the kernel copying from process to process, copying through shared memory,
# and the collectives made for shared memory.
declare -A settings=(
	[cma]="--mca btl_vader_single_copy_mechanism cma"
	[copy]="--mca btl_vader_single_copy_mechanism none"
	[sm]="--mca btl_vader_single_copy_mechanism none --mca coll_sm_priority 90"
)

for ((round = 1; round <= rounds; round++)); do
	echo "round $round of $rounds" >&2
	"$work/symmem" bench --backend host --ranks "$ranks" --kind all_reduce --sizes "$sizes" --output "$out/symmem.$round.json" >/dev/null
	for name in "${!settings[@]}"; do
		# shellcheck disable=SC2086
		"${mpi[@]}" ${settings[$name]} "$work/mpi_allreduce" 15 ${sizes//,/ } >"$out/mpi-$name.$round.json"
	done
done

# Every row is a line of its own in all files.
awk '
function field(name,    at, rest) {
	at = index($0, "\"" name "\":")
	if (!at) return ""
	rest = substr($0, at + length(name) + 3)
	sub(/[,}].*/, "", rest)
	gsub(/"/, "", rest)
	return rest
}
FNR == 1 {
	who = FILENAME
	sub(/.*\//, "", who)
	sub(/\..*/, "", who)
	if (who != "symmem") peers[who] = 1
}
/"kind":"all_reduce"/ {
	size = field("bytes") + 0
	if (!(size in seen)) { seen[size] = 1; order[++sizes] = size }
	value[who, size, ++count[who, size]] = field("median_us") + 0
}
function median(who, size,    n, i, j, x, v) {
	n = count[who, size]
	for (i = 1; i <= n; i++) v[i] = value[who, size, i]
	for (i = 2; i <= n; i++) {
		x = v[i]
		for (j = i - 1; j >= 1 && v[j] > x; j--) v[j + 1] = v[j]
		v[j + 1] = x
	}
	return (v[int((n + 1) / 2)] + v[int(n / 2) + 1]) / 2
}
END {
	printf "%12s %14s %14s %20s  %s\n", "bytes", "symmem us", "Open MPI us", "Open MPI / symmem", "best setting of Open MPI"
	for (i = 1; i <= sizes; i++) {
		size = order[i]
		best = ""
		for (peer in peers) {
			if (!count[peer, size]) continue
			m = median(peer, size)
			if (best == "" || m < theirs) { best = peer; theirs = m }
		}
		if (best == "" || !count["symmem", size]) {
			printf "%12d: one of the two has no figure\n", size
			slower = 1
			continue
		}
		ours = median("symmem", size)
		printf "%12d %14.2f %14.2f %20.2f  %s\n", size, ours, theirs, theirs / ours, best
		if (ours > theirs) slower = 1
	}
	exit slower
}' "$out"/symmem.*.json "$out"/mpi-*.json
