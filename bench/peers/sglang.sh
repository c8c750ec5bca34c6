#!/usr/bin/env bash
# Compiles SGLang's push all-reduce kernels, from its package on PyPI, to a cubin for `symmem bench --peer sglang`.
#
#   bench/peers/sglang.sh OUT.cubin [ARCHITECTURE]
#
# It needs nvcc 12.4 or later, and pip; nothing of the package is installed. SITE names a folder that already holds the unpacked
# packages' folders sglang and tvm_ffi, for a machine without a network. ARCHITECTURE is sm_90 unless given.
set -euo pipefail
out=${1:?the cubin to write}
arch=${2:-sm_90}
here=$(cd "$(dirname "$0")" && pwd)
site=${SITE:-}
if [ -z "$site" ]; then
	site=$(mktemp -d)
	trap 'rm -rf "$site"' EXIT
	python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$site" sglang==0.5.23 apache-tvm-ffi==0.1.15.post2
	for wheel in "$site"/*.whl; do
		python3 -m zipfile -e "$wheel" "$site"
	done
fi
jit=$site/sglang/kernels/jit
nvcc -cubin -arch="$arch" -std=c++20 -O3 --expt-relaxed-constexpr -DSGL_CUDA_ARCH="${arch#sm_}0" -I"$jit" -I"$jit/include" \
	-I"$site/tvm_ffi/include" -o "$out" "$here/sglang.cu"
