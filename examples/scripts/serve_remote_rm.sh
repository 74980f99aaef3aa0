#!/usr/bin/env bash
# Serves a reward model over HTTP, for `--reward.remote_url http://HOST:5000/get_reward`.
# Needs one GPU of 40 GB.
set -euo pipefail

REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
HOST=${HOST:-127.0.0.1} # 0.0.0.0 answers every client that has OPENRLHF_REWARD_KEY
PORT=${PORT:-5000}

python -m openrlhf.cli.serve_rm \
    --reward.model_name_or_path "$REWARD_MODEL" \
    --reward.normalize_enable \
    --data.max_len 8192 \
    --ds.param_dtype bf16 \
    --host "$HOST" \
    --port "$PORT" \
    --batch_size 16 \
    "$@"
