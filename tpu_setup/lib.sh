# shellcheck shell=bash
# What the scripts beside this file share; they source it.
#
# Every script takes --project, --zone and --name, or TPU_PROJECT, TPU_ZONE and TPU_NAME from the
# environment; --help; and --dry-run, which prints the commands instead of running them.

project=${TPU_PROJECT:-} zone=${TPU_ZONE:-} name=${TPU_NAME:-} dry_run=false used=0
# Where the working tree and its virtual environment lie on the workers.
# shellcheck disable=SC2034,SC2088 # the scripts use it, and the workers expand it
remote_tree='~/jaxtrain' remote_python='~/jaxtrain-venv/bin/python'

die() {
  echo "error: $*" >&2
  exit 2
}

# Prints the comment at the top of the script that is running.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# value FLAG VALUE ...: prints the value; dies where there is none.
value() {
  (($# > 1)) || die "$1 needs a value"
  printf '%s' "$2"
}

# Reads one of the flags that all scripts take, and sets `used` to how many words it was.
# shellcheck disable=SC2034 # read by the scripts
common_flag() {
  used=2
  case $1 in
    --project) project=$(value "$@") ;;
    --zone) zone=$(value "$@") ;;
    --name) name=$(value "$@") ;;
    --dry-run) dry_run=true used=1 ;;
    --help | -h) usage && exit 0 ;;
    *) die "there is no flag $1; see --help" ;;
  esac
}

need_target() {
  [[ -n $project ]] || die "which project? give --project or set TPU_PROJECT"
  [[ -n $zone ]] || die "which zone? give --zone or set TPU_ZONE"
  [[ -n $name ]] || die "which name? give --name or set TPU_NAME"
}

# The flags of need_target, for another of these scripts.
same_target() {
  target=(--project "$project" --zone "$zone" --name "$name")
  if $dry_run; then target+=(--dry-run); fi
}

# Runs a command; with --dry-run prints it instead, as it could be pasted.
run() {
  if $dry_run; then
    printf '%q ' "$@" | sed 's/ $//'
    echo
  else
    "$@"
  fi
}

# tpu GROUP VERB ...: gcloud compute tpus GROUP VERB NAME ... in the project and zone.
tpu() {
  local group=$1 verb=$2
  shift 2
  run gcloud compute tpus "$group" "$verb" "$name" --project "$project" --zone "$zone" "$@"
}

# Runs a shell command on all workers at once; its status is that of the first that failed.
on_all_workers() {
  local command=$1
  shift
  tpu tpu-vm ssh --worker all --command "$command" "$@"
}

# The state of the TPU, such as READY or PREEMPTED; nothing where there is none.
tpu_state() {
  gcloud compute tpus tpu-vm describe "$name" --project "$project" --zone "$zone" \
    --format 'value(state)' 2>/dev/null || true
}

# The state of the queued resource, such as ACTIVE or SUSPENDED; nothing where there is none.
queue_state() {
  gcloud compute tpus queued-resources describe "$name" --project "$project" --zone "$zone" \
    --format 'value(state.state)' 2>/dev/null || true
}
