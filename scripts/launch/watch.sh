# shellcheck shell=bash
# Evaluates the checkpoints of a run while it trains: a loop that starts one evaluation job for each new checkpoint, and the wandb
# run that the evaluations share with the training.

# wandb_run FOLDER: set WANDB_RUN_ID to the id in FOLDER/wandb-run-id, so that restarts and evaluations log to one run; create
# the file if it is missing, except in a dry run.
wandb_run() {
  local file="$1/wandb-run-id"
  [[ "$USE_WANDB" == "1" && -z "${WANDB_RUN_ID:-}" ]] || return 0
  if [[ -f "$file" ]]; then
    WANDB_RUN_ID="$(cat "$file")"
  elif [[ $dry_run -eq 1 ]]; then
    WANDB_RUN_ID="<new id, then in $file>"
  else
    mkdir -p -- "$1"
    WANDB_RUN_ID="$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')"
    printf '%s' "$WANDB_RUN_ID" >"$file"
  fi
  # shellcheck disable=SC2034 # launch passes it on to the job
  WANDB_RESUME=allow
}

watch_settings() {
  setting WATCH "" "SAVE_DIR of a run: evaluate each new checkpoint, until the script is stopped; needs GPUs that the run does not use" path
  setting WATCH_UNTIL "" "with WATCH, step of the last checkpoint to evaluate; default: evaluate until stopped" optional_count
}

# without_watch ARGUMENTS...: set kept_arguments to the arguments without the options that the loop sets for each evaluation.
without_watch() {
  kept_arguments=()
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --)
        kept_arguments+=("$@")
        return
        ;;
      --watch=* | --watch-until=* | --load=* | --ckpt-step=* | --dry-run) ;;
      --watch | --watch-until | --load | --ckpt-step) if [[ $# -gt 1 ]]; then shift; fi ;;
      *) kept_arguments+=("$1") ;;
    esac
    shift
  done
}

# Print the step of the newest complete checkpoint in WATCH; Megatron writes this file after a save.
_newest_step() {
  local step=""
  step="$(cat "$WATCH/latest_checkpointed_iteration.txt" 2>/dev/null)" || true
  if [[ "$step" =~ ^[0-9]+$ ]]; then printf '%s' "$((10#$step))"; fi
}

# evaluate_checkpoint STEP: evaluate a checkpoint in a job of its own, with this script's options in kept_arguments. Hard links
# keep its files while the job runs, because training removes a checkpoint after the next save.
evaluate_checkpoint() {
  local step="$1" folder held status=0 shared=1 run="${WANDB_RUN_ID:-}"
  folder="$(printf 'iter_%07d' "$step")"
  held="$WATCH/evaluations/held-$step"
  rm -rf -- "$held"
  mkdir -p -- "$held"
  if ! cp -al -- "$WATCH/$folder" "$held/" 2>/dev/null; then
    rm -rf -- "$held"
    [[ -d "$WATCH/$folder" ]] || return 2 # removed meanwhile
    held="$WATCH"                        # a file system without hard links
  else
    printf '%s' "$step" >"$held/latest_checkpointed_iteration.txt"
  fi
  if [[ "$USE_WANDB" != "1" ]]; then
    run=""
  elif [[ -f "$WATCH/wandb-run-id" ]]; then
    run="$(cat "$WATCH/wandb-run-id")"
  elif [[ -z "$run" ]]; then # the training has no run in wandb
    shared=0
    wandb_run "$WATCH/evaluations"
    run="$WANDB_RUN_ID"
  fi
  echo "evaluating the checkpoint of step $step ..." >&2
  env -u WATCH -u WATCH_UNTIL LOAD="$held" CKPT_STEP="$step" WANDB_RUN_ID="$run" STRANDS_ROLLOUT_EVAL_STEP="$step" \
    STRANDS_ROLLOUT_EVAL_SHARED="$shared" bash "$0" ${kept_arguments[@]+"${kept_arguments[@]}"} &
  _evaluation=$!
  wait "$_evaluation" || status=$?
  _evaluation=""
  [[ "$held" == "$WATCH" ]] || rm -rf -- "$held"
  return "$status"
}

# Stop the running evaluation with this script; its own script stops its job and Ray.
_stop_evaluation() {
  trap '' INT TERM HUP
  if [[ -n "$_evaluation" ]]; then
    kill "$_evaluation" 2>/dev/null || true
    wait "$_evaluation" 2>/dev/null || true
  fi
  rm -rf -- "$WATCH"/evaluations/held-*
  exit "$1"
}

# watch_checkpoints ARGUMENTS...: evaluate the newest checkpoint of WATCH whenever there is a new one. Older ones that training
# has replaced meanwhile are skipped. A checkpoint whose evaluation fails twice is skipped, too.
watch_checkpoints() {
  local step status failures=0
  _evaluation=""
  without_watch "$@"
  if [[ $dry_run -eq 1 ]]; then
    step="$(_newest_step)"
    printf '# for each new checkpoint of %s%s\n' "$WATCH" "${WATCH_UNTIL:+, up to step $WATCH_UNTIL}"
    env -u WATCH -u WATCH_UNTIL LOAD="$WATCH" CKPT_STEP="$step" STRANDS_ROLLOUT_EVAL_STEP="${step:-0}" \
      bash "$0" --dry-run ${kept_arguments[@]+"${kept_arguments[@]}"}
    return
  fi
  [[ -d "$WATCH" ]] || fail "WATCH is $WATCH, which does not exist; expected the SAVE_DIR of a run"
  trap '_stop_evaluation 130' INT
  trap '_stop_evaluation 143' TERM
  trap '_stop_evaluation 129' HUP
  mkdir -p -- "$WATCH/evaluations"
  while true; do
    step="$(_newest_step)"
    if [[ -n "$step" && ! -e "$WATCH/evaluations/step-$step" ]]; then
      status=0
      evaluate_checkpoint "$step" || status=$?
      if [[ $status -eq 0 ]]; then
        failures=0
        : >"$WATCH/evaluations/step-$step"
        continue
      fi
      failures=$((failures + 1))
      if [[ $failures -ge 2 ]]; then
        failures=0
        echo "error: the evaluation of step $step failed twice ($status) and is skipped" >&2
        printf 'failed\n' >"$WATCH/evaluations/step-$step"
      fi
    elif [[ -n "$WATCH_UNTIL" && -n "$step" && "$step" -ge "$WATCH_UNTIL" ]]; then
      return
    fi
    sleep 30 &
    wait $! || true
  done
}
