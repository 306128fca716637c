# shellcheck shell=bash
# A row of defaults for each of slime's models, named like slime's file in scripts/models. Each row names the file in
# slime's repository that its numbers are from; docs/training-models.md, "Numbers that are not slime's", has the exceptions.

# The values of a row become the defaults of the settings; `row` describes them.
_model_keys="hub source nodes gpus gpu_gb tp tp_async pp first last cp ep tokens response engine memory offload estimator clip clip_high"
_model_keys+=" attention parser thinking r3 fp8 weights conversion_nodes conversion_gpus conversion environment concurrency further"

# row KEY=VALUE...: set model_KEY for each key, to the value or to its default.
#   hub          id on the Hugging Face hub
#   source       file in slime's repository that the numbers are from; "like NAME": the file of NAME, a larger model of the family
#   nodes, gpus  nodes, and GPUs per node; gpu_gb: memory of a GPU in GB, if 80 are too few for the engines' weights
#   tp, pp, cp, ep  parallel sizes: tensor, pipeline, context, expert; tp_async: tensor, if only half of the GPUs train
#   first, last  numbers of layers of the first and of the last pipeline stage, if they differ from the other stages'
#   tokens       tokens of a training batch on a GPU; default: as many as one episode with `response` tokens needs
#   response     tokens of a response; default: the most that `tokens` allow, up to 16,384
#   engine, memory  GPUs per engine, and SGLang's fraction of the memory
#   offload      1: the optimizer's state is in the host's memory
#   estimator, clip, clip_high  --advantage-estimator, --eps-clip, --eps-clip-high
#   attention    Megatron's --attention-backend
#   parser       tool_parser of this package; auto: detected from the chat template; unknown: TOOL_PARSER must be set
#   thinking     on: the template's default, unless THINKING is set; always: the model always reasons; off: it does not reason
#   r3           1: the trainer routes tokens to the experts that the engine chose
#   fp8          1: the engines hold an FP8 copy of the weights
#   weights      format of the hub's weights
#   conversion_nodes, conversion_gpus, conversion  nodes, GPUs per node and arguments for slime's converter
#   concurrency  episodes per engine, as many as its cache holds (docs/training.md, "Why 64 episodes per engine"); default: 64 in
#                asynchronous training, else slime's
#   environment  environment variables of the job, as NAME=VALUE
#   further      arguments for slime that no other key sets
row() {
  local pair key
  for key in $_model_keys; do
    printf -v "model_$key" '%s' ""
  done
  model_nodes=1 model_gpus=8 model_pp=1 model_cp=1 model_ep=1 model_offload=0 model_estimator=grpo model_clip=0.2 model_clip_high=0.28
  model_attention=flash model_thinking=on model_r3=0 model_fp8=0 model_weights=bf16 model_conversion_nodes=1 model_conversion_gpus=1
  for pair in "$@"; do
    key="${pair%%=*}"
    [[ " $_model_keys " == *" $key "* ]] || fail "a row of scripts/launch/models.sh has the unknown key $key"
    printf -v "model_$key" '%s' "${pair#*=}"
  done
}

# The batch sizes of the CUDA graphs that SGLang captures, as in slime's scripts.
_graphs="--sglang-cuda-graph-bs 1 2 4 8 $(seq -s ' ' 16 8 256)"
_deepep="--moe-token-dispatcher-type flex --moe-enable-deepep"
# These arguments are from slime's docs/en/examples/deepseek-r1.md. Kimi-K2 has as many layers. By default, the converter does not
# split experts.
_conversion_of_61_layers="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-tensor-parallel-size 1
  --expert-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6"
_dp_attention="--sglang-enable-dp-attention --sglang-enable-dp-lm-head"

# model_row NAME: set the model_* variables from NAME's row; return 1 if there is no row.
model_row() {
  case "$1" in
    qwen2.5-0.5B) row hub=Qwen/Qwen2.5-0.5B-Instruct source=scripts/run-qwen2.5-0.5B-reproducibility.sh \
      tp=1 tokens=9216 engine=1 memory=0.7 parser=hermes thinking=off ;;
    qwen2.5-1.5B) row hub=Qwen/Qwen2.5-1.5B-Instruct source="like qwen2.5-3B" \
      tp=2 tokens=9216 engine=2 memory=0.7 gpus=4 concurrency=512 parser=hermes thinking=off ;;
    qwen2.5-3B) row hub=Qwen/Qwen2.5-3B source=examples/search-r1/run_qwen2.5_3B.sh \
      tp=2 tokens=9216 engine=2 memory=0.7 gpus=4 concurrency=512 parser=hermes thinking=off ;;
    qwen3-0.6B) row hub=Qwen/Qwen3-0.6B source="like qwen3-4B" gpus=4 tp=2 response=16384 engine=2 memory=0.7 concurrency=96 \
      parser=hermes ;;
    qwen3-1.7B) row hub=Qwen/Qwen3-1.7B source="like qwen3-4B" gpus=4 tp=2 response=16384 engine=2 memory=0.7 concurrency=96 \
      parser=hermes ;;
    qwen3-4B) row hub=Qwen/Qwen3-4B source=scripts/run-qwen3-4B.sh gpus=4 tp=2 response=16384 engine=2 memory=0.7 parser=hermes ;;
    qwen3-4B-Instruct-2507) row hub=Qwen/Qwen3-4B-Instruct-2507 source=examples/tau-bench/run_qwen3_4B.sh \
      gpus=4 tp=2 response=16384 engine=1 memory=0.7 concurrency=32 parser=hermes thinking=off ;;
    qwen3-8B) row hub=Qwen/Qwen3-8B source=examples/strands_sglang/strands_qwen3_8b.sh \
      tp=2 tp_async=4 response=16384 engine=2 memory=0.7 parser=hermes ;;
    qwen3-14B) row hub=Qwen/Qwen3-14B source="like qwen3-32B" tp=8 tokens=20480 engine=8 memory=0.7 offload=1 \
      concurrency=256 parser=hermes further="$_graphs" ;;
    qwen3-32B) row hub=Qwen/Qwen3-32B source=scripts/run-qwen3-32B.sh tp=8 tokens=20480 engine=8 memory=0.7 offload=1 \
      concurrency=144 parser=hermes further="$_graphs" ;;
    qwen3-30B-A3B) row hub=Qwen/Qwen3-30B-A3B source=scripts/run-qwen3-30B-A3B.sh \
      tp=4 ep=8 tokens=20480 engine=8 memory=0.7 offload=1 concurrency=192 parser=hermes r3=1 conversion_gpus=8 \
      further="$_graphs" ;;
    qwen3-235B-A22B) row hub=Qwen/Qwen3-235B-A22B source=scripts/run-qwen3-235B-A22B.sh nodes=8 \
      tp=4 pp=4 last=22 cp=2 ep=16 tokens=16384 engine=32 memory=0.7 offload=1 estimator=gspo clip=4e-4 clip_high=4e-4 \
      parser=hermes fp8=1 conversion_gpus=8 \
      further="$_dp_attention --sglang-dp-size 4 --sglang-ep-size 32 $_graphs --sglang-moe-a2a-backend deepep
        --sglang-deepep-mode auto --update-weight-buffer-size 4294967296" ;;
    qwen3-next-80B-A3B) row hub=Qwen/Qwen3-Next-80B-A3B-Thinking source=scripts/run-qwen3-next-80B-A3B.sh nodes=4 \
      tp=2 pp=4 last=9 cp=4 ep=8 tokens=8192 engine=8 memory=0.8 offload=1 estimator=gspo clip=4e-4 clip_high=4e-4 \
      parser=hermes thinking=always conversion_gpus=8 \
      further="--sglang-ep-size 8 --sglang-cuda-graph-bs 1 2 4 8 $(seq -s ' ' 16 8 128) --sglang-max-running-requests 256 $_deepep" ;;
    qwen3.5-0.8B) row hub=Qwen/Qwen3.5-0.8B source=tests/test_qwen3.5_0.8B_gsm8k_short.py gpus=4 \
      tp=1 tokens=9216 engine=1 memory=0.7 parser=qwen3_coder ;;
    qwen3.5-4B) row hub=Qwen/Qwen3.5-4B source="like qwen3.5-9B" tp=2 response=16384 engine=2 memory=0.7 parser=qwen3_coder ;;
    qwen3.5-9B) row hub=Qwen/Qwen3.5-9B source=examples/fully_async/run-qwen3.5-9B-fully_async.sh \
      tp=4 response=16384 engine=2 memory=0.7 parser=qwen3_coder ;;
    qwen3.5-27B) row hub=Qwen/Qwen3.5-27B source=scripts/run-qwen3.5-27B.sh nodes=4 \
      tp=4 pp=2 last=30 cp=4 tokens=8192 engine=2 memory=0.75 offload=1 parser=qwen3_coder conversion_gpus=8 \
      further="--sglang-mamba-scheduler-strategy extra_buffer" ;;
    qwen3.5-35B-A3B) row hub=Qwen/Qwen3.5-35B-A3B source=tests/test_qwen3.6_35B_A3B_pd_mooncake.py \
      tp=2 cp=2 ep=8 tokens=8192 engine=4 memory=0.75 offload=1 parser=qwen3_coder conversion_gpus=8 \
      further="$_dp_attention --sglang-dp-size 4 --sglang-ep-size 4 --sglang-max-running-requests 512
        --sglang-mamba-scheduler-strategy extra_buffer --update-weight-buffer-size 2147483648 $_deepep" ;;
    glm4-9B) row hub=zai-org/GLM-Z1-9B-0414 source=scripts/run-glm4-9B.sh tp=2 cp=2 tokens=4608 engine=2 memory=0.7 \
      parser=unknown thinking=always ;;
    glm4.7-30B-A3B) row hub=THUDM/GLM-4.7-Flash source="scripts/run-glm4.7-30B-A3B.sh, tests/test_glm4.7_30B_A3B_pd_mooncake.py" \
      tp=2 pp=2 last=23 cp=2 ep=4 tokens=8192 engine=8 memory=0.8 offload=1 parser=glm4 conversion_gpus=8 \
      further="$_dp_attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-cuda-graph-max-bs 64
        --sglang-max-running-requests 512 --moe-token-dispatcher-type alltoall" ;;
    glm4.5-355B-A32B) row hub=zai-org/GLM-4.7 source=scripts/run-glm4.7-355B-A32B.sh nodes=8 \
      tp=8 pp=4 cp=2 ep=16 tokens=16384 engine=32 memory=0.7 offload=1 estimator=gspo clip=1e-4 clip_high=2e-4 \
      parser=glm4 conversion_nodes=2 conversion_gpus=8 \
      further="$_dp_attention --sglang-dp-size 4 --sglang-ep-size 32 --sglang-moe-dense-tp-size 1
        --rollout-stop-token-ids 151329 151336 151338 $_deepep" ;;
    glm5-744B-A40B) row hub=zai-org/GLM-5 source=scripts/run-glm5-744B-A40B.sh nodes=32 \
      tp=4 pp=4 last=18 cp=2 ep=32 tokens=16384 engine=64 memory=0.70 offload=1 parser=auto conversion_nodes=4 conversion_gpus=8 \
      conversion="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 40
        --expert-model-parallel-size 16 --expert-tensor-parallel-size 1" \
      environment="INDEXER_ROPE_NEOX_STYLE=0 SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=32" \
      further="$_dp_attention --sglang-ep-size 64 --sglang-dp-size 64 --sglang-moe-dense-tp-size 1 --sglang-moe-a2a-backend deepep
        --sglang-deepep-mode auto --sglang-page-size 64 --sglang-nsa-decode-backend flashmla_sparse
        --sglang-nsa-prefill-backend flashmla_sparse --sglang-attention-backend nsa --sglang-cuda-graph-max-bs 8
        --sglang-max-running-requests 512 --sglang-chunked-prefill-size 131072 --sglang-watchdog-timeout 3600
        --data-pad-size-multiplier 4096 --log-probs-chunk-size 1024 --update-weight-buffer-size 2147483648 $_deepep" ;;
    kimi-k2) row hub=moonshotai/Kimi-K2-Instruct source=scripts/run-kimi-k2-Instruct.sh nodes=32 gpu_gb=141 concurrency=320 \
      tp=8 pp=8 last=5 cp=4 ep=32 tokens=16384 engine=16 memory=0.7 offload=1 parser=kimi_k2 thinking=off weights=fp8 \
      conversion_nodes=4 conversion_gpus=8 conversion="$_conversion_of_61_layers" \
      further="$_dp_attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-ep-size 16
        --update-weight-buffer-size 2147483648 $_deepep" ;;
    kimi-k2-thinking) row hub=moonshotai/Kimi-K2-Thinking source=scripts/run-kimi-k2-Thinking.sh nodes=32 gpu_gb=141 concurrency=320 \
      tp=8 pp=8 last=5 cp=4 ep=32 tokens=16384 engine=16 memory=0.7 offload=1 parser=kimi_k2 thinking=always weights=int4 fp8=1 \
      conversion_nodes=4 conversion_gpus=8 conversion="$_conversion_of_61_layers" \
      further="$_dp_attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-ep-size 16
        --update-weight-buffer-size 2147483648" ;;
    minimax-m2) row hub=MiniMaxAI/MiniMax-M2.5 source=scripts/run-minimax-m2.sh nodes=16 \
      tp=2 pp=2 ep=32 tokens=8192 engine=16 memory=0.7 offload=1 parser=minimax_m2 thinking=always weights=fp8 conversion_gpus=8 \
      further="--sglang-ep-size 16 --model-name minimax_m2" ;;
    moonlight) row hub=moonshotai/Moonlight-16B-A3B-Instruct source=scripts/run-moonlight-16B-A3B.sh \
      tp=4 ep=8 tokens=8192 response=4096 engine=8 memory=0.7 offload=1 concurrency=384 attention=auto parser=unknown thinking=off r3=1 \
      conversion_gpus=8 further="$_graphs $_deepep" ;;
    deepseek-v3) row hub=deepseek-ai/DeepSeek-R1 source=scripts/run-deepseek-r1.sh nodes=16 concurrency=384 \
      tp=8 pp=4 last=13 cp=4 ep=32 tokens=16384 engine=64 memory=0.7 offload=1 parser=deepseek_v3 thinking=always weights=fp8 \
      conversion_nodes=4 conversion_gpus=8 \
      conversion="$_conversion_of_61_layers" \
      further="$_dp_attention --sglang-ep-size 64 --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-moe-a2a-backend deepep
        --sglang-deepep-mode auto $_deepep
        --apply-chat-template-kwargs {\"chat_template\":\"deepseek_r1_tools\",\"thinking\":true}" ;;
    mimo-7B-rl) row hub=XiaomiMiMo/MiMo-7B-RL source=scripts/run-mimo-7B-rl-eagle.sh \
      tp=2 tokens=9216 engine=1 memory=0.7 concurrency=56 parser=auto thinking=always \
      further="--sglang-attention-backend fa3" ;;
    *) return 1 ;;
  esac
}

# Print the names of the rows, in the order of the table.
model_names() {
  sed -n 's/^    \([a-zA-Z0-9.-]*\)) row .*/\1/p' "$repository/scripts/launch/models.sh" | xargs
}

has_model_row=0

# use_model MODEL: read MODEL's row, and set model_name, slime's name of the model and its id on the hub. MODEL is the name of a
# row, an id on the hub or its last part, in upper or lower case. Without a row, slime's name is not set.
use_model() {
  local name
  shopt -s nocasematch
  for name in $(model_names); do
    model_row "$name"
    if [[ "$1" == "$name" || "$1" == "$model_hub" || "$1" == "${model_hub##*/}" ]]; then
      has_model_row=1
      default_hub_id="$model_hub"
      default_slime_model="$name"
      model_name="${model_hub##*/}"
      break
    fi
  done
  shopt -u nocasematch
  if [[ $has_model_row -eq 0 ]]; then
    row parser=unknown
    model_name="${1##*/}"
    [[ -n "$model_name" ]] || usage_error "got MODEL='$1'; expected a model's id, such as Qwen/Qwen3-8B, or one of: $(model_names)"
    default_hub_id="$1"
  fi
}

# use_model_sizes [async]: take the defaults of a job's sizes and its tool parser from the row of use_model. Without a row, the
# sizes must be set; if no row names a tool parser, TOOL_PARSER or ROLLOUT_CONFIG must be set, too. An error names the missing
# settings. In asynchronous training, half of the GPUs train. The trainer of a row with `offload` needs all GPUs of the row, so
# asynchronous training of such a row has twice as many nodes by default.
use_model_sizes() {
  local name missing=""
  if [[ $has_model_row -eq 1 ]]; then
    default_gpus="$model_gpus" default_nodes="$model_nodes"
    if [[ "${1:-}" == async ]]; then
      default_nodes="$((model_nodes * (1 + model_offload)))"
    fi
    default_tensor_parallel="$model_tp" default_pipeline_parallel="$model_pp" default_context_parallel="$model_cp"
    default_expert_parallel="$model_ep" default_gpus_per_engine="$model_engine" default_sglang_mem_fraction="$model_memory"
    default_tokens_per_gpu="$model_tokens" default_response_len="$model_response" default_first_stage="$model_first"
    default_last_stage="$model_last" default_offload="$model_offload" default_estimator="$model_estimator"
    default_clip="$model_clip" default_clip_high="$model_clip_high" default_attention="$model_attention"
    default_routing_replay="$model_r3" default_fp8="$model_fp8"
  else
    for name in NUM_GPUS TENSOR_PARALLEL GPUS_PER_ENGINE SGLANG_MEM_FRACTION MAX_RESPONSE_LEN; do
      is_given "$name" || missing+="${missing:+, }$name"
    done
  fi
  if [[ "$model_parser" == "unknown" ]]; then
    is_given TOOL_PARSER || is_given ROLLOUT_CONFIG || missing+="${missing:+, }TOOL_PARSER"
    model_parser=""
  fi
  default_tool_parser="$model_parser"
  [[ -z "$missing" || $_wants_help -eq 1 ]] || usage_error "scripts/launch/models.sh has no" \
    "$([[ $has_model_row -eq 1 ]] && printf 'tool parser' || printf 'sizes') for $MODEL; set $missing" \
    "(docs/training-models.md, \"Adding a model\"). Rows: $(model_names)"
}

# Refuse an FP8 copy of weights that are FP8 on the hub.
require_fp8_copy() {
  [[ $FP8_ROLLOUT -eq 0 || "${model_weights:-bf16}" != fp8 ]] || usage_error "got FP8_ROLLOUT=1; expected 0: $model_name is published" \
    "in FP8, so no copy is needed"
}
