#!/usr/bin/env bash
# Checks style, types, import layers, shell scripts and the documentation, in the environment of scripts/test.sh.
#   bash scripts/check.sh            run all checks
#   bash scripts/check.sh --tests    run all checks, then the tests with coverage
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"

if [[ $# -gt 1 || ($# -eq 1 && "$1" != "--tests") ]]; then
  echo "usage: bash scripts/check.sh [--tests]" >&2
  exit 2
fi
prepare_environment "$venv" "${STRANDS_ROLLOUT_TEST_EXTRAS:-dev,tools,evals,harness,a2a}" # as in scripts/test.sh: with other extras, that script would install again
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
# don't pass --quiet: mkdocs would then ignore warnings
site="$(mktemp -d)"
trap 'rm -rf -- "$site"' EXIT
NO_MKDOCS_2_WARNING=1 step "documentation" "$venv/bin/mkdocs" build --strict --site-dir "$site"
if [[ "${1:-}" == "--tests" ]]; then
  step "tests" "$venv/bin/python" -m pytest --cov --cov-report=term
fi
