#!/usr/bin/env bash
#SBATCH --job-name=openrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Runs an RL recipe of this folder on the nodes of a SLURM job, which form a Ray cluster:
#   RECIPE=examples/scripts/train_dapo_ray_hybrid_engine.sh sbatch examples/scripts/train_ppo_ray_slurm.sh
# Append further flags. Submit from a folder that all nodes see, with the Python environment active. The output
# is that of the recipe.
set -euo pipefail

RECIPE=${RECIPE:-examples/scripts/train_ppo_ray_hybrid_engine.sh}
PORT=${PORT:-6379}
read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export NODES=$SLURM_NNODES GPUS=${SLURM_GPUS_ON_NODE:-8}
# Anyone who can reach a cluster without a token can run any code on it.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Timeout in seconds for the nodes to start Ray.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-600}
# Starts Ray on all nodes, runs the recipe on the first once they are there, and stops Ray after it.
srun --kill-on-bad-exit=1 ray symmetric-run --address "$HEAD:$PORT" --min-nodes "$NODES" --num-gpus "$GPUS" \
    -- env RAY_ADDRESS="$HEAD:$PORT" bash "$RECIPE" "$@"
