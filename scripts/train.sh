#!/usr/bin/env bash
# Trains one of slime's models as a Strands agent that solves math with code: GRPO on dapo-math-17k in slime.
#   MODEL=qwen3.5-4B bash scripts/train.sh               the same GPUs generate and train in turns; evaluated on AIME 2024
#   MODEL=qwen3.5-4B bash scripts/train.sh async         some GPUs generate all the time, the others train
# MODEL names a row of launch/models.sh, which has the model's defaults; for a model without a row, set these values. Run the script
# again to resume from the last checkpoint. --help lists all settings.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"

mode=colocated
case "${1:-}" in
  colocated | async)
    mode="$1"
    shift
    ;;
  -* | "") ;;
  *) usage_error "got '$1'; expected colocated, async or an option" ;;
esac
read_options "$@"
setting MODEL qwen3-8B "model: a row of scripts/launch/models.sh, a name of slime's scripts/models, or an id on the hub"
use_model "$MODEL"
use_model_sizes "$mode"
setting NUM_GPUS "${default_gpus:-8}" "GPUs per node" count
run_name="$(printf '%s' "$model_name" | tr '[:upper:]' '[:lower:]')-strands"
if [[ "$mode" == async ]]; then
  fully_async_training "Trains $model_name as an agent that solves math with code, in slime, fully asynchronously." "$run_name-async"
else
  colocated_training "Trains $model_name as an agent that solves math with code, in slime, on GPUs that generate and train in turns." "$run_name"
fi
