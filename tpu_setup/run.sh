#!/usr/bin/env bash
# Runs a module on all workers until it ends and gathers each one's output: the programs find each
# other, and go on when the connection breaks.
#
#   run.sh --project P --zone Z --name N -- experiments.gpt --run-dir gs://BUCKET/RUN ...
#
# What follows -- is what follows "python -m". What an earlier run has left on the workers is ended
# first. The exit status is that of the run, by jaxtrain/host/exit_codes.py: 75 means that it was preempted
# and can be resumed, 77 that the TPU is gone, 255 that it could not be reached any more. Ctrl-C asks
# the run to save and end.
#
#   --logs FOLDER     a file WORKER.log for each worker, in a new folder below this one
#                     (default tpu_logs); with one - the output goes to the terminal
#   --poll SECONDS    how often to ask how it is (default 30)
#   --patience N      give up after so many times without an answer (default 60)
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --internal-ip, --iap,
#   --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

logs=tpu_logs poll=30 patience=60
while (($#)); do
  case $1 in
    --logs) logs=$(value "$@"); shift 2 ;;
    --poll) poll=$(value "$@"); shift 2 ;;
    --patience) patience=$(value "$@"); shift 2 ;;
    --) shift; break ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target
(($#)) || die "run what? write it after --, as in -- experiments.gpt --steps 100"
refuse_dry_run "$@"

gather_output() {
  local output=()
  if [[ $logs != - ]]; then
    folder=$logs/$name-$stamp
    run mkdir -p "$folder"
    output=(--output-directory "$folder")
  fi
  on_all_workers "$remote_worker log" "${output[@]}"
}

stamp=$(date -u +%Y%m%d-%H%M%S)
start="$remote_worker start $stamp $(printf '%q ' "$@" | sed 's/ $//')"
if $dry_run; then
  on_all_workers "$start"
  echo "# Every $poll s, until all have ended:"
  on_all_workers "$remote_worker state $stamp"
  gather_output
  exit
fi

asked=false
# shellcheck disable=SC2329 # a trap calls it
ask_to_end() {
  $asked && exit 130
  asked=true
  echo "asking the run on $name to save and end" >&2
  on_all_workers "$remote_worker stop" || true
}
trap ask_to_end INT TERM

# Where the connection broke it may have started all the same: the state tells.
on_all_workers "$start" || {
  status=$?
  ((status != 2)) || exit 2
}
silent=0 after_failure=0 last=''
while true; do
  if states=$(on_all_workers "$remote_worker state $stamp"); then
    silent=0
    # shellcheck disable=SC2207 # a number on each line
    codes=($(sed -n 's/^jaxtrain-run [^ ]* ended \([0-9]*\):.*/\1/p' <<<"$states"))
    status=$(exit_codes run "${codes[@]}")
    if [[ $states != *"jaxtrain-run "*" running:"* && ${#codes[@]} -gt 0 ]]; then break; fi
    # Who waits for a worker that is gone notices within a minute, or never.
    ((status == 0)) || ((++after_failure < 5)) || on_all_workers "$remote_worker stop" || true
    said=$(sed -n 's/^jaxtrain-run //p' <<<"$states" | head -n 1)
    [[ $said == "$last" ]] || echo "$said" >&2
    last=$said
  else
    state=$(tpu_state)
    case $state in
      READY | UNKNOWN) ;;
      *)
        echo "$name is ${state:-gone}" >&2
        exit 77
        ;;
    esac
    ((++silent < patience)) || {
      echo "error: $name did not answer $patience times; its run may be going on" >&2
      exit 255
    }
    echo "the connection to $name broke; the run goes on, asking again in $poll s" >&2
  fi
  sleep "$poll" &
  wait $! || true # so that a signal is heard at once
done
gather_output || echo "warning: the output of $name could not be gathered" >&2
exit "$status"
