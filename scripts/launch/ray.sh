# shellcheck shell=bash
# Runs a job on a running Ray, or on a Ray that the script starts for the job. Stops that Ray after the job, unless another job uses
# it by then. Stops no other Ray and no other job.

_ray_pid=""
_ray_log=""
_key_file=""
_job_runs=0

ray_settings() {
  setting RAY_ADDRESS "" "address of a running Ray: HOST, or its dashboard's URL, http://HOST:8265; default: the Ray of this machine, else a Ray that the script starts"
  setting RAY_DASHBOARD_PORT 8265 "port of Ray's dashboard, which accepts jobs" count
  setting MASTER_ADDR 127.0.0.1 "this machine's address for the other nodes; used by a Ray that the script starts"
  setting SOCKET_IFNAME "" "network interface between the nodes, such as eth0, for NCCL and Gloo; default: they choose"
  setting JOIN_TIMEOUT_S 1800 "seconds to wait for the other nodes to join the Ray that the script starts" count
  setting SUBMISSION_ID "" "name of the job in Ray; default: RUN_NAME and the time"
}

# Print the URL of the dashboard, which accepts jobs. If RAY_ADDRESS has Ray's own port, which accepts no jobs, the dashboard's
# port replaces it.
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

# Add to job_environment the variables set by slime's scripts for several nodes, and the variables for SOCKET_IFNAME. no_proxy keeps
# requests to a node itself, and to the first node, from going to the nodes' proxy.
add_node_environment() {
  local host="$MASTER_ADDR" name
  if [[ $NUM_NODES -gt 1 ]]; then
    if [[ "$host" == 127.0.0.1 ]]; then
      host="$(job_address)"
      host="${host#*://}"
      host="${host%%[:/]*}"
    fi
    job_environment+=("MASTER_ADDR=$host")
    for name in no_proxy NO_PROXY; do
      job_environment+=("$name=localhost,127.0.0.1,0.0.0.0,$host${!name:+,${!name}}")
    done
  fi
  if [[ -n "$SOCKET_IFNAME" ]]; then
    for name in GLOO TP NCCL; do job_environment+=("${name}_SOCKET_IFNAME=$SOCKET_IFNAME"); done
  fi
}

# Set ray_join to the command that adds another node to the Ray that this script starts.
ray_join_command() {
  ray_join=(ray start "--address=$MASTER_ADDR:6379" "--num-gpus=$NUM_GPUS" --disable-usage-stats --block)
}

ray_start_command() {
  ray_start=(env -u RAY_ADDRESS ray start --head --block "--node-ip-address=$MASTER_ADDR" "--num-gpus=$NUM_GPUS"
    --disable-usage-stats --dashboard-host=127.0.0.1 "--dashboard-port=$RAY_DASHBOARD_PORT")
}

# json_text TEXT: print TEXT as a JSON string.
json_text() {
  local text="${1//\\/\\\\}"
  printf '"%s"' "${text//\"/\\\"}"
}

# Print the job's environment as JSON, from the NAME=VALUE pairs of job_environment.
runtime_environment() {
  local pair joined=""
  for pair in "${job_environment[@]}"; do
    joined+="${joined:+, }$(json_text "${pair%%=*}"): $(json_text "${pair#*=}")"
  done
  printf '{"env_vars": {%s}}' "$joined"
}

# ray_job NAME COMMAND...: run the command as a job on Ray and return its exit status. In a dry run, print the commands.
ray_job() {
  local name="$1"
  shift
  if [[ $dry_run -eq 1 ]]; then
    _print_job "$name" "$@"
    return
  fi
  command -v ray >/dev/null || fail "the command 'ray' is not on the PATH; work in the slimerl/slime image, or install ray[default]"
  trap _clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
  SUBMISSION_ID="${SUBMISSION_ID:-$name-$(date +%Y%m%d-%H%M%S)}"
  _find_or_start_ray
  _hand_over_key
  _submit "$@"
}

_print_job() {
  local id="${SUBMISSION_ID:-@ID@}" shown name="$1"
  shift
  if [[ -z "$RAY_ADDRESS" ]]; then
    ray_start_command
    printf '# unless a Ray runs here already; stopped when the job ends\n'
    printf '%s &\n\n' "$(print_command "${ray_start[@]}")"
    if [[ $NUM_NODES -gt 1 ]]; then
      ray_join_command
      printf '# on each of the %s other nodes; the job starts when all have joined\n# %s\n\n' "$((NUM_NODES - 1))" "${ray_join[*]}"
    fi
  elif _needs_key; then
    printf '# with wandb'"'"'s key in a file of SAVE_DIR, which only you can read and which is removed when the job ends\n'
    job_environment+=("NETRC=$SAVE_DIR/.wandb-netrc")
  fi
  shown="$(print_command ray job submit "--address=$(job_address)" "--submission-id=$id" \
    "--runtime-env-json=$(runtime_environment)" -- "$@")"
  # shellcheck disable=SC2016 # for the shell that it is pasted into
  printf '%s\n' "${shown/@ID@/$name-'"$(date +%Y%m%d-%H%M%S)"'}"
}

_needs_key() {
  [[ -n "${WANDB_API_KEY:-}" && "$USE_WANDB" == "1" ]]
}

# A Ray that this script starts inherits wandb's key. Any other Ray gets the name of a file with the key, because Ray writes a
# job's environment to logs, command lines and its dashboard.
_hand_over_key() {
  local host="${WANDB_BASE_URL:-https://api.wandb.ai}"
  if [[ -n "$_ray_pid" ]] || ! _needs_key; then
    return
  fi
  host="${host#*://}"
  mkdir -p -- "$SAVE_DIR"
  _key_file="$SAVE_DIR/.wandb-netrc"
  (umask 077 && printf 'machine %s\n  login user\n  password %s\n' "${host%%[:/]*}" "$WANDB_API_KEY" >"$_key_file")
  job_environment+=("NETRC=$_key_file")
}

# Run a command of Ray for at most 60 s if the machine has `timeout`, because a hanging cluster must not block the script.
_with_timeout() {
  if command -v timeout >/dev/null; then
    timeout 60 "$@"
  else
    "$@"
  fi
}

_takes_jobs() {
  _with_timeout ray job list --address="$(job_address)" >/dev/null 2>&1
}

_ray_runs() {
  _with_timeout env -u RAY_ADDRESS ray status >/dev/null 2>&1
}

_find_or_start_ray() {
  local deadline=$((SECONDS + 20))
  echo "looking for a Ray ..." >&2
  if [[ -n "$RAY_ADDRESS" ]]; then
    _takes_jobs || fail "no Ray accepts jobs at $(job_address), the address of RAY_ADDRESS=$RAY_ADDRESS; start Ray there with" \
      "'ray start --head --dashboard-host=0.0.0.0', or unset RAY_ADDRESS to let the script start Ray here"
    return
  fi
  while _ray_runs; do
    if _takes_jobs; then
      echo "using the running Ray at $(job_address); it keeps running after the job" >&2
      return
    fi
    # give a Ray that is starting or stopping some time
    [[ $SECONDS -lt $deadline ]] ||
      fail "a Ray runs here, but accepts no jobs at $(job_address); set RAY_ADDRESS to its dashboard: http://HOST:PORT"
    sleep 1
  done
  _start_ray
}

# Start Ray in its own process (--block), so that ending this process ends this Ray and no other. Only this script receives the
# hangup of a closed terminal, so that it can stop the job before its Ray.
_start_ray() {
  local deadline=$((SECONDS + 120))
  [[ "$NUM_NODES" == "1" || "$MASTER_ADDR" != 127.0.0.1 ]] || fail "NUM_NODES is $NUM_NODES, but no Ray runs here. Set MASTER_ADDR" \
    "to this machine's address for the other nodes, to start Ray here; or set RAY_ADDRESS to a running Ray"
  _ray_log="$(mktemp)"
  ray_start_command
  echo "starting Ray; it stops when the job ends ..." >&2
  (trap '' HUP && exec "${ray_start[@]}") >"$_ray_log" 2>&1 </dev/null 9>&- & # close 9, the lock of watch.sh
  _ray_pid=$!
  while [[ $SECONDS -lt $deadline ]]; do
    if ! kill -0 "$_ray_pid" 2>/dev/null && ! wait "$_ray_pid"; then
      _ray_pid=""
      fail "Ray did not start: $(tail -n 5 "$_ray_log")"
    fi
    if _takes_jobs; then
      _wait_for_nodes
      return
    fi
    sleep 0.5
  done
  fail "Ray started, but accepted no jobs at $(job_address) within two minutes: $(tail -n 5 "$_ray_log")"
}

# Wait until all nodes have joined the Ray that this script has started.
_wait_for_nodes() {
  local wanted=$((NUM_NODES * NUM_GPUS)) found deadline=$((SECONDS + JOIN_TIMEOUT_S))
  [[ $NUM_NODES -gt 1 ]] || return 0
  ray_join_command
  echo "waiting for $((NUM_NODES - 1)) nodes; run on each: ${ray_join[*]}" >&2
  while [[ $SECONDS -lt $deadline ]]; do
    # a line of `ray status`: 0.0/16.0 GPU
    found="$(_with_timeout env -u RAY_ADDRESS ray status 2>/dev/null | sed -n 's|^ *[0-9.]*/\([0-9]*\)[0-9.]* GPU.*|\1|p')" ||
      found="" # Ray has ended, or does not answer now
    if [[ ${found:-0} -ge $wanted ]]; then
      echo "all $NUM_NODES nodes have joined" >&2
      return
    fi
    kill -0 "$_ray_pid" 2>/dev/null || fail "Ray ended before all $NUM_NODES nodes had joined: $(tail -n 5 "$_ray_log")"
    sleep 2
  done
  fail "Ray has ${found:-0} GPUs; expected $wanted within $JOIN_TIMEOUT_S s: $NUM_NODES nodes with $NUM_GPUS each. On each other node:" \
    "${ray_join[*]}"
}

# Run ray job submit in the background, because bash runs no trap while a command runs in the foreground.
_submit() {
  local status=0
  _job_runs=1
  (trap '' HUP && exec ray job submit "--address=$(job_address)" "--submission-id=$SUBMISSION_ID" \
    "--runtime-env-json=$(runtime_environment)" -- "$@") </dev/null &
  wait $! || status=$?
  _follow "$status"
}

# Follow the job until its state says that it has ended, and return its exit status. Needed because `ray job submit` also returns 0
# if only its connection has ended.
_follow() {
  local status="$1" state unanswered=0
  while true; do
    if ! state="$(_with_timeout ray job status "--address=$(job_address)" "$SUBMISSION_ID" 2>&1)"; then
      unanswered=$((unanswered + 1))
      [[ $unanswered -lt 3 ]] || fail "Ray no longer answers about the job $SUBMISSION_ID; the job may have ended with Ray"
      sleep 2
      continue
    fi
    case "$state" in
      *RUNNING* | *PENDING*)
        echo "lost the connection to the job, which still runs; reconnecting ..." >&2
        (trap '' HUP && exec ray job logs --follow "--address=$(job_address)" "$SUBMISSION_ID") </dev/null &
        wait $! || true
        sleep 1
        ;;
      *failed* | *stopped*)
        _job_runs=0
        return "$((status == 0 ? 1 : status))"
        ;;
      *)
        _job_runs=0
        return "$status"
        ;;
    esac
  done
}

# Succeed if another job runs, or waits to run, on the Ray that this script has started.
_has_other_jobs() {
  _with_timeout ray job list --address="$(job_address)" 2>/dev/null | grep -qE 'status=<JobStatus\.(RUNNING|PENDING)'
}

# Stop the job if it may still run, then the Ray that this script has started, unless another job uses that Ray. Runs however the
# script ends, except after SIGKILL.
_clean_up() {
  local status=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [[ $_job_runs -eq 1 ]]; then
    echo "stopping the job $SUBMISSION_ID ..." >&2
    _with_timeout ray job stop "--address=$(job_address)" "$SUBMISSION_ID" >&2 || true
  fi
  if [[ -n "$_ray_pid" ]] && _has_other_jobs; then
    echo "leaving the Ray of this script running, because another job uses it; to stop it later: kill $_ray_pid" >&2
  elif [[ -n "$_ray_pid" ]]; then
    echo "stopping the Ray of this script ..." >&2
    if kill "$_ray_pid" 2>/dev/null; then
      wait "$_ray_pid" 2>/dev/null || true
    elif wait "$_ray_pid" 2>/dev/null; then
      ray stop >&2 || true # a site's own `ray` command may start Ray in the background in spite of --block
    fi
  fi
  rm -f -- ${_ray_log:+"$_ray_log"} ${_key_file:+"$_key_file"}
  exit "$status"
}
