#!/usr/bin/env bash
# Runs a module to its end on a TPU that may be taken away: whenever it is, creates it again and
# goes on from the checkpoint in the bucket.
#
#   resume.sh --project P --zone Z --name N --type v5litepod-16 --spot [--queued] \
#     -- experiments.gpt --run-dir gs://BUCKET/RUN --save-every 500 ...
#
# Creates the TPU where there is none that is ready; copies the working tree as it is now, and
# installs. Goes on after what jaxtrain/host/exit_codes.py calls restartable, after a failed install, and
# whenever the TPU is not ready any more; ends with the status of anything else. The pause doubles
# with every attempt, up to five minutes; all is counted anew after an attempt that has left a newer
# checkpoint in the bucket, which the account that runs this must be allowed to list.
#
#   --delete-when-done  delete the TPU at the end, however the run ended; it costs money until then
#   --attempts N      how many attempts without progress (default 100)
#   --pause SECONDS   before the second attempt (default 30)
#   --versions FILE   the versions of all packages, as the first install found them, which every
#                     later one installs again (default LOGS/NAME.versions; delete it to update)
#   --type, --runtime, --spot, --reserved, --network, --subnetwork, --internal-ips,
#   --service-account, --queued, --poll: see create.sh; --extras: see install.sh;
#   --logs, --patience: see run.sh
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --internal-ip, --iap,
#   --dry-run, --help

set -euo pipefail
here=$(dirname "$0")
# shellcheck source=lib.sh
source "$here/lib.sh"

attempts=100 pause=30 delete=false logs=tpu_logs versions=''
how_to_create=() how_to_delete=() how_to_install=() how_to_run=()
while (($#)); do
  case $1 in
    --attempts) attempts=$(value "$@"); shift 2 ;;
    --pause) pause=$(value "$@"); shift 2 ;;
    --versions) versions=$(value "$@"); shift 2 ;;
    --delete-when-done) delete=true; shift ;;
    --type) given=$(value "$@"); how_to_create+=("$1" "$given"); shift 2 ;;
    --poll) given=$(value "$@"); how_to_create+=("$1" "$given") how_to_run+=("$1" "$given"); shift 2 ;;
    --patience) given=$(value "$@"); how_to_run+=("$1" "$given"); shift 2 ;;
    --queued) how_to_create+=(--queued) how_to_delete=(--queued); shift ;;
    --extras) given=$(value "$@"); how_to_install=(--extras "$given"); shift 2 ;;
    --logs) logs=$(value "$@"); how_to_run+=(--logs "$logs"); shift 2 ;;
    --) shift; break ;;
    *) creation_flag "$@"; shift "$used" ;;
  esac
done
need_target
[[ " $* " =~ \ --run-dir[\ =](gs://[^\ ]+) ]] ||
  die "nothing on a TPU outlives it: give the command a --run-dir gs://BUCKET/RUN"
run_dir=${BASH_REMATCH[1]}
[[ " ${how_to_create[*]} " == *" --type "* ]] || die "which accelerator? give --type"
refuse_dry_run "$@"
same_target
how_to_create+=("${placed[@]}")
[[ $logs != - ]] || logs=tpu_logs
how_to_install+=(--versions "${versions:-$logs/$name.versions}")
scratch=$(mktemp -d)

# A TPU that was taken away is still listed, and its name is taken.
make_anew() {
  if [[ -n $(tpu_state)$([[ -z ${how_to_delete[*]} ]] || queue_state) ]]; then
    "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}" || return
  fi
  "$here/create.sh" "${target[@]}" "${how_to_create[@]}"
}

# What an earlier run has left holds the chips, and runs in the tree that is replaced. One archive
# serves all attempts: an edit in the meantime would change the run.
# Joined by &&, for where the caller asks how it went bash does not stop at a failure by itself.
prepare() {
  on_all_workers "[ ! -x $remote_worker ] || $remote_worker stop" &&
    "$here/sync.sh" "${target[@]}" --archive "$scratch/$name.tar.gz" &&
    "$here/install.sh" "${target[@]}" "${how_to_install[@]}"
}

once() { "$here/run.sh" "${target[@]}" "${how_to_run[@]}" -- "$@" --auto-resume; }

if $dry_run; then
  echo "# Where there is no TPU $name that is ready:"
  "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}"
  "$here/create.sh" "${target[@]}" "${how_to_create[@]}"
  prepare
  echo "# Again and again, until it is done:"
  once "$@"
  if $delete; then "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}"; fi
  rm -r "$scratch"
  exit
fi

interrupted=false child=''
# shellcheck disable=SC2329 # a trap calls it
interrupt() {
  interrupted=true
  [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true
}
trap interrupt INT TERM

# However this script ends, it does not leave a TPU behind without a word.
# shellcheck disable=SC2329 # a trap calls it
finish() {
  local try
  rm -rf "$scratch"
  if $delete && ! $interrupted; then
    for try in 1 2 3 4 5; do
      [[ -n $(tpu_state)$([[ -z ${how_to_delete[*]} ]] || queue_state) ]] || return 0
      "$here/delete.sh" "${target[@]}" "${how_to_delete[@]}" && return
      sleep "$((try * pause))"
    done
  fi
  if [[ -n $(tpu_state) ]]; then
    echo "$name is still there and costs money until: $here/delete.sh ${target[*]} ${how_to_delete[*]}" >&2
  fi
}
trap finish EXIT

# One attempt: from whatever there is to the end of the run, whose status it returns.
prepared=false failed_installs=0
attempt() {
  local state status=0
  state=$(tpu_state)
  if [[ $state == UNKNOWN ]]; then
    echo "Google cannot be asked for $name" >&2
    return 77
  fi
  if [[ $state != READY ]]; then
    prepared=false
    make_anew || {
      echo "$name could not be made" >&2
      return 77
    }
  fi
  if ! $prepared; then
    prepare || {
      echo "$name could not be prepared" >&2
      # The TPU costs money meanwhile, and what fails every time is no accident.
      ((++failed_installs < 5)) && return 77
      return 1
    }
    prepared=true failed_installs=0
  fi
  once "$@" &
  child=$!
  while true; do # a signal ends the waiting, and not the run
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=''
  # An error may only be how the others notice that a host is taken away.
  if ! exit_codes restart "$status" 0 0 1 0 >/dev/null && ((status != 0)); then
    state=$(tpu_state)
    [[ $state == READY || $state == UNKNOWN ]] || status=77
  fi
  return "$status"
}

# The step of the newest checkpoint; nothing where there is none, or nobody may look.
newest_step() {
  gcloud storage ls "$run_dir/checkpoints/" 2>/dev/null |
    sed -n 's:.*/\([0-9][0-9]*\)/$:\1:p' | sort -n | tail -n 1 || true
}

count=0 newest=''
while true; do
  status=0
  attempt "$@" || status=$?
  ((status != 0)) || exit 0
  if $interrupted; then exit "$status"; fi
  before=$newest found=$(newest_step) progress=0
  newest=${found:-$before}
  [[ $newest == "$before" ]] || progress=1
  again=$(exit_codes restart "$status" "$progress" "$count" "$((attempts - 1))" "$pause") || {
    echo "error: the run on $name ended with status $status, and is not started again" >&2
    exit "$status"
  }
  read -r count seconds <<<"$again"
  echo "the run on $name ended with status $status; going on in $seconds s" >&2
  sleep "$seconds" &
  wait $! || true
  if $interrupted; then exit "$status"; fi
done
