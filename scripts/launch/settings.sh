# shellcheck shell=bash
# Settings of a launch script: each is an environment variable and an option, is declared once, and shows up in --help.
# Knows nothing of slime or Ray. Works with bash 3.2.

dry_run=0
extra_arguments=()
_wants_help=0
_option_names=()
_option_values=()
_declared=()
_help=""

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

usage_error() {
  printf 'error: %s\nbash %s --help shows all options.\n' "$*" "$0" >&2
  exit 2
}

# read_options ARGUMENTS...: keeps --some-name VALUE, --some-name=VALUE, or a switch's bare --some-name, for `setting` to
# take; what follows -- goes to extra_arguments.
read_options() {
  local word
  while [[ $# -gt 0 ]]; do
    word="$1"
    shift
    case "$word" in
      -h | --help) _wants_help=1 ;;
      --dry-run) dry_run=1 ;;
      --)
        extra_arguments=("$@")
        return
        ;;
      --*=*)
        _option_names+=("${word%%=*}")
        _option_values+=("${word#*=}")
        ;;
      --*)
        _option_names+=("$word")
        if [[ $# -gt 0 && "$1" != --* ]]; then
          _option_values+=("$1")
          shift
        else
          _option_values+=("") # the bare form; `setting` knows whether it may stand alone
        fi
        ;;
      *) usage_error "got '$word'; expected an option (further arguments for slime go after --)" ;;
    esac
  done
}

_option_of() {
  printf -- '--%s' "$1" | tr '[:upper:]_' '[:lower:]-'
}

# setting NAME DEFAULT MEANING [KIND]: the variable NAME gets the option's value, else the environment's, else DEFAULT.
# KIND: text, path (made absolute), count (1 or more), optional_count (none, or 0 or more), number, or switch (0 or 1).
setting() {
  local name="$1" default="$2" meaning="$3" kind="${4:-text}" option value position
  option="$(_option_of "$name")"
  value="${!name:-$default}"
  for ((position = 0; position < ${#_option_names[@]}; position++)); do
    if [[ "${_option_names[position]}" == "$option" ]]; then
      value="${_option_values[position]}"
      if [[ "$kind" == "switch" && -z "$value" ]]; then
        value=1
      elif [[ -z "$value" ]]; then
        usage_error "got $option without a value"
      fi
    fi
  done
  _check_value "$name" "$value" "$kind"
  if [[ "$kind" == "path" && -n "$value" && "$value" != /* ]]; then
    value="$PWD/${value#./}"
  fi
  printf -v "$name" '%s' "$value"
  _declared+=("$option")
  _help+="$(printf '  %-26s %-24s %s [%s]' "$option" "$name" "$meaning" "${default:-none}")"$'\n'
}

_check_value() {
  local name="$1" value="$2" kind="$3" expected
  case "$kind" in
    optional_count) [[ "$value" =~ ^[0-9]*$ ]] && return || expected="a whole number" ;;
    count) [[ "$value" =~ ^[1-9][0-9]*$ ]] && return || expected="a whole number of at least 1" ;;
    number) [[ "$value" =~ ^-?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$ ]] && return || expected="a number" ;;
    switch) [[ "$value" =~ ^[01]$ ]] && return || expected="0 or 1" ;;
    *) return 0 ;;
  esac
  usage_error "got $name='$value'; expected $expected"
}

# end_of_settings TEXT [EXAMPLE]: prints --help and ends, or refuses options that no setting has taken.
end_of_settings() {
  local option declared known
  if [[ $_wants_help -eq 1 ]]; then
    printf '%s\n\nusage: bash %s [OPTIONS] [-- FURTHER ARGUMENTS OF SLIME]\n\n' "$1" "$0"
    printf '  %-26s %-24s %s\n' "option" "environment" "meaning [default]"
    printf '%s' "${_help//"$repository"/<repository>}"
    printf '  %-26s %-24s %s\n' "--dry-run" "" "print the exact command, and do nothing" \
      "--help" "" "this text"
    if [[ -n "${2:-}" ]]; then
      printf '\nExample: %s\n' "$2"
    fi
    exit 0
  fi
  for option in ${_option_names[@]+"${_option_names[@]}"}; do
    known=0
    for declared in "${_declared[@]}"; do
      [[ "$option" == "$declared" ]] && known=1
    done
    if [[ $known -eq 0 ]]; then
      usage_error "unknown option $option; arguments of slime go after --, as in: bash $0 -- $option ..."
    fi
  done
}

# quoted WORD: as a shell would have to read it.
quoted() {
  if [[ "$1" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
    printf '%s' "$1"
  else
    printf "'%s'" "${1//\'/\'\\\'\'}"
  fi
}

# print_command WORDS...: the command, each option with its values on a line of its own.
print_command() {
  local word line="" first=1
  for word in "$@"; do
    if [[ "$word" == --* && $first -eq 0 && "$line" != *" --" ]]; then
      printf '%s \\\n  ' "$line"
      line="$(quoted "$word")"
    else
      line+="${line:+ }$(quoted "$word")"
    fi
    first=0
  done
  printf '%s\n' "$line"
}
