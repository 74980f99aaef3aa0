#!/usr/bin/env bash
# Installs Docker with NVIDIA's container toolkit, which docker_run.sh needs, on Debian or Ubuntu.
# Needs an NVIDIA driver, root rights through sudo, and NVIDIA's package source in apt. NVIDIA's guide to the
# container toolkit has the source for each release.
set -euo pipefail

if ! nvidia-smi --list-gpus; then
    echo "nvidia_docker_install.sh: no NVIDIA driver answers; install that first" >&2
    exit 1
fi
sudo apt-get update
if ! apt-cache show nvidia-container-toolkit > /dev/null; then
    echo "nvidia_docker_install.sh: apt has no nvidia-container-toolkit; add NVIDIA's package source first" >&2
    exit 1
fi
command -v docker > /dev/null || sudo apt-get install --yes docker.io
sudo apt-get install --yes nvidia-container-toolkit
sudo nvidia-ctk runtime configure --runtime=docker
sudo systemctl restart docker
sudo docker run --rm --gpus all "${IMAGE:-nvcr.io/nvidia/pytorch:26.03-py3}" nvidia-smi --list-gpus
