# shellcheck shell=bash
# A job on Ray: on one that runs, or on one that is started for it and stopped after it. Nothing else is ever stopped.

_ray_pid=""
_ray_log=""
_job_runs=0

ray_settings() {
  setting RAY_ADDRESS "" "a running Ray: its dashboard's http://HOST:8265, or HOST; default: this machine's, else one is started"
  setting RAY_DASHBOARD_PORT 8265 "port of Ray's dashboard, which takes jobs" count
  setting MASTER_ADDR 127.0.0.1 "this machine's address for the Ray that is started"
  setting SUBMISSION_ID "" "the job's name in Ray; default: the run's name and the time"
}

# The URL that takes jobs. RAY_ADDRESS may also name Ray's own port, which takes none.
job_address() {
  local host="${RAY_ADDRESS:-127.0.0.1}"
  case "$host" in
    http://* | https://*) printf '%s' "$host" ;;
    auto) printf 'http://127.0.0.1:%s' "$RAY_DASHBOARD_PORT" ;;
    *)
      host="${host#ray://}"
      printf 'http://%s:%s' "${host%:*}" "$RAY_DASHBOARD_PORT"
      ;;
  esac
}

ray_start_command() {
  ray_start=(env -u RAY_ADDRESS ray start --head --block "--node-ip-address=$MASTER_ADDR" "--num-gpus=$NUM_GPUS"
    --disable-usage-stats --dashboard-host=127.0.0.1 "--dashboard-port=$RAY_DASHBOARD_PORT")
}

# json_text TEXT: as a JSON string.
json_text() {
  local text="${1//\\/\\\\}"
  printf '"%s"' "${text//\"/\\\"}"
}

# The job's environment as JSON, from the NAME=VALUE pairs of job_environment and those that are given.
runtime_environment() {
  local pair joined=""
  for pair in "${job_environment[@]}" "$@"; do
    joined+="${joined:+, }$(json_text "${pair%%=*}"): $(json_text "${pair#*=}")"
  done
  printf '{"env_vars": {%s}}' "$joined"
}

# ray_job NAME COMMAND...: runs the command as a job of Ray and returns its exit status; in a dry run prints what would
# be run.
ray_job() {
  local name="$1"
  shift
  if [[ $dry_run -eq 1 ]]; then
    _print_job "$name" "$@"
    return
  fi
  command -v ray >/dev/null || fail "no 'ray' on the PATH; work in the slimerl/slime image, or install ray[default]"
  trap _clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  SUBMISSION_ID="${SUBMISSION_ID:-$name-$(date +%Y%m%d-%H%M%S)}"
  _find_or_start_ray
  _submit "$@"
}

_print_job() {
  local id="${SUBMISSION_ID:-@ID@}" shown name="$1"
  shift
  if [[ -z "$RAY_ADDRESS" ]]; then
    ray_start_command
    printf '# unless a Ray runs here already; stopped when the job ends\n'
    printf '%s &\n\n' "$(print_command "${ray_start[@]}")"
  elif _needs_key; then
    printf '# with WANDB_API_KEY in its environment too, handed over through a pipe\n'
  fi
  shown="$(print_command ray job submit "--address=$(job_address)" "--submission-id=$id" \
    "--runtime-env-json=$(runtime_environment)" -- "$@")"
  # shellcheck disable=SC2016 # for the shell that it is pasted into
  printf '%s\n' "${shown/@ID@/$name-'"$(date +%Y%m%d-%H%M%S)"'}"
}

_needs_key() {
  [[ -n "${WANDB_API_KEY:-}" && "$USE_WANDB" == "1" ]]
}

_takes_jobs() {
  ray job list --address="$(job_address)" >/dev/null 2>&1
}

_find_or_start_ray() {
  if [[ -n "$RAY_ADDRESS" ]]; then
    _takes_jobs || fail "no Ray takes jobs at $(job_address), which RAY_ADDRESS=$RAY_ADDRESS names; start it there with" \
      "'ray start --head --dashboard-host=0.0.0.0', or unset RAY_ADDRESS to have one started here"
  elif env -u RAY_ADDRESS ray status >/dev/null 2>&1; then
    _takes_jobs || fail "a Ray runs here, but takes no jobs at $(job_address); name its dashboard: RAY_ADDRESS=http://HOST:PORT"
  else
    _start_ray
    return
  fi
  echo "using the Ray at $(job_address)" >&2
}

# In the foreground of a process of its own (--block): when that process ends, so does this Ray, and no other.
_start_ray() {
  local deadline=$((SECONDS + 120))
  [[ "$NUM_NODES" == "1" ]] || fail "NUM_NODES is $NUM_NODES, but no Ray runs. On the first node:" \
    "ray start --head --num-gpus $NUM_GPUS --dashboard-host=0.0.0.0; on each other: ray start --address=FIRST:6379" \
    "--num-gpus $NUM_GPUS; then run this again with RAY_ADDRESS=http://FIRST:$RAY_DASHBOARD_PORT"
  _ray_log="$(mktemp)"
  ray_start_command
  echo "starting Ray; it is stopped when the job ends ..." >&2
  "${ray_start[@]}" >"$_ray_log" 2>&1 </dev/null &
  _ray_pid=$!
  while [[ $SECONDS -lt $deadline ]]; do
    if _takes_jobs; then
      return
    fi
    if ! kill -0 "$_ray_pid" 2>/dev/null && ! wait "$_ray_pid"; then
      _ray_pid=""
      fail "Ray did not start: $(tail -n 5 "$_ray_log")"
    fi
    sleep 0.5
  done
  fail "Ray was started but took no jobs at $(job_address) within two minutes: $(tail -n 5 "$_ray_log")"
}

# A Ray that was started here inherited wandb's key; another one gets it through a pipe, so that it is on no command line.
# In the background, since bash runs no trap while a command runs in the foreground.
_submit() {
  local status=0 submit
  submit=(ray job submit "--address=$(job_address)" "--submission-id=$SUBMISSION_ID")
  _job_runs=1
  if [[ -z "$_ray_pid" ]] && _needs_key; then
    "${submit[@]}" --runtime-env <(runtime_environment "WANDB_API_KEY=$WANDB_API_KEY") -- "$@" &
  else
    "${submit[@]}" "--runtime-env-json=$(runtime_environment)" -- "$@" &
  fi
  wait $! || status=$?
  _job_runs=0
  return "$status"
}

# At any end of the script: stops the job where it may still run, then the Ray that was started here.
_clean_up() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  if [[ $_job_runs -eq 1 ]]; then
    echo "stopping the job $SUBMISSION_ID ..." >&2
    ray job stop "--address=$(job_address)" "$SUBMISSION_ID" >&2 || true
  fi
  if [[ -n "$_ray_pid" ]]; then
    echo "stopping the Ray that was started ..." >&2
    if kill "$_ray_pid" 2>/dev/null; then
      wait "$_ray_pid" 2>/dev/null || true
    elif wait "$_ray_pid" 2>/dev/null; then
      ray stop >&2 || true # a site's own `ray` may put it into the background in spite of --block
    fi
  fi
  if [[ -n "$_ray_log" ]]; then
    rm -f -- "$_ray_log"
  fi
  exit "$status"
}
