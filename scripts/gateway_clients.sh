#!/usr/bin/env bash
# Installs, once, the agents and API clients on Node that the tests marked `real` run against the gateway. Needs npm.
#   bash scripts/gateway_clients.sh install
# Installs 1.1 GB into .node-clients, or $STRANDS_ROLLOUT_NODE_CLIENTS.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder="${STRANDS_ROLLOUT_NODE_CLIENTS:-$repository/.node-clients}"
clients=(
  @anthropic-ai/claude-code@2.1.197
  @openai/codex@0.171.0
  opencode-ai@1.18.33
  @strands-agents/sdk@1.16.0
  @anthropic-ai/sdk@0.109.1
  openai@6.49.0
)

if [[ "${1:-}" != "install" ]]; then
  echo "error: got '${1:-}'; expected install, as in: bash scripts/gateway_clients.sh install" >&2
  exit 2
fi
if [[ -f "$folder/.installed" && "$(cat "$folder/.installed")" == "${clients[*]}" ]]; then
  exit 0
fi
echo "installing agents on Node into $folder (once) ..." >&2
mkdir -p -- "$folder"
with_progress npm install --prefix "$folder" --no-audit --no-fund --ignore-scripts --loglevel error "${clients[@]}" >&2
# only these two packages need their install scripts, which select the program for this machine; other packages' scripts don't run
node "$folder/node_modules/@anthropic-ai/claude-code/install.cjs" >&2
node "$folder/node_modules/opencode-ai/postinstall.mjs" >&2
printf '%s' "${clients[*]}" >"$folder/.installed"
