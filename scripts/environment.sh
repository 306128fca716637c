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

# prepare_environment DIR [EXTRAS]: DIR holds an environment with this package, editable, when it returns.
prepare_environment() {
  local directory="$1" extras="${2:-}" python stamp wanted
  stamp="$directory/.strands-rollout-installed"
  wanted="$repository $extras $(cksum <"$repository/pyproject.toml")"
  if [[ -x "$directory/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    return 0
  fi
  if ! "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "making the environment $directory with $("$python" --version) ..." >&2
    if ! "$python" -m venv "$directory" >&2; then
      rm -rf -- "$directory"
      echo "error: '$python -m venv' failed; on Debian and Ubuntu, install the package python3-venv." >&2
      return 1
    fi
  fi
  echo "installing strands-rollout${extras:+ [$extras]} into $directory (a minute or two, once) ..." >&2
  rm -f -- "$stamp"
  "$directory/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
    --editable "$repository${extras:+[$extras]}" >&2
  printf '%s' "$wanted" >"$stamp"
}
