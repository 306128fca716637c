#!/usr/bin/env bash
# Downloads a model from the Hugging Face hub and converts it with slime's own tools: to Megatron's format, and to FP8 for the
# engines if FP8_ROLLOUT=1. Skips finished steps. An interrupted download continues; an interrupted conversion starts again.
set -euo pipefail

# shellcheck source=scripts/slime_launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/slime_launch.sh"

read_options "$@"
setting MODEL Qwen/Qwen3-8B "model: a row of scripts/launch/models.sh, or an id on the Hugging Face hub"
use_model "$MODEL"
MODEL="$default_hub_id"
[[ "$MODEL" == */* ]] || usage_error "got MODEL='$MODEL'; expected a model's id on the hub, such as Qwen/Qwen3-8B, or one of: $(model_names)"
setting REVISION "" "commit, tag or branch of the model; default: the newest"
setting MODEL_DIR "$repository/models" "folder of all models" path
setting HF_CHECKPOINT "$MODEL_DIR/$model_name" "folder of the model in Hugging Face's format" path
setting REF_LOAD "${HF_CHECKPOINT}_torch_dist" "folder of the model in Megatron's format" path
setting FP8_ROLLOUT "${model_fp8:-0}" "also make the FP8 copy of the weights, HF_CHECKPOINT-FP8" switch
setting CONVERSION_GPUS "${model_conversion_gpus:-1}" "GPUs per node to convert with" count
setting CONVERSION_NODES "${model_conversion_nodes:-1}" "nodes to convert with; run the script on each, with its NODE_RANK" count
setting NODE_RANK 0 "number of this node, from 0" optional_count
setting MASTER_ADDR "" "address of the node with NODE_RANK=0"
setting DOWNLOAD_ONLY 0 "download without converting; needs no slime" switch
slime_settings
end_of_settings "Downloads a model and converts it to Megatron's format. Arguments after -- go to slime's converter." \
  "bash $0 --model Qwen/Qwen3-4B --model-dir /models"

require_fp8_copy

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

# make_copy FOLDER TOOL ARGUMENTS...: on the node of rank 0, run slime's tool unless FOLDER exists. The arguments name
# FOLDER.partial, which gets its final name when it is complete.
make_copy() {
  local folder="$1" tool="$2"
  shift 2
  [[ $NODE_RANK -eq 0 ]] || return 0
  if [[ $dry_run -eq 0 ]]; then
    if [[ -e "$folder" ]]; then
      echo "the copy exists: $folder" >&2
      return
    fi
    require_slime
    rm -rf -- "$folder.partial"
  fi
  run python3 "$SLIME_DIR/tools/$tool" "$@" || fail "slime's $tool failed, see above; $folder.partial is incomplete"
  run mv "$folder.partial" "$folder"
}

# Make a bf16 copy of weights that slime's converter can't read. Since slime 0.3.1, the converter reads FP8 itself.
cast_to_bf16() {
  local reads_fp8="$SLIME_DIR/slime/backends/megatron_utils/hf_to_megatron/common.py"
  case "${model_weights:-bf16}" in
    int4) make_copy "$HF_CHECKPOINT-bf16" convert_k2_thinking_int4_to_bf16.py --model-dir "$HF_CHECKPOINT" --output-dir "$HF_CHECKPOINT-bf16.partial" ;;
    fp8)
      [[ ! -f "$reads_fp8" ]] || return 0
      make_copy "$HF_CHECKPOINT-bf16" fp8_cast_bf16.py --input-fp8-hf-path "$HF_CHECKPOINT" --output-bf16-hf-path "$HF_CHECKPOINT-bf16.partial"
      ;;
    *) return 0 ;;
  esac
  bf16="$HF_CHECKPOINT-bf16"
}

# Convert into a folder with another name first, so that nobody takes an interrupted conversion for a checkpoint.
convert() {
  local python=(python3) partial="$REF_LOAD.partial" nodes=()
  if [[ $CONVERSION_NODES -gt 1 ]]; then
    nodes=(--nnodes "$CONVERSION_NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 12345)
  fi
  if [[ $CONVERSION_GPUS -gt 1 || $CONVERSION_NODES -gt 1 ]]; then
    python=(torchrun --nproc-per-node "$CONVERSION_GPUS" ${nodes[@]+"${nodes[@]}"})
  fi
  [[ $dry_run -eq 1 || $NODE_RANK -gt 0 ]] || rm -rf -- "$partial"
  if [[ $CONVERSION_NODES -gt 1 && $NODE_RANK -eq 0 && $dry_run -eq 0 ]]; then
    echo "converting; now run this script on the $((CONVERSION_NODES - 1)) other nodes, with NODE_RANK=1 and so on" >&2
  fi
  # shellcheck disable=SC2086 # model_conversion is a list of words
  run env "PYTHONPATH=${MEGATRON_DIR:+$MEGATRON_DIR:}$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "${python[@]}" "$SLIME_DIR/tools/convert_hf_to_torch_dist.py" "${model_arguments[@]}" \
    ${model_conversion:-} --hf-checkpoint "$bf16" --save "$partial" ${extra_arguments[@]+"${extra_arguments[@]}"} ||
    fail "slime's conversion failed, see above; $partial is incomplete"
  if [[ $NODE_RANK -eq 0 ]]; then
    run mv "$partial" "$REF_LOAD"
  fi
}

# before hours of download, check what the conversion needs
bf16="$HF_CHECKPOINT"
[[ $CONVERSION_NODES -eq 1 || -n "$MASTER_ADDR" ]] || usage_error "CONVERSION_NODES is $CONVERSION_NODES; expected also MASTER_ADDR, the" \
  "address of the first node, and on each node its NODE_RANK, from 0. All nodes need the same MODEL_DIR"
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
if [[ $NODE_RANK -eq 0 ]]; then
  download
fi
copies=0
if [[ $FP8_ROLLOUT -eq 1 && $DOWNLOAD_ONLY -eq 0 && ( $dry_run -eq 1 || ! -e "$HF_CHECKPOINT-FP8" ) ]]; then
  copies=1
fi
if [[ $converts -eq 1 || $copies -eq 1 ]]; then
  cast_to_bf16
fi
if [[ $copies -eq 1 ]]; then
  make_copy "$HF_CHECKPOINT-FP8" convert_hf_to_fp8.py --model-dir "$bf16" --save-dir "$HF_CHECKPOINT-FP8.partial" --strategy block \
    --block-size 128 128 --max-workers 4
fi
if [[ $converts -eq 1 ]]; then
  convert
fi
[[ $dry_run -eq 1 || $NODE_RANK -gt 0 ]] || echo "ready: $HF_CHECKPOINT$([[ $DOWNLOAD_ONLY -eq 1 ]] || printf ' and %s' "$REF_LOAD")"
