#!/usr/bin/env bash
# Make the runs of the experiment, one after the other, each in its own folder; skip finished runs.
#   bash experiments/run.sh FOLDER [PART ...]
# PART: shipped, respelled (each is a policy, trained in several ways), drift or faults; default: all of them. The environment
# variables SEEDS (default "1 2 3") and THREADS (default: torch's) apply to all parts. Two calls with different parts can run
# at once, with THREADS=1. The part collect copies the logs of finished runs to experiments/runs, without this machine's paths.
set -euo pipefail

out="${1:?names no folder: bash experiments/run.sh FOLDER [PART ...]}"
shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(shipped respelled drift faults)
steps=30
threads=()
[[ -z "${THREADS:-}" ]] || threads=(--threads "$THREADS")
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
respelled_model="$out/respelled-model"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

# train NAME WAY OPTION...: make a run unless it is finished. WAY is a kind of rollout, or a fault.
train() {
  local name="$1" way=(--rollout "$2")
  [[ "$2" != tool-output-rewarded ]] || way=(--ablation "$2")
  shift 2
  if [[ ! -e "$out/$name/summary.json" ]]; then
    python -m experiments "${way[@]}" train --out "$out/$name" \
      --steps "$steps" ${threads[@]+"${threads[@]}"} --json "$@"
  fi
}

make_respelled_model() {
  if [[ ! -e "$respelled_model/training.json" ]]; then
    python -m experiments.shipped_model --respelled 0.1 --out "$respelled_model" ${threads[@]+"${threads[@]}"}
  fi
}

# all_ways PREFIX WAYS OPTION...: train in each way with each seed
all_ways() {
  local prefix="$1" ways="$2"
  shift 2
  for seed in ${SEEDS:-1 2 3}; do
    for way in $ways; do
      train "$prefix$way-$seed" "$way" --seed "$seed" "$@"
    done
  done
}

respelled() {
  local steps=10
  all_ways respelled- "tito retokenised" --model "$respelled_model"
  steps=30 train long-respelled-tito-1 tito --seed 1 --model "$respelled_model"
  steps=20 train long-respelled-retokenised-1 retokenised --seed 1 --model "$respelled_model"
}

# one step each, to measure the drift
drift() {
  local steps=1
  for temperature in 0.7 1.0 1.25 1.5; do
    train "drift-shipped-$temperature" retokenised --temperature "$temperature"
    train "drift-respelled-$temperature" retokenised --temperature "$temperature" --model "$respelled_model"
  done
}

# only the fault that no check finds
faults() {
  train tool-output-rewarded-1 tool-output-rewarded --seed 1 --unchecked
}

collect() {
  local run kept file
  for run in "$out"/*/summary.json; do
    run="$(dirname "$run")"
    kept="$repository/experiments/runs/$(basename "$run")"
    mkdir -p "$kept"
    for file in options.json steps.jsonl summary.json; do
      sed -e "s#$repository/##g" -e "s#\"$out/#\"runs/#g" "$run/$file" >"$kept/$file"
    done
  done
}

for part in "${parts[@]}"; do
  case "$part" in
    shipped) all_ways "" "tito retokenised openai" ;;
    respelled)
      make_respelled_model
      respelled
      ;;
    drift)
      make_respelled_model
      drift
      ;;
    faults) faults ;;
    collect) collect ;;
    *)
      echo "got the part $part; expected shipped, respelled, drift, faults or collect" >&2
      exit 2
      ;;
  esac
done
