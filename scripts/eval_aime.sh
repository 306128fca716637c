#!/usr/bin/env bash
# Evaluates a checkpoint on AIME in slime, with the agent, generation and reward of training.
# `strands-rollout eval` does the same on any SGLang server, without slime. --watch SAVE_DIR evaluates the newest checkpoint of a run
# whenever there is a new one.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"

read_options "$@"
setting MODEL Qwen/Qwen3-8B "model: a row of scripts/launch/models.sh, or an id on the hub, whose last part is the folder in MODEL_DIR"
use_model "$MODEL"
if [[ $has_model_row -eq 1 ]]; then
  use_model_sizes
fi
setting NUM_GPUS "${default_gpus:-8}" "GPUs per node" count
slime_settings
watch_settings
path_settings "$(printf '%s' "$model_name" | tr '[:upper:]' '[:lower:]')-aime"
setting LOAD "$REF_LOAD" "checkpoint to evaluate, in Megatron's format: a run's SAVE_DIR, or the model's REF_LOAD" path
setting CKPT_STEP "" "step of the checkpoint; default: the last checkpoint in LOAD" optional_count
size_settings
evaluation_settings aime-2024,aime-2025
pass_rate_settings
setting DUMP_ROLLOUTS 1 "write the samples to the folder SAVE_DIR/step-CKPT_STEP; without CKPT_STEP, to step-last" switch
wandb_settings
ray_settings
end_of_settings "Evaluates a checkpoint on AIME 2024 and 2025 in slime, with the agent that is trained." \
  "bash $0 --load checkpoints/qwen3-8b-strands --ckpt-step 199 --eval-samples 32"
if [[ -n "$WATCH" ]] && ! is_watched_evaluation; then
  watch_checkpoints "$@"
  exit
fi
ACTOR_GPUS="$NUM_GPUS" ACTOR_NODES="$NUM_NODES"
ROLLOUT_GPUS="$((NUM_GPUS * NUM_NODES))"
require_sizes
read_model_arguments
arguments=(--actor-num-nodes "$NUM_NODES" --actor-num-gpus-per-node "$NUM_GPUS" --colocate)
checkpoint_arguments
arguments+=(--load "$LOAD" --no-load-optim --no-load-rng)
if [[ -n "$CKPT_STEP" ]]; then
  arguments+=(--ckpt-step "$CKPT_STEP")
fi
agent_arguments
# slime requires the sizes of a training step even if it only evaluates. Up to 0.3.1, slime also builds a learning rate schedule,
# by default over the run's 0 steps, which Megatron refuses; newer versions don't read --lr-decay-iters here.
arguments+=(--num-rollout 0 --lr-decay-iters 1 --eval-interval 1 --rollout-batch-size 1 --global-batch-size "$ROLLOUT_GPUS")
if [[ $DUMP_ROLLOUTS -eq 1 ]]; then
  arguments+=(--save-debug-rollout-data "$SAVE_DIR/step-${CKPT_STEP:-last}/{rollout_id}.pt")
fi
context_arguments
parallel_arguments
offload_arguments # up to 0.3.1, slime makes an optimizer even if it trains nothing
engine_arguments
model_row_arguments
evaluation_arguments
pass_rate_arguments
wandb_arguments
if [[ $dry_run -eq 0 ]]; then
  # if LOAD has no checkpoint, slime silently loads REF_LOAD
  [[ "$LOAD" == "$REF_LOAD" ]] || require_path "$LOAD/latest_checkpointed_iteration.txt" "a checkpoint in Megatron's format" \
    "Set LOAD to the SAVE_DIR of a run, or to the model's REF_LOAD"
  if [[ -n "$CKPT_STEP" ]]; then
    require_path "$LOAD/$(printf 'iter_%07d' "$CKPT_STEP")" "the checkpoint of step $CKPT_STEP" \
      "LOAD has: $(cd "$LOAD" && shopt -s nullglob && saved=(iter_* releas[e]) && echo "${saved[*]:-no checkpoint}")"
  fi
fi
launch train.py
