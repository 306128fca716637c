#!/usr/bin/env bash
# Downloads a model from the Hugging Face hub and converts it to Megatron's format with slime's own tool. Skips finished steps.
# An interrupted download continues; an interrupted conversion starts again.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"

read_options "$@"
setting MODEL Qwen/Qwen3-8B "model id on the Hugging Face hub"
setting REVISION "" "commit, tag or branch of the model; default: the newest"
setting MODEL_DIR "$repository/models" "folder of all models" path
model_name="${MODEL##*/}"
[[ -n "$model_name" ]] || usage_error "got MODEL='$MODEL'; expected a model's id, such as Qwen/Qwen3-8B"
setting HF_CHECKPOINT "$MODEL_DIR/$model_name" "folder of the model in Hugging Face's format" path
setting REF_LOAD "${HF_CHECKPOINT}_torch_dist" "folder of the model in Megatron's format" path
setting CONVERSION_GPUS 1 "GPUs to convert with" count
setting DOWNLOAD_ONLY 0 "download without converting; needs no slime" switch
slime_settings
end_of_settings "Downloads a model and converts it to Megatron's format. Arguments after -- go to slime's converter." \
  "bash $0 --model Qwen/Qwen3-4B --model-dir /models"

# Succeed if the model's config.json and all its files of weights exist.
is_complete() {
  [[ -f "$HF_CHECKPOINT/config.json" ]] && python3 - "$HF_CHECKPOINT" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
index = folder / "model.safetensors.index.json"
names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
sys.exit(not all((folder / name).is_file() for name in names))
PYTHON
}

# run WORDS...: run the command, or print it in a dry run.
run() {
  if [[ $dry_run -eq 1 ]]; then
    print_command "$@"
  else
    "$@"
  fi
}

download() {
  local revision=()
  if [[ $dry_run -eq 0 ]]; then
    if is_complete; then
      echo "the model exists: $HF_CHECKPOINT" >&2
      return
    fi
    command -v hf >/dev/null || fail "the command 'hf' is not on the PATH; install it: python3 -m pip install -U huggingface_hub"
  fi
  if [[ -n "$REVISION" ]]; then
    revision=(--revision "$REVISION")
  fi
  run hf download "$MODEL" ${revision[@]+"${revision[@]}"} --local-dir "$HF_CHECKPOINT" || fail "the download of $MODEL failed," \
    "see above. If this machine can't reach the hub, set HF_ENDPOINT to a mirror, or download the model elsewhere, put it into" \
    "$HF_CHECKPOINT, and run this script again"
  [[ $dry_run -eq 1 ]] || is_complete || fail "$HF_CHECKPOINT lacks weights after the download; run this script again"
}

# Convert into a folder with another name first, so that nobody takes an interrupted conversion for a checkpoint.
convert() {
  local python=(python3) partial="$REF_LOAD.partial"
  if [[ $CONVERSION_GPUS -gt 1 ]]; then
    python=(torchrun --nproc-per-node "$CONVERSION_GPUS")
  fi
  [[ $dry_run -eq 1 ]] || rm -rf -- "$partial"
  run env "PYTHONPATH=${MEGATRON_DIR:+$MEGATRON_DIR:}$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "${python[@]}" "$SLIME_DIR/tools/convert_hf_to_torch_dist.py" "${model_arguments[@]}" \
    --hf-checkpoint "$HF_CHECKPOINT" --save "$partial" ${extra_arguments[@]+"${extra_arguments[@]}"} || fail "slime's conversion failed, see above; $partial is incomplete"
  run mv "$partial" "$REF_LOAD"
}

# check what the conversion needs before hours of download
converts=$((1 - DOWNLOAD_ONLY))
if [[ $converts -eq 1 && $dry_run -eq 0 && -e "$REF_LOAD" ]]; then
  [[ -f "$REF_LOAD/latest_checkpointed_iteration.txt" ]] || fail "$REF_LOAD exists, but is not a finished checkpoint; remove it, or" \
    "set REF_LOAD to another folder"
  echo "the model in Megatron's format exists: $REF_LOAD" >&2
  converts=0
fi
if [[ $converts -eq 1 ]]; then
  read_model_arguments
elif [[ ${#extra_arguments[@]} -gt 0 ]]; then
  usage_error "got arguments for the converter (${extra_arguments[*]}); expected none, because nothing is converted"
fi
download
if [[ $converts -eq 1 ]]; then
  convert
fi
[[ $dry_run -eq 1 ]] || echo "ready: $HF_CHECKPOINT$([[ $DOWNLOAD_ONLY -eq 1 ]] || printf ' and %s' "$REF_LOAD")"
