# shellcheck shell=bash
# Evaluates checkpoints of a run while it trains: a loop that starts an evaluation job for the newest checkpoint whenever there is a
# new one, and the wandb run that the evaluations share with the training run.

# wandb_run FOLDER: unless wandb is off or WANDB_RUN_ID is set, set WANDB_RUN_ID to the id in FOLDER/wandb-run-id, so that restarts
# and evaluations log to one run; create the file if it is missing, except in a dry run.
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

# Succeed if a watching script has started this script, to evaluate one checkpoint.
is_watched_evaluation() {
  [[ -n "${STRANDS_ROLLOUT_EVAL_STEP:-}" ]]
}

# The samples are written below WATCH, so that the samples of two watched runs don't mix.
watch_settings() {
  local name
  setting WATCH "" "SAVE_DIR of a run: evaluate each new checkpoint, until the script is stopped; needs GPUs that the run does not use" path
  setting WATCH_UNTIL "" "with WATCH, step of the last checkpoint to evaluate, such as NUM_ROLLOUT - 1; default: evaluate until stopped" optional_count
  [[ -n "$WATCH" || -z "$WATCH_UNTIL" ]] || usage_error "got WATCH_UNTIL without WATCH; expected both"
  [[ -n "$WATCH" ]] || return 0
  setting SAVE_DIR "$WATCH/evaluations/samples" "folder of the samples" path
  is_watched_evaluation || for name in LOAD CKPT_STEP; do
    ! is_given "$name" || usage_error "got WATCH and $name; expected one of them: WATCH evaluates the newest checkpoint"
  done
}

# Print the step of the newest complete checkpoint in WATCH, from the file that Megatron writes after a save; nothing if there is
# none.
_newest_step() {
  local step=""
  step="$(cat "$WATCH/latest_checkpointed_iteration.txt" 2>/dev/null)" || true
  if [[ "$step" =~ ^[0-9]+$ ]]; then printf '%s' "$((10#$step))"; fi
}

# hold_checkpoint STEP: set `held` to a folder of hard links to the checkpoint's files, which stay when the training run removes the
# checkpoint after its next save; on a file system without hard links, set `held` to WATCH itself. Return 1 if the training run has
# saved another checkpoint meanwhile, because it may have removed files of this one before they were linked.
hold_checkpoint() {
  held="$WATCH/evaluations/held-$1"
  mkdir -p -- "$held"
  if cp -al -- "$WATCH/$(printf 'iter_%07d' "$1")" "$held/" 2>/dev/null; then
    printf '%s' "$1" >"$held/latest_checkpointed_iteration.txt"
  else
    rm -rf -- "$held"
    held="$WATCH"
  fi
  [[ "$(_newest_step)" == "$1" ]]
}

_release_checkpoints() {
  rm -rf -- "$WATCH"/evaluations/held-*
}

# evaluate_checkpoint STEP ARGUMENTS...: evaluate the checkpoint in `held` with this script, in a job of its own.
evaluate_checkpoint() {
  local step="$1" status=0 shared=1 run=""
  shift
  if [[ "$USE_WANDB" == "1" ]]; then
    run="${WANDB_RUN_ID:-}"
    if [[ -f "$WATCH/wandb-run-id" ]]; then
      run="$(cat "$WATCH/wandb-run-id")"
    elif [[ -z "$run" ]]; then # the training run does not log to wandb
      shared=0
      wandb_run "$WATCH/evaluations"
      run="$WANDB_RUN_ID"
    fi
  fi
  echo "evaluating the checkpoint of step $step ..." >&2
  LOAD="$held" CKPT_STEP="$step" WANDB_RUN_ID="$run" STRANDS_ROLLOUT_EVAL_STEP="$step" STRANDS_ROLLOUT_EVAL_SHARED="$shared" \
    bash "$0" "$@" &
  _evaluation=$!
  wait "$_evaluation" || status=$?
  _evaluation=""
  return "$status"
}

# Stop the running evaluation when this script is stopped; the evaluation's script stops the evaluation's job and Ray.
_stop_evaluation() {
  trap '' INT TERM HUP
  if [[ -n "$_evaluation" ]]; then
    kill "$_evaluation" 2>/dev/null || true
    wait "$_evaluation" 2>/dev/null || true
  fi
  _release_checkpoints
  exit "$1"
}

# End the script if another script watches WATCH, or if an evaluation started by another script still runs: evaluations inherit
# the lock.
_lock_watch() {
  mkdir -p -- "$WATCH/evaluations"
  command -v flock >/dev/null || return 0
  exec 9>"$WATCH/.watch-lock"
  # 1 is a conflict; other numbers mean that the file system has no locks
  flock -n 9 || [[ $? -ne 1 ]] || fail "another script watches $WATCH, or its evaluation still runs; end it first"
}

# watch_checkpoints ARGUMENTS...: evaluate the newest checkpoint of WATCH whenever there is a new one, with this script's ARGUMENTS.
# Skips checkpoints that training has replaced meanwhile, and checkpoints whose evaluation fails twice.
# Returns only in a dry run or with WATCH_UNTIL: 1 if an evaluation has failed twice, else 0.
watch_checkpoints() {
  local step status failed="" skipped=0 shown
  step="$(_newest_step)"
  # this dry run also checks the arguments now, instead of when the first checkpoint comes
  shown="$(LOAD="$WATCH" CKPT_STEP="$step" STRANDS_ROLLOUT_EVAL_STEP="${step:-0}" bash "$0" --dry-run "$@")" || exit
  if [[ $dry_run -eq 1 ]]; then
    printf '# for each new checkpoint of %s%s\n%s\n' "$WATCH" "${WATCH_UNTIL:+, up to step $WATCH_UNTIL}" "$shown"
    return
  fi
  [[ -d "$WATCH" ]] || fail "WATCH is $WATCH, which does not exist; expected the SAVE_DIR of a run"
  [[ $NUM_NODES -eq 1 || -n "$RAY_ADDRESS" ]] || fail "NUM_NODES is $NUM_NODES; expected also RAY_ADDRESS, because a Ray of this" \
    "script ends with each evaluation, and the other nodes would have to join again"
  require_files
  require_gpus
  require_wandb
  _lock_watch
  _release_checkpoints # left by a script that was killed
  _evaluation=""
  trap '_stop_evaluation 130' INT
  trap '_stop_evaluation 143' TERM
  trap '_stop_evaluation 129' HUP
  [[ -n "$step" ]] || echo "waiting for the first checkpoint in $WATCH ..." >&2
  while true; do
    step="$(_newest_step)"
    if [[ -n "$step" && ! -e "$WATCH/evaluations/step-$step" ]]; then
      if ! hold_checkpoint "$step"; then
        _release_checkpoints
        continue
      fi
      status=0
      evaluate_checkpoint "$step" "$@" || status=$?
      _release_checkpoints
      if [[ $status -eq 0 ]]; then
        : >"$WATCH/evaluations/step-$step"
        continue
      elif [[ "$step" == "$failed" ]]; then
        echo "error: the evaluation of step $step failed twice (exit status $status) and is skipped" >&2
        printf 'failed\n' >"$WATCH/evaluations/step-$step"
        skipped=1
      fi
      failed="$step"
    elif [[ -n "$WATCH_UNTIL" && -n "$step" && "$step" -ge "$WATCH_UNTIL" ]]; then
      return "$skipped"
    fi
    sleep 30 9>&- &
    wait $! || true
  done
}
