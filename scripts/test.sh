#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. Their environment is .venv-test, or $STRANDS_ROLLOUT_TEST_VENV, with the extras
# dev and tools, or those in $STRANDS_ROLLOUT_TEST_EXTRAS.
#   bash scripts/test.sh          the default suite, in as many processes as there are CPUs, four at most
#   bash scripts/test.sh --real   the tests on the real SGLang and the real routers, which it installs (Linux on x86_64)
# With --real, the environment is .venv-real, or $STRANDS_ROLLOUT_REAL_VENV. --sglang-base-url URL, or $SGLANG_BASE_URL,
# names a running SGLang with the shipped model, such as one on a GPU, so that none is installed before the tests that break one.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"
extras="${STRANDS_ROLLOUT_TEST_EXTRAS:-dev,tools}"
chosen=()
if [[ $# -eq 0 ]]; then
  chosen=(-n auto --maxprocesses 4 --dist loadfile)
fi

if [[ "${1:-}" == "--real" ]]; then
  shift
  venv="${STRANDS_ROLLOUT_REAL_VENV:-$repository/.venv-real}"
  extras="dev,tools,bench"
  chosen=(-m real)
  if [[ -z "${SGLANG_BASE_URL:-}" && " $*" != *" --sglang-base-url"* ]]; then
    bash "$repository/scripts/sglang_cpu.sh" install
  fi
  bash "$repository/scripts/gateway.sh" install
fi
prepare_environment "$venv" "$extras"
cd "$repository"
exec "$venv/bin/python" -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
