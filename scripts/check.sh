#!/usr/bin/env bash
# Checks style, types, layers and shell scripts; with --tests also runs the tests and shows their coverage.
# Its environment is that of scripts/test.sh.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"

if [[ $# -gt 1 || ($# -eq 1 && "$1" != "--tests") ]]; then
  echo "usage: bash scripts/check.sh [--tests]" >&2
  exit 2
fi
prepare_environment "$venv" dev
cd "$repository"

step() {
  echo "== $1" >&2
  shift
  "$@"
}

step "ruff check" "$venv/bin/ruff" check .
step "ruff format" "$venv/bin/ruff" format --check .
step "mypy" "$venv/bin/mypy"
step "import layers" "$venv/bin/lint-imports"
step "shellcheck" "$venv/bin/shellcheck" --external-sources scripts/*.sh tests/real/many_tools/*.sh tests/experiments/*.sh .ci/run
if [[ "${1:-}" == "--tests" ]]; then
  step "tests" "$venv/bin/python" -m pytest --cov --cov-report=term
fi
