#!/usr/bin/env bash
# The real SGLang server on a CPU, on Linux: installs it once into an environment of its own, starts it, stops it.
#   bash scripts/sglang_cpu.sh start [--port 31000] [--model FOLDER] [-- FLAGS OF SGLANG]
#   bash scripts/sglang_cpu.sh stop PID
# start prints a line of JSON with base_url, pid and log when the server is ready. --help shows more.
# Its environment is .venv-sglang, or $STRANDS_ROLLOUT_SGLANG_VENV; it takes 2.3 GB.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_SGLANG_VENV:-$repository/.venv-sglang}"
recipe="$repository/scripts/real_engines"

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
  echo "error: SGLang's wheels are for Linux on x86_64; this is $(uname -sm). The embedded engine runs here: bash scripts/demo.sh" >&2
  exit 1
fi
case "${1:-}" in
  install | start)
    prepare_requirements "$venv" "SGLang" "$recipe/sglang.txt" "$recipe/sglang_without_dependencies.txt"
    ;;
esac
if [[ "${1:-}" == "install" ]]; then
  exit 0
fi
python="$venv/bin/python"
if [[ ! -x "$python" ]]; then
  python="$(find_python)" # help and stop need nothing of SGLang's
fi
PYTHONPATH="$repository/scripts" exec "$python" -m real_engines.sglang_cpu "$@"
