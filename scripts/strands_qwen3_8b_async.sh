#!/usr/bin/env bash
# Trains Qwen3-8B like strands_qwen3_8b.sh, but fully asynchronously: half of the GPUs generate all the time, the other half
# trains on finished episodes. slime's fully asynchronous rollout has no evaluation, no dynamic sampling and no partial
# rollouts; evaluate the checkpoints with eval_aime.sh.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"
model_name=Qwen3-8B

read_options "$@"
setting NUM_GPUS 8 "GPUs per node" count
setting ACTOR_GPUS "$((NUM_GPUS / 2))" "GPUs per node that train; the others generate" count
setting SGLANG_CONCURRENCY 32 "concurrent episodes per engine; slime also keeps this many prompts per engine in flight, so a higher number trains older samples" count
# Memory in GB of a GPU that trains, if four GPUs share the 8.2e9 parameters (TP is TENSOR_PARALLEL):
#                                                                       TP 4           TP 2, two replicas
#   weights in bf16, gradients in fp32: 6 bytes a parameter / TP        12.3           24.6
#   the optimizer, shared by the replicas: 12 bytes / 4                 24.6           24.6
#   18,432 tokens' logits in bf16 and fp32, softmax and gradient:
#   14 bytes x 151,936 words / TP                                        9.8           19.6
#   layers' inputs (36 x 4,096 x 2 bytes a token / TP), one recomputed   2.0            4.0
#   CUDA, NCCL                                                           3              3
#                                                                       52 of 80       76 of 80
# --log-probs-chunk-size would not help: the backward pass keeps the softmax of all tokens in any case.
default_tensor_parallel="$((ACTOR_GPUS % 4 == 0 ? 4 : 2))"
training_settings qwen3-8b-strands-async
pass_rate_settings
end_of_settings "Trains Qwen3-8B as an agent that solves math with code, in slime, fully asynchronously, on 8 GPUs." \
  "bash $0 --actor-gpus 4 -- --update-weights-interval 2"
[[ $ACTOR_GPUS -lt $NUM_GPUS ]] || usage_error "ACTOR_GPUS is $ACTOR_GPUS of NUM_GPUS=$NUM_GPUS; expected fewer, so that some GPUs generate"
for name in PARTIAL_ROLLOUT DYNAMIC_SAMPLING; do
  [[ "${!name:-0}" == "0" ]] || usage_error "got $name='${!name}'; expected 0: slime's fully asynchronous rollout does not support it"
done
ROLLOUT_GPUS="$(((NUM_GPUS - ACTOR_GPUS) * NUM_NODES))"
require_sizes
require_batches
read_model_arguments
arguments=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node "$ACTOR_GPUS"
  --rollout-num-gpus "$ROLLOUT_GPUS"
  --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
  --sglang-server-concurrency "$SGLANG_CONCURRENCY"
)
training_arguments
launch train_async.py
