#!/usr/bin/env bash
# Starts and stops a router in front of SGLang servers, as slime does. Installs smg and its predecessor sglang-router once, into
# .venv-gateway or $STRANDS_ROLLOUT_GATEWAY_VENV.
#   bash scripts/gateway.sh start --worker http://127.0.0.1:31000 --worker http://127.0.0.1:31001 [-- FLAGS OF THE ROUTER]
#   bash scripts/gateway.sh stop PID
# When the router is ready, start prints a line of JSON with base_url, pid and log. --help lists all options.
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
