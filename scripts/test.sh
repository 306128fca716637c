#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. Their environment is .venv-test, or $STRANDS_ROLLOUT_TEST_VENV, with the extra
# dev, or $STRANDS_ROLLOUT_TEST_EXTRAS.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"

prepare_environment "$venv" "${STRANDS_ROLLOUT_TEST_EXTRAS:-dev}"
cd "$repository"
exec "$venv/bin/python" -m pytest "$@"
