# shellcheck shell=bash
# Functions shared by all jobs of slime with this package: for their settings, their arguments for slime, and the checks before a
# job starts. A script first sets model_name, and the defaults that differ for its model; use_model and use_model_sizes do both.

# smoke_or_full SMOKE FULL: print the default of a size: SMOKE in a smoke run, else FULL.
smoke_or_full() {
  if [[ $SMOKE -eq 1 ]]; then printf '%s' "$1"; else printf '%s' "$2"; fi
}

# Print the suffix of the folder that the engines load: -FP8 if FP8_ROLLOUT is 1, else nothing.
_fp8_suffix() {
  if [[ $FP8_ROLLOUT -eq 1 ]]; then printf '%s' -FP8; fi
}

# Paths, the agent and the reward. $1 is the default name of the run.
path_settings() {
  setting SMOKE 0 "test all parts quickly: two steps with few, short episodes" switch
  setting MODEL_DIR "$repository/models" "folder of all models" path
  setting FP8_ROLLOUT "${default_fp8:-0}" "generate with the FP8 copy of the weights that prepare_model.sh makes; training stays in bf16" switch
  setting HF_CHECKPOINT "$MODEL_DIR/$model_name$(_fp8_suffix)" "folder of the model in Hugging Face's format" path
  setting REF_LOAD "${HF_CHECKPOINT%"$(_fp8_suffix)"}_torch_dist" "folder of the model in Megatron's format" path
  setting DATA_DIR "$repository/data" "folder of the data sets" path
  setting ROLLOUT_CONFIG "$repository/configs/math_code.yaml" "YAML file with the agent's settings; slime's --custom-config-path" path
  setting TOOL_PARSER "${default_tool_parser:-}" "format of tool calls, unless ROLLOUT_CONFIG sets tool_parser; default: the model row's parser, else hermes"
  setting THINKING "" "1 or 0: let the chat template switch the model's reasoning on or off; default: the template decides" optional_switch
  setting REWARD strands_rollout.reward_func "dotted path of the reward function; slime's --custom-rm-path"
  setting REWARD_KEY score "key of the reward to train on in the reward function's result; none if the result is a number"
  setting EVAL_REWARD_KEY acc "key of the number to report in evaluation; has no effect if REWARD_KEY is none"
  setting EPISODE_WORKERS "" "processes on Ray that play the episodes; default: the setting episode_workers" optional_count
  setting RUN_NAME "$1" "name of the run" name
  setting SAVE_DIR "$repository/checkpoints/$RUN_NAME" "folder of the run's checkpoints and dumps" path
  if [[ $SMOKE -eq 1 ]]; then
    RUN_NAME+=-smoke
    SAVE_DIR+=-smoke # a real run must not resume from a smoke run's checkpoint
  fi
}

# Placement of the weights on the GPUs, and maximum length of an episode. By default, SGLang gets 0.7 of the memory, as in slime's
# own scripts, even where it shares GPUs with the trainer: slime moves the trainer's state to the host while SGLang generates. On an
# 80 GB GPU, 0.7 is 56 GB. Each of the two GPUs of an engine with Qwen3-8B uses 8 GB for weights and 48 GB for the cache, which
# holds 650,000 tokens of 74 kB each. 48 concurrent episodes per engine (24 prompts x 8 on 4 engines) of 9,000 tokens on average
# need 430,000. With 0.4 the cache would hold 320,000, and SGLang would have to pause requests, drop their cache and compute it
# again.
size_settings() {
  local response="${default_response_len:-}" tokens first_stage="" last_stage=""
  setting SGLANG_MEM_FRACTION "${default_sglang_mem_fraction:-0.7}" "fraction of a GPU's memory for SGLang's weights and cache" share
  setting NUM_NODES "${default_nodes:-1}" "number of nodes; see RAY_ADDRESS and MASTER_ADDR" count
  setting TENSOR_PARALLEL "${default_tensor_parallel:-2}" "GPUs that a layer is split over in training" count
  setting PIPELINE_PARALLEL "${default_pipeline_parallel:-1}" "groups of GPUs that the layers are split over in training" count
  setting CONTEXT_PARALLEL "${default_context_parallel:-1}" "GPUs that a sequence is split over in training" count
  setting EXPERT_PARALLEL "${default_expert_parallel:-1}" "GPUs that the experts of a layer are spread over in training" count
  if [[ $PIPELINE_PARALLEL -eq ${default_pipeline_parallel:-1} ]]; then
    first_stage="${default_first_stage:-}" last_stage="${default_last_stage:-}"
  fi
  setting FIRST_STAGE_LAYERS "$first_stage" "number of layers of the first pipeline group, if it differs from the other groups'" optional_count
  setting LAST_STAGE_LAYERS "$last_stage" "number of layers of the last pipeline group, if it differs from the other groups'" optional_count
  setting OPTIMIZER_OFFLOAD "${default_offload:-0}" "keep the optimizer's state in the host's memory" switch
  setting GPUS_PER_ENGINE "${default_gpus_per_engine:-2}" "GPUs per SGLang engine" count
  setting ROUTER_POLICY consistent_hashing "policy of slime's router; the router in slime's image has the default policy, the router on PyPI does not"
  if [[ -z "$response" && -n "${default_tokens_per_gpu:-}" ]]; then # the longest response that fits, up to 16,384
    response=$((default_tokens_per_gpu * CONTEXT_PARALLEL - 2048))
    response=$((response < 16384 ? response : 16384))
  fi
  setting MAX_RESPONSE_LEN "$(smoke_or_full 2048 "${response:-16384}")" "maximum tokens of a response, tool results included" count
  setting MAX_CONTEXT_LEN "$((MAX_RESPONSE_LEN + 2048))" "maximum tokens of prompt plus response" count
  tokens=$(((MAX_CONTEXT_LEN + CONTEXT_PARALLEL - 1) / CONTEXT_PARALLEL))
  if [[ ${default_tokens_per_gpu:-0} -gt $tokens ]]; then
    tokens=$default_tokens_per_gpu
  fi
  setting MAX_TOKENS_PER_GPU "$tokens" \
    "maximum tokens of a training batch on one GPU; at least MAX_CONTEXT_LEN / CONTEXT_PARALLEL" count
}

_trains=0
_evaluates=0

# Read WANDB_API_KEY (or WANDB_KEY) only from the environment: all users of a machine can read a command line.
wandb_settings() {
  local default=0
  WANDB_API_KEY="${WANDB_API_KEY:-${WANDB_KEY:-}}"
  if [[ -n "$WANDB_API_KEY" || "${WANDB_MODE:-}" == "offline" ]]; then
    default=1
  fi
  if [[ -n "$WANDB_API_KEY" ]]; then
    export WANDB_API_KEY
  fi
  setting USE_WANDB "$default" "log to wandb; default: 1 if WANDB_API_KEY or WANDB_KEY is set, or WANDB_MODE=offline" switch
  setting WANDB_PROJECT strands-rollout "project in wandb" name
}

checkpoint_arguments() {
  arguments+=(--hf-checkpoint "$HF_CHECKPOINT" --ref-load "$REF_LOAD")
}

agent_arguments() {
  arguments+=(
    --custom-generate-function-path strands_rollout.generate
    --custom-rm-path "$REWARD"
    --custom-config-path "$ROLLOUT_CONFIG"
    --custom-rollout-log-function-path strands_rollout.log_rollout
    --custom-eval-rollout-log-function-path strands_rollout.log_eval
    --input-key prompt
    --label-key label
  )
  if [[ "$REWARD_KEY" != "none" ]]; then
    arguments+=(--reward-key "$REWARD_KEY" --eval-reward-key "$EVAL_REWARD_KEY")
  fi
}

# The limits of an episode and of a training batch belong together: a sample longer than a batch gets a batch
# of its own, which may exhaust the GPU's memory and so end the run.
context_arguments() {
  arguments+=(
    --rollout-max-response-len "$MAX_RESPONSE_LEN"
    --rollout-max-context-len "$MAX_CONTEXT_LEN"
    --use-dynamic-batch-size
    --max-tokens-per-gpu "$MAX_TOKENS_PER_GPU"
  )
}

parallel_arguments() {
  arguments+=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --sequence-parallel
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --context-parallel-size "$CONTEXT_PARALLEL"
    --expert-model-parallel-size "$EXPERT_PARALLEL"
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend "${default_attention:-flash}"
  )
  if [[ -n "$FIRST_STAGE_LAYERS" ]]; then
    arguments+=(--decoder-first-pipeline-num-layers "$FIRST_STAGE_LAYERS")
  fi
  if [[ -n "$LAST_STAGE_LAYERS" ]]; then
    arguments+=(--decoder-last-pipeline-num-layers "$LAST_STAGE_LAYERS")
  fi
}

offload_arguments() {
  if [[ $OPTIMIZER_OFFLOAD -eq 1 ]]; then
    arguments+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
  fi
}

# Consistent hashing sends all turns of an episode to the engine whose cache holds its prefix.
engine_arguments() {
  arguments+=(
    --rollout-num-gpus-per-engine "$GPUS_PER_ENGINE"
    --num-gpus-per-node "$NUM_GPUS"
    --sglang-mem-fraction-static "$SGLANG_MEM_FRACTION"
    --router-policy "$ROUTER_POLICY"
  )
}

# The row's own arguments follow the arguments that they override, because the last use of a flag counts.
model_row_arguments() {
  # shellcheck disable=SC2206 # the words of a row have no spaces and no patterns
  arguments+=(${model_further:-})
  if [[ -n "${model_concurrency:-}" && " ${arguments[*]} " != *" --sglang-server-concurrency "* ]]; then
    arguments+=(--sglang-server-concurrency "$model_concurrency")
  fi
  if [[ -n "$THINKING" && "${model_thinking:-on}" == on ]]; then
    arguments+=(--apply-chat-template-kwargs "{\"enable_thinking\": $([[ $THINKING -eq 1 ]] && printf true || printf false)}")
  fi
}

# LOG_PASSRATE adds slime's --log-passrate. For evaluations, strands_rollout.log_eval then computes the pass rates itself,
# because slime's own computation fails if samples are missing.
pass_rate_settings() {
  setting LOG_PASSRATE 1 "log pass rates in training and evaluation; needs fan_out: false" switch
}

pass_rate_arguments() {
  if [[ $LOG_PASSRATE -eq 1 ]]; then
    arguments+=(--log-passrate)
  fi
}

wandb_arguments() {
  # an evaluation for --watch logs to the training run's wandb run itself (strands_rollout.log_eval), because slime would start a new run
  if [[ "$USE_WANDB" == "1" && -z "${STRANDS_ROLLOUT_EVAL_STEP:-}" ]]; then
    arguments+=(--use-wandb --wandb-project "$WANDB_PROJECT" --wandb-group "$RUN_NAME" --disable-wandb-random-suffix)
  fi
}

# Print 1 if NVLink connects any two GPUs, else 0.
_has_nvlink() {
  if nvidia-smi topo -m 2>/dev/null | grep -q 'NV[0-9]'; then printf 1; else printf 0; fi
}

# Refuse settings that don't fit together or don't fit the model, also in a dry run.
require_sizes() {
  local trainers=$((ACTOR_GPUS * ACTOR_NODES)) replica=$((TENSOR_PARALLEL * PIPELINE_PARALLEL * CONTEXT_PARALLEL))
  [[ $MAX_RESPONSE_LEN -lt $MAX_CONTEXT_LEN ]] || usage_error "MAX_RESPONSE_LEN is $MAX_RESPONSE_LEN and MAX_CONTEXT_LEN" \
    "$MAX_CONTEXT_LEN; expected a larger MAX_CONTEXT_LEN, because the context also holds the prompt"
  [[ $((MAX_TOKENS_PER_GPU * CONTEXT_PARALLEL)) -ge $MAX_CONTEXT_LEN ]] || usage_error "MAX_TOKENS_PER_GPU is" \
    "$MAX_TOKENS_PER_GPU and CONTEXT_PARALLEL $CONTEXT_PARALLEL; expected a product of at least MAX_CONTEXT_LEN=$MAX_CONTEXT_LEN;" \
    "otherwise a long episode may run the trainer out of memory"
  [[ $((trainers % replica)) -eq 0 ]] || usage_error "$trainers GPUs train; expected a multiple of TENSOR_PARALLEL x" \
    "PIPELINE_PARALLEL x CONTEXT_PARALLEL = $replica"
  [[ $((trainers % (EXPERT_PARALLEL * PIPELINE_PARALLEL))) -eq 0 ]] || usage_error "$trainers GPUs train; expected a multiple of" \
    "EXPERT_PARALLEL x PIPELINE_PARALLEL = $((EXPERT_PARALLEL * PIPELINE_PARALLEL))"
  case "${model_thinking:-on}:$THINKING" in
    always:0) usage_error "got THINKING=0; expected 1 or no value, because $model_name always reasons" ;;
    off:1) usage_error "got THINKING=1; expected 0 or no value, because $model_name does not reason" ;;
  esac
  require_fp8_copy
  [[ "$SAVE_DIR" != *[{}]* ]] || usage_error "SAVE_DIR is $SAVE_DIR; expected no braces, which slime reads as a placeholder"
  [[ $((ROLLOUT_GPUS % GPUS_PER_ENGINE)) -eq 0 ]] || usage_error "$ROLLOUT_GPUS GPUs generate; expected a multiple of" \
    "GPUS_PER_ENGINE=$GPUS_PER_ENGINE"
}

require_no_secrets() {
  local word
  for word in ${extra_arguments[@]+"${extra_arguments[@]}"}; do
    if [[ "$word" == --wandb-key* ]]; then
      usage_error "got --wandb-key; expected the key in the environment, as WANDB_API_KEY: all users of a machine can read" \
        "a command line, and slime writes its arguments to wandb"
    fi
  done
}

# _prepare_model: print the command that prepares the model, with its id on the hub if that is known.
_prepare_model() {
  local id="OWNER/$model_name" name=""
  if [[ -n "${default_hub_id:-}" ]]; then
    id="$default_hub_id"
  elif [[ "$model_name" == Qwen* ]]; then
    id="Qwen/$model_name"
  fi
  [[ "$SLIME_MODEL" == "${default_slime_model:-${model_name/#Q/q}}" ]] || name=" --slime-model $SLIME_MODEL"
  [[ $FP8_ROLLOUT -eq 0 ]] || name+=" --fp8-rollout"
  printf '%s' "MODEL_DIR=$MODEL_DIR bash scripts/prepare_model.sh --model $id$name"
}

# _prepare_set NAME: print how to create an evaluation set.
_prepare_set() {
  local script
  case "$1" in
    aime-2024 | aime-2025) script="${1//-/_}.py" ;;
    gsm8k-train | gsm8k-test) script="gsm8k.py --split ${1#*-}" ;;
    *)
      printf '%s' "Put it there, or correct EVAL_SETS; docs/evaluation.md explains how to create data sets"
      return
      ;;
  esac
  printf '%s' "Prepare it: python3 data_prep/$script --out $DATA_DIR/$1.jsonl"
}

require_files() {
  local name
  require_slime
  require_path "$HF_CHECKPOINT/config.json" "the model" "Download it: $(_prepare_model)"
  require_path "$REF_LOAD/latest_checkpointed_iteration.txt" "the model in Megatron's format" "Convert it: $(_prepare_model)"
  require_path "$ROLLOUT_CONFIG" "the agent's configuration" "Set ROLLOUT_CONFIG to a configuration, such as configs/math_code.yaml"
  if [[ $_trains -eq 1 ]]; then
    require_path "$PROMPT_DATA" "the training data" "Prepare it: python3 data_prep/dapo_math_17k.py --out $PROMPT_DATA"
  fi
  if [[ $_evaluates -eq 0 ]]; then
    return
  fi
  if [[ -n "$EVAL_CONFIG" ]]; then
    require_path "$EVAL_CONFIG" "the evaluation's configuration" "Set EVAL_CONFIG to a file such as configs/aime_eval.yaml"
    return
  fi
  for name in ${EVAL_SETS//,/ }; do
    require_path "$DATA_DIR/$name.jsonl" "the evaluation data" "$(_prepare_set "$name")"
  done
}

require_gpus() {
  local found
  if [[ -n "$RAY_ADDRESS" ]]; then
    return
  fi
  found="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
  [[ $found -ge $NUM_GPUS ]] || fail "found $found GPUs (nvidia-smi -L); expected at least NUM_GPUS=$NUM_GPUS; set NUM_GPUS, or RAY_ADDRESS" \
    "to a running Ray"
}

# Without a key, wandb would prompt for it in the job, where nobody answers.
require_wandb() {
  if [[ $USE_WANDB -eq 1 && -z "$WANDB_API_KEY" && "${WANDB_MODE:-}" != "offline" ]] &&
    ! grep -qs wandb "${NETRC:-$HOME/.netrc}"; then
    fail "USE_WANDB is 1, but there is no key; export WANDB_API_KEY, run 'wandb login', or set WANDB_MODE=offline"
  fi
}

# Check now what slime would notice minutes later, or never: it ignores unknown arguments.
require_known_arguments() {
  local settings
  python3 -c 'import strands_rollout' || fail "python3 can't import strands_rollout; install it: python3 -m pip install -e $repository"
  settings="$(python3 -m strands_rollout.cli config --json "$ROLLOUT_CONFIG")" || fail "$ROLLOUT_CONFIG can't be used, see above"
  if [[ $LOG_PASSRATE -eq 1 && "$settings" == *'"fan_out":true'* ]]; then
    fail "fan_out is on in $ROLLOUT_CONFIG, but slime's pass rates don't support fan-out; set LOG_PASSRATE=0"
  fi
  require_known_flags "$@"
}

require_known_flags() {
  local checkout=() # in a dry run without slime, doctor uses its record of slime's flags
  if [[ -d "$SLIME_DIR" ]]; then
    checkout=(--slime-dir "$SLIME_DIR")
  fi
  print_command "$@" | python3 -m strands_rollout.cli doctor --flags - ${checkout[@]+"${checkout[@]}"} \
    ${MEGATRON_DIR:+--megatron-dir "$MEGATRON_DIR"} ||
    fail "the arguments for slime have errors, see above; nothing was started"
}

# launch PROGRAM: check the files and arguments, then run slime's train.py or train_async.py as a job on Ray, with model_arguments,
# arguments and extra_arguments; in a dry run, print the commands instead.
launch() {
  local program="$1" command name
  command=(python3 "$SLIME_DIR/$program" "${model_arguments[@]}" "${arguments[@]}" ${extra_arguments[@]+"${extra_arguments[@]}"})
  job_environment=(
    "PYTHONPATH=${MEGATRON_DIR:+$MEGATRON_DIR:}$SLIME_DIR:$repository${PYTHONPATH:+:$PYTHONPATH}"
    "PYTHONUNBUFFERED=1"
    "CUDA_DEVICE_MAX_CONNECTIONS=1"
    "NCCL_NVLS_ENABLE=$(_has_nvlink)"
    "DATA_DIR=$DATA_DIR"
  )
  add_node_environment
  # shellcheck disable=SC2206 # the words of a row have no spaces and no patterns
  job_environment+=(${model_environment:-})
  if [[ " ${arguments[*]} " =~ \ (--moe-enable-deepep|deepep)\  ]]; then
    job_environment+=("NVSHMEM_DISABLE_NCCL=1") # as in slime's scripts with DeepEP
  fi
  if [[ -n "$TOOL_PARSER" && "$TOOL_PARSER" != hermes ]]; then
    job_environment+=("STRANDS_ROLLOUT_TOOL_PARSER=$TOOL_PARSER")
    export STRANDS_ROLLOUT_TOOL_PARSER="$TOOL_PARSER"
  fi
  [[ -z "$EPISODE_WORKERS" ]] || job_environment+=("STRANDS_ROLLOUT_EPISODE_WORKERS=$EPISODE_WORKERS")
  [[ -z "${MAX_SAMPLE_STALENESS:-}" ]] || job_environment+=("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS=$MAX_SAMPLE_STALENESS")
  if [[ -n "${STRANDS_ROLLOUT_EVAL_STEP:-}" && "$USE_WANDB" == "1" ]]; then
    job_environment+=("WANDB_PROJECT=$WANDB_PROJECT")
  fi
  for name in WANDB_MODE WANDB_BASE_URL WANDB_RUN_ID WANDB_RESUME STRANDS_ROLLOUT_EVAL_STEP STRANDS_ROLLOUT_EVAL_SHARED \
    SEARCH_URL SEARCH_CORPUS; do
    if [[ -n "${!name:-}" ]]; then
      job_environment+=("$name=${!name}")
    fi
  done
  require_no_secrets
  if [[ $dry_run -eq 0 ]]; then
    require_files
    require_gpus
    require_wandb
    require_known_arguments "${command[@]}"
  elif [[ ${#extra_arguments[@]} -gt 0 ]] && python3 -c 'import strands_rollout' 2>/dev/null; then
    require_known_flags "${command[@]}" >&2
  fi
  ray_job "$RUN_NAME" "${command[@]}"
}
