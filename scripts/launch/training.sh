# shellcheck shell=bash
# GRPO on dapo-math-17k, for all training scripts: the settings, slime's arguments, and the two kinds of runs.

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
  setting TEMPERATURE 1.0 "sampling temperature" positive_number
  setting ADVANTAGE_ESTIMATOR "${default_estimator:-grpo}" "slime's --advantage-estimator, such as grpo, gspo, or cispo (slime 0.3.1 or newer)" name
  setting EPS_CLIP "${default_clip:-0.2}" "lower clip range: the ratio is clipped at 1 - EPS_CLIP" number
  setting EPS_CLIP_HIGH "${default_clip_high:-0.28}" "upper clip range: the ratio is clipped at 1 + EPS_CLIP_HIGH" number
  setting ROUTING_REPLAY "${default_routing_replay:-0}" "for a mixture of experts: in training, route each token to the experts that the engine chose" switch
  setting LEARNING_RATE 1e-6 "learning rate of Adam" number
  setting KL_LOSS_COEF 0 "coefficient of the KL loss to the initial model; 0 saves that model's forward passes" number
  setting SAVE_INTERVAL "$(smoke_or_full 2 20)" "steps between checkpoints" count
  setting KEEP_ALL_CHECKPOINTS 0 "keep all checkpoints (115 GB each for Qwen3-8B), not only the newest" switch
  setting DUMP_ROLLOUTS 1 "write each step's samples to SAVE_DIR/rollouts" switch
  wandb_settings
  ray_settings
}

# Dynamic sampling starts more prompts than a step trains, because it drops groups whose rewards are all equal. It is off by
# default in a smoke run, whose responses are too short for right answers, so that dynamic sampling would draw prompts forever.
sampling_settings() {
  setting DYNAMIC_SAMPLING "$(smoke_or_full 0 1)" "drop groups whose rewards are all equal, and draw others" switch
  setting OVER_SAMPLING_BATCH_SIZE "$(((ROLLOUT_BATCH_SIZE * 3 + 1) / 2))" \
    "prompts that slime draws at a time if DYNAMIC_SAMPLING or PARTIAL_ROLLOUT is 1; at least ROLLOUT_BATCH_SIZE" count
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

# Truncated importance sampling (TIS) weights each token by the ratio of the trainer's probability to the engine's, up to a limit.
grpo_arguments() {
  arguments+=(--advantage-estimator "$ADVANTAGE_ESTIMATOR" --eps-clip "$EPS_CLIP" --eps-clip-high "$EPS_CLIP_HIGH")
  arguments+=(--entropy-coef 0.0 --use-tis)
  if [[ $ROUTING_REPLAY -eq 1 ]]; then
    arguments+=(--use-rollout-routing-replay)
  fi
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
  offload_arguments
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
  model_row_arguments
  pass_rate_arguments
  wandb_arguments
}

# Refuse batch sizes that slime or Megatron can't use. slime silently drops the episodes that don't fill an optimizer step. Megatron
# stops after minutes of loading if the replicas can't share the episodes of a step evenly, also with dynamic batch sizes, where
# slime's micro batch is 1.
require_batches() {
  local samples=$((ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT)) replicas prompts=$ROLLOUT_BATCH_SIZE
  replicas=$((ACTOR_GPUS * ACTOR_NODES / (TENSOR_PARALLEL * PIPELINE_PARALLEL * CONTEXT_PARALLEL)))
  [[ $N_SAMPLES_PER_PROMPT -gt 1 ]] || usage_error "N_SAMPLES_PER_PROMPT is 1; expected 2 or more: GRPO compares the episodes of a prompt"
  [[ $((samples % GLOBAL_BATCH_SIZE)) -eq 0 ]] || usage_error "a step has ROLLOUT_BATCH_SIZE x N_SAMPLES_PER_PROMPT = $samples" \
    "episodes; expected a multiple of GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE"
  if [[ $((GLOBAL_BATCH_SIZE % replicas)) -ne 0 ]]; then
    while [[ $((prompts * N_SAMPLES_PER_PROMPT % replicas)) -ne 0 ]]; do prompts=$((prompts + 1)); done
    usage_error "GLOBAL_BATCH_SIZE is $GLOBAL_BATCH_SIZE; expected a multiple of the $replicas replicas that train" \
      "($((ACTOR_GPUS * ACTOR_NODES)) GPUs train; a replica has TENSOR_PARALLEL x PIPELINE_PARALLEL x CONTEXT_PARALLEL =" \
      "$((TENSOR_PARALLEL * PIPELINE_PARALLEL * CONTEXT_PARALLEL)) GPUs)," \
      "such as ROLLOUT_BATCH_SIZE=$prompts with GLOBAL_BATCH_SIZE=$((prompts * N_SAMPLES_PER_PROMPT))"
  fi
  [[ ${OVER_SAMPLING_BATCH_SIZE:-$ROLLOUT_BATCH_SIZE} -ge $ROLLOUT_BATCH_SIZE ]] || usage_error "OVER_SAMPLING_BATCH_SIZE is" \
    "$OVER_SAMPLING_BATCH_SIZE; expected at least ROLLOUT_BATCH_SIZE=$ROLLOUT_BATCH_SIZE"
}

# colocated_training TEXT RUN_NAME: the complete script of a training run in which the same GPUs generate and train in turns.
colocated_training() {
  training_settings "$2"
  sampling_settings
  setting EVAL_INTERVAL "$(smoke_or_full 2 20)" "steps between evaluations; the first evaluation is before the first step" count
  evaluation_settings aime-2024
  pass_rate_settings
  end_of_settings "$1" "NUM_GPUS=8 bash $0 --data-dir /data --num-rollout 500 -- --lr 2e-6"
  ACTOR_GPUS="$NUM_GPUS" ACTOR_NODES="$NUM_NODES"
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

# Print the default of SGLANG_CONCURRENCY: an engine's share of the episodes that strands_rollout.generate_rollout_fully_async starts
# (max_started_groups in slime_plugin/fully_async.py, if the weights are updated after each step), but at most as many as its cache
# holds. Further slots would stay empty.
_async_concurrency() {
  local engines=$((ROLLOUT_GPUS / GPUS_PER_ENGINE)) steps=$((MAX_SAMPLE_STALENESS - 1)) share most="${model_concurrency:-64}"
  engines=$((engines > 0 ? engines : 1)) steps=$((steps > 0 ? steps : 1))
  share=$(((steps * ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT + engines - 1) / engines))
  printf '%s' "$((share < most ? share : most))"
}

# fully_async_training TEXT RUN_NAME: the complete script of a training run in which some GPUs generate all the time, and the others train
# on finished episodes. slime's fully asynchronous rollout has no evaluation, no dynamic sampling and no partial rollouts.
fully_async_training() {
  local name nodes gpus
  setting NUM_NODES "${default_nodes:-1}" "number of nodes; see RAY_ADDRESS and MASTER_ADDR" count
  nodes="$NUM_NODES" gpus="$NUM_GPUS"
  if [[ $NUM_NODES -eq 1 ]]; then gpus="$((NUM_GPUS / 2))"; else nodes="$((NUM_NODES / 2))"; fi
  setting ACTOR_NODES "$nodes" "number of nodes with GPUs that train" count
  setting ACTOR_GPUS "$gpus" "number of GPUs that train on each of the ACTOR_NODES nodes; all other GPUs generate" count
  setting MAX_SAMPLE_STALENESS 4 "maximum number of weight versions that a trained sample may be behind the newest weights; also limits groups in flight" count
  # Memory in GB of a GPU that trains, if four GPUs share the 8.2e9 parameters (TP is TENSOR_PARALLEL):
  #                                                                       TP 4           TP 2, two replicas
  #   weights in bf16, gradients in fp32: 6 bytes a parameter / TP        12.3           24.6
  #   the optimizer, shared by the replicas: 12 bytes / 4                 24.6           24.6
  #   18,432 tokens' logits in bf16 and fp32, softmax and gradient:
  #   14 bytes x 151,936 token ids / TP                                    9.8           19.6
  #   layers' inputs (36 x 4,096 x 2 bytes a token / TP), one recomputed   2.0            4.0
  #   CUDA, NCCL                                                           3              3
  #                                                                       52 of 80       76 of 80
  # --log-probs-chunk-size would not help: the backward pass keeps the softmax of all tokens in any case.
  # docs/training.md ("Asynchronous training") computes the cache of an engine.
  if [[ -n "${model_tp_async:-}" && $((ACTOR_GPUS * ACTOR_NODES % model_tp_async)) -eq 0 ]]; then
    default_tensor_parallel="$model_tp_async"
  fi
  training_settings "$2"
  ROLLOUT_GPUS="$((NUM_GPUS * NUM_NODES - ACTOR_GPUS * ACTOR_NODES))"
  setting SGLANG_CONCURRENCY "$(_async_concurrency)" \
    "concurrent episodes per engine; default: as many as MAX_SAMPLE_STALENESS allows, but at most as many as the cache holds" count
  pass_rate_settings
  end_of_settings "$1" "bash $0 --actor-gpus 4 -- --update-weights-interval 2"
  [[ $ROLLOUT_GPUS -gt 0 ]] || usage_error "$((ACTOR_GPUS * ACTOR_NODES)) of $((NUM_GPUS * NUM_NODES)) GPUs train (ACTOR_GPUS x ACTOR_NODES);" \
    "expected fewer, so that some GPUs generate"
  for name in PARTIAL_ROLLOUT DYNAMIC_SAMPLING; do
    [[ "${!name:-0}" == "0" ]] || usage_error "got $name='${!name}'; expected 0: slime's fully asynchronous rollout does not support it"
  done
  require_sizes
  require_batches
  read_model_arguments
  arguments=(
    --actor-num-nodes "$ACTOR_NODES"
    --actor-num-gpus-per-node "$ACTOR_GPUS"
    --rollout-num-gpus "$ROLLOUT_GPUS"
    --rollout-function-path strands_rollout.generate_rollout_fully_async
    --sglang-server-concurrency "$SGLANG_CONCURRENCY"
  )
  training_arguments
  wandb_run "$SAVE_DIR" # eval_aime.sh --watch logs to the same run
  launch train_async.py
}
