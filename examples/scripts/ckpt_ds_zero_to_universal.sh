#!/usr/bin/env bash
# Converts a checkpoint to DeepSpeed's universal format, so that another number of GPUs can resume from it.
# Needs CPU memory for one layer's optimizer states in each worker. Makes $CKPT/${TAG}_universal beside the
# checkpoint; resume with `--ds.use_universal_ckpt --ckpt.load_enable`.
set -euo pipefail

CKPT=${CKPT:?name the folder of --ckpt.path}
TAG=${TAG:-$(cat "$CKPT/latest")}
WORKERS=${WORKERS:-4}

python -m deepspeed.checkpoint.ds_to_universal \
    --input_folder "$CKPT/$TAG" \
    --output_folder "$CKPT/${TAG}_universal" \
    --num_extract_workers "$WORKERS" \
    --num_merge_workers "$WORKERS"
echo "${TAG}_universal" > "$CKPT/latest_universal"
