#!/usr/bin/env bash
# Trains Qwen3-8B on 8 GPUs, which generate and train in turns. See train.sh, which also trains other models.
set -euo pipefail

export MODEL=qwen3-8B
# shellcheck source=scripts/train.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/train.sh" colocated "$@"
