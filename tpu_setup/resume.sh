#!/usr/bin/env bash
# Runs a module to its end on a TPU that may be taken away: whenever it is, creates it again and
# goes on from the checkpoint in the bucket.
#
#   resume.sh --project P --zone Z --name N --type v5litepod-16 --spot [--queued] \
#     -- experiments.gpt --run-dir gs://BUCKET/RUN --save-every 500 ...
#
# Creates, syncs and installs where there is no TPU that is ready. Goes on after exit status 75
# (preempted), 76 (hung) and 77 (lost a worker), and whenever the TPU is not ready any more; ends
# with the status of anything else.
#
#   --attempts N      how often to run at most (default 100)
#   --pause SECONDS   between attempts (default 30)
#   --type, --runtime, --spot, --queued, --poll: see create.sh; --extras: see install.sh;
#   --logs: see run.sh
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
here=$(dirname "$0")
# shellcheck source=lib.sh
source "$here/lib.sh"

attempts=100 pause=30 how_to_create=() how_to_delete=() how_to_install=() how_to_run=()
while (($#)); do
  case $1 in
    --attempts) attempts=$(value "$@"); shift 2 ;;
    --pause) pause=$(value "$@"); shift 2 ;;
    --type | --runtime | --poll) given=$(value "$@"); how_to_create+=("$1" "$given"); shift 2 ;;
    --spot) how_to_create+=(--spot); shift ;;
    --queued) how_to_create+=(--queued) how_to_delete=(--queued); shift ;;
    --extras) given=$(value "$@"); how_to_install=(--extras "$given"); shift 2 ;;
    --logs) given=$(value "$@"); how_to_run=(--logs "$given"); shift 2 ;;
    --) shift; break ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target
[[ " $* " =~ \ --run-dir[\ =]gs:// ]] ||
  die "nothing on a TPU outlives it: give the command a --run-dir gs://BUCKET/RUN"
[[ " ${how_to_create[*]} " == *" --type "* ]] || die "which accelerator? give --type"
same_target

# A TPU that was taken away is still listed, and its name is taken.
make_anew() {
  if [[ -n $(tpu_state)$([[ -z ${how_to_delete[*]} ]] || queue_state) ]]; then
    "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}" || return
  fi
  prepare
}

# Joined by &&, for where the caller asks how it went bash does not stop at a failure by itself.
prepare() {
  "$here/create.sh" "${target[@]}" "${how_to_create[@]}" &&
    "$here/sync.sh" "${target[@]}" &&
    "$here/install.sh" "${target[@]}" "${how_to_install[@]}"
}

once() { "$here/run.sh" "${target[@]}" "${how_to_run[@]}" -- "$@" --auto-resume; }

if $dry_run; then
  echo "# Where there is no TPU $name that is ready:"
  "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}"
  prepare
  echo "# Again and again, until it is done:"
  once "$@"
  exit
fi

for ((attempt = 1; attempt <= attempts; attempt++)); do
  # Capacity may be gone for a while: that is one more attempt, not the end.
  if [[ $(tpu_state) == READY ]] || make_anew; then
    status=0
    once "$@" || status=$?
    ((status != 0)) || exit 0
    state=$(tpu_state)
    case $status in
      75 | 76 | 77 | 134) ;;
      *) [[ $state != READY ]] || exit "$status" ;;
    esac
    echo "attempt $attempt ended with status $status, $name is ${state:-gone}; going on" >&2
  else
    status=1
    echo "attempt $attempt: $name could not be made; trying again in $pause s" >&2
  fi
  sleep "$pause"
done
echo "error: not done after $attempts attempts" >&2
exit "$status"
