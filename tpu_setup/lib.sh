# shellcheck shell=bash
# What the scripts beside this file share; they source it.
#
# Every script takes --project, --zone and --name, or TPU_PROJECT, TPU_ZONE and TPU_NAME from the
# environment; --help; and --dry-run, which prints the commands instead of running them. To reach
# hosts without external addresses: --internal-ip from inside their network, --iap from outside.

project=${TPU_PROJECT:-} zone=${TPU_ZONE:-} name=${TPU_NAME:-} dry_run=false used=0
# How to connect: ssh and scp through Google's proxy are in gcloud's alpha commands only.
connect=() connect_by=(gcloud)
# Where the working tree and its virtual environment lie on the workers.
# shellcheck disable=SC2034,SC2088 # the scripts use it, and the workers expand it
remote_tree='~/jaxtrain' remote_venv='~/jaxtrain-venv' remote_worker='~/jaxtrain/tpu_setup/worker.sh'

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
    --internal-ip) connect=(--internal-ip) used=1 ;;
    --iap) connect=(--tunnel-through-iap) connect_by=(gcloud alpha) used=1 ;;
    --help | -h) usage && exit 0 ;;
    *) die "there is no flag $1; see --help" ;;
  esac
}

# Reads a flag of create.sh that resume.sh passes on; `placed` gathers them.
placed=()
# shellcheck disable=SC2034 # read by the scripts
creation_flag() {
  case $1 in
    --network | --subnetwork | --service-account | --runtime)
      local given
      given=$(value "$@")
      placed+=("$1" "$given") used=2
      ;;
    --internal-ips | --reserved | --spot) placed+=("$1") used=1 ;;
    *) common_flag "$@" ;;
  esac
}

# What follows -- is the experiment's: there a --dry-run would run for real.
refuse_dry_run() {
  local word
  for word in "$@"; do
    [[ $word != --dry-run ]] || die "--dry-run after -- is a flag of the module: write it before --"
  done
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
  case ${connect[*]} in
    --internal-ip) target+=(--internal-ip) ;;
    --tunnel-through-iap) target+=(--iap) ;;
  esac
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

# on WORKER COMMAND ...: runs a shell command on a worker, or at once on all; its status is that of
# the first that failed.
on() {
  local worker=$1 command=$2
  shift 2
  run "${connect_by[@]}" compute tpus tpu-vm ssh "$name" --project "$project" --zone "$zone" \
    --worker "$worker" --command "$command" "${connect[@]}" "$@"
}

on_all_workers() { on all "$@"; }

# Copies a file to the home folders of all workers.
copy_to_all() {
  run "${connect_by[@]}" compute tpus tpu-vm scp "$1" "$name:$2" --worker all \
    --project "$project" --zone "$zone" "${connect[@]}"
}

# The state of the TPU, such as READY or PREEMPTED; nothing where there is none; UNKNOWN where Google
# cannot be asked.
tpu_state() { state_of tpu-vm state; }

# The state of the queued resource, such as ACTIVE or SUSPENDED; likewise.
queue_state() { state_of queued-resources state.state; }

state_of() {
  local said errors
  errors=$(mktemp)
  if said=$(gcloud compute tpus "$1" describe "$name" --project "$project" --zone "$zone" \
    --format "value($2)" 2>"$errors"); then
    echo "$said"
  elif ! grep -qi 'not.found' "$errors"; then
    echo UNKNOWN
  fi
  rm -f "$errors"
}

# exit_codes VERB ...: what a status means is written in one place.
exit_codes() { python3 -I "$(dirname "$0")/../jaxtrain/host/exit_codes.py" "$@"; }
