#!/usr/bin/env bash
# Measures all-reduce between two islands of ranks, as two hosts have: symmem's backend nixl with memory of the CPU and Open MPI, side by side, in turn,
# in the same two network namespaces of this machine, joined by a cable, and prints for each size the median over all rounds. Inside a
# namespace both may share memory; between them both go by TCP. Of symmem the forms are measured one by one, and auto; Open MPI runs with several settings, of
# which the fastest at each size counts.
#
#   bench/compare-islands.sh [-n RANKS] [-r ROUNDS] [-s SIZES] [-k REPETITIONS] [-f FORMS] [-o DIRECTORY]
#
#   -n  ranks in each of the two namespaces, default 2
#   -r  rounds, default 5
#   -s  sizes in bytes, with commas between them, default 1024,65536,1048576,67108864
#   -k  repetitions of each measurement in a round, default 15
#   -f  forms of symmem, with spaces between them, default "auto hierarchical transfers"
#   -o  directory for what both measured, as JSON; default one that is removed at the end
#
# Needs root, ip, go, mpicc and mpirun (Debian: iproute2 openmpi-bin libopenmpi-dev), and NIXL, which SYMMEM_NIXL_LIBRARY may name. SYMMEM names a binary of the
# command to take in place of one that is built. Exits with 1 if auto is slower than Open MPI at any size.
set -euo pipefail

ranks=2 rounds=5 repetitions=15 sizes=1024,65536,1048576,67108864 forms="auto hierarchical transfers" out=
while getopts n:r:s:k:f:o: flag; do
	case $flag in
	n) ranks=$OPTARG ;;
	r) rounds=$OPTARG ;;
	s) sizes=$OPTARG ;;
	k) repetitions=$OPTARG ;;
	f) forms=$OPTARG ;;
	o) out=$OPTARG ;;
	*) sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
	esac
done
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
spaces=("symmem-bench-$$-0" "symmem-bench-$$-1")
pids=()
cleanup() {
	for pid in "${pids[@]}"; do
		kill "$pid" 2>/dev/null || true
	done
	wait
	for space in "${spaces[@]}"; do
		ip netns del "$space" 2>/dev/null || true
	done
	rm -rf "$work"
}
trap cleanup EXIT
out=${out:-$work/results}
mkdir -p "$out"

symmem=${SYMMEM:-$work/symmem}
if [ "$symmem" = "$work/symmem" ]; then
	(cd "$here/.." && CGO_ENABLED=0 go build -o "$symmem" ./cmd/symmem)
fi
mpicc -O3 -march=native -std=gnu11 -Wall -Wextra -o "$work/mpi_collectives" "$here/peers/mpi_collectives.c"

for i in 0 1; do
	ip netns add "${spaces[i]}"
	ip -n "${spaces[i]}" link set lo up
done
ip -n "${spaces[0]}" link add cable type veth peer name cable netns "${spaces[1]}"
for i in 0 1; do
	ip -n "${spaces[i]}" addr add "10.213.79.$((i + 1))/24" dev cable
	ip -n "${spaces[i]}" link set cable up
done
for i in 0 1; do
	until ip -n "${spaces[i]}" link show cable | grep -q "state UP"; do sleep 0.1; done
done

# One process is one rank, and rank 0 writes what was measured. UCX would find ways between the namespaces that two hosts have not.
export SYMMEM_BACKEND=nixl SYMMEM_DEVICE=host SYMMEM_UNPROTECTED_NETWORK=allow UCX_TLS=tcp UCX_NET_DEVICES=cable
ours() {
	local form=$1 file=$2 rank
	pids=()
	SYMMEM_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
	export SYMMEM_TOKEN SYMMEM_RENDEZVOUS_ADDR=10.213.79.1:29400 SYMMEM_WORLD_SIZE=$((2 * ranks)) SYMMEM_LOCAL_WORLD_SIZE=$ranks
	for ((rank = 0; rank < 2 * ranks; rank++)); do
		SYMMEM_RANK=$rank SYMMEM_LOCAL_RANK=$((rank % ranks)) ip netns exec "${spaces[rank / ranks]}" \
			"$symmem" bench --kind all_reduce --sizes "$sizes" --algorithm "$form" --peer none --reps "$repetitions" --output "$file" >"$work/rank.$rank" 2>&1 &
		pids+=($!)
	done
	for rank in "${!pids[@]}"; do
		if ! wait "${pids[rank]}"; then
			cat "$work"/rank.* >&2
			return 1
		fi
	done
	pids=()
}

# The agent runs what Open MPI would run on another host in a namespace, under a name of its own.
cat >"$work/agent" <<EOF
#!/bin/bash
host=\$1
shift
exec ip netns exec "symmem-bench-$$-\${host#island}" unshare --uts bash -c 'hostname "\$0"; exec bash -c "\$*"' "\$host" "\$@"
EOF
chmod +x "$work/agent"
theirs() {
	local file=$1
	shift
	# shellcheck disable=SC2086
	"$work/agent" island0 mpirun --allow-run-as-root --host "island0:$ranks,island1:$ranks" -np $((2 * ranks)) --mca plm_rsh_agent "$work/agent" \
		--mca oob_tcp_if_include cable --mca btl_tcp_if_include cable --mca pml ob1 --mca btl self,vader,tcp "$@" "$work/mpi_collectives" all_reduce "$repetitions" ${sizes//,/ } >"$file" 2>"$work/mpi" &
	pids=($!)
	wait "${pids[0]}" || return 1
	pids=()
}
binding="--bind-to none --oversubscribe"
if [ $((2 * ranks)) -le "$(nproc)" ]; then
	binding="--bind-to none --mca mpi_yield_when_idle 0"
fi
# Which is best depends on the size and the machine: what its tables choose for ranks that are alike, and what is made for hosts with several ranks; each with and
# without the kernel copying from process to process.
declare -A settings=(
	[tuned]="--mca btl_vader_single_copy_mechanism cma"
	[copy]="--mca btl_vader_single_copy_mechanism none"
	[han]="--mca btl_vader_single_copy_mechanism cma --mca coll_han_priority 100"
	[hansimple]="--mca btl_vader_single_copy_mechanism cma --mca coll_han_priority 100 --mca coll_han_use_simple_allreduce 1"
)

for ((round = 1; round <= rounds; round++)); do
	echo "round $round of $rounds" >&2
	for form in $forms; do
		ours "$form" "$out/symmem-$form.$round.json"
	done
	for name in "${!settings[@]}"; do
		# shellcheck disable=SC2086
		theirs "$out/mpi-$name.$round.json" $binding ${settings[$name]} || {
			echo "Open MPI does not run with ${settings[$name]}: $(tail -n 3 "$work/mpi")" >&2
			rm -f "$out/mpi-$name.$round.json"
			unset "settings[$name]"
		}
	done
done

awk -v ours=symmem-auto -f "$here/table.awk" "$out"/symmem-*.json "$out"/mpi-*.json
