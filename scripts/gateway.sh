#!/usr/bin/env bash
# A router before SGLang servers, as slime starts one: installs smg and its forerunner sglang-router once into an
# environment of their own, starts one, stops it.
#   bash scripts/gateway.sh start --worker http://127.0.0.1:31000 --worker http://127.0.0.1:31001 [-- FLAGS OF THE ROUTER]
#   bash scripts/gateway.sh stop PID
# start prints a line of JSON with base_url, pid and log when the router is ready. --help shows more.
# Its environment is .venv-gateway, or $STRANDS_ROLLOUT_GATEWAY_VENV.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_GATEWAY_VENV:-$repository/.venv-gateway}"

case "${1:-}" in
  install | start) prepare_requirements "$venv" "the routers" "$repository/scripts/real_engines/gateway.txt" ;;
esac
if [[ "${1:-}" == "install" ]]; then
  exit 0
fi
python="$venv/bin/python"
if [[ ! -x "$python" ]]; then
  python="$(find_python)"
fi
PYTHONPATH="$repository/scripts" exec "$python" -m real_engines.gateway "$@"
