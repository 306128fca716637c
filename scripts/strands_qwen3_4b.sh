#!/usr/bin/env bash
# Trains like strands_qwen3_8b.sh, with Qwen3-4B on 4 GPUs.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"
model_name=Qwen3-4B

read_options "$@"
setting NUM_GPUS 4 "GPUs per node" count
colocated_training "Trains Qwen3-4B as an agent that solves math with code, in slime, on 4 GPUs." qwen3-4b-strands
