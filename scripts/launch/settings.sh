# shellcheck shell=bash
# Settings of a launch script. Each setting is declared once, as an environment variable and an option, and appears in --help.
# Independent of slime and Ray. Works with bash 3.2.

dry_run=0
extra_arguments=()
_wants_help=0
_option_names=()
_option_values=()
_names=()
_meanings=()

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

usage_error() {
  printf 'error: %s\nbash %s --help shows all options.\n' "$*" "$0" >&2
  exit 2
}

# read_options ARGUMENTS...: store --some-name VALUE, --some-name=VALUE, or a switch's bare --some-name, for `setting`.
# Arguments after -- go to extra_arguments.
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
          _option_values+=("") # an option without a value; `setting` accepts that for a switch only
        fi
        ;;
      *) usage_error "got '$word'; expected an option (arguments for slime go after --)" ;;
    esac
  done
}

# _is_option WORD NAME: succeed if WORD is NAME's option; for example, --some-name is the option of SOME_NAME. bash 3.2 needs
# another process to change the case of a word, but can compare words without regard to case.
_is_option() {
  local same=1
  shopt -s nocasematch
  [[ "$1" == "--${2//_/-}" ]] || same=0
  shopt -u nocasematch
  [[ $same -eq 1 ]]
}

# is_given NAME: succeed if the environment or an option sets NAME.
is_given() {
  local option
  [[ -z "${!1:-}" ]] || return 0
  for option in ${_option_names[@]+"${_option_names[@]}"}; do
    if _is_option "$option" "$1"; then
      return 0
    fi
  done
  return 1
}

# setting NAME DEFAULT MEANING [KIND]: set the variable NAME to the value of its option, else to its value in the environment, unless
# that is empty, else to DEFAULT. Does nothing if NAME is already declared.
# KIND: text, name, path (made absolute), count (1 or more), number (0 or more), positive_number (above 0), optional_count and
# optional_number (empty, or 0 or more), share (between 0 and 1), optional_top_p (empty, or above 0 and at most 1), names (separated by
# commas), switch (0 or 1), or optional_switch (empty, 0 or 1).
setting() {
  local name="$1" default="$2" meaning="$3" kind="${4:-text}" value position
  if [[ " ${_names[*]:-} " == *" $name "* ]]; then
    return # a script may declare a setting before the library does, with another default
  fi
  value="${!name:-$default}"
  for ((position = 0; position < ${#_option_names[@]}; position++)); do
    if _is_option "${_option_names[position]}" "$name"; then
      value="${_option_values[position]}"
      if [[ "$kind" == "switch" && -z "$value" ]]; then
        value=1
      elif [[ -z "$value" ]]; then
        usage_error "got ${_option_names[position]} without a value; expected ${_option_names[position]} VALUE"
      fi
    fi
  done
  _check_value "$name" "$value" "$kind"
  if [[ "$kind" == "path" ]]; then
    _absolute "$value"
    value="$absolute"
  fi
  printf -v "$name" '%s' "$value"
  _names+=("$name")
  _meanings+=("$meaning [${default:-none}]")
}

# _absolute PATH: set `absolute` to the absolute path without a trailing slash, so that suffixes can be appended to it.
_absolute() {
  absolute="$1"
  # shellcheck disable=SC2088 # the shell does not expand the tilde of --option=~/x
  if [[ "$absolute" == "~/"* ]]; then
    absolute="$HOME/${absolute#"~/"}"
  elif [[ -n "$absolute" && "$absolute" != /* ]]; then
    absolute="$PWD/${absolute#./}"
  fi
  while [[ "$absolute" == ?*/ ]]; do
    absolute="${absolute%/}"
  done
}

_check_value() {
  local name="$1" value="$2" kind="$3" expected
  case "$kind" in
    name) [[ "$value" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] && return || expected="a letter or digit, then letters, digits, dots, dashes and underscores" ;;
    optional_count) [[ "$value" =~ ^(0|[1-9][0-9]{0,8})?$ ]] && return || expected="a whole number without leading zeros, and less than a billion" ;;
    count) [[ "$value" =~ ^[1-9][0-9]{0,8}$ ]] && return || expected="a whole number of at least 1, and less than a billion" ;;
    optional_number) [[ -z "$value" || "$value" =~ ^[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$ ]] && return || expected="a number of at least 0" ;;
    number) [[ "$value" =~ ^[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$ ]] && return || expected="a number of at least 0" ;;
    positive_number) [[ "$value" =~ ^[0-9]*\.?[0-9]+$ && "$value" =~ [1-9] ]] && return || expected="a number above 0" ;;
    optional_top_p) [[ "$value" =~ ^(|1|1\.0*|0?\.[0-9]*[1-9][0-9]*)$ ]] && return || expected="a number above 0, at most 1" ;;
    share) [[ "$value" =~ ^0?\.[0-9]*[1-9][0-9]*$ ]] && return || expected="a number between 0 and 1, such as 0.7" ;;
    names) [[ "$value" =~ ^[^,[:space:]]+(,[^,[:space:]]+)*$ ]] && return || expected="names separated by commas, without spaces" ;;
    optional_switch) [[ "$value" =~ ^[01]?$ ]] && return || expected="0 or 1" ;;
    switch) [[ "$value" =~ ^[01]$ ]] && return || expected="0 or 1" ;;
    *) return 0 ;;
  esac
  usage_error "got $name='$value'; expected $expected"
}

# end_of_settings TEXT EXAMPLE: if --help was given, print the help and exit; else refuse options that belong to no setting.
end_of_settings() {
  local option name known
  if [[ $_wants_help -eq 1 ]]; then
    _print_help "$@"
    exit 0
  fi
  for option in ${_option_names[@]+"${_option_names[@]}"}; do
    known=0
    for name in "${_names[@]}"; do
      if _is_option "$option" "$name"; then
        known=1
      fi
    done
    if [[ $known -eq 0 ]]; then
      usage_error "unknown option $option$(_did_you_mean "${option#--}") Arguments for slime go after --, as in: bash $0 -- $option ..."
    fi
  done
}

# _did_you_mean WORD: print "; did you mean --OPTION?" for the option with the smallest edit distance, or "." if none is near.
_did_you_mean() {
  printf '%s\n' "${_names[@]}" DRY_RUN | tr '[:upper:]_' '[:lower:]-' | awk -v word="$1" '
    function changes(from, to, i, j, least) {
      for (i = 0; i <= length(from); i++) least[i, 0] = i
      for (j = 0; j <= length(to); j++) least[0, j] = j
      for (i = 1; i <= length(from); i++)
        for (j = 1; j <= length(to); j++) {
          least[i, j] = least[i - 1, j - 1] + (substr(from, i, 1) != substr(to, j, 1))
          if (least[i - 1, j] + 1 < least[i, j]) least[i, j] = least[i - 1, j] + 1
          if (least[i, j - 1] + 1 < least[i, j]) least[i, j] = least[i, j - 1] + 1
        }
      return least[length(from), length(to)]
    }
    BEGIN { best = length(word) / 3 }
    { count = changes(word, $0); if (count <= best) { best = count - 0.5; near = $0 } }
    END { printf near ? "; did you mean --" near "?" : "." }'
}

_print_help() {
  local position option row="  %-26s %-24s %s\n"
  printf '%s\n\nusage: bash %s [OPTIONS] [-- ARGUMENTS FOR SLIME]\n\n' "$1" "$0"
  # shellcheck disable=SC2059 # all rows have the same format
  printf "$row" "option" "environment" "meaning [default]"
  for ((position = 0; position < ${#_names[@]}; position++)); do
    option="$(printf '%s' "--${_names[position]//_/-}" | tr '[:upper:]' '[:lower:]')"
    # shellcheck disable=SC2059
    printf "$row" "$option" "${_names[position]}" "${_meanings[position]//"$repository"/<repository>}"
  done
  # shellcheck disable=SC2059
  printf "$row" "--dry-run" "" "print the exact command without running it" "--help" "" "show this help"
  printf '\nExample: %s\n' "$2"
}

# quote WORD: set `quoted` to WORD, quoted for a shell.
quote() {
  if [[ "$1" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
    quoted="$1"
  else
    quoted="'${1//\'/\'\\\'\'}'"
  fi
}

# print_command WORDS...: print the command, with each option and its values on a separate line.
print_command() {
  local word quoted line="" first=1
  for word in "$@"; do
    quote "$word"
    if [[ "$word" == --* && $first -eq 0 && "$line" != *" --" ]]; then
      printf '%s \\\n  ' "$line"
      line="$quoted"
    else
      line+="${line:+ }$quoted"
    fi
    first=0
  done
  printf '%s\n' "$line"
}
