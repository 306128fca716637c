#!/usr/bin/env bash
# Train this folder's agent with slime: GRPO of Qwen3-8B on one node of 8 GPUs, in the image slimerl/slime.
#   bash run_slime.sh --dry-run    prints the command and runs nothing
#   bash run_slime.sh --lr 2e-6    all other arguments go to slime
# Environment variables, with defaults below: SLIME_DIR, MEGATRON_DIR, HF_CHECKPOINT, SLIME_MODEL, SAVE_DIR, NUM_GPUS.
# The arguments come from scripts/strands_qwen3_8b.sh in strands-rollout's repository, which has more settings and checks;
# scripts/prepare_model.sh there downloads and converts the model. Run this script again to continue from the last checkpoint.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
slime="${SLIME_DIR:-/root/slime}"
megatron="${MEGATRON_DIR:-/root/Megatron-LM}"
model="${HF_CHECKPOINT:-/root/models/Qwen3-8B}"
slime_model="${SLIME_MODEL:-qwen3-8B}" # the model's file in slime's scripts/models
save="${SAVE_DIR:-$here/checkpoints}"
gpus="${NUM_GPUS:-8}"

fail() { echo "error: $*" >&2; exit 1; }

dry_run=0
for word in "$@"; do
  shift
  case "$word" in
    -h | --help) sed -n '2,/^set/s/^# //p' "${BASH_SOURCE[0]}" && exit ;;
    --dry-run) dry_run=1 ;;
    *) set -- "$@" "$word" ;;
  esac
done

MODEL_ARGS=("<MODEL_ARGS of scripts/models/$slime_model.sh in slime>")
if [[ -f "$slime/scripts/models/$slime_model.sh" ]]; then
  # shellcheck source=/dev/null
  source "$slime/scripts/models/$slime_model.sh"
elif [[ $dry_run -eq 0 || -d "$slime" ]]; then
  fail "no $slime/scripts/models/$slime_model.sh; work in the image slimerl/slime, or set SLIME_DIR and SLIME_MODEL"
fi

AGENT_ARGS=(
  --custom-generate-function-path strands_rollout.generate
  --custom-rm-path strands_rollout.reward_func
  --custom-config-path "$here/rollout.yaml"
  --custom-rollout-log-function-path strands_rollout.log_rollout
  --custom-eval-rollout-log-function-path strands_rollout.log_eval
  --custom-reward-post-process-path strands_rollout.normalize_rewards
  --dynamic-sampling-filter-path strands_rollout.keep_informative_groups
  --input-key prompt
  --label-key label
  --reward-key score
  --eval-reward-key acc
)
DATA_ARGS=(
  --prompt-data "$here/train.jsonl"
  --rollout-shuffle
  --num-rollout 300
  --rollout-batch-size 16
  --over-sampling-batch-size 24
  --n-samples-per-prompt 8
  --global-batch-size 128
  --balance-data
  --rollout-temperature 1.0
  --rollout-max-response-len 4096
  --rollout-max-context-len 6144
  --save-debug-rollout-data "$save/rollouts/{rollout_id}.pt"
  --eval-interval 20
  --eval-prompt-data held-out "$here/held_out.jsonl"
  --n-samples-per-eval-prompt 4
  --eval-max-response-len 4096
  --eval-max-context-len 6144
  --eval-temperature 1.0
  --eval-top-p 1.0
  --log-passrate
)
TRAIN_ARGS=(
  --hf-checkpoint "$model"
  --ref-load "${model}_torch_dist"
  --load "$save"
  --override-opt-param-scheduler
  --save "$save"
  --save-interval 20
  --save-retain-interval 6000
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.0 --use-tis
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --use-dynamic-batch-size
  --max-tokens-per-gpu 6144
)
GPU_ARGS=(
  --actor-num-nodes 1 --actor-num-gpus-per-node "$gpus" --num-gpus-per-node "$gpus" --colocate
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
  --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --attention-dropout 0.0 --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
  --router-policy consistent_hashing
)

environment='{"env_vars": {"PYTHONPATH": "'"$megatron:$slime:$here${PYTHONPATH:+:$PYTHONPATH}"'", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}'
ray=http://127.0.0.1:8265
command=(ray job submit --address="$ray" --runtime-env-json="$environment" -- python3 "$slime/train.py"
  "${MODEL_ARGS[@]}" "${AGENT_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAIN_ARGS[@]}" "${GPU_ARGS[@]}" "$@")
if [[ $dry_run -eq 1 ]]; then
  printf '%q ' "${command[@]}"
  exit
fi

[[ -f "$model/config.json" && -f "${model}_torch_dist/latest_checkpointed_iteration.txt" ]] ||
  fail "$model or ${model}_torch_dist is missing; make both with scripts/prepare_model.sh, or set HF_CHECKPOINT"
command -v ray >/dev/null || fail "no 'ray' on the PATH; work in the image slimerl/slime, or: pip install 'ray[default]'"
strands-rollout config --json "$here/rollout.yaml" >/dev/null
printf '%q ' "${command[@]}" | strands-rollout doctor --flags - --slime-dir "$slime"
if ! ray status >/dev/null 2>&1; then
  # --block ties this Ray to its process: ending the process ends this Ray and no other. The process ignores HUP, so that a
  # closed terminal ends this script first.
  (trap '' HUP && exec ray start --head --block --num-gpus "$gpus" --disable-usage-stats --dashboard-host=127.0.0.1) >&2 &
  trap 'kill $! && wait || true' EXIT
  until ray job list --address="$ray" >/dev/null 2>&1; do
    kill -0 $! 2>/dev/null || fail "Ray did not start; its output is above"
    sleep 1
  done
fi
"${command[@]}"
