#!/usr/bin/env bash
# Makes checkpoint/ anew from the episodes: plays them with the scripted policy, trains a model on what was said, in
# about three minutes. Its environment is .venv-train, which it makes; it takes 1.5 GB.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/environment.sh"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="${STRANDS_ROLLOUT_TRAIN_VENV:-$repository/.venv-train}"
transcripts="$(mktemp)"
trap 'rm -f -- "$transcripts"' EXIT

prepare_environment "$venv" "dev,tools,train"
"$venv/bin/python" "$here/record.py" >"$transcripts"
PYTHONPATH="$repository" "$venv/bin/python" -m experiments.shipped_model --transcripts "$transcripts" --out "$here/checkpoint" --threads 1
