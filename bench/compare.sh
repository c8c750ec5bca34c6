#!/usr/bin/env bash
# Measures collectives of symmem's host backend and of Open MPI side by side, in turn, on this machine, and prints for each kind
# and size the median over all rounds. Alternating lets both meet the same disturbances. Open MPI runs with several settings, of which the
# fastest at each size counts.
#
#   bench/compare.sh [-n RANKS] [-r ROUNDS] [-k KINDS] [-s SIZES] [-g] [-o DIRECTORY]
#
#   -n  ranks, default 2; more than there are cores is no fair comparison
#   -r  rounds, default 5
#   -k  collectives, with commas between them, default all_reduce; there are reduce_scatter, all_gather, broadcast, reduce, all_to_all and barrier too
#   -s  sizes in bytes, with commas between them, default 1024,65536,1048576,67108864
#   -g  symmem replays graphs of 20 runs in place of enqueuing each, which Open MPI has nothing like
#   -o  directory for what both measured, as JSON; default one that is removed at the end
#
# Needs go, mpicc and mpirun (Debian: openmpi-bin libopenmpi-dev). Exits with 1 if symmem is slower at any size.
set -euo pipefail

ranks=2 rounds=5 kinds=all_reduce sizes=1024,65536,1048576,67108864 mode=eager out=
while getopts n:r:k:s:go: flag; do
	case $flag in
	n) ranks=$OPTARG ;;
	r) rounds=$OPTARG ;;
	k) kinds=$OPTARG ;;
	s) sizes=$OPTARG ;;
	g) mode=graph ;;
	o) out=$OPTARG ;;
	*) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
	esac
done
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${out:-$work/results}
mkdir -p "$out"

(cd "$here/.." && CGO_ENABLED=0 go build -o "$work/symmem" ./cmd/symmem)
mpicc -O3 -march=native -std=gnu11 -Wall -Wextra -o "$work/mpi_collectives" "$here/peers/mpi_collectives.c"

# Shared memory only, a core for each rank where there are enough, spinning.
# shellcheck disable=SC2054 # the commas are of one argument
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
	"$work/symmem" bench --backend host --ranks "$ranks" --kind "$kinds" --sizes "$sizes" --mode "$mode" --output "$out/symmem.$round.json" >/dev/null
	for name in "${!settings[@]}"; do
		# shellcheck disable=SC2086
		"${mpi[@]}" ${settings[$name]} "$work/mpi_collectives" "$kinds" 15 ${sizes//,/ } >"$out/mpi-$name.$round.json"
	done
done

awk -v ours=symmem -f "$here/table.awk" "$out"/symmem.*.json "$out"/mpi-*.json
