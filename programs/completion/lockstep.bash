# Completion of the command line of lockstep, for bash 4 and later. docs/how-to/completion.md says how to enable it.
#
# The tables have one line per option: its names; then what follows it, if anything: "choice" with all values, "list"
# with values that may be combined with commas, "file", "directory", "program", "hosts", "variable" or "value" (nothing
# to complete). The lint test cli_surface compares them with the help texts.

_lockstep_host_options='
-H --hosts hosts
--hostfile file
--env-from choice auto slurm none
--remote-path program
--connect-timeout value
--interface value
--cwd directory
'

_lockstep_run_options="
-h --help
-n --ranks -np value
-x --export variable
--pass-local-rank
--transport choice auto self shm hierarchy tcp mpi nccl
$_lockstep_host_options
--ship
--gpus value
--isolate-gpus
--share-gpus
--bind choice auto cores none
--stdin choice none 0 all
--output directory
--quiet-ranks
--name value
--trace
--grace value
--fail-grace value
--max-restarts value
--restart-pause value
--min-hosts value
--retry-exit-code value
--join-timeout value
--hang-timeout value
--work-timeout value
--idle-timeout value
--stall-timeout value
--host-timeout value
--inject value
"

_lockstep_doctor_options="
-h --help
--mpi
--model-bytes value
$_lockstep_host_options
--json
--report
"

_lockstep_plan_options='
-h --help
-n --ranks --ranks-per-node value
--gpus value
--steps value
--start-timeout value
--nodes value
--link value
--latency value
--every value
--json
'

_lockstep_submit_options='
-h --help
-N --nodes value
--ranks-per-node --ntasks-per-node value
-n --ranks --ntasks value
--gpus-per-node value
-c --cpus-per-rank --cpus-per-task value
--mem value
-t --time value
-p --partition value
-A --account value
-a --array value
--grid value
-J --name --job-name value
--mail value
--requeue
--no-requeue
--signal-before value
--remote-path program
--before value
--run value
--output directory
--dry-run
--follow
'

_lockstep_status_options='
-h --help
--json
'

_lockstep_bench_options='
-h --help
-n --ranks value
--size value
--model list mlp-50m mlp-65m mlp-6m transformer-2m cnn-1m
--optimizer choice sgd adamw
--impl value
--rounds value
--mpi directory
--python program
--json
'

_lockstep_build_options='
-h --help
--python program
'

# Prints the options of a command, one per line.
_lockstep_option_names() {
  local table=_lockstep_${1}_options line word
  while read -r line; do
    for word in $line; do
      [[ $word == -* ]] && echo "$word"
    done
  done <<< "${!table}"
}

# Prints what follows the option $2 of the command $1; nothing for a flag and for an unknown option.
_lockstep_option_value() {
  local table=_lockstep_${1}_options line word
  while read -r line; do
    for word in $line; do
      [[ $word == "$2" ]] || continue
      for word in $line; do
        [[ $word == -* ]] || break
        line=${line#"$word"}
        line=${line# }
      done
      echo "$line"
      return
    done
  done <<< "${!table}"
}

# Prints the programs that begin with $1: those in PATH, and executable files and directories.
_lockstep_programs() {
  local name
  if [[ -n $1 && $1 != */* ]]; then
    while read -r name; do
      [[ -n $(type -P -- "$name") ]] && echo "$name"
    done < <(compgen -c -- "$1")
  fi
  while IFS= read -r name; do
    [[ -d $name || -x $name ]] && printf '%s\n' "$name"
  done < <(compgen -f -- "$1")
}

# Prints the completions of $2 as a value that $1 describes, as a table does.
_lockstep_values() {
  local kind=${1%% *} values=${1#* } current=$2 before=
  case $kind in
    list | hosts)
      [[ $current == *,* ]] && before=${current%,*},
      ;;
  esac
  case $kind in
    choice) compgen -W "$values" -- "$current" ;;
    list) compgen -P "$before" -W "$values" -- "${current#"$before"}" ;;
    hosts) compgen -P "$before" -A hostname -- "${current#"$before"}" ;;
    variable) compgen -A export -- "$current" ;;
    file) compgen -f -- "$current" ;;
    directory) compgen -d -- "$current" ;;
    program) _lockstep_programs "$current" ;;
  esac
}

# Sets `words` to the words of the command line up to the cursor. bash also splits them at "=" and ":".
_lockstep_split_words() {
  local rest=$COMP_LINE word i
  words=()
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if ((i == 0)) || [[ $rest == [[:space:]]* ]]; then
      words+=("$word")
    else
      words[${#words[@]}-1]+=$word
    fi
    rest=${rest#"${rest%%[![:space:]]*}"}
    rest=${rest#"$word"}
  done
}

# Sets `program_index` to the index in `words` of the program of the command $1, which is the last word or an earlier
# one; 0 if there is none. An option of another command, such as sbatch, is taken for a flag.
_lockstep_find_program() {
  local i last=$((${#words[@]} - 1))
  program_index=0
  for ((i = 2; i <= last; ++i)); do
    case ${words[i]} in
      --)
        ((i < last)) && program_index=$((i + 1))
        return
        ;;
      -*=*) ;;
      -*) [[ -n $(_lockstep_option_value "$1" "${words[i]}") ]] && ((++i)) ;;
      *)
        program_index=$i
        return
        ;;
    esac
  done
}

# Prints the completions of the last of `words`, one per line.
_lockstep_complete() {
  local current=${words[${#words[@]}-1]} last=$((${#words[@]} - 1)) command=${words[1]} value program_index
  if ((last == 1)); then
    compgen -W 'run submit doctor plan status bench build help --help --version' -- "$current"
    return
  fi
  case $command in
    run | submit | doctor | plan | status | bench | build) ;;
    help)
      ((last == 2)) && compgen -W 'run submit doctor plan status bench build' -- "$current"
      return
      ;;
    *) return ;;
  esac
  if [[ $command == bench ]] && ((last == 2)); then
    compgen -W 'all-reduce step launch memory arena --help' -- "$current"
    return
  fi
  if [[ $command =~ ^(run|submit|doctor|plan)$ ]]; then
    _lockstep_find_program "$command"
    if ((program_index > 0 && program_index < last)); then
      compgen -f -- "$current"
      return
    fi
  fi
  if [[ $current == --*=* ]]; then
    value=$(_lockstep_option_value "$command" "${current%%=*}")
    _lockstep_values "$value" "${current#*=}" | while IFS= read -r value; do
      printf '%s\n' "${current%%=*}=$value"
    done
    return
  fi
  value=$(_lockstep_option_value "$command" "${words[last - 1]}")
  if [[ -n $value ]]; then
    _lockstep_values "$value" "$current"
  elif [[ $current == -* ]]; then
    _lockstep_option_names "$command" | while read -r value; do
      [[ $value == "$current"* ]] && echo "$value"
    done
  elif [[ $command =~ ^(run|submit|doctor|plan)$ ]]; then
    _lockstep_programs "$current"
  fi
}

# Succeeds if the completions of the last of `words` are paths.
_lockstep_completes_files() {
  local current=${words[${#words[@]}-1]} last=$((${#words[@]} - 1)) command=${words[1]} value program_index
  ((last > 1)) || return 1
  case $command in
    run | submit | doctor | plan)
      _lockstep_find_program "$command"
      ((program_index > 0 && program_index < last)) && return 0
      ;;
    status | bench | build) ;;
    *) return 1 ;;
  esac
  if [[ $current == --*=* ]]; then
    value=$(_lockstep_option_value "$command" "${current%%=*}")
  else
    value=$(_lockstep_option_value "$command" "${words[last - 1]}")
    [[ -z $value && $current != -* && $command =~ ^(run|submit|doctor|plan)$ ]] && return 0
  fi
  [[ $value == file || $value == directory || $value == program ]]
}

_lockstep() {
  local words reply before
  _lockstep_split_words
  # bash replaces only the part of the word after the last "=" or ":".
  before=${COMP_WORDS[COMP_CWORD]}
  [[ $before == [=:]* ]] && before=
  before=${words[${#words[@]}-1]%"$before"}
  COMPREPLY=()
  while IFS= read -r reply; do
    COMPREPLY+=("${reply#"$before"}")
  done < <(_lockstep_complete)
  # Directories get a slash, and special characters of file names a backslash. Not if the replies are commands, options
  # or values, of which one may have the name of a directory.
  _lockstep_completes_files && compopt -o filenames 2> /dev/null
}

complete -F _lockstep lockstep
