#!/usr/bin/env bash
# Converts the last checkpoint of a run to DeepSpeed's universal format, with one file for each parameter and
# optimizer state, in ${TAG}_universal next to it. Use it in other programs, or resume from it with
# `--ckpt.load_enable --ds.use_universal_ckpt`. Resuming on another number of GPUs or at another ZeRO stage does
# not need it. DeepSpeed converts checkpoints of Adam, saved at --ds.zero_stage 1 to 3.
set -euo pipefail

CKPT=${CKPT:-./ckpt/checkpoints} # --ckpt.path
WORKERS=${WORKERS:-4}

# RL runs have a folder for each model. The policy's folder decides where to resume from, so it is written last.
MODELS=("$CKPT")
if [[ -d $CKPT/_actor ]]; then MODELS=("$CKPT/_actor"); fi
TAG=${TAG:-$(cat "${MODELS[0]}/latest")}
if [[ -d $CKPT/_critic ]]; then MODELS=("$CKPT/_critic" "${MODELS[@]}"); fi

for model in "${MODELS[@]}"; do
    mkdir -p "$model/${TAG}_universal"
    # Files of the run beside those of DeepSpeed, but for their manifest
    find "$model/$TAG" -maxdepth 1 \( -name 'origin.json' -o -name 'metric.json' -o -name 'random_state_*' -o -name 'moving_average_*' \) \
        -exec cp -t "$model/${TAG}_universal" {} +
    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
        --input_folder "$model/$TAG" \
        --output_folder "$model/${TAG}_universal" \
        --num_extract_workers "$WORKERS" \
        --num_merge_workers "$WORKERS"
    echo "${TAG}_universal" > "$model/latest_universal"
done
