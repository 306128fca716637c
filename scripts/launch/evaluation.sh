# shellcheck shell=bash
# Evaluation in slime: data sets, sampling, and protocols, which fix the conditions so that numbers can be compared.

evaluation_settings() {
  local samples=16 length="$MAX_RESPONSE_LEN" one=1.0
  # shellcheck disable=SC2034 # job.sh checks the files of an evaluation
  _evaluates=1
  setting EVAL_SETS "$1" "data sets to evaluate on, separated by commas: NAME is DATA_DIR/NAME.jsonl" names
  setting EVAL_CONFIG "" "slime's --eval-config instead of EVAL_SETS, such as configs/aime_eval.yaml" path
  setting EVAL_PROTOCOL "" "protocol of EVAL_SETS: qwen3 or tool; sets sampling, lengths, samples, prompt and agent, and the metric's name"
  if [[ -n "$EVAL_PROTOCOL" ]]; then samples="" length="" one=""; fi # the protocol has them
  setting EVAL_SAMPLES "$(smoke_or_full 1 "$samples")" "samples per problem; default: EVAL_PROTOCOL's, else 16" optional_count
  setting EVAL_MAX_RESPONSE_LEN "$(smoke_or_full "$MAX_RESPONSE_LEN" "$length")" \
    "maximum tokens of a response in evaluation; default: EVAL_PROTOCOL's, else MAX_RESPONSE_LEN" optional_count
  setting EVAL_TEMPERATURE "$one" "sampling temperature in evaluation; default: EVAL_PROTOCOL's, else 1.0" optional_number
  setting EVAL_TOP_P "$one" "top-p in evaluation; default: EVAL_PROTOCOL's, else 1.0" optional_top_p
  setting EVAL_TOP_K "" "top-k in evaluation; default: EVAL_PROTOCOL's, else all tokens" optional_count
  [[ "$EVAL_SAMPLES" != 0 ]] || usage_error "got EVAL_SAMPLES='$EVAL_SAMPLES'; expected a whole number of at least 1"
}

evaluation_arguments() {
  local name
  if [[ -n "$EVAL_PROTOCOL" ]]; then
    _protocol_arguments
    return
  fi
  if [[ -n "$EVAL_CONFIG" ]]; then
    arguments+=(--eval-config "$EVAL_CONFIG")
  else
    arguments+=(--eval-prompt-data)
    for name in ${EVAL_SETS//,/ }; do
      arguments+=("$name" "$DATA_DIR/$name.jsonl")
    done
  fi
  arguments+=(
    --n-samples-per-eval-prompt "$EVAL_SAMPLES"
    --eval-max-response-len "$EVAL_MAX_RESPONSE_LEN"
    --eval-max-context-len "$((EVAL_MAX_RESPONSE_LEN + MAX_CONTEXT_LEN - MAX_RESPONSE_LEN))"
    --eval-temperature "$EVAL_TEMPERATURE"
    --eval-top-p "$EVAL_TOP_P"
  )
  if [[ -n "$EVAL_TOP_K" ]]; then
    arguments+=(--eval-top-k "$EVAL_TOP_K")
  fi
}

# slime can sample each set with its own parameters, but can neither extend prompts nor change the agent. So this package writes
# copies of the sets for slime, with the protocol's instruction and agent in each row.
_protocol_arguments() {
  local name word words sets=() options=(--protocol "$EVAL_PROTOCOL" --config "$ROLLOUT_CONFIG" --model "$HF_CHECKPOINT")
  [[ -z "$EVAL_CONFIG" ]] || usage_error "got EVAL_PROTOCOL and EVAL_CONFIG; expected one of them: EVAL_CONFIG has its own sampling"
  for name in ${EVAL_SETS//,/ }; do
    [[ $dry_run -eq 1 ]] || require_path "$DATA_DIR/$name.jsonl" "the evaluation data" "$(_prepare_set "$name")"
    sets+=("$name=$DATA_DIR/$name.jsonl")
  done
  options+=(--out "$SAVE_DIR/protocol-$EVAL_PROTOCOL" --prompt-room "$((MAX_CONTEXT_LEN - MAX_RESPONSE_LEN))")
  [[ -z "$EVAL_SAMPLES" ]] || options+=(--samples "$EVAL_SAMPLES")
  [[ -z "$EVAL_TEMPERATURE" ]] || options+=(--temperature "$EVAL_TEMPERATURE")
  [[ -z "$EVAL_TOP_P" ]] || options+=(--top-p "$EVAL_TOP_P")
  [[ -z "$EVAL_TOP_K" ]] || options+=(--top-k "$EVAL_TOP_K")
  [[ -z "$EVAL_MAX_RESPONSE_LEN" ]] || options+=(--max-new-tokens "$EVAL_MAX_RESPONSE_LEN")
  [[ $dry_run -eq 0 ]] || options+=(--dry-run)
  words="$(python3 -m strands_rollout.evaluation.slime_protocol "${options[@]}" -- "${sets[@]}")" ||
    fail "the protocol $EVAL_PROTOCOL can't be used, see above"
  while IFS= read -r word; do
    arguments+=("$word")
  done <<<"$words"
}
