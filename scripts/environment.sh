# shellcheck shell=bash
# Makes a virtual environment with this package in it; sourced by the other scripts. Needs Python 3.11 or newer with
# venv and pip, nothing else. It installs again only when pyproject.toml, the Python or the extras have changed.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The first Python >= 3.11 on the PATH; $PYTHON, where it is set, is the only candidate.
find_python() {
  local candidate candidates=(python3.13 python3.12 python3.11 python3 python)
  if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  echo "error: no Python 3.11 or newer found; tried ${candidates[*]}." >&2
  echo "Install one, or name it: PYTHON=/path/to/python bash $0" >&2
  return 1
}

# variable_of DIR: the variable that names an environment's folder: the one that is set to it, else by its default name.
variable_of() {
  local name
  for name in "${!STRANDS_ROLLOUT_@}"; do
    if [[ "${!name}" == "$1" ]]; then
      printf '%s\n' "$name"
      return
    fi
  done
  case "$1" in
    *.venv-demo) printf 'STRANDS_ROLLOUT_VENV\n' ;;
    *) printf 'STRANDS_ROLLOUT_%s_VENV\n' "$(printf '%s' "${1##*.venv-}" | tr '[:lower:]' '[:upper:]')" ;;
  esac
}

# make_environment DIR: DIR is a virtual environment with pip when it returns; one that is there stays as it is.
make_environment() {
  local directory="$1" python
  if "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  python="$(find_python)"
  if ! mkdir -p -- "$directory" 2>/dev/null || [[ ! -w "$directory" ]]; then
    echo "error: the environment $directory can't be made: its folder can't be written to." >&2
    echo "Name another folder for it in $(variable_of "$directory"), or use a copy of this repository that is yours." >&2
    return 1
  fi
  echo "making the environment $directory with $("$python" --version) ..." >&2
  if ! "$python" -m venv "$directory" >&2; then
    rm -rf -- "$directory"
    echo "error: '$python -m venv' failed; on Debian and Ubuntu, install the package python3-venv." >&2
    return 1
  fi
}

# is_installed DIR WANTED: DIR holds what WANTED describes. mark_installed DIR WANTED says so from now on.
is_installed() {
  local stamp="$1/.strands-rollout-installed"
  [[ -x "$1/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$2" ]]
}

mark_installed() {
  printf '%s' "$2" >"$1/.strands-rollout-installed"
}

# counting_minutes COMMAND...: runs a quiet command, with a line on stderr for each minute that it takes.
counting_minutes() {
  local status=0 counter
  (
    minutes=0
    trap 'kill $(jobs -p) 2>/dev/null; exit' TERM # the sleep too: it holds the stderr that a caller may wait for
    while sleep 60 & wait $! && kill -0 $$; do
      minutes=$((minutes + 1))
      echo "... still installing after $minutes min" >&2
    done
  ) >/dev/null &
  counter=$!
  "$@" || status=$?
  { kill "$counter" && wait "$counter"; } 2>/dev/null || true
  return "$status"
}

# install_into DIR ARGUMENTS...: pip's arguments; whatever DIR held is unmarked.
install_into() {
  local directory="$1"
  shift
  rm -f -- "$directory/.strands-rollout-installed"
  counting_minutes "$directory/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@" >&2
}

# prepare_environment DIR [EXTRAS]: DIR holds an environment with this package, editable, when it returns.
prepare_environment() {
  local directory="$1" extras="${2:-}" wanted
  wanted="$repository $extras $(cksum <"$repository/pyproject.toml")"
  if is_installed "$directory" "$wanted"; then
    return 0
  fi
  make_environment "$directory"
  echo "installing strands-rollout${extras:+ [$extras]} into $directory (some minutes, once) ..." >&2
  install_into "$directory" --editable "$repository${extras:+[$extras]}"
  mark_installed "$directory" "$wanted"
}

# prepare_requirements DIR WHAT FILE [FILE]: DIR holds what the first file lists, and what the second lists without its
# dependencies, when it returns.
prepare_requirements() {
  local directory="$1" what="$2" wanted
  shift 2
  wanted="$(cat "$@" | cksum)"
  if is_installed "$directory" "$wanted"; then
    return 0
  fi
  make_environment "$directory"
  echo "installing $what into $directory (some minutes, once) ..." >&2
  install_into "$directory" --requirement "$1"
  if [[ $# -gt 1 ]]; then
    install_into "$directory" --no-deps --requirement "$2"
  fi
  mark_installed "$directory" "$wanted"
}
