# shellcheck shell=bash
# slime's checkout, Megatron's, and what slime's own scripts say of a model. Changes nothing on the machine.

# The folder of the importable slime, or nothing.
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
  setting SLIME_DIR "$(_importable_slime)" "checkout of THUDM/slime; default: that of the importable slime" path
  local beside=""
  if [[ -n "$SLIME_DIR" && -d "$SLIME_DIR/../Megatron-LM" ]]; then
    beside="$(cd "$SLIME_DIR/../Megatron-LM" && pwd)"
  fi
  setting MEGATRON_DIR "$beside" "checkout of Megatron-LM; default: the one beside slime's, if any" path
  setting SLIME_MODEL "${model_name/#Q/q}" "slime's name of the model, a file of its scripts/models"
}

# model_arguments gets slime's own arguments of SLIME_MODEL; a marked placeholder in a dry run where there is no slime.
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
    fail "no $file; expected slime's own arguments of the model there. SLIME_MODEL (--slime-model) names one" \
      "of: $(cd "$SLIME_DIR/scripts/models" && set -- *.sh && echo "${@%.sh}")"
  fi
}

require_slime() {
  [[ -n "$SLIME_DIR" ]] || fail "no checkout of THUDM/slime found: python3 imports none (the slime of PyPI is an unrelated" \
    "package). Work in the slimerl/slime image, or: git clone https://github.com/THUDM/slime && SLIME_DIR=slime bash $0"
  [[ -f "$SLIME_DIR/train.py" ]] || fail "SLIME_DIR is $SLIME_DIR, which has no train.py; expected a checkout of THUDM/slime"
}

# require_path PATH WHAT REMEDY: it exists, or the script ends with a sentence.
require_path() {
  [[ -e "$1" ]] || fail "$2 is missing: $1. $3"
}
