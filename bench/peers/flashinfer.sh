#!/usr/bin/env bash
# Measures FlashInfer's fused all-reduce with residual and RMSNorm, from its package on PyPI, between the first WORLD GPUs of this host, 2 unless it is given. Beside it stands
# `symmem bench --ranks 2 --kind all_reduce_rms_norm --dtype bf16 --mode graph --sizes 64K,128K,256K,512K,1M,2M`.
#
#   bench/peers/flashinfer.sh [procs|threads]
#
# It needs nvcc, and pip; nothing of the package is installed. SITE names a folder that already holds the unpacked package's folder flashinfer, for a
# machine without a network. ARCH is sm_90a unless given. REPS, REPLAYS and LIMIT (seconds) change what flashinfer.cu takes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=${SITE:-}
if [ -z "$site" ]; then
	site=$work/site
	python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$site" flashinfer-python==0.7.2.post1
	for wheel in "$site"/*.whl; do
		python3 -m zipfile -e "$wheel" "$site"
	done
fi
headers=$work/include/flashinfer
mkdir -p "$headers/comm"
cp "$site"/flashinfer/data/include/flashinfer/{exception.h,fp4_layout.cuh,utils.cuh,vec_dtypes.cuh} "$headers"
cp "$site/flashinfer/data/include/flashinfer/comm/trtllm_allreduce_fusion.cuh" "$headers/comm"
# Its own wants a library for logging. Nothing that is compiled here logs.
for level in TRACE DEBUG INFO WARN ERROR CRITICAL; do
	echo "#define FLASHINFER_LOG_$level(...) ((void)0)"
done >"$headers/logging.h"
# NVLink multicast is no part of this comparison.
if grep -rniE 'multimem|multicast|nvls|mnnvl' "$work/include"; then
	echo "multicast in what is to be compiled: not built" >&2
	exit 1
fi
arch=${ARCH:-sm_90a}
# The flags with which FlashInfer compiles its kernels.
nvcc -std=c++17 -O3 -use_fast_math --expt-relaxed-constexpr -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 \
	-DFLASHINFER_ENABLE_FP8_E8M0 -DFLASHINFER_ENABLE_FP4_E2M1 -gencode="arch=compute_${arch#sm_},code=$arch" -DWORLD="${WORLD:-2}" -I"$work/include" -o "$work/flashinfer" "$here/flashinfer.cu" -lpthread
timeout -k 5 60 "$work/flashinfer" "${1:-procs}"
