#!/usr/bin/env bash
# Trains Qwen3-8B like strands_qwen3_8b.sh, but fully asynchronously: half of the GPUs generate all the time, the other half
# trains on finished episodes. slime's fully asynchronous rollout has no evaluation, no dynamic sampling and no partial
# rollouts; to evaluate the run's checkpoints, run eval_aime.sh --watch on other GPUs.
set -euo pipefail

export MODEL=qwen3-8B
# shellcheck source=scripts/train.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/train.sh" async "$@"
