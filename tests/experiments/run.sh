#!/usr/bin/env bash
# Makes the runs of the experiment, one after the other, each in a folder of its own; goes on where it was cut.
#   bash tests/experiments/run.sh FOLDER [VARIANT ...]
# VARIANT: tito, retokenised, openai, faults; default: all. $SEEDS, $STEPS: default "0 1 2" and 60.
set -euo pipefail

out="${1:?names no folder: bash tests/experiments/run.sh FOLDER [VARIANT ...]}"
shift
variants=("$@")
[[ ${#variants[@]} -gt 0 ]] || variants=(tito retokenised openai faults)
steps="${STEPS:-60}"

# train NAME OPTION... : a run that is over is not made again
train() {
  local name="$1"
  shift
  if [[ ! -e "$out/$name/summary.json" ]]; then
    strands-rollout train --out "$out/$name" --steps "$steps" --json "$@"
  fi
}

for variant in "${variants[@]}"; do
  if [[ "$variant" == faults ]]; then
    for fault in train-tool-tokens shifted-logprobs tool-output-rewarded; do
      train "$fault-0" --seed 0 --unchecked --ablation "$fault"
    done
    train aborted-as-completed-0 --seed 0 --unchecked --ablation aborted-as-completed --extra-prompts 16
  else
    for seed in ${SEEDS:-0 1 2}; do
      train "$variant-$seed" --seed "$seed" --rollout "$variant"
    done
  fi
done
