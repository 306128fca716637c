#!/usr/bin/env bash
# Starts and stops the real SGLang server on a CPU, on Linux. Installs 2.3 GB once, into .venv-sglang or
# $STRANDS_ROLLOUT_SGLANG_VENV.
#   bash scripts/sglang_cpu.sh start [--port 31000] [--model FOLDER] [-- FLAGS OF SGLANG]
#   bash scripts/sglang_cpu.sh stop PID
# When the server is ready, start prints a line of JSON with base_url, pid and log. --help lists all options.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_SGLANG_VENV:-$repository/.venv-sglang}"
recipe="$repository/scripts/real_engines"

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
  echo "error: SGLang's wheels need Linux on x86_64; this machine is $(uname -sm). The embedded engine runs here: bash scripts/demo.sh" >&2
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
  python="$(find_python)" # --help and stop need no SGLang
fi
PYTHONPATH="$repository/scripts" exec "$python" -m real_engines.sglang_cpu "$@"
