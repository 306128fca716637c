#!/usr/bin/env bash
# Trains like strands_qwen3_8b.sh, with Qwen3-4B on 4 GPUs.
set -euo pipefail

export MODEL=qwen3-4B
# shellcheck source=scripts/train.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/train.sh" colocated "$@"
