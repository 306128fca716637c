# shellcheck shell=bash
# Finds the checkouts of slime and Megatron-LM, and slime's own arguments for a model. Changes nothing on the machine.

# Print the checkout of the slime that python3 imports, or nothing.
_importable_slime() {
  python3 -c '
import importlib.util, pathlib
found = importlib.util.find_spec("slime")
folders = list(found.submodule_search_locations or []) if found else []
for folder in map(pathlib.Path, folders):
    if (folder.parent / "train.py").is_file():
        print(folder.parent)
        break
' 2>/dev/null || true
}

slime_settings() {
  setting SLIME_DIR "$(_importable_slime)" "checkout of THUDM/slime; default: the checkout that python3 imports" path
  local beside=""
  if [[ -n "$SLIME_DIR" && -d "$SLIME_DIR/../Megatron-LM" ]]; then
    beside="$(cd "$SLIME_DIR/../Megatron-LM" && pwd)"
  fi
  setting MEGATRON_DIR "$beside" "checkout of Megatron-LM; default: the folder Megatron-LM next to SLIME_DIR, if it exists" path
  setting SLIME_MODEL "${default_slime_model:-${model_name/#Q/q}}" "slime's name of the model: a file in its scripts/models, without .sh"
}

# Set model_arguments to slime's own arguments for SLIME_MODEL; in a dry run without slime, to a marked placeholder.
read_model_arguments() {
  local file="$SLIME_DIR/scripts/models/$SLIME_MODEL.sh"
  model_arguments=()
  if [[ -n "$SLIME_DIR" && -f "$file" ]]; then
    # shellcheck source=/dev/null
    source "$file"
    model_arguments=(${MODEL_ARGS[@]+"${MODEL_ARGS[@]}"})
    [[ ${#model_arguments[@]} -gt 0 ]] || fail "$file sets no MODEL_ARGS; expected a checkout of THUDM/slime (SLIME_DIR)"
  elif [[ $dry_run -eq 1 && ! -d "$SLIME_DIR" ]]; then
    model_arguments=("<MODEL_ARGS of scripts/models/$SLIME_MODEL.sh in slime>")
    SLIME_DIR="${SLIME_DIR:-<SLIME_DIR>}"
  else
    require_slime
    fail "no $file; expected slime's own arguments for the model there. Set SLIME_MODEL (--slime-model) to" \
      "one of: $(cd "$SLIME_DIR/scripts/models" && set -- *.sh && echo "${@%.sh}")"
  fi
}

require_slime() {
  [[ -n "$SLIME_DIR" ]] || fail "no checkout of THUDM/slime found: python3 can't import slime (the slime on PyPI is an unrelated" \
    "package). Work in the slimerl/slime image, or run: git clone https://github.com/THUDM/slime && SLIME_DIR=slime bash $0"
  [[ -f "$SLIME_DIR/train.py" ]] || fail "SLIME_DIR is $SLIME_DIR, which has no train.py; expected a checkout of THUDM/slime"
}

# require_path PATH WHAT REMEDY: exit with an error that names WHAT and REMEDY unless PATH exists.
require_path() {
  [[ -e "$1" ]] || fail "$2 is missing: $1. $3"
}
