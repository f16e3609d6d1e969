#!/usr/bin/env bash
# Deletes a TPU, and with it all that is on its disks; it costs money until then.
#
#   delete.sh --project P --zone Z --name N [--queued]
#
#   --queued          it was created with --queued: delete the queued resource and its TPU
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
  tpu queued-resources delete --force --quiet
else
  tpu tpu-vm delete --quiet
fi
