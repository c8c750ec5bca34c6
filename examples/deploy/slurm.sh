#!/usr/bin/env bash
# Runs symmem verify, and then symmem bench, with one rank on each of 8 GPUs of 2 hosts:
#
#   sbatch slurm.sh [BENCH FLAGS…]
#
# srun tells each rank its place and the host of rank 0. A secret of the job lets ranks of other hosts in, and nobody else.
#SBATCH --job-name=symmem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=00:30:00
set -euo pipefail

# A variable, since arguments are for everybody on the host to see. srun passes the environment on.
SYMMEM_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export SYMMEM_TOKEN
export SYMMEM_BACKEND=${SYMMEM_BACKEND:-nixl} # the backend that reaches other hosts
symmem=${SYMMEM:-symmem}                      # the command, at the same place on every host

# A rank that fails ends the step: the others have the same status anyway.
srun --kill-on-bad-exit=1 "$symmem" verify --short
srun --kill-on-bad-exit=1 "$symmem" bench --kind all_reduce --output "symmem-${SLURM_JOB_ID}.json" "$@"
