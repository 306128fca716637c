# shellcheck shell=bash
# Steps of .ci/run and .ci/full: their names, and the seconds that each took. Sourced in the repository's root.

scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
# shellcheck disable=SC2034 # for the scripts that source this
test_python="${STRANDS_ROLLOUT_TEST_VENV:-.venv-test}/bin/python"
_times=()
_step=""
_since=0

step() {
  _note
  _step="$1"
  _since="$SECONDS"
  printf '\n== %s [%d s]\n' "$1" "$SECONDS"
}

_note() {
  if [[ -n "$_step" ]]; then
    _times+=("$(printf '%6d s  %s' "$((SECONDS - _since))" "$_step")")
  fi
}

end_steps() {
  step "seconds of each step"
  printf '%s\n' "${_times[@]}"
}
