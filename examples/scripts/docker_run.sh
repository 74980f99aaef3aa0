#!/usr/bin/env bash
# Starts a shell, or the given command, in NVIDIA's PyTorch container, in this folder.
# Needs Docker with the NVIDIA container toolkit. `make env` in the container creates the Python environment in
# .venv.
set -euo pipefail

IMAGE=${IMAGE:-nvcr.io/nvidia/pytorch:26.03-py3}
FOLDER=${FOLDER:-$PWD}
MODELS=${MODELS:-$HOME/.cache/huggingface}

if (($# == 0)); then
    set -- bash
fi
docker run -it --rm --gpus all --shm-size=10g --cap-add=SYS_ADMIN \
    -v "$FOLDER:/openrlhf" \
    -v "$MODELS:/root/.cache/huggingface" \
    -w /openrlhf \
    "$IMAGE" "$@"
