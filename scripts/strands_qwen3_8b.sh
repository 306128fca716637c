#!/usr/bin/env bash
# Trains Qwen3-8B as a Strands agent that solves math with code: GRPO on dapo-math-17k in slime, evaluated on AIME 2024,
# on 8 GPUs that generate and train in turns. Run the script again to resume from the last checkpoint. --help lists all settings.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"
model_name=Qwen3-8B

read_options "$@"
setting NUM_GPUS 8 "GPUs per node" count
colocated_training "Trains Qwen3-8B as an agent that solves math with code, in slime, on one node of 8 GPUs." qwen3-8b-strands
