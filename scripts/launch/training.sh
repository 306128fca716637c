# shellcheck shell=bash
# GRPO on dapo-math-17k: the settings and slime's arguments, shared by all training scripts.

training_settings() {
  _trains=1
  slime_settings
  path_settings "$1"
  setting PROMPT_DATA "$DATA_DIR/dapo-math-17k.jsonl" "training data" path
  size_settings
  setting NUM_ROLLOUT "$(smoke_or_full 2 3000)" "training steps" count
  setting ROLLOUT_BATCH_SIZE "$(smoke_or_full 4 16)" "prompts per step" count
  setting N_SAMPLES_PER_PROMPT "$(smoke_or_full 4 8)" "episodes per prompt" count
  setting GLOBAL_BATCH_SIZE "$((ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT))" "episodes per optimizer step" count
  setting TEMPERATURE 1.0 "sampling temperature" number
  setting LEARNING_RATE 1e-6 "learning rate of Adam" number
  setting KL_LOSS_COEF 0 "coefficient of the KL loss to the initial model; 0 saves its forward passes" number
  setting SAVE_INTERVAL "$(smoke_or_full 2 20)" "steps between checkpoints" count
  setting KEEP_ALL_CHECKPOINTS 0 "keep all checkpoints (115 GB each for Qwen3-8B), not only the newest" switch
  setting DUMP_ROLLOUTS 1 "write each step's samples to SAVE_DIR/rollouts" switch
  wandb_settings
  ray_settings
}

# Dynamic sampling starts more prompts than it trains, because it drops groups whose rewards are all equal. A smoke run's responses
# are too short for right answers, so that it would draw prompts forever.
sampling_settings() {
  setting DYNAMIC_SAMPLING "$(smoke_or_full 0 1)" "drop groups whose rewards are all equal, and draw others" switch
  setting OVER_SAMPLING_BATCH_SIZE "$(((ROLLOUT_BATCH_SIZE * 3 + 1) / 2))" "prompts to start at once, with DYNAMIC_SAMPLING or PARTIAL_ROLLOUT" count
  setting PARTIAL_ROLLOUT 0 "keep unfinished episodes at the end of a step, and resume them in the next step" switch
}

rollout_arguments() {
  arguments+=(
    --prompt-data "$PROMPT_DATA"
    --rollout-shuffle
    --num-rollout "$NUM_ROLLOUT"
    --rollout-batch-size "$ROLLOUT_BATCH_SIZE"
    --n-samples-per-prompt "$N_SAMPLES_PER_PROMPT"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --rollout-temperature "$TEMPERATURE"
    --balance-data
    --custom-reward-post-process-path strands_rollout.normalize_rewards
  )
  if [[ $DUMP_ROLLOUTS -eq 1 ]]; then
    arguments+=(--save-debug-rollout-data "$SAVE_DIR/rollouts/{rollout_id}.pt")
  fi
}

sampling_arguments() {
  if [[ $DYNAMIC_SAMPLING -eq 1 || $PARTIAL_ROLLOUT -eq 1 ]]; then
    arguments+=(--over-sampling-batch-size "$OVER_SAMPLING_BATCH_SIZE")
  fi
  if [[ $DYNAMIC_SAMPLING -eq 1 ]]; then
    arguments+=(--dynamic-sampling-filter-path strands_rollout.keep_informative_groups)
  fi
  if [[ $PARTIAL_ROLLOUT -eq 1 ]]; then
    arguments+=(--partial-rollout)
  fi
}

# TIS weights each token by the ratio of the trainer's probability to the engine's.
grpo_arguments() {
  arguments+=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.0 --use-tis)
  if [[ ! "$KL_LOSS_COEF" =~ ^0*\.?0*$ ]]; then
    arguments+=(--use-kl-loss --kl-loss-coef "$KL_LOSS_COEF" --kl-loss-type low_var_kl)
  fi
}

optimizer_arguments() {
  arguments+=(
    --optimizer adam
    --lr "$LEARNING_RATE"
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
  )
}

# A run resumes because it loads from the folder that it saves to. --override-opt-param-scheduler lets it resume with another number
# of steps or learning rate, which Megatron refuses otherwise. A smoke run always starts from scratch, and saves no optimizer.
# Megatron keeps the newest checkpoint, and each checkpoint whose step is a multiple of --save-retain-interval, which must be a
# multiple of --save-interval. The product of steps and interval is a step that no run reaches, so that only the newest checkpoint
# stays.
save_arguments() {
  if [[ $SMOKE -eq 1 ]]; then
    arguments+=(--save "$SAVE_DIR" --save-interval "$SAVE_INTERVAL" --no-save-optim)
  else
    arguments+=(--load "$SAVE_DIR" --override-opt-param-scheduler --save "$SAVE_DIR" --save-interval "$SAVE_INTERVAL")
    if [[ $KEEP_ALL_CHECKPOINTS -eq 0 ]]; then
      arguments+=(--save-retain-interval "$((SAVE_INTERVAL * NUM_ROLLOUT))")
    fi
  fi
}

training_arguments() {
  checkpoint_arguments
  save_arguments
  agent_arguments
  rollout_arguments
  context_arguments
  grpo_arguments
  optimizer_arguments
  parallel_arguments
  engine_arguments
  pass_rate_arguments
  wandb_arguments
}

# Refuse batch sizes that slime or Megatron can't use. slime silently drops the episodes that don't fill an optimizer step. Megatron
# stops after minutes of loading if the replicas can't share the episodes of a step evenly, also with dynamic batch sizes, where
# slime's micro batch is 1.
require_batches() {
  local samples=$((ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT)) replicas prompts=$ROLLOUT_BATCH_SIZE
  replicas=$((ACTOR_GPUS * NUM_NODES / (TENSOR_PARALLEL * CONTEXT_PARALLEL)))
  [[ $N_SAMPLES_PER_PROMPT -gt 1 ]] || usage_error "N_SAMPLES_PER_PROMPT is 1; expected 2 or more: GRPO compares the episodes of a prompt"
  [[ $((samples % GLOBAL_BATCH_SIZE)) -eq 0 ]] || usage_error "a step has ROLLOUT_BATCH_SIZE x N_SAMPLES_PER_PROMPT = $samples" \
    "episodes; expected a multiple of GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE"
  if [[ $((GLOBAL_BATCH_SIZE % replicas)) -ne 0 ]]; then
    while [[ $((prompts * N_SAMPLES_PER_PROMPT % replicas)) -ne 0 ]]; do prompts=$((prompts + 1)); done
    usage_error "GLOBAL_BATCH_SIZE is $GLOBAL_BATCH_SIZE; expected a multiple of the $replicas replicas that train (GPUs that train:" \
      "$((ACTOR_GPUS * NUM_NODES)), of a replica: TENSOR_PARALLEL x CONTEXT_PARALLEL = $((TENSOR_PARALLEL * CONTEXT_PARALLEL)))," \
      "such as ROLLOUT_BATCH_SIZE=$prompts with GLOBAL_BATCH_SIZE=$((prompts * N_SAMPLES_PER_PROMPT))"
  fi
  [[ ${OVER_SAMPLING_BATCH_SIZE:-$ROLLOUT_BATCH_SIZE} -ge $ROLLOUT_BATCH_SIZE ]] || usage_error "OVER_SAMPLING_BATCH_SIZE is" \
    "$OVER_SAMPLING_BATCH_SIZE; expected at least ROLLOUT_BATCH_SIZE=$ROLLOUT_BATCH_SIZE"
}

# colocated_training TEXT RUN_NAME: the complete script of a training in which the same GPUs generate and train in turns.
colocated_training() {
  training_settings "$2"
  sampling_settings
  setting EVAL_INTERVAL "$(smoke_or_full 2 20)" "steps between evaluations; the first evaluation is before the first step" count
  evaluation_settings aime-2024
  pass_rate_settings
  end_of_settings "$1" "NUM_GPUS=8 bash $0 --data-dir /data --num-rollout 500 -- --lr 2e-6"
  ACTOR_GPUS="$NUM_GPUS"
  ROLLOUT_GPUS="$((NUM_GPUS * NUM_NODES))"
  require_sizes
  require_batches
  read_model_arguments
  arguments=(--actor-num-nodes "$NUM_NODES" --actor-num-gpus-per-node "$NUM_GPUS" --colocate)
  training_arguments
  sampling_arguments
  arguments+=(--eval-interval "$EVAL_INTERVAL")
  if [[ $SMOKE -eq 1 ]]; then
    arguments+=(--skip-eval-before-train)
  fi
  evaluation_arguments
  launch train.py
}
