# shellcheck shell=bash
# Creates virtual environments, most of them with this package, for the scripts that source this file. Needs Python 3.11 or newer
# with venv and pip. Installs again only if pyproject.toml (or a file of requirements), the extras or the folder of this
# repository has changed, if the environment's Python no longer exists, or if the last installation did not finish.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Print the first of python3.13, python3.12, python3.11, python3 and python that is Python 3.11 or newer; if none is, fail. If
# PYTHON is set, try only that Python.
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
  echo "Install Python 3.11 or newer, or name one: PYTHON=/path/to/python bash $0" >&2
  return 1
}

# variable_of DIR: print the name of the environment variable that sets the folder DIR, for error messages. If no variable is set
# to DIR, derive the name from the folder's default name.
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

# make_environment DIR: create a virtual environment with pip in DIR. An existing environment stays unchanged.
make_environment() {
  local directory="$1" python
  if "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  python="$(find_python)"
  if ! mkdir -p -- "$directory" 2>/dev/null || [[ ! -w "$directory" ]]; then
    echo "error: can't create the environment: the folder $directory can't be created or written to." >&2
    echo "Name another folder for it in $(variable_of "$directory"), or work in a copy of this repository that you can write to." >&2
    return 1
  fi
  echo "creating the environment $directory with $("$python" --version) ..." >&2
  if ! "$python" -m venv "$directory" >&2; then
    rm -rf -- "$directory"
    echo "error: '$python -m venv' failed; on Debian and Ubuntu, install the package python3-venv." >&2
    return 1
  fi
}

# is_installed DIR WANTED: succeed if DIR holds the installation that WANTED describes. mark_installed DIR WANTED records it.
is_installed() {
  local stamp="$1/.strands-rollout-installed"
  [[ -x "$1/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$2" ]]
}

mark_installed() {
  printf '%s' "$2" >"$1/.strands-rollout-installed"
}

# with_progress COMMAND...: run a quiet command, and print a line on stderr after each minute.
with_progress() {
  local status=0 counter
  (
    minutes=0
    trap 'kill $(jobs -p) 2>/dev/null; exit' TERM # kill the sleep, too: it keeps stderr open, and a caller may wait for stderr's end
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

# install_into DIR ARGUMENTS...: run pip install with ARGUMENTS in DIR. Until mark_installed, DIR counts as not installed.
install_into() {
  local directory="$1"
  shift
  rm -f -- "$directory/.strands-rollout-installed"
  with_progress "$directory/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@" >&2
}

# prepare_environment DIR [EXTRAS]: create the environment DIR if needed, and install this package there, editable.
prepare_environment() {
  local directory="$1" extras="${2:-}" wanted
  wanted="$repository $extras $(cksum <"$repository/pyproject.toml")"
  if is_installed "$directory" "$wanted"; then
    return 0
  fi
  make_environment "$directory"
  echo "installing strands-rollout${extras:+ [$extras]} into $directory (takes some minutes, once) ..." >&2
  install_into "$directory" --editable "$repository${extras:+[$extras]}"
  mark_installed "$directory" "$wanted"
}

# prepare_requirements DIR WHAT FILE [FILE]: create the environment DIR if needed, and install the requirements of the first file,
# then the requirements of the second file without their dependencies. WHAT names the requirements in the progress line.
prepare_requirements() {
  local directory="$1" what="$2" wanted
  shift 2
  wanted="$(cat "$@" | cksum)"
  if is_installed "$directory" "$wanted"; then
    return 0
  fi
  make_environment "$directory"
  echo "installing $what into $directory (takes some minutes, once) ..." >&2
  install_into "$directory" --requirement "$1"
  if [[ $# -gt 1 ]]; then
    install_into "$directory" --no-deps --requirement "$2"
  fi
  mark_installed "$directory" "$wanted"
}
