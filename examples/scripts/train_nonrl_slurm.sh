#!/usr/bin/env bash
#SBATCH --job-name=openrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Runs a supervised recipe of this folder on the nodes of a SLURM job:
#   RECIPE=examples/scripts/train_dpo_llama.sh sbatch examples/scripts/train_nonrl_slurm.sh
# Append further flags. Submit from a folder that all nodes see, with the Python environment active. The output
# is that of the recipe.
set -euo pipefail

RECIPE=${RECIPE:-examples/scripts/train_sft.sh}
PORT=${PORT:-29500}
read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

LAUNCH="srun --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=${SLURM_GPUS_ON_NODE:-8}"
LAUNCH+=" --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT -m"
export LAUNCH
bash "$RECIPE" "$@"
