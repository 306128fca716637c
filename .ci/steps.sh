# shellcheck shell=bash
# Print the steps of .ci/run and .ci/full with the seconds that each took. Sourced in the repository's root.

scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
# shellcheck disable=SC2034 # for the scripts that source this
test_python="${STRANDS_ROLLOUT_TEST_VENV:-.venv-test}/bin/python"
_times=()
_step=""
_since=0

step() {
  _record_time
  _step="$1"
  _since="$SECONDS"
  printf '\n== %s [%d s]\n' "$1" "$SECONDS"
}

_record_time() {
  if [[ -n "$_step" ]]; then
    _times+=("$(printf '%6d s  %s' "$((SECONDS - _since))" "$_step")")
  fi
}

# first_python VERSION...: print the first of these Pythons found on the PATH or in pyenv, or nothing.
first_python() {
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" "$(pyenv root 2>/dev/null || true)"/versions/"$version".*/bin/python3; do
      if "$candidate" -c '' >/dev/null 2>&1; then
        printf '%s\n' "$candidate"
        return
      fi
    done
  done
}

end_steps() {
  step "seconds of each step"
  printf '%s\n' "${_times[@]}"
}
