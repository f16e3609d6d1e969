#!/usr/bin/env bash
# Says in what state a TPU is, and what its workers are running.
#
#   status.sh --project P --zone Z --name N [--queued]
#
#   --queued          show the queued resource of that name instead
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

queued=false
while (($#)); do
  case $1 in
    --queued) queued=true; shift ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target

if $queued; then
  tpu queued-resources describe --format 'yaml(state)'
  exit
fi
tpu tpu-vm describe --format 'yaml(acceleratorType,runtimeVersion,schedulingConfig,state,health)'
# The bracket keeps pgrep from finding this very command.
on_all_workers "pgrep -af '[j]axtrain-venv/bin/python' || echo 'nothing is running'"
