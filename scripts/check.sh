#!/usr/bin/env bash
# Checks style, types, import layers, shell scripts and the documentation.
#   bash scripts/check.sh            all of these
#   bash scripts/check.sh --tests    also the tests, with their coverage
# Its environment is that of scripts/test.sh.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"

if [[ $# -gt 1 || ($# -eq 1 && "$1" != "--tests") ]]; then
  echo "usage: bash scripts/check.sh [--tests]" >&2
  exit 2
fi
prepare_environment "$venv" "${STRANDS_ROLLOUT_TEST_EXTRAS:-dev,tools,evals,harness,a2a}" # as scripts/test.sh, which would install it again
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
step "shellcheck" "$venv/bin/shellcheck" --external-sources scripts/*.sh experiments/*.sh .ci/run .ci/full .ci/steps.sh
# not --quiet, with which warnings would not count
site="$(mktemp -d)"
trap 'rm -rf -- "$site"' EXIT
NO_MKDOCS_2_WARNING=1 step "documentation" "$venv/bin/mkdocs" build --strict --site-dir "$site"
if [[ "${1:-}" == "--tests" ]]; then
  step "tests" "$venv/bin/python" -m pytest --cov --cov-report=term
fi
