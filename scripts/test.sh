#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest.
#   bash scripts/test.sh                              the default suite, in one process per CPU, four at most
#   bash scripts/test.sh --end-to-end                 the tests that run whole commands, such as the tutorial's
#   bash scripts/test.sh --real                       the tests on the real SGLang and the real routers, and with agents on Node
#                                                     if npm is installed; installs all of these (Linux on x86_64)
#   bash scripts/test.sh --environments               the tests of environments from other libraries, whose requirements conflict
#                                                     with the extra dev; the tests of strands-env need Python 3.12 or newer
#                                                     (PYTHON=python3.12)
#   SLIME_PATH=DIR:DIR bash scripts/test.sh --slime   the tests on slime itself, once for each of these checkouts
# Virtual environments:
#   default   .venv-test, or $STRANDS_ROLLOUT_TEST_VENV, with the extras dev, tools, evals, harness and a2a, or the extras in
#             $STRANDS_ROLLOUT_TEST_EXTRAS
#   --real    .venv-real, or $STRANDS_ROLLOUT_REAL_VENV. --sglang-base-url URL, or $SGLANG_BASE_URL, names a running SGLang with
#             the shipped model, such as a server on a GPU; then only the tests that break a server install SGLang
#   --environments  .venv-environments, or $STRANDS_ROLLOUT_ENVIRONMENTS_VENV
#   --slime   .venv-slime, or $STRANDS_ROLLOUT_SLIME_VENV, with torch. If pip's torch is too large, name an index of CPU builds in
#             PIP_EXTRA_INDEX_URL, or a torch in a file of PIP_CONSTRAINT. With STRANDS_ROLLOUT_TEST_WORKERS=2, episode workers
#             play the episodes of these tests
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${STRANDS_ROLLOUT_TEST_VENV:-$repository/.venv-test}"
extras="${STRANDS_ROLLOUT_TEST_EXTRAS:-dev,tools,evals,harness,a2a}"
chosen=()
parallel=(-n auto --maxprocesses 4 --dist loadfile)
if [[ $# -eq 0 ]]; then
  chosen=("${parallel[@]}")
fi

if [[ "${1:-}" == "--end-to-end" ]]; then
  shift
  chosen=(-m end_to_end "${parallel[@]}")
fi

if [[ "${1:-}" == "--real" ]]; then
  shift
  venv="${STRANDS_ROLLOUT_REAL_VENV:-$repository/.venv-real}"
  extras="dev,tools,bench,ray"
  chosen=(-m real)
  if [[ -z "${SGLANG_BASE_URL:-}" && " $*" != *" --sglang-base-url"* ]]; then
    bash "$repository/scripts/sglang_cpu.sh" install
  fi
  bash "$repository/scripts/gateway.sh" install
  if command -v npm >/dev/null; then
    bash "$repository/scripts/gateway_clients.sh" install
  fi
fi
if [[ "${1:-}" == "--slime" ]]; then
  shift
  : "${SLIME_PATH:?is not set; expected one or several checkouts of THUDM/slime, with colons between them}"
  IFS=: read -ra checkouts <<<"$SLIME_PATH"
  for at in "${!checkouts[@]}"; do
    # without this check, pytest would skip the tests and succeed
    if [[ ! -f "${checkouts[at]}/slime/rollout/sglang_rollout.py" ]]; then
      echo "error: SLIME_PATH names '${checkouts[at]}', which is not a checkout of THUDM/slime" >&2
      exit 1
    fi
    checkouts[at]="$(cd -- "${checkouts[at]}" >/dev/null && pwd)"
  done
  venv="${STRANDS_ROLLOUT_SLIME_VENV:-$repository/.venv-slime}"
  prepare_environment "$venv" "dev,reasoning-gym,tools"
  with_progress "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch pybase64 pylatexenc tqdm \
    ${STRANDS_ROLLOUT_TEST_WORKERS:+"ray>=2.40"}
  failed=()
  cd "$repository"
  # one process per checkout, because a process can import only one slime
  for checkout in "${checkouts[@]}"; do
    printf '\n== slime at %s\n' "$checkout"
    SLIME_PATH="$checkout" "$venv/bin/python" -m pytest -m slime "$@" || failed+=("$checkout")
  done
  [[ ${#failed[@]} -eq 0 ]] || { echo "error: tests failed on slime at ${failed[*]}" >&2 && exit 1; }
  exit 0
fi
if [[ "${1:-}" == "--environments" ]]; then
  shift
  venv="${STRANDS_ROLLOUT_ENVIRONMENTS_VENV:-$repository/.venv-environments}"
  extras="ifeval,reasoning-gym,search,strands-env,verifiers"
  make_environment "$venv"
  # an old pip takes many minutes to resolve these extras
  with_progress "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"
  prepare_environment "$venv" "$extras"
  with_progress "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    "pytest>=9" "pytest-asyncio>=1.4" "pytest-timeout>=2.4" "verifiers[harbor,ta]"
  export PATH="$venv/bin:$PATH" # has uv
  chosen=(tests/environments)
fi
prepare_environment "$venv" "$extras"
cd "$repository"
# with this variable, each process would compile all modules, and rewrite the assertions of 400 files, again
unset PYTHONDONTWRITEBYTECODE
exec "$venv/bin/python" -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
