#!/usr/bin/env bash
# Runs the demo: an agent on a small language model solves math problems with code, on this machine.
# Arguments go to `strands-rollout demo`; --help lists them. Installs into .venv-demo, or $STRANDS_ROLLOUT_VENV.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_VENV:-$repository/.venv-demo}"

prepare_environment "$venv"
exec "$venv/bin/strands-rollout" demo "$@"
