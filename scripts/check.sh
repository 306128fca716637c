#!/usr/bin/env bash
# Checks style, types, layers, shell scripts, the sizes that scripts/house.py measures, and the documentation.
#   bash scripts/check.sh            all of these
#   bash scripts/check.sh --tests    also the tests, with their coverage
#   bash scripts/check.sh --house    the sizes alone, among them how far a reader walks through one tool turn
# Its environment is that of scripts/test.sh.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"

if [[ $# -gt 1 || ($# -eq 1 && "$1" != "--tests" && "$1" != "--house") ]]; then
  echo "usage: bash scripts/check.sh [--tests|--house]" >&2
  exit 2
fi
prepare_environment "$venv" dev
cd "$repository"

step() {
  echo "== $1" >&2
  shift
  "$@"
}

if [[ "${1:-}" == "--house" ]]; then
  step "house" "$venv/bin/python" scripts/house.py --walk
  exit 0
fi
step "ruff check" "$venv/bin/ruff" check .
step "ruff format" "$venv/bin/ruff" format --check .
step "mypy" "$venv/bin/mypy"
step "import layers" "$venv/bin/lint-imports"
step "shellcheck" "$venv/bin/shellcheck" --external-sources scripts/*.sh experiments/*.sh .ci/run .ci/full .ci/steps.sh
step "house" "$venv/bin/python" scripts/house.py
# not --quiet, with which warnings would not count
site="$(mktemp -d)"
trap 'rm -rf -- "$site"' EXIT
NO_MKDOCS_2_WARNING=1 step "documentation" "$venv/bin/mkdocs" build --strict --site-dir "$site"
if [[ "${1:-}" == "--tests" ]]; then
  step "tests" "$venv/bin/python" -m pytest --cov --cov-report=term
fi
