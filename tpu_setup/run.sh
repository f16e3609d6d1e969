#!/usr/bin/env bash
# Runs a module on all workers and gathers each one's output: the programs find each other.
#
#   run.sh --project P --zone Z --name N -- experiments.gpt --run-dir gs://BUCKET/RUN ...
#
# What follows -- is what follows "python -m". The exit status is that of the first worker that
# failed: 75 means that the run was preempted and can be resumed.
#
#   --logs FOLDER     a file WORKER.log for each worker, in a new folder below this one
#                     (default tpu_logs); with one - the output goes to the terminal
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

logs=tpu_logs
while (($#)); do
  case $1 in
    --logs) logs=$(value "$@"); shift 2 ;;
    --) shift; break ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target
(($#)) || die "run what? write it after --, as in -- experiments.gpt --steps 100"

output=()
if [[ $logs != - ]]; then
  folder=$logs/$name-$(date -u +%Y%m%d-%H%M%S)
  run mkdir -p "$folder"
  output=(--output-directory "$folder")
fi
# exec: a signal to the shell on the worker is then one to Python.
on_all_workers "cd $remote_tree && exec $remote_python -u -m $(printf '%q ' "$@" | sed 's/ $//')" \
  "${output[@]}"
